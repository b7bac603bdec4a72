"""Tell whether looking up drafts in the prompt would make answers faster on this machine.

The model answers questions about the handbook. For each answer it is then computed, without the model, what a draft from the prompt would
have guessed: the tokens that follow the last occurrence of the newest N tokens. How long a batch of several tokens takes, compared with one
token, is measured. Both together give the speed that the answers would have had.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import shared
from localrag import Question, Session
from localrag.engine.llama import LlamaContext, LlamaModel, LlamaTokenizer
from localrag.engine.threads import num_cores
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
    given = parser.parse_args()
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
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    questions = [row["question"] for row in rows if row.get("answers")]
    questions = questions[:: max(1, len(questions) // num_questions)][:num_questions]
    with shared.fresh_home() as settings:
        with KnowledgeBase.open(settings.kb_dir, "handbook", create=True) as kb:
            kb.ingest([shared.ROOT / "examples" / "handbook"], open_embedder(settings))
        with Session.open(model=model, kbs=["handbook"], keep=False, settings=settings) as session:
            tokenizer, answers = session.engine.tokenizer, []
            for question in questions:
                answer = session.ask(Question.of(question, max_tokens=max_tokens, unanswerable="answer"))
                answers.append(Written(list(answer.prompt.token_ids), tokenizer.encode(answer.text)))
            return session.engine.info.path.resolve(), answers


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
    """How long a batch of so many tokens of one answer takes, all with logits, compared with one token. Medians."""
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
