"""The five factors put together: one function returns the score with what it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from localrag.errors import UsageError
from localrag.relevance.alignment import align
from localrag.relevance.dependencies import choose_roots, import_graph, rate_depths
from localrag.relevance.kinds import kind_of
from localrag.relevance.meaning import Progress
from localrag.relevance.mentions import rate_mentions
from localrag.relevance.profile import File, Profile, Rating
from localrag.relevance.weights import DEFAULT_WEIGHTS, Weights
from localrag.tokens import Embedder

MAX_TASK_CHARS = 32_768
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Score:
    """`score` is `sum(contributions.values())`, to the last bit, and lies in 0 to 1.

    `contributions` has the five factors in the order of FACTORS, each its share of the weights times its value; `details` says for each
    factor its `value` (0 to 1) and what that was computed from, fit for JSON.
    """

    path: str
    score: float
    contributions: Mapping[str, float]
    details: Mapping[str, Mapping[str, object]]


def score(
    files: Sequence[File],
    task: str,
    *,
    weights: Weights = DEFAULT_WEIGHTS,
    embedder: Embedder | None = None,
    now: float,
    others: Sequence[File] = (),
    progress: Progress | None = None,
) -> list[Score]:
    """How relevant each of `files` is for the task, best first, ties by path; the order in which files are given does not matter.

    `others` are not scored, but read for words, references and imports as the files are. `now` is in seconds since the epoch. Of the
    task, the first MAX_TASK_CHARS characters and MAX_TERMS different words count. UsageError if a path is given twice, and if the method
    is semantic without an embedder; hybrid without one is keyword, and the details say so. `progress` hears of the files embedded.
    """
    if weights.method == "semantic" and embedder is None:
        raise UsageError("Scoring by meaning needs an embedder.", hint="Use the method keyword, or hybrid.")
    task = task[:MAX_TASK_CHARS]
    profiles, everything = _profiles(files, others)
    aligned = align(profiles, everything, task, weights.method, embedder, progress)
    graph = import_graph(everything)
    mentioned, named = rate_mentions(profiles, everything, task, graph)
    roots = choose_roots(profiles, aligned, named)
    depths = rate_depths(profiles, graph, roots, weights.max_depth)
    shares = weights.shares
    scores = []
    for profile, alignment, mention, depth in zip(profiles, aligned, mentioned, depths, strict=True):
        ratings = {
            "task_alignment": alignment,
            "recency": _recency(profile.modified, now, weights.half_life_days),
            "mention_density": mention,
            "dependency_depth": depth,
            "file_type": _file_type(profile, weights.file_types),
        }
        contributions = {name: share * ratings[name].value for name, share in shares.items()}
        details = {name: {"value": rating.value, **rating.details} for name, rating in ratings.items()}
        scores.append(Score(profile.label, sum(contributions.values()), contributions, details))
    return sorted(scores, key=lambda one: (-one.score, one.path))


def _profiles(files: Sequence[File], others: Sequence[File]) -> tuple[list[Profile], list[Profile]]:
    """The files to score, and all that are read, in order of their paths. What is among `files` is no other."""
    profiles = sorted((Profile(file) for file in files), key=lambda profile: profile.path)
    for one, following in pairwise(profiles):
        if one.path == following.path:
            raise UsageError(f"The file {one.path} is given twice.", hint="Give each file once.", path=one.path)
    known = {profile.path for profile in profiles}
    beside = {profile.path: profile for profile in map(Profile, others) if profile.path not in known}
    return profiles, sorted([*profiles, *beside.values()], key=lambda profile: profile.path)


def _recency(modified: float | None, now: float, half_life_days: float) -> Rating:
    """Half for each half-life of age. A date in the future counts as now; without a date, 0.5, which favours neither way."""
    if modified is None or not math.isfinite(modified):
        return Rating(0.5, {"age_days": None, "reason": "no date"})
    age_days = max(now - modified, 0.0) / _DAY_S
    return Rating(0.5 ** (age_days / half_life_days), {"age_days": age_days})


def _file_type(profile: Profile, values: Mapping[str, float]) -> Rating:
    kind = kind_of(profile.path, profile.text)
    return Rating(values[kind], {"kind": kind})
