"""Find the evidence to offer to a prompt, passages from all knowledge bases of the session and piped text, and choose what to send of it.

Small models use context badly: they copy from its beginning and repeat it. They answer best from the few sentences that are nearest to the
question. Larger models get whole passages, as long as these come near the best one (docs/measured.md has the numbers).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.conversation import split
from localrag.errors import UsageError
from localrag.files import JsonCache
from localrag.prompt.layout import source_text
from localrag.question import EvidenceKind, Question, Search, TopK
from localrag.session.answerability import NUM_COMPARED, Answerability, Calibration
from localrag.session.timing import TimedReranker
from localrag.text.languages import language_of, stem
from localrag.text.sentences import Span, Unit, excerpt, units
from localrag.text.terms import terms
from localrag.types import Chunk, Hit, Message, ModelInfo, comparable, expanded, merged

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
MIN_GAIN = 0.12
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
        found = [
            [
                replace(hit, chunk=self._scoped(hit.chunk, kb), copies=tuple(self._scoped(chunk, kb) for chunk in hit.copies))
                for hit in kb.retrieve(query, self.embedder, k=top_k, mode=mode, where=where, learning=self.learning, reranker=reranker)
            ]
            for kb in self.knowledge_bases
        ]
        return _on_one_scale(found) if mode == "hybrid" else [hit for hits in found for hit in hits]

    def _scoped(self, chunk: Chunk, kb: KnowledgeBase) -> Chunk:
        return replace(chunk, scope=kb.name if len(self.knowledge_bases) > 1 else "")


def _on_one_scale(found: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Join the hits of several hybrid searches, which score each hit against the best one of its own knowledge base.

    The scores of a knowledge base are multiplied by the relevance of its best hit as a share of that of the best hit of all: the only
    match in a collection about something else would otherwise count as much as a perfect one.
    """
    nearest = [max((hit.relevance or 0.0 for hit in hits), default=0.0) for hits in found]
    best = max(nearest, default=0.0)
    if not best or len(found) < 2:
        return [hit for hits in found for hit in hits]
    return [_scaled(hit, near / best) for hits, near in zip(found, nearest, strict=True) for hit in hits]


def _scaled(hit: Hit, factor: float) -> Hit:
    contributions = {name: factor * part for name, part in hit.contributions.items()}
    return replace(hit, score=sum(contributions.values()), contributions=contributions)


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


SMALL_WEIGHTS = 1_000_000_000
"""Models with fewer weights in their layers get sentences."""
NUM_READ_FOR_SENTENCES = 8
"""Number of passages from which sentences are chosen."""
MIN_PASSAGE_SHARE = {"passages": 0.7, "sentences": 0.6}
"""Least share of the best passage's score. On the handbook, the first passage holds 86 of 100 answers, the first four 94, and those of the
first four with at least 0.7 of its score 93, in 30 % less text."""
MIN_SENTENCE_SHARE = 0.9
"""Least share of the best sentence's score. Both halves of the handbook's questions keep most answers with 0.85 to 0.95."""
HEADING_WEIGHT = 0.5
"""Weight of a word of the question that stands in the headings above a sentence, not in itself."""
SENTENCE_TOKENS = 120
MAX_TUNED = 256
"""Number of models whose tuned options are kept."""

LESS_RELEVANT = "less relevant"
"""The reason in the ledger for a passage that was retrieved and not chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRule:
    """How much of the evidence to send. `top_k` passages are retrieved; those below `min_share` of the best score are left out.

    `max_tokens` limits the passages in the prompt, with their tags; None sets no limit. Unless it `is_strict`, the best one is always sent.
    """

    kind: EvidenceKind
    top_k: TopK
    min_share: float = 0.0
    max_tokens: int | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen hits, best first, and the reason for each passage left out, by label."""

    hits: list[Hit] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


class EvidenceFile:
    """The file `evidence.json` in the home: for each model, the options of Search that `localrag eval --tune-evidence` found best."""

    def __init__(self, home: Path | None) -> None:
        self._kept = JsonCache(None if home is None else home / "evidence.json", most=MAX_TUNED)

    def search_for(self, model: ModelInfo) -> Search | None:
        """Return the options for a model; None if there are none, or invalid ones."""
        options = self._kept.read().get(_key(model))
        if not isinstance(options, dict) or not options.keys() <= set(_TUNED):
            return None
        top_k = options.get("top_k")
        with suppress(UsageError):
            return Search(**options) if top_k is None or (type(top_k) is int and 1 <= top_k <= MAX_DEPTH) else None
        return None

    def save(self, model: ModelInfo, search: Search) -> None:
        values = {name: getattr(search, name) for name in _TUNED}
        self._kept.put(_key(model), {name: value for name, value in values.items() if value is not None})


_TUNED = ("top_k", "evidence", "evidence_tokens")


def _key(model: ModelInfo) -> str:
    return f"{model.path.name}, {model.file_size} bytes"


def rule_for(search: Search, model: ModelInfo, tuned: Search | None = None) -> EvidenceRule:
    """Return the rule for a question. Options that it gives override those `tuned` for its model, which override what its size suggests."""
    if tuned not in (None, Search()) and all(getattr(search, name) is None for name in _TUNED):
        return replace(rule_for(tuned, model), is_strict=False)
    kind = search.evidence or ("sentences" if search.top_k is None and _is_small(model) else "passages")
    limit = SENTENCE_TOKENS if search.evidence_tokens is None and kind == "sentences" else search.evidence_tokens
    return EvidenceRule(
        kind=kind,
        top_k=search.top_k or (NUM_READ_FOR_SENTENCES if kind == "sentences" else DEFAULT_TOP_K),
        min_share=MIN_PASSAGE_SHARE[kind] if search.top_k is None else 0.0,
        max_tokens=limit,
        is_strict=search.evidence_tokens is not None,
    )


def _is_small(model: ModelInfo) -> bool:
    """A layer of a transformer has about 12 times the square of its width in weights. The echo has no layers, and is not small."""
    return 0 < 12 * model.num_layers * model.embedding_length**2 < SMALL_WEIGHTS


def select(hits: Sequence[Hit], question: str, rule: EvidenceRule, count: Callable[[str], int]) -> Selection:
    """Choose from ranked hits by a rule. `count` counts tokens of the model."""
    near = [hit for hit in hits if hit.score >= rule.min_share * hits[0].score]
    chosen = _best_sentences(near, question, rule, count) if rule.kind == "sentences" else _within(near, rule, count)
    labels = {hit.label for hit in chosen}
    others = [chunk for hit in hits if hit.label not in labels for chunk in (hit.chunk, *hit.copies)]
    return Selection(chosen, {chunk.label: LESS_RELEVANT for chunk in others})


def _within(hits: Sequence[Hit], rule: EvidenceRule, count: Callable[[str], int]) -> list[Hit]:
    """Return the hits up to the first that does not fit."""
    if rule.max_tokens is None:
        return list(hits)
    chosen: list[Hit] = []
    num_tokens = 0
    for hit in hits:
        num_tokens += _tokens(hit, count)
        if num_tokens > rule.max_tokens and (chosen or rule.is_strict):
            break
        chosen.append(hit)
    return chosen


def _best_sentences(hits: Sequence[Hit], question: str, rule: EvidenceRule, count: Callable[[str], int]) -> list[Hit]:
    """Return the hits that hold the best sentences, in the order of their best ones, each with the spans of its own."""
    chosen: dict[int, list[Unit]] = {}
    costs: Counter[int] = Counter()
    for index, unit in _ranked(hits, question):
        more = [*chosen.get(index, ()), unit]
        cost = _tokens(_excerpted(hits[index], more), count)
        is_over = rule.max_tokens is not None and costs.total() - costs[index] + cost > rule.max_tokens
        if is_over and (chosen or rule.is_strict):
            continue
        chosen[index], costs[index] = more, cost
    return [_excerpted(hits[index], chosen[index]) for index in chosen]


def _ranked(hits: Sequence[Hit], question: str) -> list[tuple[int, Unit]]:
    """Rank the sentences of all hits, best first, down to MIN_SENTENCE_SHARE of the best score. Returns (index of the hit, sentence).

    The score is the share of the question's words, weighted by rarity among the sentences, that a sentence holds, plus HEADING_WEIGHT of
    the share that only its headings and its table's head hold, plus its passage's score as a share of the best one's. Words are compared
    by their stems.
    """
    language = language_of([question, *(hit.chunk.text for hit in hits)]) or "en"

    def matching(*texts: str) -> set[str]:
        return question_words.intersection(stem(word, language) for text in texts for word in terms(text))

    question_words = {stem(word, language) for word in terms(question)}
    matches: list[tuple[int, Unit, set[str], set[str]]] = []
    for index, hit in enumerate(hits):
        text = hit.chunk.text
        for unit in units(text) or [Unit((0, len(text)))]:
            words = matching(text[slice(*unit.span)])
            above = matching(hit.chunk.heading, text[slice(*unit.header)] if unit.header else "")
            matches.append((index, unit, words, above - words))
    holders = Counter(word for _, _, words, above in matches for word in words | above)
    weights = {word: math.log1p((len(matches) - holders[word] + 0.5) / (holders[word] + 0.5)) for word in question_words}
    total = sum(weights.values()) or 1.0
    best_passage = max((hit.score for hit in hits), default=0.0) or 1.0

    def score(index: int, words: set[str], above: set[str]) -> float:
        share, share_above = (sum(weights[word] for word in each) / total for each in (words, above))
        return share + HEADING_WEIGHT * share_above + hits[index].score / best_passage

    scored = [(score(index, words, above), index, unit) for index, unit, words, above in matches]
    scored.sort(key=lambda each: -each[0])  # stable: equals keep the order of the hits and of their text
    return [(index, unit) for score, index, unit in scored if score >= MIN_SENTENCE_SHARE * scored[0][0]]


def _excerpted(hit: Hit, chosen: Sequence[Unit]) -> Hit:
    """Return a hit with the spans of these sentences and of the heads of their tables; without spans if they are all of its text."""
    spans: set[Span] = {unit.span for unit in chosen} | {unit.header for unit in chosen if unit.header is not None}
    return replace(hit, spans=tuple(sorted(spans))) if len(chosen) < len(units(hit.chunk.text)) else hit


def _tokens(hit: Hit, count: Callable[[str], int]) -> int:
    return count(source_text(hit, excerpt(hit.chunk.text, hit.spans) if hit.spans else None))


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
