"""How far a file is, import by import, from the files that the task is about.

Those roots are the files that the task names; where it names none, the files whose alignment with the task is at least ROOT_SHARE of
the best. A root has 1, a file at distance d from the nearest root 1 - d / (max_depth + 1), a file farther away 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localrag.outline import imports, language_of
from localrag.relevance.profile import Profile, Rating
from localrag.relevance.resolving import Resolver

ROOT_SHARE = 0.9


def import_graph(everything: Sequence[Profile]) -> dict[str, tuple[str, ...]]:
    """path → the paths of the files that it imports, itself left out, in order of their names. Only files at hand are in it."""
    resolver = Resolver(profile.path for profile in everything)
    graph = {}
    for profile in everything:
        language = language_of(profile.name)
        names = imports(profile.text, language) if language else []
        found = {path for name in names for path in resolver.resolve(profile.path, name, language or "")}
        graph[profile.path] = tuple(sorted(found - {profile.path}))
    return graph


def choose_roots(profiles: Sequence[Profile], aligned: Sequence[Rating], named: Sequence[str]) -> list[str]:
    """The files that the task is about; none if it names none and nothing is aligned with it."""
    if named:
        return sorted(named)
    best = max((rating.value for rating in aligned), default=0.0)
    return sorted(
        profile.path for profile, rating in zip(profiles, aligned, strict=True) if rating.value > 0 and rating.value >= ROOT_SHARE * best
    )


def rate_depths(profiles: Sequence[Profile], graph: Mapping[str, Sequence[str]], roots: Sequence[str], max_depth: int) -> list[Rating]:
    distances = _distances(graph, roots, max_depth)
    ratings = []
    for profile in profiles:
        distance = distances.get(profile.path)
        value = 0.0 if distance is None else 1.0 - distance / (max_depth + 1)
        ratings.append(Rating(value, {"distance": distance, "imports": len(graph[profile.path])}))
    return ratings


def _distances(graph: Mapping[str, Sequence[str]], roots: Sequence[str], max_depth: int) -> dict[str, int]:
    """Breadth first, so that each file has its shortest distance and cycles end."""
    distances = dict.fromkeys(roots, 0)
    layer = list(roots)
    for depth in range(1, max_depth + 1):
        layer = list(dict.fromkeys(target for source in layer for target in graph[source] if target not in distances))
        distances.update(dict.fromkeys(layer, depth))
    return distances
