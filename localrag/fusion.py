"""Ranked lists become one list, with the explanation of every score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

RANK_CONSTANT = 60
"""The `k` of reciprocal rank fusion, as its authors chose it (Cormack, Clarke and Büttcher, SIGIR 2009)."""

Scored = tuple[int, float, dict[str, float]]
"""An id, its score, and the contributions that the score is the sum of."""


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
    """Highest score first, ties by id."""
    return sorted(scored, key=lambda entry: (-entry[1], entry[0]))
