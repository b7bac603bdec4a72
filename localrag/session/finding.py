"""What is offered to a prompt as evidence: passages from every knowledge base of the session, and what was piped in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from localrag.fusion import fuse
from localrag.messages import Message
from localrag.passages import Hit
from localrag.session.bypass import Bypass, bypass
from localrag.terms import terms

if TYPE_CHECKING:
    from localrag.kb.filters import Where
    from localrag.session.answers import Answer
    from localrag.session.options import Options
    from localrag.session.walk import Session

DEFAULT_TOP_K = 4
MIN_DEPTH = 100
"""The fewest passages that are looked for where as many shall be offered as the window may hold."""
MAX_DEPTH = 1000

MAX_FOLLOW_UP_TERMS = 4
"""Words that a question may have, stop words aside, to be taken for one that needs the one before it. Measured on 26 follow-ups and 50
questions of their own behind another one (benchmarks/chat_retrieval.py)."""
FOLLOW_UP_DEPTH = 20

TopK = int | Literal["fit"]
"""How many passages are offered; "fit" is as many as the window may hold, of which the prompt takes those that fit."""


def unsearched(session: Session, messages: Sequence[Message], options: Options) -> Bypass | None:
    """Why nothing is searched for in a conversation, if so."""
    return bypass(messages, has_kb=bool(session.knowledge_bases), has_tools=bool(options.get("tools")))


def offered(
    session: Session, question: str, options: Options, *, before: str = "", rewritten: str = "", searches: bool = True
) -> list[Hit]:
    """All that is offered as evidence: what was piped in comes before what was found, unless nothing is searched for.

    `before` and `rewritten` are as in `retrieve_after`.
    """
    if "hits" in options:
        return list(options["hits"])
    top_k, where = options.get("top_k", DEFAULT_TOP_K), options.get("where")
    if not searches:
        found = []
    elif top_k == "fit":
        found = _as_fit(session, rewritten or question, where)
    else:
        found = retrieve_after(session, before, question, top_k=top_k, where=where, rewritten=rewritten)
    if options.get("weigh") and found:
        from localrag.session.weighing import weighed  # noqa: PLC0415  # weight: few asks read files

        found = weighed(found, question, session.knowledge_bases, session.weights)
    piped = options.get("piped", "")
    if not piped.strip():
        return found
    from localrag.kb.piped import piped_hits  # noqa: PLC0415  # weight: most asks have no piped text

    return [*piped_hits(piped, question, session.engine.counter), *found]


def retrieve(session: Session, question: str, *, top_k: int, where: Where | None = None, rerank: bool = True) -> list[Hit]:
    """The best chunks of all knowledge bases together, best first. Labels name the knowledge base where there are several."""
    if session.embedder is None:
        return []
    reranker = session.reranker if rerank else None
    found = [
        replace(hit, chunk=replace(hit.chunk, scope=kb.name if len(session.knowledge_bases) > 1 else ""))
        for kb in session.knowledge_bases
        for hit in kb.retrieve(question, session.embedder, k=top_k, where=where, learning=session.learning, reranker=reranker)
    ]
    return sorted(found, key=lambda hit: (-hit.score, hit.label))[:top_k]


def is_follow_up(question: str, before: str) -> bool:
    """Whether a question is taken for one that needs `before`, the one that it follows if there is one."""
    return bool(before) and len(terms(question)) <= MAX_FOLLOW_UP_TERMS


def retrieve_after(
    session: Session, before: str, question: str, *, top_k: int, where: Where | None = None, rewritten: str = ""
) -> list[Hit]:
    """The best chunks for a question that follows another one ("and its price?"); with an empty `before` as `retrieve`.

    A short question is looked for by itself and together with the one before it, or as it was `rewritten`, and the two orders are fused.
    """
    if not is_follow_up(question, before):
        return retrieve(session, question, top_k=top_k, where=where)
    queries = {"question": question, "with the one before": f"{before}\n\n{question}"}
    if rewritten:
        queries = {"question": question, "rewritten": rewritten}
    return _fused(session, queries, top_k=top_k, where=where)


def _fused(session: Session, queries: Mapping[str, str], *, top_k: int, where: Where | None) -> list[Hit]:
    depth = max(top_k, FOLLOW_UP_DEPTH)
    found = {name: retrieve(session, query, top_k=depth, where=where) for name, query in queries.items()}
    hits = [hit for each in found.values() for hit in each]
    best = {hit.label: hit for hit in sorted(hits, key=lambda hit: hit.relevance or 0.0)}  # of a hit in both, the more relevant
    numbers = {label: number for number, label in enumerate(best)}
    labels = list(best)
    scored = fuse({name: [numbers[hit.label] for hit in each] for name, each in found.items()})
    return [replace(best[labels[number]], score=score, contributions=parts) for number, score, parts in scored[:top_k]]


def _as_fit(session: Session, question: str, where: Where | None) -> list[Hit]:
    """As many as a window of chunks of their mean size holds, in tokens of the model that will read them."""
    found = retrieve(session, question, top_k=MIN_DEPTH, where=where, rerank=False)
    num_tokens = sum(session.engine.counter(hit.chunk.text) for hit in found)
    depth = min(MAX_DEPTH, session.slot.n_ctx * len(found) // max(1, num_tokens))
    if session.reranker is None and (len(found) < MIN_DEPTH or depth <= MIN_DEPTH):
        return found
    return retrieve(session, question, top_k=max(MIN_DEPTH, depth), where=where)


def none_passes(session: Session, where: Where | None, hits: Sequence[Hit]) -> list[str]:
    """A warning where no document passes the conditions; `hits` is what was found."""
    if not where or any(hit.chunk.kb for hit in hits) or any(kb.sources(where) for kb in session.knowledge_bases):
        return []
    return [f"No document passes {where}. To see what they are: localrag kb show NAME"]


def left_unread(answer: Answer, question: str) -> list[str]:
    """A warning where some of many passages were read for a question that needs all."""
    if not 0 < len(answer.hits) < answer.chunks_in_kb:
        return []
    from localrag.kb.coverage import needs_all  # noqa: PLC0415  # weight

    if not needs_all(question):
        return []
    read = f"{len(answer.hits)} of {answer.chunks_in_kb} passages"
    return [f"The answer rests on {read}, and the question seems to need all that match. To have them all read: --exhaustive."]
