"""Score files for a task: rate task alignment, combine the five factors, and weigh the hits of a search by the scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from localrag.errors import ConfigError, UsageError
from localrag.relevance.profile import File, Profile, Rating, count_words, idf, kind_of, task_terms
from localrag.relevance.references import choose_roots, import_graph, rate_depths, rate_mentions
from localrag.text.tokens import Embedder, embed_queries
from localrag.types import Hit

if TYPE_CHECKING:
    import numpy as np

Method = Literal["keyword", "semantic", "hybrid"]
METHODS: tuple[Method, ...] = get_args(Method)

NAMING_COUNT = 3
"""Extra occurrences for a word in a path, a heading or the name of a definition, which says what the file is about."""

EmbedProgress = Callable[[int, int], None]
"""Called with the number of files embedded so far, and of all files."""

WINDOW_CHARS = 700
"""Characters embedded as one window: about 254 tokens of source code, the limit of the default embedder."""

MAX_WINDOWS = 64
MAX_WINDOWS_IN_ALL = 192
"""Most windows embedded of one file, and of all files together (at least one of each). The default embedder takes about 0.1 s of
one core per window, so a folder takes about ten seconds.
"""

BEST_WINDOWS = 3
"""Number of best windows whose mean is the similarity of a file: one may be chance, and the mean of all is too blunt."""

_TITLE_CHARS = 100
_TASK_WINDOWS = 8

MAX_TASK_CHARS = 32_768
_DAY_S = 86_400.0

FACTORS = ("task_alignment", "recency", "mention_density", "dependency_depth", "file_type")
"""The factors, in the order in which contributions are listed and added."""

DEFAULT_FILE_TYPES: Mapping[str, float] = MappingProxyType(
    {"source_code": 1.0, "test_code": 0.9, "requirements": 0.8, "documentation": 0.7, "config": 0.6, "other": 0.5}
)

MAX_DEPTH_LIMIT = 100

STRENGTH = 0.5
"""Effect of a relevance of 1, as a share of the distance between the best and the worst hit."""


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
            raise ConfigError("All weights of relevance are 0, so no score can be computed.", hint=f"Weigh one of {', '.join(FACTORS)}.")
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
        while max(sum(parts.values()), math.fsum(parts.values())) > 1.0:  # rounding can exceed 1 by the last bit
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
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    raise ConfigError(f"The relevance setting {name} is {text}, but must be {allowed}.", name=name)


DEFAULT_WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a file, 0 to 1. It equals `sum(contributions.values())` to the last bit.

    `contributions` has the five factors in the order of FACTORS, each its share of the weights times its value. `details` has,
    for each factor, its `value` (0 to 1) and the numbers that explain it, as JSON.
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
    progress: EmbedProgress | None = None,
) -> list[Score]:
    """Score `files` by relevance for the task, best first, ties by path; the order of `files` does not matter.

    `others` are not scored, but read for words, references and imports like the files. `now` is in seconds since the epoch.
    Only the first MAX_TASK_CHARS characters and MAX_TERMS different words of the task count. Raises UsageError for a repeated
    path, and for the semantic method without an embedder; hybrid without one becomes keyword, and the details say so.
    `progress` counts embedded files.
    """
    if weights.method == "semantic" and embedder is None:
        raise UsageError("Scoring by meaning needs an embedder.", hint="Use the method keyword, or hybrid.")
    task = task[:MAX_TASK_CHARS]
    profiles, everything = _profiles(files, others)
    aligned = align(profiles, everything, task, weights.method, embedder, progress)
    graph = import_graph(everything)
    mentioned, task_paths = rate_mentions(profiles, everything, task, graph)
    roots = choose_roots(profiles, aligned, task_paths)
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
    """Sort hits again, with a contribution "relevance" for each hit whose source has a score (0 to 1) in `scores`.

    The contribution is `strength` × relevance × spread, where the spread is the highest minus the lowest score of the hits: on
    any scale (rank fusion's is about 0.03), a relevance of 1 lifts a hit by at most that share of it. If all hits have the same
    score, the spread is that score, so that relevance alone decides. A score stays the sum of its contributions.
    """
    if not hits:
        return []
    values = [hit.score for hit in hits]
    spread = max(values) - min(values) or abs(values[0]) or 1.0
    weighed = [_weighed(hit, scores, strength * spread) for hit in hits]
    return sorted(weighed, key=lambda hit: (-hit.score, hit.label))


def _profiles(files: Sequence[File], others: Sequence[File]) -> tuple[list[Profile], list[Profile]]:
    """Return the files to score, and all files, sorted by path; a file in both lists counts once."""
    profiles = sorted((Profile(file) for file in files), key=lambda profile: profile.path)
    for one, following in pairwise(profiles):
        if one.path == following.path:
            raise UsageError(f"The file {one.path} is given twice.", hint="Give each file once.", path=one.path)
    paths = {profile.path for profile in profiles}
    beside = {profile.path: profile for profile in map(Profile, others) if profile.path not in paths}
    return profiles, sorted([*profiles, *beside.values()], key=lambda profile: profile.path)


def _recency(modified: float | None, now: float, half_life_days: float) -> Rating:
    """Halve the value with each half-life of age. A future date counts as now; without a date, the value is 0.5."""
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


def align(
    profiles: Sequence[Profile],
    everything: Sequence[Profile],
    task: str,
    method: Method,
    embedder: Embedder | None,
    progress: EmbedProgress | None = None,
) -> list[Rating]:
    """Rate how well each of `profiles` fits the task. Words are weighted by their rarity in `everything`. Without an embedder,
    only words count.
    """
    terms = task_terms(task)
    weights = {stem: _weight(sum(_count(each, stem) > 0 for each in everything), len(everything)) for stem in terms}
    if method == "keyword" or embedder is None:
        fallback = {} if method == "keyword" else {"asked": method, "reason": "no embedder"}
        by_words = _by_words(profiles, terms, weights)
        return [Rating(value, {"method": "keyword", **fallback, "keyword": value, **details}) for value, details in by_words]
    by_meaning = _rate_meaning(profiles, task, weights, embedder, progress)
    if method == "semantic":
        return [Rating(value, {"method": method, "semantic": value, **details}) for value, details in by_meaning]
    return [
        Rating(
            (word.value + near.value) / 2, {"method": method, "keyword": word.value, "semantic": near.value, **word.details, **near.details}
        )
        for word, near in zip(_by_words(profiles, terms, weights), by_meaning, strict=True)
    ]


def _by_words(profiles: Sequence[Profile], terms: Mapping[str, str], weights: Mapping[str, float]) -> list[Rating]:
    total = sum(weights.values())
    ratings = []
    for profile in profiles:
        counts = {stem: _count(profile, stem) for stem in terms}
        weight = sum(weights[stem] * num / (num + 1) for stem, num in counts.items())
        details = {
            "found": {terms[stem]: num for stem, num in counts.items() if num},
            "missing": [terms[stem] for stem, num in counts.items() if not num],
        }
        ratings.append(Rating(min(weight / total, 1.0) if total else 0.0, details))
    return ratings


def _count(profile: Profile, stem: str) -> int:
    return profile.counts[stem] + NAMING_COUNT * profile.naming_counts[stem]


def _weight(num_holding: int, num_files: int) -> float:
    return idf(num_files, num_holding) if num_holding else idf(num_files, 1) / 2


def _rate_meaning(
    profiles: Sequence[Profile], task: str, weights: Mapping[str, float], embedder: Embedder, progress: EmbedProgress | None = None
) -> list[Rating]:
    """Rate files by the cosine similarity of the task with their best windows, at least 0.

    Of a file with too many windows, these are embedded: the first, those with most of the task's words (`weights` by stem), and
    some spread over the rest. A window too long for the embedder is truncated. The details say how much was embedded.
    """
    direction = _direction(task, weights, embedder)
    limit = max(1, min(MAX_WINDOWS, MAX_WINDOWS_IN_ALL // max(len(profiles), 1)))
    ratings = []
    for num_done, profile in enumerate(profiles):
        if progress is not None:
            progress(num_done, len(profiles))
        spans = windows(profile.text)
        texts = [profile.text[start:end] for start, end in _chosen(profile.text, spans, limit, weights)]
        pieces = [
            piece for text in texts if text.strip() and (piece := _fitted(f"{profile.path[-_TITLE_CHARS:]}\n{text.strip()}", embedder))
        ]
        near: list[float] = []
        if direction is not None and pieces:  # one call per file, so that its vectors do not depend on other files
            near = sorted((float(one) for one in embedder.embed(pieces) @ direction), reverse=True)[:BEST_WINDOWS]
        value = min(max(sum(near) / len(near), 0.0), 1.0) if near else 0.0
        ratings.append(Rating(value, {"windows_embedded": len(pieces), "windows": len(spans)}))
    return ratings


def windows(text: str) -> list[tuple[int, int]]:
    """Split a text into (start, end) spans of about WINDOW_CHARS, at line ends if possible."""
    spans, start = [], 0
    while start < len(text):
        end = min(start + WINDOW_CHARS, len(text))
        if end < len(text):
            end = text.rfind("\n", start + WINDOW_CHARS // 2, end) + 1 or end
        spans.append((start, end))
        start = end
    return spans


def _chosen(text: str, spans: list[tuple[int, int]], limit: int, weights: Mapping[str, float]) -> list[tuple[int, int]]:
    if len(spans) <= limit:
        return spans
    span_weights = {}
    for at, (start, end) in enumerate(spans):
        counts = count_words(text[start:end])
        span_weights[at] = sum(weight for stem, weight in weights.items() if counts[stem])
    order = [0, *sorted((at for at in span_weights if at and span_weights[at]), key=lambda at: (-span_weights[at], at))][:limit]
    rest = sorted(span_weights.keys() - set(order))
    room = limit - len(order)
    order += [rest[num * len(rest) // room] for num in range(room)]
    return [spans[at] for at in sorted(order)]


def _direction(task: str, weights: Mapping[str, float], embedder: Embedder) -> np.ndarray | None:
    """Return the unit vector of a task, the mean over its windows; None for an empty text."""
    texts = (task[start:end].strip() for start, end in _chosen(task, windows(task), _TASK_WINDOWS, weights))
    pieces = [piece for text in texts if text and (piece := _fitted(text, embedder))]
    if not pieces:
        return None
    mean = embed_queries(embedder, pieces).mean(axis=0)
    length = float((mean @ mean) ** 0.5)
    return mean / length if length else None


def _fitted(text: str, embedder: Embedder) -> str:
    """Truncate a text to the embedder's limit; a lone surrogate becomes a question mark."""
    piece = text.encode("utf-8", "replace").decode()
    while piece and (num_tokens := embedder.count(piece)) > embedder.max_tokens:
        piece = piece[: min(len(piece) * embedder.max_tokens // num_tokens, len(piece) - 1)]
    return piece.strip()
