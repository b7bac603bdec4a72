"""Compare a council in one batch with a shared prefix, sequential answers, and server slots. All personas get the same evidence."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks import peers, shared
from localrag.engine.engine import Engine
from localrag.engine.threads import num_cores
from localrag.question import Question
from localrag.session import Session
from localrag.text.tokens import common_length
from localrag.types import Message, SamplingParams

OURS, CHAT, CHAT_LAST = "localrag", f"{peers.CHAT}, persona first", f"{peers.CHAT}, persona last"
PARALLEL, SEQUENTIAL = f"{peers.SLOTS}, at once", f"{peers.SLOTS}, one by one"
SYSTEM = "You sit on council {number} of a workshop for printed parts. Answer in full sentences and at length."
TASK = (
    "Task: a bracket holds a lamp inside a parked car in summer. It must stay stiff at 80 °C, hold 2 kg for years and be printed without "
    "a heated chamber. Which material do you recommend, and how is it to be printed, dried and treated afterwards?"
)
PERSONAS = (
    ("a materials engineer", "glass transition, creep under load over years and what moisture does to stiffness"),
    ("a print farm operator", "failed prints, the time on the machine, drying of spools and what beginners do wrong"),
    ("a buyer", "the price of the filament, of nozzles that wear out and of parts that have to be printed again"),
    ("a safety officer", "fumes, particles, hot surfaces and what happens when the part fails above a person"),
    ("a mechanical designer", "wall thickness, the direction of layers, ribs and where the screws take the load"),
    ("a test engineer", "which measurements would prove the choice and how many parts have to be tested in heat"),
    ("an environmental adviser", "waste, recycling, the energy of annealing and how long the part will be in use"),
    ("a customer", "how the part looks, how soon it is there and whether it can be replaced without tools"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One council's prompts. `ids` are those of `last`, whose personas stand at the end."""

    first: list[list[Message]]
    last: list[list[Message]]
    ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class Run:
    wall_s: float
    num_tokens: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="counted councils of each size (default 3)")
    parser.add_argument("--members", type=int, nargs="*", default=[3, 8], help="sizes, up to 8 (default 3 8)")
    parser.add_argument("--prefix-tokens", type=int, default=1470, help="tokens that all members share (default 1470)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer (default 128)")
    given = parser.parse_args()
    path, rows = shared.default_model(), list[dict[str, object]]()
    about: dict[str, object] = {}
    with Session.open(str(path), keep=False) as session:
        for num_members in given.members:
            cases = make_cases(session, num_members, given.prefix_tokens, given.max_tokens)
            about = shape(next(cases))
            rows += compare(session.engine, path, cases, given.runs, given.max_tokens)
    shared.report_table("council", rows, runs=given.runs, answer_tokens=given.max_tokens, **about, note=peers.SLOTS_NOTE)


def make_cases(session: Session, num_members: int, prefix_tokens: int, max_tokens: int) -> Iterator[Case]:
    """Councils without end, each with a number of its own at the very beginning: no program has seen its prefix before."""
    counter, overhead = session.engine.counter, 24  # of the template
    evidence = shared.beginning(shared.handbook(), prefix_tokens - counter(SYSTEM + TASK) - overhead, counter)
    for number in count(100):
        system, shown = SYSTEM.format(number=number), f"Evidence:\n\n{evidence}\n\n{TASK}"
        personas = [
            f"You are {who}. Your part is {what}. Judge by that alone, name your reasons one by one, and write at least ten sentences."
            for who, what in PERSONAS[:num_members]
        ]
        first = [[Message("system", persona), Message("user", f"{system}\n\n{shown}")] for persona in personas]
        last = [[Message("system", system), Message("user", f"{shown}\n\n{persona}")] for persona in personas]
        yield Case(first, last, [list(session.prepare(Question.of(each, max_tokens=max_tokens)).prompt.token_ids) for each in last])


def shape(case: Case) -> dict[str, object]:
    shared_tokens = common_length(case.ids[0], case.ids[-1])
    return {"prefix_tokens": shared_tokens, "persona_tokens": statistics.mean(map(len, case.ids)) - shared_tokens}


def compare(engine: Engine, path: Path, cases: Iterator[Case], num_runs: int, max_tokens: int) -> list[dict[str, object]]:
    """Every program in turn. Where a member of ours ends early, that member of the others may write no more tokens either."""
    case = next(cases)
    num_members, longest = len(case.ids), max(map(len, case.ids)) + 16
    # for ours, the prefix once; for slots, which evaluate it each on their own, as often as there are members
    engine.reserve(longest + num_members * (max_tokens + 128), num_sequences=num_members)
    with ExitStack() as stack:
        chat = stack.enter_context(closing(peers.ChatCompletion(path, n_ctx=longest + max_tokens + 128)))
        programs: dict[str, Callable[[Case, Sequence[int]], Run]] = {
            CHAT: lambda case, limits: one_by_one(chat, case.first, limits),
            CHAT_LAST: lambda case, limits: one_by_one(chat, case.last, limits),
        }
        server = stack.enter_context(closing(make_slots(path, num_members, longest + max_tokens))) if peers.HAS_SLOTS else None
        if server is not None:
            programs[PARALLEL] = lambda case, limits: timed(lambda: server.ask_all(case.ids, limits))
            programs[SEQUENTIAL] = lambda case, limits: timed(lambda: list(map(server.ask, case.ids, limits)))
        warm_up(engine, case, chat, server)
        runs: dict[str, list[Run]] = {name: [] for name in (OURS, *programs)}
        for _ in range(num_runs):
            case = next(cases)
            own = ours(engine, case.ids, max_tokens)
            runs[OURS].append(own)
            tell(OURS, own)
            for name, program in programs.items():
                chat.llama.reset()
                runs[name].append(program(case, own.num_tokens))
                tell(name, runs[name][-1])
                # two programs have the same prompts: what the first one left must not help the second
                case = next(cases)
    missing: list[dict[str, object]] = [] if peers.HAS_SLOTS else [{"members": num_members, "program": f"{peers.SLOTS}: not installed"}]
    return [row(num_members, name, each, runs[OURS]) for name, each in runs.items()] + missing


def tell(program: str, run: Run) -> None:
    """A council takes minutes."""
    print(f"{len(run.num_tokens)} members, {program}: {run.wall_s:.1f} s, {sum(run.num_tokens)} tokens", file=sys.stderr, flush=True)


def warm_up(engine: Engine, case: Case, chat: peers.ChatCompletion, server: peers.Slots | None) -> None:
    """What only a first call does is done."""
    engine.generate(case.ids[0][:64], SamplingParams(max_tokens=4))
    chat.ask([Message("user", PERSONAS[0][1])], 4)
    if server is not None:
        server.ask(case.ids[0][:64], 4)


def make_slots(path: Path, num_members: int, num_cells: int) -> peers.Slots:
    flash = shared.chosen_attention()
    num_cells = num_members * (num_cells + 64)
    return peers.Slots(path, n_ctx=num_cells, num_slots=num_members, num_threads=num_cores(), flash_attention=flash)


def ours(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> Run:
    started = time.perf_counter()
    sequences = [engine.add(list(ids), SamplingParams(max_tokens=max_tokens)) for ids in prompts]
    while not engine.is_idle:
        engine.step()
    return Run(time.perf_counter() - started, [len(each.completion_ids) for each in sequences])


def one_by_one(chat: peers.ChatCompletion, prompts: Sequence[Sequence[Message]], limits: Sequence[int]) -> Run:
    return timed(lambda: list(map(chat.ask, prompts, limits)))


def timed(answer_all: Callable[[], list[peers.Answered]]) -> Run:
    started = time.perf_counter()
    answers = answer_all()
    return Run(time.perf_counter() - started, [each.num_tokens for each in answers])


def row(num_members: int, program: str, runs: list[Run], own: list[Run]) -> dict[str, object]:
    walls = [run.wall_s for run in runs]
    return {
        "members": num_members,
        "program": program,
        "wall_s": statistics.median(walls),
        "min_s": min(walls),
        "max_s": max(walls),
        "answer tokens": statistics.median(sum(run.num_tokens) for run in runs),
        "localrag takes, of this": statistics.median(mine.wall_s / wall for mine, wall in zip(own, walls, strict=True)),
    }


if __name__ == "__main__":
    main()
