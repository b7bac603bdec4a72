"""Ranking: lists are fused by rank; feedback, a reranker and diversity each add their share to the score.

A score is the sum of its contributions, so that it explains itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import TARGET_TOKENS, split_counted
from localrag.kb.filters import Where
from localrag.kb.protocols import AnyIndex, AnyStore, Reranker
from localrag.kb.query import Query, parse
from localrag.kb.schema import embedded
from localrag.settings import Learning
from localrag.text.terms import terms
from localrag.text.tokens import Embedder
from localrag.types import Chunk, Hit, comparable

if TYPE_CHECKING:
    from localrag.kb.protocols import Feedback, Reranker
    from localrag.kb.vector_cache import Vectors


RANK_CONSTANT = 60
"""The `k` of reciprocal rank fusion, as its authors chose it (Cormack, Clarke and Büttcher, SIGIR 2009)."""

Scored = tuple[int, float, dict[str, float]]
"""An id, its score, and the contributions that the score is the sum of."""

MAX_SHARE = 0.10
"""The most that feedback adds to a score, or takes from it, as a share of that score: some ranks, never the first place for anything."""

_VOTES = 4.0
_SUPPLIED = 20.0
"""Pseudo-counts: this many neutral votes and this many average prompts are added before computing the boost."""
_USUAL_SHARE = 0.25
"""Share of the chunks of a prompt that is cited: few answers name more than one source of four."""

NUM_RERANKED = 20
"""The number of best hits that a reranker reads."""


def fuse(rankings: Mapping[str, Sequence[int]], *, k: int = RANK_CONSTANT, weights: Mapping[str, float] | None = None) -> list[Scored]:
    """Reciprocal rank fusion: an id gets weight / (k + rank) from every ranking that holds it, rank 1 being its best.

    `rankings` maps a name to ids, best first, each id at most once; `weights` a name to its weight, 1 where it names none. Returns
    (id, score, contributions), highest score first, ties by id. The score is `sum(contributions.values())`, to the last bit, and
    contributions name only the rankings that hold the id.
    """
    contributions: dict[int, dict[str, float]] = {}
    for name, ids in rankings.items():
        weight = 1.0 if weights is None else weights.get(name, 1.0)
        for rank, one in enumerate(ids, start=1):
            contributions.setdefault(one, {})[name] = weight / (k + rank)
    return in_order((one, sum(parts.values()), parts) for one, parts in contributions.items())


def in_order(scored: Iterable[Scored]) -> list[Scored]:
    """Sort by score, highest first, ties by id."""
    return sorted(scored, key=lambda entry: (-entry[1], entry[0]))


def feedback_boost(feedback: Feedback, learning: Learning = "votes") -> float:
    """The share of its score that a chunk gains by feedback, −MAX_SHARE to MAX_SHARE; 0 without feedback.

    Votes of people count in full, citations half and only if `learning` is "all". Retrievals do not count: they say how the chunk was
    ranked, not whether it helped, and a chunk that is found often would be found even more often.
    """
    useful, useless = max(0, feedback.useful), max(0, feedback.useless)
    supplied = max(0, feedback.supplied)
    cited = min(max(0, feedback.cited), supplied)
    if learning == "off":
        return 0.0
    votes = (useful - useless) / (useful + useless + _VOTES)
    citing = (cited - _USUAL_SHARE * supplied) / (supplied + _SUPPLIED) if learning == "all" else 0.0
    return MAX_SHARE * max(-1.0, min(1.0, votes + citing / 2))


def rank(reranker: Reranker, query: str, texts: Sequence[str]) -> list[int] | None:
    """Rank texts by a reranker: their indices, best first, ties in order. None if the reranker gives no scores.

    Raises KnowledgeBaseError unless there is a number for each text.
    """
    scores = reranker.scores(query, texts)
    if scores is None:
        return None
    if len(scores) != len(texts) or any(map(math.isnan, scores)):
        raise KnowledgeBaseError(
            f"The reranker gave {len(scores)} scores for {len(texts)} passages, or some that are no numbers.",
            hint="Use another reranker, or none.",
        )
    return sorted(range(len(texts)), key=lambda place: (-scores[place], place))


def diversify(hits: Sequence[Hit], k: int, diversity: float) -> list[Hit]:
    """Choose `k` hits by maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998), best first.

    `diversity` is the price of likeness, 0 (nothing) to 1: a hit loses `diversity` × the best score × its likeness (0 to 1, by shared
    words) to the most similar hit chosen before it. The loss is a contribution named "diversity", so that scores stay the sums of their
    contributions, and fall from hit to hit.
    """
    if not hits or not diversity:
        return list(hits[:k])
    top = max(hit.score for hit in hits)
    kinds = [frozenset(terms(hit.chunk.text)) for hit in hits]
    likeness = [0.0] * len(hits)
    left = list(range(len(hits)))
    chosen: list[Hit] = []
    while left and len(chosen) < k:
        best = max(left, key=lambda at: (hits[at].score - diversity * top * likeness[at], -at))
        left.remove(best)
        chosen.append(_less(hits[best], diversity * top * likeness[best]))
        for at in left:
            likeness[at] = max(likeness[at], _alike(kinds[at], kinds[best]))
    return chosen


def _less(hit: Hit, loss: float) -> Hit:
    if not loss:
        return hit
    parts = {**hit.contributions, "diversity": -loss}
    return replace(hit, score=sum(parts.values()), contributions=parts)


def _alike(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / math.sqrt(len(one) * len(other)) if one and other else 0.0


Mode = Literal["hybrid", "semantic", "keyword"]
MODES: tuple[Mode, ...] = ("hybrid", "semantic", "keyword")

MIN_SIMILARITY = 0.30
"""The threshold for a store without one for its embedder. Measured with all-MiniLM-L6-v2. On examples/handbook the best chunk had
0.42 to 0.80 for 22 questions that it answers, 0.36 to 0.47 for 8 questions of its field that it does not answer, which no floor tells
apart, and 0.04 to 0.35 for 30 questions about other things, 2 of them over the floor. On 387 relevant pairs of Cranfield, 6.5 % lie below
it; the best of each of 45 questions had 0.41 or more."""

MIN_WORD_SHARE = 0.5
"""Measured on the same 30 questions about other things: words alone let 1 through ("What is 2 + 2?"); any word in 5 % of the chunks or
fewer would have let 12 through."""

DEPTH = 100
"""Length of each ranking before fusion; more if more hits are wanted."""

_DEEPER = 4
"""Factor by which the rankings are lengthened if identical texts leave fewer than `k`."""

RERANK_WEIGHT = 4.0
"""Weight of the reranker's order in the fusion; meaning and words weigh 1 each, so the reranker leads and they break near-ties."""

MAX_QUERY_CHARS = 32_768

PIPED_SOURCE = "standard input"
PIPED_SCOPE = "stdin"
"""The source of text that is piped in with a question, and the scope of its labels."""

_Ranking = list[tuple[int, float]]


def retrieve(
    store: AnyStore,
    index: Callable[[], AnyIndex | None],
    query: str,
    embedder: Embedder | None,
    *,
    k: int,
    mode: Mode = "hybrid",
    kb: str = "",
    where: Where | None = None,
    learning: Learning = "off",
    reranker: Reranker | None = None,
    diversity: float = 0.0,
) -> list[Hit]:
    """Return the `k` best relevant texts, best first; fewer, or none, if no more are relevant. All are of one generation of the store.

    `index` returns the vector index of the current generation and is called inside the reading transaction; keyword mode needs neither
    it nor an embedder. The score is the reciprocal rank fusion of "semantic" and "keyword" in hybrid mode, the cosine similarity in
    semantic mode, BM25 in keyword mode. With a `reranker`, which reads the best NUM_RERANKED, it is the fusion of the mode's rankings
    with "rerank". With `learning`, feedback changes the score by up to a tenth, as "feedback"; `diversity` (0 to 1) lowers hits that
    repeat a better one (see `diversify`). Chunks with the text of a better hit are its `copies` and do not count towards `k`.

    A hit's relevance is its cosine similarity on a scale that all embedders share, the threshold if words alone found it, and None in
    keyword mode. Of a query, the first MAX_QUERY_CHARS characters and MAX_TERMS different words count.
    """
    query = query[:MAX_QUERY_CHARS].encode("utf-8", "replace").decode()
    vector = None if mode == "keyword" or embedder is None else _embed(query, embedder)
    wanted = parse(query)
    num_looked_at = max(k, NUM_RERANKED) if reranker is not None else 2 * k if diversity else k
    with store.reading():
        if embedder is not None and mode != "keyword":
            store.check_embedder(embedder.fingerprint, embedder.dim)
        vectors = index() if vector is not None else None
        limit = max(DEPTH, k)
        while True:
            by_words = _by_words(store, wanted, limit, where) if mode != "semantic" else []
            is_deeper = len(by_words) == limit
            by_meaning: _Ranking = []
            relevance: dict[int, float] = {}
            if vectors is not None and vector is not None:
                by_meaning, by_words, relevance = _by_meaning(store, vectors, vector, wanted, by_words, limit, where)
            rankings: dict[str, _Ranking] = (
                {"semantic": by_meaning, "keyword": by_words} if mode == "hybrid" else {mode: by_meaning or by_words}
            )
            scored = _scored(rankings)
            if learning != "off":
                scored = _with_feedback(store, scored, learning)
            texts = _texts(store, [one for one, _, _ in scored], num_looked_at, kb)
            if len(texts) >= k or not (is_deeper or len(by_meaning) == limit):
                break
            limit *= _DEEPER  # copies of few texts fill the rankings
    chunks = {one: same[0] for one, same in texts.items()}
    if reranker is not None:
        scored = _reranked(scored, rankings, chunks, query, reranker)
    return diversify(_hits(scored, texts, relevance, rankings), k, diversity)


def piped_hits(text: str, question: str, count: Callable[[str], int]) -> list[Hit]:
    """Cut a text that is piped in into hits: all of it, those that share most words with the question first, ties in order of the text.

    `count` counts tokens of the model that will read them. The score is the share of the question's words that a chunk holds.
    Labels are `KB#stdin/1` and so on, in order of the text.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is a question mark, as in every text that a model is given
    wanted = set(terms(question))
    hits = []
    for ordinal, (start, piece) in enumerate(split_counted(text, count, TARGET_TOKENS)):
        end = start + len(piece)
        chunk = Chunk(ordinal + 1, 0, ordinal, piece, start, end, PIPED_SOURCE, scope=PIPED_SCOPE)
        score = len(wanted & set(terms(piece))) / max(1, len(wanted))
        hits.append(Hit(chunk, score, {"words": score}))
    return sorted(hits, key=lambda hit: -hit.score)


def _hits(
    scored: list[Scored], texts: Mapping[int, Sequence[Chunk]], relevance: Mapping[int, float], rankings: Mapping[str, _Ranking]
) -> list[Hit]:
    own = {name: dict(ranking) for name, ranking in rankings.items()}
    return [
        Hit(
            texts[one][0],
            score,
            parts,
            min(1.0, relevance[one]) if one in relevance else None,
            {name: found[one] for name, found in own.items() if one in found},
            tuple(texts[one][1:]),
        )
        for one, score, parts in scored
        if one in texts
    ]


def _by_meaning(
    store: AnyStore, vectors: AnyIndex, vector: Vectors, wanted: Query, by_words: _Ranking, limit: int, where: Where | None
) -> tuple[_Ranking, _Ranking, dict[int, float]]:
    """The nearest chunks, the matches of words that count beside them, and the relevance of both by id."""
    known = store.min_similarity
    least = MIN_SIMILARITY if known is None else known
    near = [(one, score) for one, score in vectors.search(vector, limit, among=store.allowed(where)) if score >= least]
    relevance: dict[int, float] = {}
    if by_words:
        similarities = vectors.similarities(vector, [one for one, _ in by_words])
        by_words = _relevant(store, by_words, wanted, similarities, least)
        relevance = {one: _relevance(similarities.get(one, 0.0), least) for one, _ in by_words}
    return near, by_words, relevance | {one: _relevance(score, least) for one, score in near}


def _relevance(similarity: float, least: float) -> float:
    """A similarity on the common scale: MIN_SIMILARITY at the embedder's threshold or below, to 1. Tiers of budgets use it."""
    return MIN_SIMILARITY + (max(similarity, least) - least) * (1.0 - MIN_SIMILARITY) / (1.0 - least)


def _by_words(store: AnyStore, wanted: Query, limit: int, where: Where | None) -> _Ranking:
    """The best matches of words and of characters; a chunk that matches both gets the sum of its scores."""
    found = dict(store.keyword_ids(wanted.keyword, limit, where)) if wanted.keyword else {}
    if wanted.characters:
        for one, score in store.character_ids(wanted.characters, limit, where):
            found[one] = found.get(one, 0.0) + score
    return sorted(found.items(), key=lambda hit: (-hit[1], hit[0]))[:limit]


def _relevant(store: AnyStore, by_words: _Ranking, wanted: Query, similarities: Mapping[int, float], least: float) -> _Ranking:
    """The matches that are near in meaning, or hold enough of the question's words."""
    far = [one for one, _ in by_words if similarities.get(one, 0.0) < least]
    if not far:
        return by_words
    num_chunks = store.num_chunks
    shares = dict.fromkeys(far, 0.0)
    total = 0.0

    def weigh(num_matches: int, matching: Sequence[int]) -> None:
        nonlocal total
        weight = math.log1p((num_chunks - num_matches + 0.5) / (num_matches + 0.5))
        total += weight
        for one in matching:
            shares[one] += weight

    for num_matches, matching in store.keyword_holders(wanted.keyword, far):
        weigh(num_matches, matching)
    for num_matches, matching in store.character_holders(wanted.characters, far):
        # many of a question's pairs of characters span two words and occur nowhere: those weigh no more than the rarest that do
        weigh(max(1, num_matches), matching)
    return [(one, score) for one, score in by_words if shares.get(one, total) >= MIN_WORD_SHARE * total]


def _scored(rankings: Mapping[str, _Ranking]) -> list[Scored]:
    """Fuse several rankings; a single one keeps its own scores."""
    if len(rankings) > 1:
        return fuse({name: [one for one, _ in ranking] for name, ranking in rankings.items()})
    return [(one, score, {name: score}) for name, ranking in rankings.items() for one, score in ranking]


def _with_feedback(store: AnyStore, scored: list[Scored], learning: Learning) -> list[Scored]:
    known = store.feedback([one for one, _, _ in scored])
    boosted = []
    for one, score, parts in scored:
        boost = score * feedback_boost(known[one], learning) if one in known else 0.0
        whole = {**parts, "feedback": boost} if boost else parts
        boosted.append((one, sum(whole.values()), whole))
    return in_order(boosted)


def _texts(store: AnyStore, ids: Sequence[int], num: int, kb: str) -> dict[int, list[Chunk]]:
    """The first `num` different texts of these chunks: id of the first chunk → all chunks with that text, in order."""
    found: dict[str, list[Chunk]] = {}
    for chunk in store.chunks(ids, kb=kb):
        key = comparable(chunk.text)
        if key in found or len(found) < num:
            found.setdefault(key, []).append(chunk)
    return {same[0].id: same for same in found.values()}


def _reranked(
    scored: list[Scored], rankings: Mapping[str, _Ranking], chunks: Mapping[int, Chunk], query: str, reranker: Reranker
) -> list[Scored]:
    """Fuse again with the reranker's order of the best, if it returns one. Feedback keeps its share."""
    best = [one for one, _, _ in scored if one in chunks][:NUM_RERANKED]
    places = rank(reranker, query, [embedded(chunks[one].heading, chunks[one].text) for one in best])
    if places is None:
        return scored
    orders = {name: [one for one, _ in ranking] for name, ranking in rankings.items()} | {"rerank": [best[place] for place in places]}
    shares = {one: parts["feedback"] / (score - parts["feedback"]) for one, score, parts in scored if "feedback" in parts}
    fused = []
    for one, score, parts in fuse(orders, weights={"rerank": RERANK_WEIGHT}):
        whole = {**parts, "feedback": score * shares[one]} if one in shares else parts
        fused.append((one, sum(whole.values()), whole))
    return in_order(fused)


def _embed(query: str, embedder: Embedder) -> Vectors | None:
    """A unit vector of the whole query: the mean over its pieces if it is too long for the embedder. None for no text."""
    pieces = [piece for _, piece in split_counted(query, embedder.count, embedder.max_tokens)]
    if not pieces:
        return None
    import numpy as np  # noqa: PLC0415  # heavy

    mean = embedder.embed(pieces).mean(axis=0)
    length = float(np.linalg.norm(mean))
    return (mean / length).astype(np.float32) if length else None
