"""A question to ranked chunks: by meaning, by words, or both.

What counts as relevant, so that a question about something else finds nothing:

- by meaning, a chunk whose cosine similarity with the question is at least MIN_SIMILARITY;
- by words, a chunk that holds one of the question's words, stop words ("what", "the", "does") set aside;
- in hybrid mode, words alone are enough only if they carry at least MIN_WORD_SHARE of the question's weight, a word weighing the more
  the fewer chunks hold it (its BM25 weight). A part number asked for by itself is found wherever it stands; a chunk that shares one
  word of several with the question must also be near it in meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from localrag.fusion import fuse
from localrag.kb.chunking import split_counted
from localrag.kb.store import Store
from localrag.passages import Hit
from localrag.terms import terms
from localrag.tokens import Embedder

if TYPE_CHECKING:
    from localrag.kb.vectors import VectorIndex, Vectors

Mode = Literal["hybrid", "semantic", "keyword"]
MODES: tuple[Mode, ...] = ("hybrid", "semantic", "keyword")

MIN_SIMILARITY = 0.30
"""Measured with all-MiniLM-L6-v2. On examples/handbook the best chunk had 0.42 to 0.80 for 22 questions that it answers, 0.36 to 0.47 for
8 questions of its field that it does not answer, which no floor tells apart, and 0.04 to 0.35 for 30 questions about other things, 2 of
them over the floor. On 387 relevant pairs of Cranfield, 6.5 % lie below it; the best of each of 45 questions had 0.41 or more."""

MIN_WORD_SHARE = 0.5
"""Measured on the same 30 questions about other things: words alone let 1 through ("What is 2 + 2?"); any word in 5 % of the chunks or
fewer would have let 12 through."""

DEPTH = 100
"""How far down each ranking is followed before they are fused; more if more hits are wanted."""

MAX_QUERY_CHARS = 32_768


def retrieve(
    store: Store,
    index: Callable[[], VectorIndex | None],
    query: str,
    embedder: Embedder | None,
    *,
    k: int,
    mode: Mode = "hybrid",
    kb: str = "",
) -> list[Hit]:
    """The `k` best relevant chunks, best first; fewer, or none, if no more are relevant. All are of one generation of the store.

    `index` gives the vector index of the present generation, and is called inside the reading transaction; keyword mode needs neither
    it nor an embedder. The score is the reciprocal rank fusion of "semantic" and "keyword" in hybrid mode, the cosine similarity in
    semantic mode, BM25 in keyword mode. A hit's relevance is its cosine similarity, at least MIN_SIMILARITY where words alone found it, and
    not known in keyword mode. Of a query, the first MAX_QUERY_CHARS characters and MAX_TERMS different words count.
    """
    query = query[:MAX_QUERY_CHARS].encode("utf-8", "replace").decode()
    vector = None if mode == "keyword" or embedder is None else _embed(query, embedder)
    words = terms(query)
    with store.reading():
        if embedder is not None and mode != "keyword":
            store.check_embedder(embedder.fingerprint, embedder.dim)
        depth = max(DEPTH, k)
        by_words = store.keyword_ids(_any_of(words), depth) if words and mode != "semantic" else []
        vectors = index() if vector is not None else None
        by_meaning = []
        relevance: dict[int, float] = {}
        if vectors is not None and vector is not None:
            by_meaning = [(one, score) for one, score in vectors.search(vector, depth) if score >= MIN_SIMILARITY]
            if mode == "hybrid":
                similarities = vectors.similarities(vector, [one for one, _ in by_words])
                by_words = _relevant(store, by_words, words, similarities)
                relevance |= {one: max(MIN_SIMILARITY, similarities.get(one, 0.0)) for one, _ in by_words}
            relevance |= dict(by_meaning)
        ranked = _ranked(mode, by_meaning, by_words)[:k]
        chunks = {chunk.id: chunk for chunk in store.chunks([one for one, _, _ in ranked], kb=kb)}
    return [Hit(chunks[one], score, parts, min(1.0, relevance[one]) if one in relevance else None) for one, score, parts in ranked]


def _any_of(words: Sequence[str]) -> str:
    """An FTS5 expression. Each word is a quoted string, so that nothing of FTS5's own syntax is read in it."""
    return " OR ".join(f'"{word}"' for word in words)


def _relevant(
    store: Store, by_words: list[tuple[int, float]], words: Sequence[str], similarities: dict[int, float]
) -> list[tuple[int, float]]:
    """The matches that are near in meaning, or hold enough of the question's words."""
    far = [one for one, _ in by_words if similarities.get(one, 0.0) < MIN_SIMILARITY]
    if not far:
        return by_words
    num_chunks = store.num_chunks
    shares = dict.fromkeys(far, 0.0)
    total = 0.0
    for word in words:
        match = _any_of([word])
        num_matches = store.num_matches(match)
        weight = math.log1p((num_chunks - num_matches + 0.5) / (num_matches + 0.5))
        total += weight
        for one in store.matching(match, far):
            shares[one] += weight
    return [(one, score) for one, score in by_words if shares.get(one, total) >= MIN_WORD_SHARE * total]


def _ranked(
    mode: Mode, by_meaning: list[tuple[int, float]], by_words: list[tuple[int, float]]
) -> list[tuple[int, float, dict[str, float]]]:
    if mode == "hybrid":
        return fuse({"semantic": [one for one, _ in by_meaning], "keyword": [one for one, _ in by_words]})
    return [(one, score, {mode: score}) for one, score in (by_meaning if mode == "semantic" else by_words)]


def _embed(query: str, embedder: Embedder) -> Vectors | None:
    """One unit vector for the whole query: the mean of its pieces' where it is longer than the embedder takes. None for no text."""
    pieces = [piece for _, piece in split_counted(query, embedder.count, embedder.max_tokens)]
    if not pieces:
        return None
    import numpy as np  # noqa: PLC0415  # heavy

    mean = embedder.embed(pieces).mean(axis=0)
    length = float(np.linalg.norm(mean))
    return (mean / length).astype(np.float32) if length else None
