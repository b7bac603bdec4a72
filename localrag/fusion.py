"""Ranked lists become one list, with the explanation of every score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

RANK_CONSTANT = 60
"""The `k` of reciprocal rank fusion, as its authors chose it (Cormack, Clarke and Büttcher, SIGIR 2009)."""


def fuse(rankings: Mapping[str, Sequence[int]], *, k: int = RANK_CONSTANT) -> list[tuple[int, float, dict[str, float]]]:
    """Reciprocal rank fusion: an id gets 1 / (k + rank) from every ranking that holds it, rank 1 being its best.

    `rankings` maps a name to ids, best first, each id at most once. Returns (id, score, contributions), highest score first,
    ties by id. The score is `sum(contributions.values())`, to the last bit, and contributions name only the rankings that hold the id.
    """
    contributions: dict[int, dict[str, float]] = {}
    for name, ids in rankings.items():
        for rank, one in enumerate(ids, start=1):
            contributions.setdefault(one, {})[name] = 1.0 / (k + rank)
    fused = [(one, sum(parts.values()), parts) for one, parts in contributions.items()]
    return sorted(fused, key=lambda entry: (-entry[1], entry[0]))
