"""Time repeated questions about the same evidence: in one process, in a new process, and in batches about several documents."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks import peers, shared
from localrag.engine.engine import Engine
from localrag.engine.jobs import BATCH
from localrag.engine.threads import num_cores
from localrag.question import Question
from localrag.session import Answer, Session
from localrag.text.tokens import common_length
from localrag.types import Attachment, Message, SamplingParams

OURS = "localrag"
SYSTEM = "You answer from the evidence of case {number} alone, and briefly."
QUESTIONS = (
    "Which of these materials keeps its shape longest in a parked car in summer, and at which temperature does it give way?",
    "How long and at which temperature does a spool have to be dried before it is printed, and how can one tell that it was wet?",
    "Which nozzle would you choose for a filament that is filled with fibres, and what wears out first when it is the wrong one?",
    "What has to be watched when a part is annealed, and by how much does it usually shrink in each of its directions?",
    "Which of the fumes that are named here are a danger to people in the same room, and what is to be done about them?",
)
ABOUT = (
    "What does the text say about temperatures? Give every number that you find, with what it belongs to.",
    "What are the most important warnings of the text, and what happens to those who do not heed them?",
    "Summarise the text for somebody who has never seen such a machine, in three or four plain sentences.",
    "Which things does the text compare with each other, and which of them does it find to be better?",
)
NUM_DOCUMENTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["again", "disk", "batch"], help="again, disk, batch (default: all)")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (default 3)")
    parser.add_argument("--evidence-tokens", type=int, default=1437, help="tokens that the questions share (default 1437)")
    parser.add_argument("--document-tokens", type=int, default=800, help="tokens of each document of the batch (default 800)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of each answer of the batch (default 48)")
    parser.add_argument("--child", nargs=2, metavar=("FILE", "QUESTION"), help="ask in this process and print one JSON object")
    given = parser.parse_args()
    if strange := set(given.what) - {"again", "disk", "batch"}:
        parser.error(f"there is no {min(strange)!r}; there are again, disk and batch")
    if given.child:
        print(json.dumps(ask_in_this_process(Path(given.child[0]), given.child[1])))
        return
    if "again" in given.what:
        ask_again(given.runs, given.evidence_tokens)
    if "disk" in given.what:
        ask_in_new_processes(given.runs, given.evidence_tokens)
    if "batch" in given.what:
        ask_many(given.runs, given.document_tokens, given.max_tokens)


# The same evidence again in the same process


@dataclass(frozen=True, slots=True)
class Ask:
    """A first question or a later one: its prompt, and the position at which what all of them share ends."""

    messages: list[Message]
    ids: list[int]
    border: int


@dataclass(frozen=True, slots=True)
class Firsts:
    """Seconds to the first token, and the tokens that were not evaluated again where a program tells it."""

    first_s: float
    again_s: list[float]
    cached_tokens: int | None = None


def ask_again(num_runs: int, evidence_tokens: int) -> None:
    path, flash = shared.default_model(), shared.chosen_attention()
    with Session.open(str(path), keep=False) as session, ExitStack() as stack:
        cases = make_cases(session, evidence_tokens)
        num_cells = max(len(ask.ids) for ask in next(cases)) + 64
        session.engine.reserve(num_cells)
        chat = stack.enter_context(closing(peers.ChatCompletion(path, n_ctx=num_cells)))
        programs: dict[str, Callable[[list[Ask]], Firsts]] = {
            OURS: lambda asks: firsts_of_ours(session.engine, asks),
            peers.CHAT: lambda asks: firsts(asks, lambda ask: chat.stream(ask.messages, 2, len(ask.ids))),
        }
        if peers.HAS_SLOTS:
            server = peers.Slots(path, n_ctx=num_cells, num_slots=1, num_threads=num_cores(), flash_attention=flash)
            stack.enter_context(closing(server))
            programs[peers.SLOTS] = lambda asks: firsts(asks, lambda ask: server.ask(ask.ids, 2))
        runs: dict[str, list[Firsts]] = {name: [] for name in programs}
        for _ in range(num_runs):
            case = next(cases)
            for name, program in programs.items():
                runs[name].append(program(case))
    rows = [row_of_firsts(name, each, runs[OURS]) for name, each in runs.items()]
    missing: list[dict[str, object]] = [] if peers.HAS_SLOTS else [{"program": f"{peers.SLOTS}: not installed"}]
    about: dict[str, object] = {
        "shared_tokens": case[0].border,
        "question_tokens": len(case[0].ids) - case[0].border,
        "note": peers.SLOTS_NOTE,
    }
    shared.report_table("followups", [*rows, *missing], runs=num_runs, **about)


def make_cases(session: Session, evidence_tokens: int) -> Iterator[list[Ask]]:
    """Evidence without end, each with a number of its own at the very beginning: no program has seen it before."""
    counter = session.engine.counter
    evidence = shared.beginning(shared.handbook(), evidence_tokens - counter(SYSTEM) - 24, counter)
    for number in count(100):
        system = Message("system", SYSTEM.format(number=number))
        asked = [[system, Message("user", f"Evidence:\n\n{evidence}\n\nQuestion: {question}")] for question in QUESTIONS]
        prompts = [list(session.prepare(Question.of(messages, max_tokens=2)).prompt.token_ids) for messages in asked]
        border = min(common_length(prompts[0], each) for each in prompts[1:])
        yield [Ask(messages, ids, border) for messages, ids in zip(asked, prompts, strict=True)]


def firsts(asks: Sequence[Ask], answer: Callable[[Ask], peers.Answered]) -> Firsts:
    first, *again = [answer(ask).first_s for ask in asks]
    return Firsts(first, again)


def firsts_of_ours(engine: Engine, asks: Sequence[Ask]) -> Firsts:
    sampling = SamplingParams(max_tokens=2)
    done = [engine.generate(list(ask.ids), sampling, breakpoints=(ask.border,)) for ask in asks]
    first, *again = [each.timings.first_token_s for each in done]
    return Firsts(first, again, done[-1].cached_tokens)


def row_of_firsts(program: str, runs: list[Firsts], own: list[Firsts]) -> dict[str, object]:
    again = [statistics.median(run.again_s) for run in runs]
    ours = [statistics.median(run.again_s) for run in own]
    row: dict[str, object] = {
        "program": program,
        "first ask_s": statistics.median(run.first_s for run in runs),
        "again_s": statistics.median(again),
        "slowest again_s": max(max(run.again_s) for run in runs),
        "again / first": statistics.median(seconds / run.first_s for seconds, run in zip(again, runs, strict=True)),
        "localrag takes, of this": statistics.median(mine / theirs for mine, theirs in zip(ours, again, strict=True)),
    }
    return row if runs[0].cached_tokens is None else row | {"cached tokens": runs[0].cached_tokens}


# The same evidence in a new process


def ask_in_new_processes(num_runs: int, evidence_tokens: int) -> None:
    """Two processes a run, in a home of their own: the first evaluates, the second reads."""
    shared.chosen_attention()
    with Session.open(str(shared.default_model()), vocab_only=True, keep=False) as session:
        evidence = shared.beginning(shared.handbook(), evidence_tokens, session.engine.counter)
    pairs = [two_processes(evidence, number) for number in range(num_runs)]
    rows = []
    for what in ("prefill_s", "first_token_s"):
        first, second = ([float(pair[which][what]) for pair in pairs] for which in (0, 1))
        rows.append(
            {
                "what": {"prefill_s": "evaluating the prompt", "first_token_s": "from the question to the first token"}[what],
                "first process_s": statistics.median(first),
                "second process_s": statistics.median(second),
                "slowest second_s": max(second),
                "second / first": statistics.median(b / a for a, b in zip(first, second, strict=True)),
            }
        )
    evaluated, read = [pair[0]["prefill_s"] for pair in pairs], [pair[1]["read_s"] for pair in pairs]
    rows.append(
        {
            "what": "the shared beginning alone: evaluated, or read",
            "first process_s": statistics.median(evaluated),
            "second process_s": statistics.median(read),
            "slowest second_s": max(read),
            "second / first": statistics.median(b / a for a, b in zip(evaluated, read, strict=True)),
        }
    )
    tokens = {name: pairs[0][1][name] for name in ("prompt_tokens", "cached_tokens", "load_s")}
    shared.report_table("disk", rows, runs=num_runs, load_of_the_model="left out of both", of_the_second_process=tokens)


def two_processes(evidence: str, number: int) -> list[dict[str, float]]:
    with shared.fresh_home() as settings:
        home, file = settings.home, settings.home / "evidence.md"
        file.write_text(f"Case {number}.\n\n{evidence}", encoding="utf-8")
        return [child(home, file, QUESTIONS[(number + which) % len(QUESTIONS)]) for which in (0, 1)]


def child(home: Path, file: Path, question: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.followups", "--child", str(file), question]
    environment = os.environ | {"LOCALRAG_HOME": str(home)}
    done = subprocess.run(command, cwd=shared.ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"A child process failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def ask_in_this_process(file: Path, question: str) -> dict[str, float]:
    """What an ask about a file takes, the loading of the model and the making of its context left out."""
    with Session.open(str(shared.default_model())) as session:
        text = file.read_text(encoding="utf-8")
        loaded_s, started, first = session.engine.load_s, time.perf_counter(), [0.0]

        def heard(_text: str) -> None:
            first[0] = first[0] or time.perf_counter() - started - (session.engine.load_s - loaded_s)

        sampling = SamplingParams(max_tokens=4)
        answer = session.ask(Question.of(question, sampling=sampling, attachments=(Attachment(label=file.name, text=text),)), on_text=heard)
        return {
            "prefill_s": answer.timings.prefill_s,
            "first_token_s": first[0],
            "read_s": read_again(session.engine, answer),
            "load_s": session.engine.load_s,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
        }


def read_again(engine: Engine, answer: Answer) -> float:
    """Seconds to read from disk what an answer's prompt shares with others."""
    cells = engine.context.single if engine.context is not None else None
    assert cells is not None
    assert engine.prefix_cache is not None
    engine.forget()
    started = time.perf_counter()
    engine.prefix_cache.recall(cells, list(answer.prompt.token_ids), answer.prompt.breakpoints)
    assert cells.breakpoints, "nothing was kept"
    return time.perf_counter() - started


# Many questions about several documents


@dataclass(frozen=True, slots=True)
class Done:
    wall_s: float
    num_answer_tokens: int


def ask_many(num_runs: int, document_tokens: int, max_tokens: int) -> None:
    path, flash = shared.default_model(), shared.chosen_attention()
    with Session.open(str(path), keep=False) as session, ExitStack() as stack:
        questions = [make_questions(session, document_tokens, run) for run in range(num_runs)]
        prompts = [
            [list(session.prepare(Question.of(each, max_tokens=max_tokens)).prompt.token_ids) for each in texts] for texts in questions
        ]
        longest = max(len(ids) for each in prompts for ids in each) + max_tokens + 64
        chat = stack.enter_context(closing(peers.ChatCompletion(path, n_ctx=longest)))
        server = None
        if peers.HAS_SLOTS:
            server = peers.Slots(path, n_ctx=8 * longest, num_slots=8, num_threads=num_cores(), flash_attention=flash)
            stack.enter_context(closing(server))
        runs: dict[str, list[Done]] = {}
        for texts, ids in zip(questions, prompts, strict=True):
            for name, seconds_of in batch_programs(session, chat, server, texts, ids, max_tokens).items():
                runs.setdefault(name, []).append(seconds_of())
        num_prompt_tokens = [sum(map(len, each)) for each in prompts]
    rows = [row_of_batch(name, each, runs[OURS], num_prompt_tokens) for name, each in runs.items()]
    missing: list[dict[str, object]] = [] if peers.HAS_SLOTS else [{"program": f"{peers.SLOTS}: not installed"}]
    about: dict[str, object] = {"questions": len(questions[0]), "documents": NUM_DOCUMENTS, "prompt_tokens": num_prompt_tokens[0]}
    shared.report_table("batch", [*rows, *missing], runs=num_runs, answer_tokens_at_most=max_tokens, **about, note=peers.SLOTS_NOTE)


def make_questions(session: Session, document_tokens: int, run: int) -> list[str]:
    """Four questions about each of eight documents, in the order of the documents; in every run other documents."""
    pages, counter = shared.handbook().split(" "), session.engine.counter
    step = len(pages) // NUM_DOCUMENTS
    texts = []
    for number in range(NUM_DOCUMENTS):
        start = number * step + 7 * run
        text = shared.beginning(" ".join((pages[start:] + pages[:start])[:1000]), document_tokens, counter)
        texts += [f"Document {run}-{number}:\n\n{text}\n\nQuestion: {question}" for question in ABOUT]
    return texts


def batch_programs(
    session: Session, chat: peers.ChatCompletion, server: peers.Slots | None, texts: list[str], ids: list[list[int]], max_tokens: int
) -> dict[str, Callable[[], Done]]:
    """Everybody has the questions in one mixed order; those who answer in the order of asking, also sorted by document."""
    mixed = random.Random(5).sample(range(len(texts)), len(texts))

    def chat_in(order: Sequence[int]) -> Done:
        chat.llama.reset()
        return timed(lambda: [chat.ask([Message("user", texts[i])], max_tokens) for i in order])

    programs: dict[str, Callable[[], Done]] = {
        OURS: lambda: batch_of_ours(session, [texts[i] for i in mixed], max_tokens),
        f"{peers.CHAT}, one by one": lambda: chat_in(mixed),
        f"{peers.CHAT}, one by one, sorted by document": lambda: chat_in(range(len(texts))),
    }
    if server is not None:
        programs[f"{peers.SLOTS}, 8 slots"] = lambda: timed(
            lambda: server.ask_all([ids[i] for i in mixed], [max_tokens] * len(mixed), may_end=True)
        )
    return programs


def batch_of_ours(session: Session, texts: Sequence[str], max_tokens: int) -> Done:
    questions = [Question.of(text, id=i, max_tokens=max_tokens) for i, text in enumerate(texts)]
    started = time.perf_counter()
    answers = [event.answer or event.error for event in session.run(questions, policy=BATCH) if event.answer or event.error]
    wall_s = time.perf_counter() - started
    assert all(isinstance(each, Answer) for each in answers), answers
    return Done(wall_s, sum(each.completion_tokens for each in answers if isinstance(each, Answer)))


def timed(answer_all: Callable[[], list[peers.Answered]]) -> Done:
    started = time.perf_counter()
    answers = answer_all()
    return Done(time.perf_counter() - started, sum(each.num_tokens for each in answers))


def row_of_batch(program: str, runs: list[Done], own: list[Done], num_prompt_tokens: list[int]) -> dict[str, object]:
    """Tokens are those of all prompts, taken over or not, and of the answers."""

    def speeds(each: list[Done]) -> list[float]:
        return [(tokens + run.num_answer_tokens) / run.wall_s for run, tokens in zip(each, num_prompt_tokens, strict=True)]

    return {
        "program": program,
        "wall_s": statistics.median(run.wall_s for run in runs),
        "answer tokens": statistics.median(run.num_answer_tokens for run in runs),
        "tokens/s": statistics.median(speeds(runs)),
        "localrag is faster by": statistics.median(mine / theirs for mine, theirs in zip(speeds(own), speeds(runs), strict=True)),
    }


if __name__ == "__main__":
    main()
