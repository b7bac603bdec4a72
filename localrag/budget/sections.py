"""The sections of a prompt: their order, defaults and colours, and the flex numbers of each; and profiles, which override them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from math import floor
from types import MappingProxyType
from typing import Literal, get_args

from localrag.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Percent:
    """A share, 0 to 100, of the window less the fixed sections. Raises ConfigError for anything else."""

    value: float

    def __post_init__(self) -> None:
        if not _is_within(self.value, 100):
            raise ConfigError(f"A percentage must be a number from 0 to 100, not {self.value!r}.", hint="Write a number from 0 to 100.")


Cut = Literal["never", "drop", "oldest", "truncate", "middle", "summarize", "error"]
"""What to do with content that does not fit: "never" cuts it; "drop" removes the lowest score first, "oldest" the oldest message;
"truncate" cuts at the end of a sentence or line; "middle" removes the middle of each text; "summarize" shortens level by level;
"error" refuses the prompt.
"""
CUTS: tuple[Cut, ...] = get_args(Cut)

Length = int | Percent
"""A number of tokens, or a share of the window less the fixed sections."""


@lru_cache(maxsize=1024)
def exact(value: float) -> Fraction:
    """Return the decimal number that was written: 0.1 + 0.2 + 0.7 is 1."""
    return Fraction(str(value))


def tokens_of(length: Length, whole: int) -> int:
    """Convert a length to tokens, rounded down; a percentage refers to `whole`."""
    return floor(exact(length.value) * whole / 100) if isinstance(length, Percent) else length


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section of a prompt, with the numbers of a CSS flex item.

    A section starts at `basis`. If there is room left, it grows in proportion to `grow`; if there is too little, it shrinks in
    proportion to `shrink` times `basis`. It stays within `min` and `max` (None: no limit). With `shrink` 0 it gives nothing
    back. `content`, if known, is the number of tokens to place: it caps both limits, so that no section gets more than it can
    use, and it is the `basis` if that is None. `cut` says what to do with content that does not fit. With `spare` above 0, the
    section takes leftover tokens in proportion to `spare`, even beyond its `max`; it takes nothing that another section could
    use.

    Lengths are tokens or a Percent; the factors are finite and not negative. Raises ConfigError, naming section and field, for
    any other value and for a `min` over a `max` of the same kind. A percentage and a number can cross only in some windows;
    then `min` wins, as in CSS.
    """

    name: str
    basis: Length | None = 0
    min: Length = 0
    max: Length | None = None
    grow: float = 0.0
    shrink: float = 1.0
    spare: float = 0.0
    cut: Cut = "never"
    content: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"A section's name must be a non-empty text, not {self.name!r}.", hint="Give the section a name.")
        for key in ("basis", "min", "max", "content"):
            self._check_length(key, getattr(self, key))
        if isinstance(self.content, Percent):
            raise self._error("content", "must be a whole number of tokens, not a percentage")
        if self.basis is None and self.content is None:
            raise self._error("basis", "is required if content is not given")
        for key in ("grow", "shrink", "spare"):
            self._check_factor(key, getattr(self, key))
        if self.cut not in CUTS:
            raise self._error("cut", f"must be one of {', '.join(CUTS)}, not {self.cut!r}")
        if _is_over(self.min, self.max):
            raise self._error("min", f"({self.min!r}) is greater than its max ({self.max!r})")

    @classmethod
    def fixed(cls, name: str, tokens: int) -> Section:
        """Return a section of exactly `tokens` tokens in every window."""
        return cls(name=name, basis=tokens, min=tokens, max=tokens, shrink=0.0)

    @property
    def is_fixed(self) -> bool:
        """Whether its size is a fixed number of tokens, whatever the window."""
        return isinstance(self.basis, int) and self.min == self.basis == self.max and self.content is None

    def _check_length(self, key: str, value: object) -> None:
        if isinstance(value, Percent) or (key != "min" and value is None):
            return
        if not _is_count(value):
            raise self._error(key, f"must be a whole number of tokens, 0 or more, or a percentage, not {value!r}")

    def _check_factor(self, key: str, value: object) -> None:
        if not _is_number(value) or value < 0:  # type: ignore[operator]  # _is_number says that it is one
            raise self._error(key, f"must be a finite number, 0 or more, not {value!r}")

    def _error(self, key: str, fault: str) -> ConfigError:
        return ConfigError(f"Section {self.name!r}: {key} {fault}.", hint=f"Correct {key} of section {self.name!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flex:
    """The flex numbers of one section; see Section. A `basis` of None is the content; a `spare` of None is 0 unless the caller sets it."""

    basis: Length | None = None
    min: Length = 0
    max: Length | None = None
    grow: float = 0.0
    shrink: float = 1.0
    spare: float | None = None
    cut: Cut = "drop"

    def section(self, name: str, content: int) -> Section:
        """Return the section `name` with `content` tokens to place. With the cut "error" it gets all of them, whatever its max."""
        section = Section(
            name=name,
            basis=self.basis,
            min=self.min,
            max=self.max,
            grow=self.grow,
            shrink=self.shrink,
            spare=self.spare or 0.0,
            cut=self.cut,
            content=content,
        )
        return replace(section, basis=content, min=content, max=None, shrink=0.0) if self.cut == "error" else section


def _is_count(value: object) -> bool:
    """Tell whether it is a whole number, 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_within(value: object, most: float) -> bool:
    """Tell whether it is a number from 0 to `most`; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def _is_over(low: Length, high: Length | None) -> bool:
    if isinstance(low, Percent) and isinstance(high, Percent):
        return low.value > high.value
    return isinstance(low, int) and isinstance(high, int) and low > high


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSpec:
    """One section of a prompt, and its defaults.

    `help` describes its content in one line. `flex` is its default share of the window, and `cuts` are the cuts that it
    supports; a section without cuts is sent whole or not at all, and a budget cannot change it. The content of a section that
    `is_protected` is never cut. People write the text of a section that `has_limit`, so a budget may refuse a longer one.

    `colour` is `#rrggbb`. It is a background of white letters, and is used on light and dark pages and terminals: its contrast
    is at least 4.5 to 1 with white, 3.5 to 1 with black and 3 to 1 with the page in dark mode.
    """

    name: str
    colour: str
    help: str
    flex: Flex | None = None
    cuts: tuple[Cut, ...] = ()
    is_protected: bool = False
    has_limit: bool = False


_IN_ORDER = (
    SectionSpec(name="template", colour="#6b7280", help="The text that the model's template adds.", is_protected=True),
    SectionSpec(name="system", colour="#8b5cd6", help="The system text.", is_protected=True, has_limit=True),
    SectionSpec(
        name="tools",
        colour="#c2570c",
        help="Descriptions of tools, and the calls and results of this round.",
        flex=Flex(max=Percent(30), spare=1.0, cut="drop"),
        cuts=("drop", "error"),
    ),
    SectionSpec(
        name="memories",
        colour="#c43b7a",
        help="Facts from earlier conversations.",
        flex=Flex(max=Percent(10), cut="drop"),
        cuts=("drop", "truncate", "error"),
    ),
    SectionSpec(
        name="summary",
        colour="#0f7f78",
        help="A summary of the messages that history leaves out.",
        flex=Flex(max=Percent(10), cut="truncate"),
        cuts=("truncate",),
    ),
    SectionSpec(name="pinned", colour="#a8606c", help="Earlier messages that are always sent.", is_protected=True),
    SectionSpec(
        name="history",
        colour="#3b6fd4",
        help="Earlier messages of the conversation.",
        flex=Flex(basis=Percent(5), grow=1.0, cut="summarize"),
        cuts=("oldest", "truncate", "summarize", "error"),
    ),
    SectionSpec(
        name="attachments",
        colour="#8a6a12",
        help="Files that came with the question.",
        flex=Flex(basis=Percent(30), grow=1.0, cut="truncate"),
        cuts=("drop", "truncate", "summarize", "error"),
    ),
    SectionSpec(
        name="cited",
        colour="#667600",
        help="In a council: passages that the proposals cite.",
        flex=Flex(max=Percent(60), grow=1.0, shrink=0.25, cut="drop"),
        cuts=("drop", "truncate", "error"),
    ),
    SectionSpec(
        name="evidence",
        colour="#25803f",
        help="Passages that were found for the question.",
        flex=Flex(basis=Percent(50), max=Percent(50), cut="drop"),
        cuts=("drop", "truncate", "summarize", "error"),
    ),
    SectionSpec(name="pointers", colour="#b22fd6", help="References to passages in earlier messages.", is_protected=True),
    SectionSpec(name="question", colour="#0b7aa6", help="The question.", is_protected=True, has_limit=True),
    SectionSpec(
        name="proposals",
        colour="#5f50f0",
        help="In a council: the other members' proposals.",
        flex=Flex(basis=Percent(40), grow=1.0, shrink=0.5, cut="middle"),
        cuts=("middle", "error"),
    ),
    SectionSpec(
        name="plan",
        colour="#8a5896",
        help="In a council: the planner's plan.",
        flex=Flex(max=Percent(10), cut="truncate"),
        cuts=("truncate", "drop", "error"),
    ),
    SectionSpec(
        name="instructions", colour="#ae34ae", help="In a council: the instructions for this role.", is_protected=True, has_limit=True
    ),
    SectionSpec(name="gap", colour="#7a6a58", help="A margin that no section may use."),
    SectionSpec(
        name="thinking",
        colour="#e0115f",
        help="Room for the model's thoughts before its answer.",
        flex=Flex(basis=1024, min=32, grow=1.0, cut="never"),
        cuts=("never",),
    ),
    SectionSpec(
        name="answer",
        colour="#cc3030",
        help="Room for the answer.",
        flex=Flex(basis=512, min=32, grow=1.0, cut="never"),
        cuts=("never",),
    ),
)
SPECS: Mapping[str, SectionSpec] = MappingProxyType({spec.name: spec for spec in _IN_ORDER})
"""Specs by name, in the order of the prompt and of its ledger."""
ORDER = tuple(SPECS)
PROTECTED = tuple(spec.name for spec in _IN_ORDER if spec.is_protected)
LIMITED = tuple(spec.name for spec in _IN_ORDER if spec.has_limit)
RESERVED = tuple(spec.name for spec in _IN_ORDER if spec.flex is None or spec.flex.cut == "never")
"""Sections that get their tokens before the others share the rest of the window."""
SECTIONS: Mapping[str, Flex] = MappingProxyType({spec.name: spec.flex for spec in _IN_ORDER if spec.flex is not None})
"""The flexible sections. Percentages refer to the window less the fixed sections; content comes first, and the answer gets the rest."""


def colour_of(name: str) -> str:
    """Return the colour of a section; grey for a name from the ledger of another version."""
    return SPECS[name].colour if name in SPECS else "#707070"


Overflow = Literal["prioritize", "truncate", "summarize", "error"]
"""What to do with content that does not fit: keep the best, cut at a sentence end, use summaries, or refuse."""
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of evidence: its share in percent, and the minimum relevance (0 to 1) of its hits."""

    name: str
    share: float
    threshold: float


TIERS = (Tier("primary", 50, 0.7), Tier("supporting", 30, 0.5), Tier("reference", 15, 0.3))
"""Default tiers. Shares are relative to each other: if evidence has 95 %, they are percentages of the whole."""

_BY_OVERFLOW: Mapping[Overflow, tuple[Cut, ...]] = MappingProxyType(
    {"prioritize": ("drop", "oldest"), "truncate": ("truncate", "middle"), "summarize": ("summarize",), "error": ("error",)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A complete way to share a window.

    `gap` is a margin that no section uses: tokens, or a percentage of the window less the fixed sections. `max_messages` limits
    the messages of history (None: as many as fit). `limits` are maximum tokens of texts that are always sent whole (`system`,
    `question`, `instructions`): longer ones are refused. Raises ConfigError for tier shares over 100 %, thresholds that do not
    fall, an unknown section or limit, and a `cut` that its section does not support.
    """

    name: str = "default"
    gap: Length = 0
    max_messages: int | None = None
    tiers: tuple[Tier, ...] = TIERS
    sections: Mapping[str, Flex] = field(default_factory=lambda: SECTIONS)
    limits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", MappingProxyType(dict(self.limits)))
        if unknown := sorted(self.limits.keys() - set(LIMITED)):
            raise self._error(f"{unknown[0]!r} cannot have a limit", hint=f"These can: {', '.join(LIMITED)}.")
        unknown = sorted(self.sections.keys() - SECTIONS.keys())
        if unknown:
            fixed = f"{unknown[0]} is always sent whole" if unknown[0] in PROTECTED else "it is unknown"
            raise self._error(f"section {unknown[0]!r} cannot be configured: {fixed}", hint=f"Sections: {', '.join(SECTIONS)}.")
        object.__setattr__(self, "sections", MappingProxyType({**SECTIONS, **self.sections}))
        self._check_numbers()
        for name, flex in self.sections.items():
            flex.section(name, 0)  # checks every field
            if flex.cut not in SPECS[name].cuts:
                raise self._error(f"section {name!r}: cut must be one of {', '.join(SPECS[name].cuts)}, not {flex.cut!r}")
        self._check_sum("the shares of the tiers", [tier.share for tier in self.tiers])

    def _check_numbers(self) -> None:
        Section(name="gap", basis=self.gap)
        for name, limit in self.limits.items():
            if not _is_count(limit):
                raise self._error(f"the limit of {name} must be a whole number of tokens, 0 or more, not {limit!r}")
        most = self.max_messages
        if most is not None and not _is_count(most):
            raise self._error(f"max_messages must be a whole number, 0 or more, not {self.max_messages!r}")
        for tier in self.tiers:
            if not (_is_within(tier.share, 100) and _is_within(tier.threshold, 1)):
                raise self._error(
                    f"tier {tier.name!r} must have a share of 0 to 100 and a threshold of 0 to 1, not {tier.share!r} and {tier.threshold!r}"
                )
        thresholds = [tier.threshold for tier in self.tiers]
        if thresholds != sorted(thresholds, reverse=True):
            raise self._error(f"the thresholds of the tiers must fall, not {thresholds}")

    def check_bases(self) -> None:
        """Raise ConfigError if the bases of the sections add up to more than 100 %: in a hand-written table, that is a mistake."""
        self._check_sum(
            "the bases of the sections", [flex.basis.value for flex in self.sections.values() if isinstance(flex.basis, Percent)]
        )

    def _check_sum(self, what: str, values: list[float]) -> None:
        if (total := sum(map(exact, values))) > 100:  # as decimal numbers: 8.9 + 19.6 + 3.6 + 67.9 is 100
            raise self._error(f"{what} add up to {float(total)} %, which is more than 100 %")

    def _error(self, what: str, *, hint: str | None = None) -> ConfigError:
        return ConfigError(
            f"Budget {self.name!r}: {what}.", hint=hint or f"Correct [budgets.{self.name}] in models.toml.", budget=self.name
        )

    def with_overflow(self, overflow: Overflow, section: str | None = None) -> Profile:
        """Return the same profile with one overflow strategy for a section, or for all that support it. Raises ConfigError if
        `section` does not.
        """
        if overflow not in OVERFLOWS:
            raise self._error(f"overflow must be one of {', '.join(OVERFLOWS)}, not {overflow!r}")
        names = [section] if section is not None else list(self.sections)
        changed = dict(self.sections)
        for name in names:
            if name not in changed:
                raise self._error(f"section {name!r} has no overflow", hint=f"Sections: {', '.join(SECTIONS)}.")
            cut = next((cut for cut in SPECS[name].cuts if cut in _BY_OVERFLOW[overflow]), None)
            if cut is not None:
                changed[name] = replace(changed[name], cut=cut)
            elif section is not None:
                raise self._error(f"section {name!r} cannot {overflow}", hint=f"Ways to cut it: {', '.join(SPECS[name].cuts)}.")
        return replace(self, sections=changed)

    def with_context_ratio(self, ratio: float) -> Profile:
        """Return the same profile with evidence limited to `ratio` (0 to 1) of the window less the fixed sections."""
        share = Percent(round(100 * ratio, 6))
        evidence = self.sections["evidence"]
        low = evidence.min if not isinstance(evidence.min, Percent) else Percent(min(evidence.min.value, share.value))
        return replace(self, sections={**self.sections, "evidence": replace(evidence, basis=share, min=low, max=share, spare=0.0)})

    def with_spare_for_evidence(self) -> Profile:
        """Return the same profile with leftover tokens going to evidence, unless the profile sets `spare` of evidence itself."""
        evidence = self.sections["evidence"]
        if evidence.spare is not None:
            return self
        return replace(self, sections={**self.sections, "evidence": replace(evidence, spare=1.0)})

    def allowance(self, section: str, window: int, fixed_tokens: int) -> int:
        """Return the maximum tokens of a section in a window with `fixed_tokens` fixed tokens, whatever its content."""
        whole = max(0, window - fixed_tokens)
        most = self.sections[section].max
        return whole if most is None else min(tokens_of(most, whole), whole)

    def tier(self, relevance: float | None) -> str | None:
        """Return the tier of a hit: the first if its relevance is unknown, None below all thresholds."""
        for tier in self.tiers:
            if relevance is None or relevance >= tier.threshold:
                return tier.name
        return None
