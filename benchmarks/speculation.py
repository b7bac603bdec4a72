"""Tell whether looking up drafts in the prompt would make answers faster on this machine.

The model answers questions about the handbook. For each answer it is then computed, without the model, what a draft from the prompt would
have guessed: the tokens that follow the last occurrence of the newest N tokens. How long a batch of several tokens takes, compared with one
token, is measured. Both together give the speed that the answers would have had.

With --real, each question is answered twice instead, without drafts and as localrag decides, in turns. A prompt is evaluated once, so the
second answer begins at once. Only the seconds after the first token count.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import shared
from localrag import Answer, Question, Session
from localrag.engine.llama import LlamaContext, LlamaModel, LlamaTokenizer
from localrag.engine.threads import num_cores
from localrag.grading import is_met
from localrag.kb import KnowledgeBase
from localrag.session import open_embedder
from localrag.types import SamplingParams

QUESTIONS = shared.ROOT / "benchmarks" / "handbook_questions.jsonl"
NGRAMS = (2, 3)
DRAFTS = (2, 4, 8)
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Written:
    """The tokens of a prompt and of the answer to it."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


@dataclass(frozen=True)
class Lookup:
    """What drafts would have done: steps without and with a draft, tokens drafted and accepted, and the steps by their batch size."""

    num_tokens: int
    num_drafts: int
    num_drafted: int
    num_accepted: int
    sizes: Sequence[int]

    def speed(self, costs: Mapping[int, float]) -> float:
        """Speed compared with one token per step; `costs` are those of a batch by its size, compared with one token."""
        return self.num_tokens / sum(costs[size] for size in self.sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of models.toml or a .gguf file (default: the default model)")
    parser.add_argument("--questions", type=int, default=40, help="number of questions, evenly spaced (default 40)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an answer (default 96)")
    parser.add_argument("--real", action="store_true", help="measure the speed of answers with drafts and without")
    given = parser.parse_args()
    if given.real:
        compare(given.model, given.questions, given.max_tokens)
        return
    path, answers = write(given.model, given.questions, given.max_tokens)
    costs = step_costs(path, [1 + most for most in range(max(DRAFTS) + 1)])
    rows: list[dict[str, object]] = []
    for ngram in NGRAMS:
        for most in DRAFTS:
            found = [look_up(each, ngram, most) for each in answers]
            total = Lookup(
                *(sum(getattr(each, name) for each in found) for name in ("num_tokens", "num_drafts", "num_drafted", "num_accepted")),
                sizes=[size for each in found for size in each.sizes],
            )
            rows.append(
                {
                    "ngram": ngram,
                    "draft": most,
                    "steps with a draft_%": 100 * total.num_drafts / max(1, len(total.sizes)),
                    "accepted_%": 100 * total.num_accepted / max(1, total.num_drafted),
                    "tokens per step": total.num_tokens / max(1, len(total.sizes)),
                    "speed": total.speed(costs),
                }
            )
    shared.report_table("speculation", rows, answers=len(answers), costs={size: round(cost, 2) for size, cost in costs.items()})


def write(model: str | None, num_questions: int, max_tokens: int) -> tuple[Path, list[Written]]:
    """Answer questions about the handbook, greedily. Returns the model's file, and the tokens."""
    with open_handbook(model) as session:
        tokenizer, answers = session.engine.tokenizer, []
        session.engine.draft_tokens = 0
        for row in questions(num_questions):
            answer = session.ask(Question.of(row["question"], max_tokens=max_tokens, unanswerable="answer"))
            answers.append(Written(list(answer.prompt.token_ids), tokenizer.encode(answer.text)))
        return session.engine.info.path.resolve(), answers


def questions(most: int) -> list[dict[str, Any]]:
    """Questions that the handbook answers, with what a right answer says, evenly spaced."""
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    answered = [row for row in rows if row.get("answers")]
    return answered[:: max(1, len(answered) // most)][:most]


@contextmanager
def open_handbook(model: str | None) -> Iterator[Session]:
    """A session on the handbook, in a home that knows nothing of this machine."""
    with shared.fresh_home() as settings:
        with KnowledgeBase.open(settings.kb_dir, "handbook", create=True) as kb:
            kb.ingest([shared.ROOT / "examples" / "handbook"], open_embedder(settings))
        with Session.open(model=model, kbs=["handbook"], keep=False, settings=settings) as session:
            yield session


def compare(model: str | None, num_questions: int, max_tokens: int) -> None:
    """Answer each question without drafts and with them. What drafts cost is learned on the way, as it is by anyone's first answers."""
    choices: dict[str, int | None] = {"without drafts": 0, "as localrag decides": None}
    with open_handbook(model) as session:
        answers: dict[str, list[Answer]] = {name: [] for name in choices}
        asked = questions(num_questions)
        for number, row in enumerate(asked):
            for name in (list, reversed)[number % 2](choices):
                session.engine.draft_tokens = choices[name]
                answers[name].append(session.ask(Question.of(row["question"], max_tokens=max_tokens, unanswerable="answer")))
    plain = answers["without drafts"]
    rows: list[dict[str, object]] = []
    for name, given in answers.items():
        speeds = [_tokens_per_s(each) for each in given]
        drafted, accepted = (sum(getattr(each, f"{kind}_tokens") for each in given) for kind in ("drafted", "accepted"))
        decode_s = sum(each.timings.decode_s for each in given)
        rows.append(
            {
                "decoding": name,
                "tokens": sum(each.completion_tokens for each in given),
                "drafted": drafted,
                "accepted_%": 100 * accepted / drafted if drafted else None,
                "median tokens/s": statistics.median(speeds),
                "tokens/s of all": sum(each.completion_tokens - 1 for each in given) / decode_s,
                "median gain": statistics.median(speed / _tokens_per_s(other) for speed, other in zip(speeds, plain, strict=True)),
                "right": sum(is_met(row["answers"], each.text) for row, each in zip(asked, given, strict=True)),
                "same text": sum(each.text == other.text for each, other in zip(given, plain, strict=True)),
            }
        )
    shared.report_table("speculation-real", rows, answers=len(plain), learned=session.engine.speed.to_dict())


def _tokens_per_s(answer: Answer) -> float:
    return answer.timings.tokens_per_s(answer.completion_tokens) or math.nan


def look_up(written: Written, ngram: int, most: int) -> Lookup:
    """Replay an answer with drafts of at most `most` tokens."""
    ids, start = [*written.prompt_ids, *written.answer_ids], len(written.prompt_ids)
    at, num_drafts, num_drafted, num_accepted, sizes = start, 0, 0, 0, []
    while at < len(ids):
        draft = _draft(ids[:at], ngram, most)
        accepted = next((n for n, token in enumerate(draft) if at + n >= len(ids) or ids[at + n] != token), len(draft))
        num_drafts, num_drafted, num_accepted = num_drafts + bool(draft), num_drafted + len(draft), num_accepted + accepted
        sizes.append(1 + len(draft))
        at += accepted + 1
    return Lookup(len(written.answer_ids), num_drafts, num_drafted, num_accepted, sizes)


def _draft(ids: Sequence[int], ngram: int, most: int) -> Sequence[int]:
    """The tokens behind the last earlier occurrence of the newest `ngram` tokens."""
    key = ids[-ngram:]
    for end in range(len(ids) - 1, ngram - 1, -1):
        if ids[end - ngram : end] == key:
            return ids[end : end + most]
    return ()


def step_costs(path: Path, sizes: Sequence[int], runs: int = 15) -> dict[int, float]:
    """The time of a batch of each size, all tokens of one answer and with logits, divided by that of one token. Medians."""
    model = LlamaModel(path)
    ids = LlamaTokenizer(model).encode(shared.handbook())[: PROMPT_TOKENS + max(sizes)]
    context = LlamaContext(
        model,
        num_cells=1024,
        num_outputs=max(sizes),
        num_threads=num_cores(),
        flash_attention=shared.chosen_attention(),
    )
    times: dict[int, list[float]] = {size: [] for size in sizes}
    context.begin(0, ids, SamplingParams())
    context.decode([(token, at, 0, False) for at, token in enumerate(ids[:PROMPT_TOKENS])])
    for _ in range(runs):
        for size in sizes:
            entries = [(ids[at], at, 0, True) for at in range(PROMPT_TOKENS, PROMPT_TOKENS + size)]
            started = time.perf_counter()
            context.decode(entries)
            context.all_logits()
            times[size].append(time.perf_counter() - started)
            context.cut(0, PROMPT_TOKENS)
    context.end(0)
    context.close()
    model.close()
    medians = {size: statistics.median(each) for size, each in times.items()}
    return {size: each / medians[1] for size, each in medians.items()}


if __name__ == "__main__":
    main()
