"""Compare a whole council on examples/handbook, from its task to its verdict, with the same prompts sent one at a time.

    python -m benchmarks.council_run --runs 3

The peer gets the texts of our prompts, each as a system and a user message, with our answer's length as its token limit. It does not
search, verify answers or constrain them to a grammar. Model loading is not timed, and every run starts with an empty KV cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks import peers, shared
from localrag.catalog import Catalog
from localrag.deliberation import Council
from localrag.kb import KnowledgeBase
from localrag.session import Answer, open_embedder, prepare_queries
from localrag.session.council_run import run_council
from localrag.settings import Settings
from localrag.text.tokens import common_length
from localrag.types import Message

OURS, FIRST, LAST = "localrag", f"{peers.CHAT}, persona first", f"{peers.CHAT}, persona last"
TASK = "What is best for parts at 80 °C: PETG or ABS?"
KB = "handbook"
Numbers = dict[str, float]


@dataclass(slots=True)
class Last:
    """What our last run said: (role, kind, answer) of each turn, in order."""

    said: list[tuple[str, str, Answer]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (default 3)")
    parser.add_argument("--task", default=TASK, help="what the council decides")
    given = parser.parse_args()
    with handbook_home() as settings:
        catalog, last = Catalog.load(settings), Last()
        council = catalog.council("default")
        path = catalog.open(catalog.model(council.judge.model))

        def ours() -> Numbers:
            return tell(OURS, convene(council, given.task, settings, last))

        ours()  # its prompts say how large a window the peer needs
        window = max(answer.prompt_tokens + answer.completion_tokens for _, _, answer in last.said) + 64
        with closing(peers.ChatCompletion(path, n_ctx=window)) as chat:
            programs: dict[str, Callable[[], Numbers]] = {
                OURS: ours,
                FIRST: lambda: tell(FIRST, one_by_one(chat, last, persona_first=True)),
                LAST: lambda: tell(LAST, one_by_one(chat, last, persona_first=False)),
            }
            runs = shared.in_turn(programs, given.runs)
    about = {"council": council.name, "task": given.task, "runs": given.runs, "model": path.name}
    shared.report_table("council_run", [row(name, each, runs[OURS]) for name, each in runs.items()], **about)
    shared.report_table("council_run_turns", [row_of_turn(*each) for each in last.said], **about)


@contextmanager
def handbook_home() -> Iterator[Settings]:
    """A home that nothing else uses, with the handbook in the knowledge base KB."""
    with shared.fresh_home() as settings:
        embedder = open_embedder(settings)
        with KnowledgeBase.open(settings.kb_dir, KB, create=True) as kb:
            kb.ingest([shared.ROOT / "examples" / "handbook"], embedder)
        prepare_queries(embedder, settings, on_start=lambda: None)
        yield settings


def convene(council: Council, task: str, settings: Settings, last: Last) -> Numbers:
    """One run of ours. Its search and the checks of its answers are in its time."""
    events: list[dict[str, Any]] = []
    sat = run_council(council, task, settings=settings, kbs=[KB], keep=False, on_event=events.append)
    kinds = [each["kind"] for each in events if each["event"] == "said" and "error" not in each]
    last.said = [(role, kind, answer) for kind, (role, answer) in zip(kinds, sat.answers, strict=True)]
    end = next(each for each in events if each["event"] == "end")
    usage = end["usage"]
    return {
        "wall_s": end["total_s"] - sum(each["load_s"] for each in end["loads"]),
        "prompt tokens": usage["prompt_tokens"],
        "evaluated tokens": usage["evaluated_tokens"],
        "answer tokens": usage["completion_tokens"],
    }


def one_by_one(chat: peers.ChatCompletion, last: Last, *, persona_first: bool) -> Numbers:
    """The prompts of our last run in their order; each goes on from what it has in common with the one before."""
    chat.llama.reset()
    numbers = dict.fromkeys(("wall_s", "prompt tokens", "evaluated tokens", "answer tokens"), 0.0)
    for _, _, answer in last.said:
        held, limit = held_by(chat), answer.completion_tokens
        started = time.perf_counter()
        num_written = chat.ask(messages_of(answer, persona_first=persona_first), limit).num_tokens
        numbers["wall_s"] += time.perf_counter() - started
        now = held_by(chat)
        # a token that ends the answer is not evaluated, and neither is the last one that the limit allows
        num_prompt_tokens = len(now) - num_written + (num_written == limit)
        numbers["prompt tokens"] += num_prompt_tokens
        numbers["evaluated tokens"] += num_prompt_tokens - min(common_length(held, now), num_prompt_tokens - 1)
        numbers["answer tokens"] += num_written
    return numbers


def held_by(chat: peers.ChatCompletion) -> list[int]:
    """The tokens in the peer's cache."""
    held: list[int] = chat.llama.input_ids[: chat.llama.n_tokens].tolist()
    return held


def messages_of(answer: Answer, *, persona_first: bool) -> list[Message]:
    """The texts of a prompt of ours: where the persona comes first, it stands before the system text, else where we have it."""
    parts = [each.part for each in answer.prompt.parts if not each.part.is_markup]
    leading = ("instructions", "system") if persona_first else ("system",)
    system = "\n\n".join(filter(None, ("".join(part.text for part in parts if part.section == name).strip() for name in leading)))
    user = "".join(part.text for part in parts if part.section not in leading).strip()
    return [*([Message("system", system)] if system else []), Message("user", user)]


def tell(program: str, numbers: Numbers) -> Numbers:
    """A run takes its time."""
    said = ", ".join(f"{value:.0f} {name}" for name, value in numbers.items() if name != "wall_s")
    print(f"{program}: {numbers['wall_s']:.1f} s, {said}", file=sys.stderr, flush=True)
    return numbers


def row(program: str, runs: Sequence[Numbers], own: Sequence[Numbers]) -> dict[str, object]:
    walls = [run["wall_s"] for run in runs]
    medians = {name: round(statistics.median(run[name] for run in runs)) for name in runs[0] if name != "wall_s"}
    return {
        "program": program,
        "wall_s": statistics.median(walls),
        "min_s": min(walls),
        "max_s": max(walls),
        **medians,
        "localrag takes, of this": statistics.median(mine["wall_s"] / wall for mine, wall in zip(own, walls, strict=True)),
    }


def row_of_turn(role: str, kind: str, answer: Answer) -> dict[str, object]:
    """Those who are asked at once share what the first of them evaluates."""
    return {
        "role": role,
        "turn": kind,
        "prompt tokens": answer.prompt_tokens,
        "cached tokens": answer.cached_tokens,
        "evaluated tokens": answer.prompt_tokens - answer.cached_tokens,
        "answer tokens": answer.completion_tokens,
    }


if __name__ == "__main__":
    main()
