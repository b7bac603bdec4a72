"""Measure recall@5 of follow-up questions, by the way in which their search query is formed.

A follow-up such as "And for how many hours?" needs the earlier turns. An independent question after another one does not. Both kinds are
measured, since whatever helps the first can harm the second.

    python -m benchmarks.chat_retrieval --rewrite

With `--conversations DIR`, the questions are those of a folder in MTRAG's format (see docs/how-to/quality.md), and none is rewritten.
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
from localrag.conversation import search_query
from localrag.grading import is_met
from localrag.kb import KnowledgeBase
from localrag.kb import evaluate as evaluation
from localrag.kb.retrieve import fuse
from localrag.session import Retriever, Session, open_embedder, retrieval
from localrag.session.query_rewrite import QueryRewrite, QueryRewriter
from localrag.settings import Settings
from localrag.types import Hit, Message, comparable, merged

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
    parser.add_argument("--conversations", type=Path, metavar="DIR", help="measure on a folder with corpus.jsonl and conversations.jsonl")
    given = parser.parse_args()
    if given.conversations:
        measure_conversations(given.conversations)
        return
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


# Conversations in MTRAG's format

NUM_OTHERS = 5
"""Conversations that each first question is asked after, as a change of subject."""

Turns = tuple[list[str], str, Mapping[str, int]]
"""The questions before, the question, and the relevant documents."""


def measure_conversations(folder: Path) -> None:
    settings = Settings.from_env()
    collection, embedder = evaluation.read_collection(folder), open_embedder(settings)
    evaluation.open_index(collection, embedder, settings.home).close()
    kinds = conversation_cases(collection)
    name, embedder = evaluation.index_name(collection, embedder), open_embedder(settings, for_queries=True)
    with KnowledgeBase.open(settings.home / evaluation.FOLDER, name) as kb:
        retriever = Retriever(knowledge_bases=[kb], embedder=embedder, learning="off")
        depth = retrieval.FOLLOW_UP_DEPTH
        ways: dict[str, Callable[[list[str], str], list[Hit]]] = {
            "the last turn only": lambda _before, asked: retriever.search(asked, top_k=depth),
            "with the turn before, if of at most four words": lambda before, asked: if_short(retriever, before, asked),
            "as every command": lambda before, asked: retrieval.retrieve_after(retriever, before, asked, top_k=depth),
        }
        rows: list[dict[str, object]] = []
        for name, way in ways.items():
            row: dict[str, object] = {"searched for": name}
            for kind, cases in kinds.items():
                run = {one: evaluation.ranked_documents(way(before, asked)) for one, (before, asked, _) in cases.items()}
                scores = evaluation.scored({one: relevant for one, (*_, relevant) in cases.items()}, run, evaluation.CONVERSATION_MEASURES)
                for measure, title in evaluation.CONVERSATION_MEASURES.items():
                    row[f"{title}, {len(cases)} {kind}"] = round(statistics.fmean(each[measure] for each in scores.values()), 4)
            rows.append(row)
    shared.report_table("conversation_retrieval", rows, collection=folder.resolve().name)


def conversation_cases(collection: evaluation.Collection) -> dict[str, dict[str, Turns]]:
    """The follow-ups, and each first question after other conversations, at even distances."""
    turns = {
        one: (retrieval.asked_before(messages), search_query(messages), collection.qrels[one])
        for one, messages in collection.conversations.items()
    }
    follow_ups = {one: case for one, case in turns.items() if case[0]}
    others = [[*before, asked] for before, asked, _ in follow_ups.values()]
    changes: dict[str, Turns] = {}
    for at, (one, (before, asked, relevant)) in enumerate((one, case) for one, case in turns.items() if not case[0]):
        for number in range(NUM_OTHERS):
            other = others[(at + number * len(others) // NUM_OTHERS) % len(others)]
            changes[f"{one} {number}"] = ([*before, *other], asked, relevant)
    return {"follow-ups": follow_ups, "changes of subject": changes}


def if_short(retriever: Retriever, before: list[str], asked: str) -> list[Hit]:
    """The rule until 2026-11-25: only a question of few words is searched with the one before, too, and the ranks are fused."""
    depth = retrieval.FOLLOW_UP_DEPTH
    if not retrieval.is_short(asked, before):
        return retriever.search(asked, top_k=depth)
    rankings = {query: retriever.search(query, top_k=depth) for query in (asked, f"{before[-1]}\n\n{asked}")}
    best = merged(sorted((hit for hits in rankings.values() for hit in hits), key=lambda hit: -(hit.relevance or 0.0)))
    numbers = {comparable(hit.chunk.text): number for number, hit in enumerate(best)}
    fused = fuse({query: [numbers[comparable(hit.chunk.text)] for hit in hits] for query, hits in rankings.items()})
    return [best[number] for number, _, _ in fused[:depth]]


# The handbook


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
