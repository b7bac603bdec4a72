"""Ranking: lists are fused by rank; feedback, a reranker and diversity each add their share to the score.

A score is the sum of its contributions, so that it explains itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from localrag.errors import KnowledgeBaseError
from localrag.passages import Hit
from localrag.settings import Learning
from localrag.terms import terms

if TYPE_CHECKING:
    from localrag.kb.protocols import Feedback, Reranker

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
