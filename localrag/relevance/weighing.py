"""The scores of files weigh the passages that a search found in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from localrag.passages import Hit

STRENGTH = 0.5
"""How much of the distance between the best and the worst hit a relevance of 1 is worth."""


def weigh(hits: Sequence[Hit], scores: Mapping[str, float], *, strength: float = STRENGTH) -> list[Hit]:
    """The hits, best first again, each with a contribution "relevance" where its chunk's source has a score (0 to 1) in `scores`.

    The contribution is `strength` × relevance × spread, the spread being the highest minus the lowest score of the hits: whatever
    scale they have (a rank fusion's are about 0.03), a relevance of 1 lifts a hit past no more than that share of it. Where all hits
    have the same score, the spread is that score, so that relevance alone decides. A score stays the sum of its contributions.
    """
    if not hits:
        return []
    values = [hit.score for hit in hits]
    spread = max(values) - min(values) or abs(values[0]) or 1.0
    weighed = [_weighed(hit, scores, strength * spread) for hit in hits]
    return sorted(weighed, key=lambda hit: (-hit.score, hit.label))


def _weighed(hit: Hit, scores: Mapping[str, float], scale: float) -> Hit:
    relevance = scores.get(hit.chunk.source)
    if relevance is None:
        return hit
    contributions = {**(hit.contributions or {"retrieval": hit.score}), "relevance": scale * relevance}
    return replace(hit, score=sum(contributions.values()), contributions=contributions)
