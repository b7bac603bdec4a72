"""How a budget is to be shared: the defaults, and what a `[budgets.NAME]` table of models.toml changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import floor
from types import MappingProxyType
from typing import Literal, get_args

from localrag.budget.section import Cut, Length, Percent, Section
from localrag.errors import ConfigError

Overflow = Literal["prioritize", "truncate", "summarize", "error"]
"""What becomes of what is too much: keep the best, cut at the border of a sentence, step down to summaries, or refuse."""
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)

PROTECTED = ("scaffold", "system", "pinned", "pointers", "question", "instructions")
"""Sections that are sent whole, or nothing is."""
LIMITED = ("system", "question", "instructions")
"""Of those, the ones that people write, and that a budget may bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flex:
    """How one section bends; see Section. A `basis` of None is what there is to place."""

    basis: Length | None = None
    min: Length = 0
    max: Length | None = None
    grow: float = 0.0
    shrink: float = 1.0
    cut: Cut = "drop"

    def section(self, name: str, content: int) -> Section:
        """The section of that name with so many tokens to place. One whose cut is "error" gets all of it, whatever its max."""
        section = Section(
            name=name, basis=self.basis, min=self.min, max=self.max, grow=self.grow, shrink=self.shrink, cut=self.cut, content=content
        )
        return replace(section, basis=content, min=content, max=None, shrink=0.0) if self.cut == "error" else section


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of evidence: its share of the whole in percent, and the relevance (0 to 1) from which a hit belongs to it."""

    name: str
    share: float
    threshold: float


TIERS = (Tier("primary", 50, 0.7), Tier("supporting", 30, 0.5), Tier("reference", 15, 0.3))
"""The shares and thresholds of evidence. The shares are of each other: with an evidence of 95 % they are percentages of the whole."""

SECTIONS: Mapping[str, Flex] = MappingProxyType(
    {
        "tools": Flex(max=Percent(30), cut="drop"),
        "memories": Flex(max=Percent(10), cut="drop"),
        "summary": Flex(max=Percent(10), cut="truncate"),
        "history": Flex(basis=Percent(5), grow=1.0, cut="summarize"),
        "attachments": Flex(basis=Percent(30), grow=1.0, cut="truncate"),
        "cited": Flex(max=Percent(60), grow=1.0, shrink=0.25, cut="drop"),
        "evidence": Flex(basis=Percent(50), max=Percent(50), cut="drop"),
        "proposals": Flex(basis=Percent(40), grow=1.0, shrink=0.5, cut="middle"),
        "plan": Flex(max=Percent(10), cut="truncate"),
        "thinking": Flex(basis=1024, min=32, grow=1.0, cut="never"),
        "answer": Flex(basis=512, min=32, grow=1.0, cut="never"),
    }
)
"""The sections that bend. Percentages are of the window less what is fixed; content is served first, and the answer takes what is left."""

_CUTS: Mapping[str, tuple[Cut, ...]] = MappingProxyType(
    {
        "tools": ("drop", "error"),
        "memories": ("drop", "truncate", "error"),
        "summary": ("truncate",),
        "history": ("oldest", "truncate", "summarize", "error"),
        "attachments": ("drop", "truncate", "summarize", "error"),
        "cited": ("drop", "truncate", "error"),
        "evidence": ("drop", "truncate", "summarize", "error"),
        "proposals": ("middle", "error"),
        "plan": ("truncate", "drop", "error"),
        "thinking": ("never",),
        "answer": ("never",),
    }
)
_BY_OVERFLOW: Mapping[Overflow, tuple[Cut, ...]] = MappingProxyType(
    {"prioritize": ("drop", "oldest"), "truncate": ("truncate", "middle"), "summarize": ("summarize",), "error": ("error",)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A whole way of sharing a window.

    `gap` is a margin that nobody gets: tokens, or a percentage of the window less what is fixed. `max_messages` is the most
    messages of history (None: as many as fit). `limits` are the most tokens that a text may have which is always sent whole
    (`system`, `question`, `instructions`): a longer one is refused. ConfigError for shares of tiers that add up to more than 100 %,
    thresholds that do not fall, a section or a limit that is not known, and a `cut` that a section cannot have.
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
            raise self._error(f"{unknown[0]!r} has no limit of its own", hint=f"Those that can have one: {', '.join(LIMITED)}.")
        unknown = sorted(self.sections.keys() - SECTIONS.keys())
        if unknown:
            fixed = f"{unknown[0]} is always sent whole" if unknown[0] in PROTECTED else "it is not known"
            raise self._error(f"section {unknown[0]!r} cannot be configured: {fixed}", hint=f"Sections: {', '.join(SECTIONS)}.")
        object.__setattr__(self, "sections", MappingProxyType({**SECTIONS, **self.sections}))
        self._check_numbers()
        for name, flex in self.sections.items():
            flex.section(name, 0)  # checks every field
            if flex.cut not in _CUTS[name]:
                raise self._error(f"section {name!r}: cut is one of {', '.join(_CUTS[name])}, not {flex.cut!r}")
        self._check_sum("the shares of the tiers", [tier.share for tier in self.tiers])

    def _check_numbers(self) -> None:
        Section(name="gap", basis=self.gap)
        for name, limit in self.limits.items():
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
                raise self._error(f"the limit of {name} is a whole number of tokens, 0 or more, not {limit!r}")
        most = self.max_messages
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            raise self._error(f"max_messages is a whole number, 0 or more, not {self.max_messages!r}")
        for tier in self.tiers:
            if not (_is_within(tier.share, 100) and _is_within(tier.threshold, 1)):
                raise self._error(
                    f"tier {tier.name!r} has a share of 0 to 100 and a threshold of 0 to 1, not {tier.share!r} and {tier.threshold!r}"
                )
        thresholds = [tier.threshold for tier in self.tiers]
        if thresholds != sorted(thresholds, reverse=True):
            raise self._error(f"the thresholds of the tiers must fall, not {thresholds}")

    def check_bases(self) -> None:
        """ConfigError if the bases of the sections add up to more than 100 %: in a table that a person wrote, that is a mistake."""
        self._check_sum(
            "the bases of the sections", [flex.basis.value for flex in self.sections.values() if isinstance(flex.basis, Percent)]
        )

    def _check_sum(self, what: str, values: list[float]) -> None:
        if (total := sum(Fraction(str(value)) for value in values)) > 100:  # as decimal numbers: 8.9 + 19.6 + 3.6 + 67.9 is 100
            raise self._error(f"{what} add up to {float(total)} %, which is more than 100 %")

    def _error(self, what: str, *, hint: str | None = None) -> ConfigError:
        return ConfigError(
            f"Budget {self.name!r}: {what}.", hint=hint or f"Correct [budgets.{self.name}] in models.toml.", budget=self.name
        )

    def with_overflow(self, overflow: Overflow, section: str | None = None) -> Profile:
        """The same with one strategy for a section, or for all that can have it; ConfigError if that section cannot."""
        if overflow not in OVERFLOWS:
            raise self._error(f"overflow is one of {', '.join(OVERFLOWS)}, not {overflow!r}")
        names = [section] if section is not None else [name for name in self.sections if name not in ("thinking", "answer", "summary")]
        changed = dict(self.sections)
        for name in names:
            if name not in changed:
                raise self._error(f"section {name!r} has no overflow", hint=f"Sections: {', '.join(SECTIONS)}.")
            cut = next((cut for cut in _CUTS[name] if cut in _BY_OVERFLOW[overflow]), None)
            if cut is not None:
                changed[name] = replace(changed[name], cut=cut)
            elif section is not None:
                raise self._error(f"section {name!r} cannot {overflow}", hint=f"It can be cut so: {', '.join(_CUTS[name])}.")
        return replace(self, sections=changed)

    def with_context_ratio(self, ratio: float) -> Profile:
        """The same with evidence taking at most that share (0 to 1) of the window less what is fixed."""
        share = Percent(round(100 * ratio, 6))
        evidence = self.sections["evidence"]
        low = evidence.min if not isinstance(evidence.min, Percent) else Percent(min(evidence.min.value, share.value))
        return replace(self, sections={**self.sections, "evidence": replace(evidence, basis=share, min=low, max=share)})

    def allowance(self, section: str, window: int, fixed_tokens: int) -> int:
        """The most tokens that a section may have in a window of which so many are fixed, however much there is to place."""
        whole = max(0, window - fixed_tokens)
        most = self.sections[section].max
        return whole if most is None else floor(Fraction(str(most.value)) * whole / 100) if isinstance(most, Percent) else min(most, whole)

    def tier(self, relevance: float | None) -> str | None:
        """The tier of a hit; the first for one whose relevance is not known, None for one below all thresholds."""
        for tier in self.tiers:
            if relevance is None or relevance >= tier.threshold:
                return tier.name
        return None


def _is_within(value: object, most: float) -> bool:
    """Whether it is a number from 0 to `most`; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
