"""Combine the five factors into a score with its contributions, and weigh the hits of a search by scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NoReturn

from localrag.errors import ConfigError, UsageError
from localrag.relevance.alignment import METHODS, Method, Progress, align, rate_mentions
from localrag.relevance.dependencies import choose_roots, import_graph, rate_depths
from localrag.relevance.profile import File, Profile, Rating, kind_of
from localrag.text.tokens import Embedder
from localrag.types import Hit

MAX_TASK_CHARS = 32_768
_DAY_S = 86_400.0

FACTORS = ("task_alignment", "recency", "mention_density", "dependency_depth", "file_type")
"""The factors, in the order in which contributions are listed and added."""

DEFAULT_FILE_TYPES: Mapping[str, float] = MappingProxyType(
    {"source_code": 1.0, "test_code": 0.9, "requirements": 0.8, "documentation": 0.7, "config": 0.6, "other": 0.5}
)

MAX_DEPTH_LIMIT = 100

STRENGTH = 0.5
"""The value of a relevance of 1, as a share of the distance between the best and the worst hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The five weights (each 0 or more; only their proportion matters) and the parameters of the factors.

    `half_life_days` is the age at which recency is one half; `max_depth` the number of imports to follow; `file_types` maps kinds of
    files to values of 0 to 1, and kinds left out keep their default. Raises ConfigError for anything else.
    """

    task_alignment: float = 0.4
    recency: float = 0.2
    mention_density: float = 0.2
    dependency_depth: float = 0.1
    file_type: float = 0.1
    half_life_days: float = 7.0
    max_depth: int = 3
    method: Method = "hybrid"
    file_types: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = [(name, getattr(self, name)) for name in FACTORS]
        checks = (
            *((name, value, _is_number(value) and value >= 0, "a number of 0 or more") for name, value in weights),
            ("half_life_days", self.half_life_days, _is_number(self.half_life_days) and self.half_life_days > 0, "a number above 0"),
            ("max_depth", self.max_depth, _is_depth(self.max_depth), f"a whole number of 0 to {MAX_DEPTH_LIMIT}"),
            ("method", self.method, self.method in METHODS, f"one of {', '.join(METHODS)}"),
            ("file_types", self.file_types, isinstance(self.file_types, Mapping), "a table of kinds and values"),
        )
        for name, value, ok, allowed in checks:
            if not ok:
                _refuse(name, value, allowed)
        if not any(value for _, value in weights):
            raise ConfigError("All weights of relevance are 0, so nothing is left to score by.", hint=f"Weigh one of {', '.join(FACTORS)}.")
        for kind, value in self.file_types.items():
            if kind not in DEFAULT_FILE_TYPES:
                _refuse("file_types", kind, f"given for {', '.join(DEFAULT_FILE_TYPES)} only")
            if not (_is_number(value) and 0 <= value <= 1):
                _refuse(f"file_types.{kind}", value, "a number of 0 to 1")
        object.__setattr__(self, "file_types", MappingProxyType({**DEFAULT_FILE_TYPES, **self.file_types}))

    @property
    def shares(self) -> dict[str, float]:
        """Each factor's share, in the order of FACTORS; their sum never exceeds 1."""
        largest = max(getattr(self, name) for name in FACTORS)  # first, so that the sum of huge weights stays finite
        parts = {name: getattr(self, name) / largest for name in FACTORS}
        total = math.fsum(parts.values())
        parts = {name: part / total for name, part in parts.items()}
        while max(sum(parts.values()), math.fsum(parts.values())) > 1.0:  # by the last bit of a rounded sum
            top = max(parts, key=lambda name: parts[name])
            parts[top] = math.nextafter(parts[top], 0.0)
        return parts


def _is_number(value: object) -> bool:
    """Whether a value is a finite number: not infinity, NaN, a boolean, or an integer beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_depth(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DEPTH_LIMIT


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise ConfigError(f"The relevance setting {name} is {shown}, but must be {allowed}.", name=name)


DEFAULT_WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Score:
    """`score` is `sum(contributions.values())`, to the last bit, and lies in 0 to 1.

    `contributions` has the five factors in the order of FACTORS, each its share of the weights times its value; `details` has for each
    factor its `value` (0 to 1) and the numbers behind it, fit for JSON.
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
    """Score `files` by relevance for the task, best first, ties by path; the order of `files` does not matter.

    `others` are not scored, but read for words, references and imports like the files. `now` is in seconds since the epoch. Of the task,
    the first MAX_TASK_CHARS characters and MAX_TERMS different words count. Raises UsageError for a repeated path, and for the semantic
    method without an embedder; hybrid without one becomes keyword, and the details say so. `progress` counts embedded files.
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


def weigh(hits: Sequence[Hit], scores: Mapping[str, float], *, strength: float = STRENGTH) -> list[Hit]:
    """Sort hits again, each with a contribution "relevance" if its chunk's source has a score (0 to 1) in `scores`.

    The contribution is `strength` × relevance × spread, where the spread is the highest minus the lowest score of the hits: on any scale (a
    rank fusion's is about 0.03), a relevance of 1 lifts a hit by at most that share of it. If all hits have the same score, the spread is
    that score, so that relevance alone decides. A score stays the sum of its contributions.
    """
    if not hits:
        return []
    values = [hit.score for hit in hits]
    spread = max(values) - min(values) or abs(values[0]) or 1.0
    weighed = [_weighed(hit, scores, strength * spread) for hit in hits]
    return sorted(weighed, key=lambda hit: (-hit.score, hit.label))


def _profiles(files: Sequence[File], others: Sequence[File]) -> tuple[list[Profile], list[Profile]]:
    """The files to score, and all files, sorted by path; a file that is in both counts once."""
    profiles = sorted((Profile(file) for file in files), key=lambda profile: profile.path)
    for one, following in pairwise(profiles):
        if one.path == following.path:
            raise UsageError(f"The file {one.path} is given twice.", hint="Give each file once.", path=one.path)
    known = {profile.path for profile in profiles}
    beside = {profile.path: profile for profile in map(Profile, others) if profile.path not in known}
    return profiles, sorted([*profiles, *beside.values()], key=lambda profile: profile.path)


def _recency(modified: float | None, now: float, half_life_days: float) -> Rating:
    """Halves with each half-life of age. A date in the future counts as now; without a date, the value is 0.5."""
    if modified is None or not math.isfinite(modified):
        return Rating(0.5, {"age_days": None, "reason": "no date"})
    age_days = max(now - modified, 0.0) / _DAY_S
    return Rating(0.5 ** (age_days / half_life_days), {"age_days": age_days})


def _file_type(profile: Profile, values: Mapping[str, float]) -> Rating:
    kind = kind_of(profile.path, profile.text)
    return Rating(values[kind], {"kind": kind})


def _weighed(hit: Hit, scores: Mapping[str, float], scale: float) -> Hit:
    relevance = scores.get(hit.chunk.source)
    if relevance is None:
        return hit
    contributions = {**(hit.contributions or {"retrieval": hit.score}), "relevance": scale * relevance}
    return replace(hit, score=sum(contributions.values()), contributions=contributions)
