"""Measure recall@5 of follow-up questions, by the way in which their search query is formed.

A follow-up such as "And for how many hours?" needs the earlier turns. An independent question after another one does not. Both kinds are
measured, since whatever helps the first can harm the second.

    python -m benchmarks.chat_retrieval --rewrite
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import shared
from benchmarks.council_run import KB, handbook_home
from benchmarks.quality import load_questions
from localrag.grading import is_met
from localrag.session import Session, retrieval
from localrag.session.query_rewrite import QueryRewrite, QueryRewriter
from localrag.types import Hit, Message

FOLLOW_UPS = Path(__file__).with_name("handbook_followups.jsonl")
K = 5


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """What was said before, a question, and what a passage has to hold that answers it."""

    question: str
    answer: str
    asked: str
    answers: Sequence[Sequence[str]]
    sources: Sequence[str]

    def is_found(self, hits: Sequence[Hit]) -> bool:
        return any(hit.chunk.source.removeprefix("handbook/") in self.sources and is_met(self.answers, hit.chunk.text) for hit in hits[:K])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rewrite", action="store_true", help="also have the default model rewrite short ones, as chat --rewrite does (minutes)"
    )
    given = parser.parse_args()
    with handbook_home() as settings, Session.open(kbs=[KB], keep=False, settings=settings) as session:
        ways: dict[str, Callable[[Case], list[Hit]]] = {
            "last message only": lambda case: session.retrieve(case.asked, top_k=K),
            "joined with the one before": lambda case: session.retrieve(f"{case.question}\n\n{case.asked}", top_k=K),
            "as chat does it": lambda case: retrieval.retrieve_after(session.retriever, [case.question], case.asked, top_k=K),
        }
        kinds = {"follow-ups": follow_ups(), "questions of their own": strangers()}
        made = {case: rewriting for cases in kinds.values() for case, rewriting in rewritten(session, cases)} if given.rewrite else {}
        if made:
            ways["rewritten by the model"] = lambda case: session.retrieve(text_of(made, case) or case.asked, top_k=K)
            ways["as chat --rewrite does it"] = lambda case: retrieval.retrieve_after(
                session.retriever, [case.question], case.asked, top_k=K, rewritten=text_of(made, case)
            )
        rows: list[dict[str, object]] = []
        for name, way in ways.items():
            found = {kind: [case.is_found(way(case)) for case in cases] for kind, cases in kinds.items()}
            rows.append({"searched for": name} | {f"recall@{K}, {len(each)} {kind}": sum(each) / len(each) for kind, each in found.items()})
    shared.report_table("chat_retrieval", rows)
    if made:
        shared.report_table("chat_retrieval_rewriting", [cost(made)])


def follow_ups() -> list[Case]:
    rows = [json.loads(line) for line in FOLLOW_UPS.read_text(encoding="utf-8").splitlines()]
    return [Case(row["question"], row["answer"], row["follow_up"], row["answers"], row["sources"]) for row in rows]


def strangers() -> list[Case]:
    """Each question of the handbook behind another one, about something else."""
    questions = load_questions()
    before = [*questions[17:], *questions[:17]]
    return [Case(b.question, "", q.question, q.answers, q.sources) for q, b in zip(questions, before, strict=True)]


def rewritten(session: Session, cases: Sequence[Case]) -> Iterator[tuple[Case, QueryRewrite]]:
    """Those that are short, as the session's model rewrites them."""
    session.engine.share_contexts()
    rewriter = QueryRewriter(session.engine, n_ctx=session.slot.n_ctx)
    for case in cases:
        said = [Message("user", case.question), Message("assistant", case.answer or "It depends."), Message("user", case.asked)]
        rewriting = rewriter(said) if retrieval.is_short(case.asked, [case.question]) else None
        if rewriting is not None:
            print(f"{case.question} | {case.asked} -> {rewriting.text}")
            yield case, rewriting


def text_of(made: Mapping[Case, QueryRewrite], case: Case) -> str:
    return made[case].text if case in made else ""


def cost(made: Mapping[Case, QueryRewrite]) -> dict[str, object]:
    """Of one rewriting: medians, and how many of them were of use."""
    each = list(made.values())
    return {
        "rewritten": len(each),
        "of use": sum(bool(rewriting.text) for rewriting in each),
        "tokens in": statistics.median(rewriting.prompt_tokens for rewriting in each),
        "evaluated": statistics.median(rewriting.prompt_tokens - rewriting.cached_tokens for rewriting in each),
        "tokens out": statistics.median(rewriting.completion_tokens for rewriting in each),
        "s": round(statistics.median(rewriting.seconds for rewriting in each), 2),
    }


if __name__ == "__main__":
    main()
