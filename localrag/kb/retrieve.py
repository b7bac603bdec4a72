"""Retrieve the chunks most relevant to a query: cosine similarity and BM25, fused by a weighted sum.

Feedback, a reranker and diversity adjust the score. Every score is the sum of its named contributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import TARGET_TOKENS, split_counted
from localrag.kb.database import embedded
from localrag.kb.filters import Where
from localrag.kb.protocols import AnyIndex, AnyStore, Reranker
from localrag.kb.query import Query, parse
from localrag.settings import Learning
from localrag.text.terms import terms
from localrag.text.tokens import Embedder, embed_queries
from localrag.types import Chunk, Hit, comparable

if TYPE_CHECKING:
    from localrag.kb.protocols import Feedback, Reranker
    from localrag.kb.vector_cache import Vectors


RANK_CONSTANT = 60
"""The `k` of reciprocal rank fusion, as its authors chose it (Cormack, Clarke and Büttcher, SIGIR 2009)."""

Scored = tuple[int, float, dict[str, float]]
"""(id, score, contributions). The score is the sum of the contributions."""

MAX_SHARE = 0.10
"""Largest share of a score that feedback may add or subtract. It moves a chunk by a few ranks but cannot lift any chunk to the top."""

_VOTES = 4.0
_SUPPLIED = 20.0
"""Pseudo-counts: this many neutral votes and this many average prompts are added before computing the boost."""
_USUAL_SHARE = 0.25
"""Usual share of the chunks in a prompt that are cited: few answers cite more than one source in four."""

NUM_RERANKED = 20
"""Number of best hits that a reranker rescores."""


def fuse(rankings: Mapping[str, Sequence[int]], *, k: int = RANK_CONSTANT, weights: Mapping[str, float] | None = None) -> list[Scored]:
    """Fuse rankings by reciprocal rank fusion: an id gets weight / (k + rank) from each ranking that holds it. Ranks count from 1.

    `rankings` maps a name to ids, best first, each at most once. `weights` maps names to weights; the default is 1. Returns (id, score,
    contributions), highest score first, ties by id. The score is exactly `sum(contributions.values())`, and contributions name only the
    rankings that hold the id.
    """
    contributions: dict[int, dict[str, float]] = {}
    for name, ids in rankings.items():
        weight = 1.0 if weights is None else weights.get(name, 1.0)
        for rank, one in enumerate(ids, start=1):
            contributions.setdefault(one, {})[name] = weight / (k + rank)
    return in_order((one, sum(parts.values()), parts) for one, parts in contributions.items())


SEMANTIC_WEIGHT = 2 / 3
"""Weight of the cosine similarity in a hybrid score. BM25 has the rest. On the development part of MTRAG, nDCG@10 is within 0.005 of its
best for weights of 0.6 to 0.75, with the last turn or the last two as the query."""

MIN_SCORE_SHARE = 0.4
"""Least share of the best hit's hybrid score. Weaker hits are left out: on the development part of MTRAG, that drops 8 of 10 hits and no
nDCG@10; a share of 0.5 costs 0.004."""


def combine(similarities: Mapping[int, float], keyword: Mapping[int, float]) -> list[Scored]:
    """Fuse cosine similarities and BM25 scores by a convex combination (Bruch, Gai and Ingber, TOIS 2023).

    Each is divided by its largest value, so a score is 0 to 1 and depends on how near a chunk comes to the best one, not on its rank alone.
    A negative similarity counts as 0. Returns entries as `fuse` does.
    """
    nearest, most = max(similarities.values(), default=0.0), max(keyword.values(), default=0.0)
    scored = []
    for one in similarities.keys() | keyword.keys():
        parts = {}
        if one in similarities and nearest > 0:
            parts["semantic"] = SEMANTIC_WEIGHT * max(0.0, similarities[one]) / nearest
        if one in keyword and most > 0:
            parts["keyword"] = (1 - SEMANTIC_WEIGHT) * keyword[one] / most
        scored.append((one, sum(parts.values()), parts))
    return in_order(scored)


def in_order(scored: Iterable[Scored]) -> list[Scored]:
    """Sort by score, highest first, ties by id."""
    return sorted(scored, key=lambda entry: (-entry[1], entry[0]))


def feedback_boost(feedback: Feedback, learning: Learning = "votes") -> float:
    """Return the share of its score that a chunk gains from feedback, −MAX_SHARE to MAX_SHARE; 0 without feedback.

    Votes of people count in full; citations count half, and only if `learning` is "all". Retrievals do not count: they show how the chunk
    was ranked, not whether it helped, and counting them would reinforce themselves.
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
    """Rank texts with a reranker. Return their indices, best first, ties in order; None if the reranker returns no scores.

    Raises KnowledgeBaseError unless the reranker returns a number for each text.
    """
    scores = reranker.scores(query, texts)
    if scores is None:
        return None
    if len(scores) != len(texts) or any(map(math.isnan, scores)):
        raise KnowledgeBaseError(
            f"The reranker returned {len(scores)} scores for {len(texts)} passages, or some scores that are not numbers.",
            hint="Use another reranker, or none.",
        )
    return sorted(range(len(texts)), key=lambda index: (-scores[index], index))


def diversify(hits: Sequence[Hit], k: int, diversity: float) -> list[Hit]:
    """Choose `k` hits by maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998), best first.

    `diversity` is the weight of the penalty, 0 (none) to 1. A hit loses `diversity` × the best score × its similarity (0 to 1, by shared
    words) to the most similar hit chosen before it. The loss is a contribution named "diversity", so that scores remain the sums of their
    contributions and decrease from hit to hit.
    """
    if not hits or not diversity:
        return list(hits[:k])
    top = max(hit.score for hit in hits)
    words = [frozenset(terms(hit.chunk.text)) for hit in hits]
    similarity = [0.0] * len(hits)
    candidates = list(range(len(hits)))
    selected: list[Hit] = []
    while candidates and len(selected) < k:
        best = max(candidates, key=lambda at: (hits[at].score - diversity * top * similarity[at], -at))
        candidates.remove(best)
        selected.append(_penalised(hits[best], diversity * top * similarity[best]))
        for at in candidates:
            similarity[at] = max(similarity[at], _word_similarity(words[at], words[best]))
    return selected


def _penalised(hit: Hit, loss: float) -> Hit:
    if not loss:
        return hit
    parts = {**hit.contributions, "diversity": -loss}
    return replace(hit, score=sum(parts.values()), contributions=parts)


def _word_similarity(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / math.sqrt(len(one) * len(other)) if one and other else 0.0


Mode = Literal["hybrid", "semantic", "keyword"]
MODES: tuple[Mode, ...] = ("hybrid", "semantic", "keyword")

MIN_SIMILARITY = 0.30
"""Cosine threshold for a store that has none for its embedder, measured with all-MiniLM-L6-v2. On examples/handbook, the best chunk had
0.42 to 0.80 for 22 questions that the handbook answers, 0.36 to 0.47 for 8 on-topic questions that it does not answer (no threshold
separates those), and 0.04 to 0.35 for 30 off-topic questions, 2 of them above the threshold. Of 387 relevant pairs of Cranfield, 6.5 %
lie below it; the best chunk for each of 45 questions had at least 0.41."""

MIN_WORD_SHARE = 0.3
"""Least weighted share of the question's words for a chunk that is far in meaning. Of 267 questions of MTRAG, 42 find something on
examples/handbook, and 16 with a share of 0.5; none of them counts as answerable (session/answerability.py). A share of 0.5 loses passages
for questions that are joined with the one before, which holds half of the words: 0.004 of nDCG@10."""

DEPTH = 100
"""Length of each ranking before fusion; longer if more hits are requested."""

_DEEPER = 4
"""Factor by which rankings are lengthened if identical texts leave fewer than `k` hits."""

RERANK_WEIGHT = 4.0
"""Weight of the reranker's ranking in the fusion. The semantic and keyword rankings have weight 1, so they only break near-ties."""

MAX_QUERY_CHARS = 32_768

PIPED_SOURCE = "standard input"
PIPED_SCOPE = "stdin"
"""Source of text that is piped in with a question, and scope of its labels."""

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
    """Return the `k` most relevant chunks with distinct texts, best first, all of one store generation. May return fewer, or none.

    `index` returns the vector index of the current generation; it is called inside the reading transaction. Keyword mode needs neither it
    nor an embedder.

    The score is a weighted sum of "semantic" and "keyword" in hybrid mode (see `combine`), cosine similarity in semantic mode, and BM25 in
    keyword mode. With a `reranker`, which rescores the best NUM_RERANKED, it is RRF of the mode's rankings and "rerank". With `learning`,
    "feedback" changes the score by up to a tenth. `diversity` (0 to 1) penalises hits that resemble a better one (see `diversify`). Chunks
    with the same text as a better hit become its `copies` and do not count towards `k`.

    Hybrid mode returns nothing if no chunk is relevant: near enough in meaning, or with enough of the question's words. If one is, others
    follow as far as their score reaches MIN_SCORE_SHARE of the best one's. Semantic mode returns only chunks that are near enough.

    A hit's relevance is its cosine similarity on a scale that all embedders share; at least the threshold MIN_SIMILARITY if its words
    match; None in keyword mode. Only the first MAX_QUERY_CHARS characters and MAX_TERMS distinct words of a query are used.
    """
    query = query[:MAX_QUERY_CHARS].strip().encode("utf-8", "replace").decode()
    vector = None if mode == "keyword" or embedder is None else _embed(query, embedder)
    query_terms = parse(query)
    num_looked_at = max(k, NUM_RERANKED) if reranker is not None else 2 * k if diversity else k
    with store.reading():
        if embedder is not None and mode != "keyword":
            store.check_embedder(embedder.fingerprint, embedder.dim)
        vectors = index() if vector is not None else None
        limit = max(DEPTH, k)
        while True:
            by_words = _by_words(store, query_terms, limit, where) if mode != "semantic" else []
            is_deeper = len(by_words) == limit
            by_meaning: _Ranking = []
            relevance: dict[int, float] = {}
            if vectors is not None and vector is not None:
                near = vectors.search(vector, limit, among=store.allowed(where))
                is_deeper = is_deeper or len(near) == limit
                similarities = vectors.similarities(vector, [one for one, _ in by_words]) | dict(near)
                relevance = _relevances(store, query_terms, by_words, similarities)
                by_meaning = sorted(similarities.items(), key=lambda hit: (-hit[1], hit[0]))
                if mode == "semantic":
                    by_meaning = [(one, score) for one, score in by_meaning if relevance[one] >= MIN_SIMILARITY]
                elif max(relevance.values(), default=0.0) < MIN_SIMILARITY:
                    by_meaning, by_words = [], []
            rankings: dict[str, _Ranking] = (
                {"semantic": by_meaning, "keyword": by_words} if mode == "hybrid" else {mode: by_meaning or by_words}
            )
            scored = _scored(rankings)
            if learning != "off":
                scored = _with_feedback(store, scored, learning)
            texts = _texts(store, [one for one, _, _ in scored], num_looked_at, kb)
            if len(texts) >= k or not is_deeper or not scored:
                break
            limit *= _DEEPER  # copies of a few texts fill the rankings
    chunks = {one: same[0] for one, same in texts.items()}
    if reranker is not None:
        scored = _reranked(scored, rankings, chunks, query, reranker)
    return diversify(_hits(scored, texts, relevance, rankings), k, diversity)


def piped_hits(text: str, question: str, count: Callable[[str], int]) -> list[Hit]:
    """Cut piped text into hits. All of it is kept, ordered by the share of the question's words in each chunk, ties in text order.

    `count` counts tokens of the model that will read the hits. The score is that share. Labels are `KB#stdin/1` and so on, in text order.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates become question marks, as in every prompt
    question_words = set(terms(question))
    hits = []
    for ordinal, (start, piece) in enumerate(split_counted(text, count, TARGET_TOKENS)):
        end = start + len(piece)
        chunk = Chunk(ordinal + 1, 0, ordinal, piece, start, end, PIPED_SOURCE, scope=PIPED_SCOPE)
        score = len(question_words & set(terms(piece))) / max(1, len(question_words))
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
            _scores_of(one, own, relevance),
            tuple(texts[one][1:]),
        )
        for one, score, parts in scored
        if one in texts
    ]


def _scores_of(one: int, rankings: Mapping[str, Mapping[int, float]], relevance: Mapping[int, float]) -> dict[str, float]:
    """Return a chunk's scores in the rankings that found it. A chunk far in meaning was found by its words, if it has any."""
    scores = {name: ranking[one] for name, ranking in rankings.items() if one in ranking}
    if len(scores) > 1 and relevance.get(one, 1.0) <= MIN_SIMILARITY:
        scores.pop("semantic", None)
    return scores


def _relevances(store: AnyStore, query_terms: Query, by_words: _Ranking, similarities: Mapping[int, float]) -> dict[int, float]:
    """Return the relevance of each chunk. It is at least MIN_SIMILARITY if the chunk is relevant."""
    least = MIN_SIMILARITY if store.min_similarity is None else store.min_similarity
    relevance = {one: _relevance(similarity, least) for one, similarity in similarities.items()}
    for one, _ in _relevant(store, by_words, query_terms, similarities, least):
        relevance[one] = max(MIN_SIMILARITY, relevance.get(one, 0.0))
    return relevance


def _relevance(similarity: float, least: float) -> float:
    """Map a similarity to the scale that all embedders share: 0 to 0, the threshold `least` to MIN_SIMILARITY, and 1 to 1."""
    if similarity < least:
        return MIN_SIMILARITY * max(0.0, similarity) / least
    return MIN_SIMILARITY + (similarity - least) * (1.0 - MIN_SIMILARITY) / (1.0 - least)


def _by_words(store: AnyStore, query_terms: Query, limit: int, where: Where | None) -> _Ranking:
    """Return the best matches of words and characters. A chunk that matches both gets the sum of its scores."""
    scores = dict(store.keyword_ids(query_terms.keyword, limit, where)) if query_terms.keyword else {}
    if query_terms.characters:
        for one, score in store.character_ids(query_terms.characters, limit, where):
            scores[one] = scores.get(one, 0.0) + score
    return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:limit]


def _relevant(store: AnyStore, by_words: _Ranking, query_terms: Query, similarities: Mapping[int, float], least: float) -> _Ranking:
    """Keep the matches that are near in meaning or contain enough of the question's words, weighted by rarity."""
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

    for num_matches, matching in store.keyword_holders(query_terms.keyword, far):
        weigh(num_matches, matching)
    for num_matches, matching in store.character_holders(query_terms.characters, far):
        # many character pairs of a question span two words and occur nowhere: give them the weight of the rarest pair that occurs
        weigh(max(1, num_matches), matching)
    return [(one, score) for one, score in by_words if shares.get(one, total) >= MIN_WORD_SHARE * total]


def _scored(rankings: Mapping[str, _Ranking]) -> list[Scored]:
    """Fuse the two rankings of hybrid search. A single ranking keeps its own scores."""
    if len(rankings) > 1:
        scored = combine(dict(rankings["semantic"]), dict(rankings["keyword"]))
        return [entry for entry in scored if entry[1] > 0 and entry[1] >= MIN_SCORE_SHARE * scored[0][1]]
    return [(one, score, {name: score}) for name, ranking in rankings.items() for one, score in ranking]


def _with_feedback(store: AnyStore, scored: list[Scored], learning: Learning) -> list[Scored]:
    feedback = store.feedback([one for one, _, _ in scored])
    boosted = []
    for one, score, parts in scored:
        boost = score * feedback_boost(feedback[one], learning) if one in feedback else 0.0
        whole = {**parts, "feedback": boost} if boost else parts
        boosted.append((one, sum(whole.values()), whole))
    return in_order(boosted)


def _texts(store: AnyStore, ids: Sequence[int], num: int, kb: str) -> dict[int, list[Chunk]]:
    """Group chunks by text. Return id of the first chunk → all chunks with that text, in order, for the first `num` distinct texts."""
    by_text: dict[str, list[Chunk]] = {}
    for chunk in store.chunks(ids, kb=kb):
        key = comparable(chunk.text)
        if key in by_text or len(by_text) < num:
            by_text.setdefault(key, []).append(chunk)
    return {same[0].id: same for same in by_text.values()}


def _reranked(
    scored: list[Scored], rankings: Mapping[str, _Ranking], chunks: Mapping[int, Chunk], query: str, reranker: Reranker
) -> list[Scored]:
    """Fuse again with the reranker's ranking of the best hits, if it returns one. Feedback keeps its share of the score."""
    best = [one for one, _, _ in scored if one in chunks][:NUM_RERANKED]
    order = rank(reranker, query, [embedded(chunks[one].heading, chunks[one].text) for one in best])
    if order is None:
        return scored
    orders = {name: [one for one, _ in ranking] for name, ranking in rankings.items()} | {"rerank": [best[index] for index in order]}
    shares = {one: parts["feedback"] / (score - parts["feedback"]) for one, score, parts in scored if "feedback" in parts}
    fused = []
    for one, score, parts in fuse(orders, weights={"rerank": RERANK_WEIGHT}):
        whole = {**parts, "feedback": score * shares[one]} if one in shares else parts
        fused.append((one, sum(whole.values()), whole))
    return in_order(fused)


def _embed(query: str, embedder: Embedder) -> Vectors | None:
    """Embed the whole query as a unit vector: the mean over its pieces if it is too long for the embedder. None for an empty query."""
    if not query:
        return None
    limit = embedder.max_tokens
    pieces = [query] if embedder.count(query) <= limit else [piece for _, piece in split_counted(query, embedder.count, limit)]
    import numpy as np  # noqa: PLC0415  # heavy

    mean = embed_queries(embedder, pieces).mean(axis=0)
    length = float(np.linalg.norm(mean))
    return (mean / length).astype(np.float32) if length else None
