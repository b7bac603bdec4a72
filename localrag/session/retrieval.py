"""Find the evidence to offer to a prompt: passages from all knowledge bases of the session, and piped text."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.conversation import split
from localrag.errors import UsageError
from localrag.question import Question, TopK
from localrag.session.answerability import NUM_COMPARED, Answerability, Calibration
from localrag.session.timing import TimedReranker
from localrag.text.terms import terms
from localrag.types import Chunk, Hit, Message, comparable, expanded, merged

if TYPE_CHECKING:
    from localrag.kb import KnowledgeBase, Mode
    from localrag.kb.filters import Where
    from localrag.kb.protocols import Reranker
    from localrag.relevance import File
    from localrag.session.answer import Answer
    from localrag.settings import Learning
    from localrag.text.tokens import Embedder

DEFAULT_TOP_K = 4
MIN_DEPTH = 100
"""Minimum number of passages to search for with `top_k` "fit"."""
MAX_DEPTH = 1000

MAX_FILE_BYTES = 2 * 1024 * 1024
"""Size limit in bytes. The relevance of a larger file is computed from its retrieved chunks."""

MAX_FOLLOW_UP_TERMS = 4
"""Maximum number of words, without stop words, of a question that the model may rewrite as a follow-up."""
FOLLOW_UP_DEPTH = 20
MIN_GAIN = 0.05
"""How much nearer to its best passage, in cosine similarity, a question must come by the turns before it for them to be searched too."""
MAX_EARLIER_CHARS = 2000
"""Characters of the conversation to search with, newest first: embedding a query takes time in proportion to its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retriever:
    """Searches one or several knowledge bases. Every command uses it, so all of them find the same passages.

    `learning` says which votes and counts affect the ranking. `reranker` reorders the best passages.
    """

    knowledge_bases: Sequence[KnowledgeBase]
    embedder: Embedder | None
    learning: Learning
    reranker: Reranker | None = None
    counter: Callable[[str], int] | None = None
    """Counts tokens of the model that will read the hits. Needed for piped text and for `top_k` "fit"."""
    n_ctx: int = 0
    """The model's window in tokens, for `top_k` "fit"."""
    weights: Mapping[str, object] = field(default_factory=dict)
    """Fields of relevance.Weights, for `weigh`."""
    calibration: Calibration | None = None
    """Turns what a search finds into a probability; None for an embedder that was not calibrated."""

    def search(self, query: str, *, top_k: int, mode: Mode = "hybrid", where: Where | None = None, rerank: bool = True) -> list[Hit]:
        """The `top_k` best texts of all knowledge bases, best first, each once: `copies` holds further passages with the same text.

        With several knowledge bases, labels include the name. Without an embedder, only keyword mode finds anything.
        """
        if self.embedder is None and mode != "keyword":
            return []
        reranker = self.reranker if rerank else None
        hits = self._search(query, top_k, mode, where, reranker)
        if isinstance(reranker, TimedReranker) and reranker.is_skipped and len(self.knowledge_bases) > 1:
            hits = self._search(query, top_k, mode, where, None)  # reranked and plain scores are not comparable
        return merged(sorted(hits, key=lambda hit: (-hit.score, hit.label)))[:top_k]

    def everything(self, query: str, *, where: Where | None = None) -> list[Hit]:
        """Every passage that matches `where`: first those relevant to the query, then the rest by document, with a score of 0."""
        num_chunks = max(1, sum(kb.num_chunks for kb in self.knowledge_bases))
        hits = self.search(query, top_k=num_chunks, where=where)
        labels = {chunk.label for hit in hits for chunk in (hit.chunk, *hit.copies)}
        rest = [self._scoped(chunk, kb) for kb in self.knowledge_bases for chunk in kb.chunks(where)]
        return merged([*hits, *(Hit(chunk, 0.0) for chunk in rest if chunk.label not in labels)])

    def offered(
        self,
        question: Question,
        query: str,
        *,
        top_k: TopK | None = None,
        before: Sequence[str] = (),
        rewritten: str = "",
        searches: bool = True,
        reads_all: bool = False,
    ) -> list[Hit]:
        """All evidence for a question: its piped text, then the hits for `query` if it `searches`. Identical texts are included; the prompt
        merges them.

        Hits given with the question replace the search. `top_k` is the number of passages; None is the question's own, or DEFAULT_TOP_K.
        `before` and `rewritten` are as in `retrieve_after`. With `reads_all`, every passage that matches the question's filters is
        included.
        """
        if question.given.hits is not None:
            return list(question.given.hits)
        top_k = top_k or question.search.top_k or DEFAULT_TOP_K
        hits = self._hits(query, top_k, question.search.where, before, rewritten, reads_all=reads_all) if searches else []
        return self._completed(hits, question, query)

    def assessed(
        self, question: Question, query: str, *, top_k: TopK, before: Sequence[str] = (), rewritten: str = "", searches: bool = True
    ) -> tuple[list[Hit], Answerability | None]:
        """Return the evidence for a question as `offered` does, and how likely the knowledge bases answer it.

        None if nothing was searched, or not by meaning, or if the embedder was not calibrated.
        """
        if question.given.hits is not None or not searches or self.calibration is None or self.embedder is None:
            return self.offered(question, query, top_k=top_k, before=before, rewritten=rewritten, searches=searches), None
        depth = top_k if top_k == "fit" else max(top_k, NUM_COMPARED)
        hits = self._hits(query, depth, question.search.where, before, rewritten, reads_all=False)
        answerability = self.calibration.assess(hits)
        return self._completed(hits if top_k == "fit" else hits[:top_k], question, query), answerability

    def _completed(self, hits: list[Hit], question: Question, query: str) -> list[Hit]:
        """The hits of a search, weighed if the question says so, with their copies, after the piped text."""
        if question.search.weigh and hits:
            hits = weighed(hits, query, self.knowledge_bases, self.weights)
        hits = expanded(hits)
        piped = question.given.piped
        if not piped.strip():
            return hits
        from localrag.kb.retrieve import piped_hits  # noqa: PLC0415  # weight: most asks have no piped text

        return [*piped_hits(piped, query, self._count), *hits]

    def _hits(self, query: str, top_k: TopK, where: Where | None, before: Sequence[str], rewritten: str, *, reads_all: bool) -> list[Hit]:
        if reads_all:
            return self.everything(query, where=where)
        if top_k == "fit":
            return self._as_fit(before, query, where=where, rewritten=rewritten)
        return retrieve_after(self, before, query, top_k=top_k, where=where, rewritten=rewritten)

    def _as_fit(self, before: Sequence[str], question: str, *, where: Where | None, rewritten: str) -> list[Hit]:
        """As many hits as chunks of average size fit in the window."""

        def search(top_k: int, *, rerank: bool) -> list[Hit]:
            return retrieve_after(self, before, question, top_k=top_k, where=where, rewritten=rewritten, rerank=rerank)

        hits = search(MIN_DEPTH, rerank=False)
        num_tokens = sum(self._count(hit.chunk.text) for hit in hits)
        depth = min(MAX_DEPTH, self.n_ctx * len(hits) // max(1, num_tokens))
        if self.reranker is None and (len(hits) < MIN_DEPTH or depth <= MIN_DEPTH):
            return hits
        return search(max(MIN_DEPTH, depth), rerank=True)

    def _count(self, text: str) -> int:
        if self.counter is None:
            raise UsageError("This retriever cannot count tokens.", hint="Give it the counter of a model, or a number of passages.")
        return self.counter(text)

    def _search(self, query: str, top_k: int, mode: Mode, where: Where | None, reranker: Reranker | None) -> list[Hit]:
        return [
            replace(hit, chunk=self._scoped(hit.chunk, kb), copies=tuple(self._scoped(chunk, kb) for chunk in hit.copies))
            for kb in self.knowledge_bases
            for hit in kb.retrieve(query, self.embedder, k=top_k, mode=mode, where=where, learning=self.learning, reranker=reranker)
        ]

    def _scoped(self, chunk: Chunk, kb: KnowledgeBase) -> Chunk:
        return replace(chunk, scope=kb.name if len(self.knowledge_bases) > 1 else "")


def distinct(hits: Sequence[Hit], *, kept: Collection[str] = ()) -> list[Hit]:
    """Keep each text once, as `merged` does. Piped text stays complete, even where it repeats itself."""
    from localrag.kb.retrieve import PIPED_SCOPE  # noqa: PLC0415  # weight

    piped = {hit.label for hit in hits if hit.chunk.scope == PIPED_SCOPE and not hit.chunk.kb}
    return merged(hits, kept={*kept, *piped})


def asked_before(messages: Sequence[Message]) -> list[str]:
    """The answered questions of a conversation, oldest first; empty for a first question."""
    parts = split(messages)
    exchanges = sorted((*parts.history, *parts.pinned), key=lambda exchange: exchange.messages[0].number)
    return ["\n\n".join(message.content for _, message in each.messages if message.role == "user") for each in exchanges]


def is_short(question: str, before: Sequence[str]) -> bool:
    """Whether a question is so short that it may be a follow-up to `before`, the questions preceding it."""
    return bool(before) and len(terms(question)) <= MAX_FOLLOW_UP_TERMS


def retrieve_after(
    retriever: Retriever,
    before: Sequence[str],
    question: str,
    *,
    top_k: int,
    where: Where | None = None,
    rewritten: str = "",
    rerank: bool = True,
) -> list[Hit]:
    """The best texts for a question asked after others ("and its price?"). With an empty `before`, same as `Retriever.search`.

    The question is searched for alone and joined with the one before. If the two together come nearer to a passage by MIN_GAIN, it is a
    follow-up: the hits of both, and of the whole conversation, are fused. Otherwise it has changed the subject, and only its own hits
    count. A question that was `rewritten` is searched for in both forms.
    """

    def search(query: str) -> list[Hit]:
        return retriever.search(query, top_k=max(top_k, FOLLOW_UP_DEPTH), where=where, rerank=rerank)

    if not before:
        return retriever.search(question, top_k=top_k, where=where, rerank=rerank)
    hits = {"question": search(question)}
    if rewritten:
        hits["rewritten"] = search(rewritten)
    else:
        hits["with the one before"] = search(f"{before[-1]}\n\n{question}")
        if _best_similarity(hits["with the one before"]) < _best_similarity(hits["question"]) + MIN_GAIN:
            return hits["question"][:top_k]
        if len(before) > 1:
            hits["conversation"] = search("\n\n".join([*_newest(before), question]))
    return _fused(hits)[:top_k]


def _best_similarity(hits: Sequence[Hit]) -> float:
    return max((hit.scores.get("semantic", 0.0) for hit in hits), default=0.0)


def _newest(questions: Sequence[str]) -> list[str]:
    """The newest questions within MAX_EARLIER_CHARS, at least one, in order."""
    num_chars = 0
    for number, each in enumerate(reversed(questions)):
        num_chars += len(each)
        if number and num_chars > MAX_EARLIER_CHARS:
            return list(questions[-number:])
    return list(questions)


def _fused(hits_by_query: Mapping[str, Sequence[Hit]]) -> list[Hit]:
    """The hits of several queries, best first. A score is the mean of a text's scores, 0 where a query does not find it."""
    best = merged(sorted((hit for hits in hits_by_query.values() for hit in hits), key=lambda hit: -(hit.relevance or 0.0)))
    parts: dict[str, dict[str, float]] = {comparable(hit.chunk.text): {} for hit in best}
    for name, hits in hits_by_query.items():
        for hit in hits:
            parts[comparable(hit.chunk.text)].setdefault(name, hit.score / len(hits_by_query))
    fused = []
    for hit in best:  # the more relevant hit of each text
        contributions = parts[comparable(hit.chunk.text)]
        fused.append(replace(hit, score=sum(contributions.values()), contributions=contributions))
    return sorted(fused, key=lambda hit: (-hit.score, hit.label))


def none_passes(knowledge_bases: Sequence[KnowledgeBase], where: Where | None, hits: Sequence[Hit]) -> list[str]:
    """Warn if no document matches the filters. `hits` are the search results."""
    if not where or any(hit.chunk.kb for hit in hits) or any(kb.sources(where) for kb in knowledge_bases):
        return []
    return [f"No document passes {where}. To see the documents' fields: localrag kb show NAME"]


def left_unread(answer: Answer, question: str) -> list[str]:
    """Warn if the answer uses only some passages while the question seems to need all."""
    if not 0 < len(answer.hits) < answer.chunks_in_kb:
        return []
    from localrag.kb.query import needs_all  # noqa: PLC0415  # weight

    if not needs_all(question):
        return []
    coverage = f"{len(answer.hits)} of {answer.chunks_in_kb} passages"
    return [f"The answer uses {coverage}, but the question seems to need all that match. To read all of them: --exhaustive."]


def weighed(hits: Sequence[Hit], task: str, knowledge_bases: Sequence[KnowledgeBase], weights: Mapping[str, object]) -> list[Hit]:
    """Reorder hits by the relevance of their files. A missing or non-text file is scored by its chunks among the hits.

    Files are compared with the task by keywords, because the hits are already ranked by meaning. Documents with the same path (such as
    https://x.org/a and https://x.org/a/) share a score.
    """
    from localrag.relevance import Weights, score, weigh  # noqa: PLC0415  # weight: few asks read files
    from localrag.relevance.profile import normalised  # noqa: PLC0415

    paths: dict[str, Path] = {}
    for kb in knowledge_bases:
        paths |= kb.paths()
    by_path = {hit.chunk.source: normalised(hit.chunk.source) for hit in hits}
    files = {path: _file(source, hits, paths.get(source)) for source, path in by_path.items()}
    keyword_weights = Weights(**{**weights, "method": "keyword"})  # type: ignore[arg-type]  # checked by the catalogue
    scores = {normalised(each.path): each.score for each in score(list(files.values()), task, weights=keyword_weights, now=time.time())}
    return weigh(hits, {source: scores[path] for source, path in by_path.items()})


def _file(source: str, hits: Sequence[Hit], path: Path | None) -> File:
    from localrag.kb.readers import UnreadableError  # noqa: PLC0415  # weight
    from localrag.kb.walk import read_file  # noqa: PLC0415
    from localrag.relevance import File  # noqa: PLC0415

    try:
        if path is not None and path.stat().st_size <= MAX_FILE_BYTES:
            return File(source, read_file(str(path)).data.decode("utf-8"), path.stat().st_mtime)
    except (OSError, UnreadableError, UnicodeDecodeError):
        pass
    return File(source, "\n".join(hit.chunk.text for hit in hits if hit.chunk.source == source), None)
