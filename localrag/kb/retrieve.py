"""A question to ranked chunks: by meaning, by words, or both.

What counts as relevant, so that a question about something else finds nothing:

- by meaning, a chunk whose cosine similarity with the question is at least what the store says of its embedder (see
  calibration.py), or MIN_SIMILARITY;
- by words, a chunk that holds one of the question's words, stop words ("what", "the", "does") set aside;
- in hybrid mode, words alone are enough only if they carry at least MIN_WORD_SHARE of the question's weight, a word weighing the more
  the fewer chunks hold it (its BM25 weight). A part number asked for by itself is found wherever it stands; a chunk that shares one
  word of several with the question must also be near it in meaning.

What else there is to a ranking, all of it optional: only documents that pass a filter (`where`), what was learned of a chunk (`learning`),
a second look at the best (`reranker`), and less of what repeats itself (`diversity`). Near duplicates of a better hit are always left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from localrag.fusion import Scored, fuse, in_order
from localrag.kb.chunking import split_counted
from localrag.kb.diversity import Distinct, diversify
from localrag.kb.filters import Where
from localrag.kb.prior import prior
from localrag.kb.query import Query, parse
from localrag.kb.rerank import NUM_RERANKED, Reranker, rank
from localrag.kb.schema import embedded
from localrag.kb.truth import AnyIndex, AnyStore
from localrag.passages import Chunk, Hit
from localrag.settings import Learning
from localrag.tokens import Embedder

if TYPE_CHECKING:
    from localrag.kb.vectors import Vectors

Mode = Literal["hybrid", "semantic", "keyword"]
MODES: tuple[Mode, ...] = ("hybrid", "semantic", "keyword")

MIN_SIMILARITY = 0.30
"""For a store that does not say what counts for its embedder. Measured with all-MiniLM-L6-v2. On examples/handbook the best chunk had
0.42 to 0.80 for 22 questions that it answers, 0.36 to 0.47 for 8 questions of its field that it does not answer, which no floor tells
apart, and 0.04 to 0.35 for 30 questions about other things, 2 of them over the floor. On 387 relevant pairs of Cranfield, 6.5 % lie below
it; the best of each of 45 questions had 0.41 or more."""

MIN_WORD_SHARE = 0.5
"""Measured on the same 30 questions about other things: words alone let 1 through ("What is 2 + 2?"); any word in 5 % of the chunks or
fewer would have let 12 through."""

DEPTH = 100
"""How far down each ranking is followed before they are fused; more if more hits are wanted."""

RERANK_WEIGHT = 4.0
"""What the reranker's order weighs beside those of meaning and words, which weigh 1 each: it leads, and they settle what it finds alike."""

MAX_QUERY_CHARS = 32_768

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
    """The `k` best relevant chunks, best first; fewer, or none, if no more are relevant. All are of one generation of the store.

    `index` gives the vector index of the present generation, and is called inside the reading transaction; keyword mode needs neither
    it nor an embedder. The score is the reciprocal rank fusion of "semantic" and "keyword" in hybrid mode, the cosine similarity in
    semantic mode, BM25 in keyword mode. With a `reranker`, which looks at the best NUM_RERANKED, it is the fusion of the mode's rankings
    with "rerank". With `learning`, what is known of a chunk's use adds or takes up to a tenth, as "feedback"; `diversity` (0 to 1) takes
    from what repeats a better hit (see diversity.py). A hit's relevance is its cosine similarity on a scale that
    embedders have in common, the least that counts where words alone found it, and not known in keyword mode. Of a query, the first
    MAX_QUERY_CHARS characters and MAX_TERMS different words count.
    """
    query = query[:MAX_QUERY_CHARS].encode("utf-8", "replace").decode()
    vector = None if mode == "keyword" or embedder is None else _embed(query, embedder)
    wanted = parse(query)
    num_looked_at = max(k, NUM_RERANKED) if reranker is not None else 2 * k if diversity else k
    with store.reading():
        if embedder is not None and mode != "keyword":
            store.check_embedder(embedder.fingerprint, embedder.dim)
        by_words = _by_words(store, wanted, max(DEPTH, k), where) if mode != "semantic" else []
        vectors = index() if vector is not None else None
        by_meaning: _Ranking = []
        relevance: dict[int, float] = {}
        if vectors is not None and vector is not None:
            by_meaning, by_words, relevance = _by_meaning(store, vectors, vector, wanted, by_words, max(DEPTH, k), where)
        rankings: dict[str, _Ranking] = (
            {"semantic": by_meaning, "keyword": by_words} if mode == "hybrid" else {mode: by_meaning or by_words}
        )
        scored = _scored(rankings)
        if learning != "off":
            scored = _with_feedback(store, scored, learning)
        chunks = _distinct(store, [one for one, _, _ in scored], num_looked_at, kb)
    if reranker is not None:
        scored = _reranked(scored, rankings, chunks, query, reranker)
    return diversify(_hits(scored, chunks, relevance, rankings), k, diversity)


def _hits(scored: list[Scored], chunks: Mapping[int, Chunk], relevance: Mapping[int, float], rankings: Mapping[str, _Ranking]) -> list[Hit]:
    own = {name: dict(ranking) for name, ranking in rankings.items()}
    return [
        Hit(
            chunks[one],
            score,
            parts,
            min(1.0, relevance[one]) if one in relevance else None,
            {name: found[one] for name, found in own.items() if one in found},
        )
        for one, score, parts in scored
        if one in chunks
    ]


def _by_meaning(
    store: AnyStore, vectors: AnyIndex, vector: Vectors, wanted: Query, by_words: _Ranking, limit: int, where: Where | None
) -> tuple[_Ranking, _Ranking, dict[int, float]]:
    """What is near, those matches of words that count beside it, and how relevant each of both is."""
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
    """MIN_SIMILARITY for the least that counts by this embedder, or less, to 1: the tiers of budgets hold for every embedder."""
    return MIN_SIMILARITY + (max(similarity, least) - least) * (1.0 - MIN_SIMILARITY) / (1.0 - least)


def _by_words(store: AnyStore, wanted: Query, limit: int, where: Where | None) -> _Ranking:
    """The best matches of words and of characters; what matches both has the sum of its scores."""
    found = dict(store.keyword_ids(wanted.keyword, limit, where)) if wanted.keyword else {}
    if wanted.characters:
        for one, score in store.character_ids(wanted.characters, limit, where):
            found[one] = found.get(one, 0.0) + score
    return sorted(found.items(), key=lambda hit: (-hit[1], hit[0]))[:limit]


def _relevant(store: AnyStore, by_words: _Ranking, wanted: Query, similarities: Mapping[int, float], least: float) -> _Ranking:
    """The matches that are near in meaning, or hold enough of what the question looks for."""
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
        # many of a question's pairs of characters reach over two words and stand nowhere: those weigh no more than the rarest that do
        weigh(max(1, num_matches), matching)
    return [(one, score) for one, score in by_words if shares.get(one, total) >= MIN_WORD_SHARE * total]


def _scored(rankings: Mapping[str, _Ranking]) -> list[Scored]:
    """The fusion of several rankings; a ranking by itself keeps its own scores."""
    if len(rankings) > 1:
        return fuse({name: [one for one, _ in ranking] for name, ranking in rankings.items()})
    return [(one, score, {name: score}) for name, ranking in rankings.items() for one, score in ranking]


def _with_feedback(store: AnyStore, scored: list[Scored], learning: Learning) -> list[Scored]:
    known = store.feedback([one for one, _, _ in scored])
    return in_order(
        (one, sum(parts.values()), parts)
        for one, score, before in scored
        for gained in [score * prior(known[one], learning) if one in known else 0.0]
        for parts in [{**before, "feedback": gained} if gained else before]
    )


def _distinct(store: AnyStore, ids: Sequence[int], num: int, kb: str) -> dict[int, Chunk]:
    """The first `num` of these chunks that are no near duplicates of an earlier one."""
    distinct, found = Distinct(), dict[int, Chunk]()
    step = num + num // 4 + 1
    for at in range(0, len(ids), step):
        for chunk in store.chunks(ids[at : at + step], kb=kb):
            if len(found) < num and distinct.is_new(chunk.text):
                found[chunk.id] = chunk
        if len(found) == num:
            break
    return found


def _reranked(
    scored: list[Scored], rankings: Mapping[str, _Ranking], chunks: Mapping[int, Chunk], query: str, reranker: Reranker
) -> list[Scored]:
    """Everything fused anew with the order that the reranker gives to the best. What was learned weighs as it did."""
    best = [one for one, _, _ in scored if one in chunks][:NUM_RERANKED]
    places = rank(reranker, query, [embedded(chunks[one].heading, chunks[one].text) for one in best])
    orders = {name: [one for one, _ in ranking] for name, ranking in rankings.items()} | {"rerank": [best[place] for place in places]}
    shares = {one: parts["feedback"] / (score - parts["feedback"]) for one, score, parts in scored if "feedback" in parts}
    fused = []
    for one, score, parts in fuse(orders, weights={"rerank": RERANK_WEIGHT}):
        whole = {**parts, "feedback": score * shares[one]} if one in shares else parts
        fused.append((one, sum(whole.values()), whole))
    return in_order(fused)


def _embed(query: str, embedder: Embedder) -> Vectors | None:
    """One unit vector for the whole query: the mean of its pieces' where it is longer than the embedder takes. None for no text."""
    pieces = [piece for _, piece in split_counted(query, embedder.count, embedder.max_tokens)]
    if not pieces:
        return None
    import numpy as np  # noqa: PLC0415  # heavy

    mean = embedder.embed(pieces).mean(axis=0)
    length = float(np.linalg.norm(mean))
    return (mean / length).astype(np.float32) if length else None
