"""What each factor of a file's relevance counts, checked at birth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NoReturn, get_args

from localrag.errors import ConfigError

Method = Literal["keyword", "semantic", "hybrid"]
METHODS: tuple[Method, ...] = get_args(Method)

FACTORS = ("task_alignment", "recency", "mention_density", "dependency_depth", "file_type")
"""The factors, in the order in which contributions are listed and added."""

DEFAULT_FILE_TYPES: Mapping[str, float] = MappingProxyType(
    {"source_code": 1.0, "test_code": 0.9, "requirements": 0.8, "documentation": 0.7, "config": 0.6, "other": 0.5}
)

MAX_DEPTH_LIMIT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The five weights (each 0 or more; only their proportion matters) and what shapes the factors.

    `half_life_days` is the age at which recency is one half; `max_depth` the number of imports that are followed; `file_types` gives
    a value of 0 to 1 for each kind of file, kinds that are left out keeping their default. ConfigError for anything else.
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
        """Each factor's part of the whole, in the order of FACTORS; they never add up to more than 1."""
        largest = max(getattr(self, name) for name in FACTORS)  # first, so that the sum of huge weights stays finite
        parts = {name: getattr(self, name) / largest for name in FACTORS}
        total = math.fsum(parts.values())
        parts = {name: part / total for name, part in parts.items()}
        while max(sum(parts.values()), math.fsum(parts.values())) > 1.0:  # by the last bit of a rounded sum
            top = max(parts, key=lambda name: parts[name])
            parts[top] = math.nextafter(parts[top], 0.0)
        return parts


def _is_number(value: object) -> bool:
    """A finite number; infinity, NaN, True, and a whole number beyond all floats are none."""
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
