"""Budget profiles: how a window is shared. The defaults, overridden by a `[budgets.NAME]` table of models.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, get_args

from localrag.budget.flex import tokens_of
from localrag.budget.sections import LIMITED, PROTECTED, SECTIONS, SPECS, Cut, Flex, Length, Percent, Section
from localrag.errors import ConfigError

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
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
                raise self._error(f"the limit of {name} must be a whole number of tokens, 0 or more, not {limit!r}")
        most = self.max_messages
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
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
        if (total := sum(Fraction(str(value)) for value in values)) > 100:  # as decimal numbers: 8.9 + 19.6 + 3.6 + 67.9 is 100
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


def _is_within(value: object, most: float) -> bool:
    """Tell whether it is a number from 0 to `most`; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
