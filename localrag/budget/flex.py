"""Share a window among sections by CSS Flexible Box Layout, section 9.7 ("Resolving Flexible Lengths"), in exact arithmetic.

Differences from CSS: nothing overflows the window. When sections shrink, the whole excess is removed, even if the shrink
factors add up to less than 1. Floors that do not fit raise an error. A percentage refers to the window less the fixed sections.
Tokens that are left at the end are shared once more, among the sections that ask for them.

All arithmetic uses integers and fractions, so the result does not depend on the machine or on the order of the sections. A
factor is read as the decimal number that was written: 0.1 + 0.2 + 0.7 is 1, and no token is lost to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import floor
from types import MappingProxyType

from localrag.budget.ledger import WRITTEN
from localrag.budget.sections import Section, exact, tokens_of
from localrag.errors import BudgetExceededError, ConfigError, UsageError

Exact = int | Fraction


@dataclass(frozen=True, slots=True)
class FlexItem:
    """A section in a known window: sizes in whole tokens, and the factors for growing and shrinking."""

    name: str
    basis: int
    min: int
    max: int
    grow: float
    shrink: float
    spare: float
    most: int
    """Maximum when leftover tokens are shared; at least `max`."""

    @property
    def hypothetical(self) -> int:
        """The basis clamped to the limits."""
        return max(self.min, min(self.basis, self.max))

    @property
    def floor(self) -> int:
        """The smallest size that the item can be cut to."""
        return self.min if self.shrink else self.hypothetical

    def clamp(self, size: Exact) -> Exact:
        """Clamp a size to the limits. If they cross, min wins over max."""
        return max(self.min, min(size, self.max))

    def weight(self, *, growing: bool) -> Fraction:
        return exact(self.grow) if growing else exact(self.shrink) * self.basis


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens by section, at most `window` in total. `items` are the sections as resolved for this window."""

    window: int
    allocations: Mapping[str, int]
    items: tuple[FlexItem, ...] = field(default=(), compare=False)

    @property
    def spare(self) -> int:
        """Tokens of the window that no section got."""
        return self.window - sum(self.allocations.values())


def negotiate(window: int, sections: Sequence[Section]) -> Budget:
    """Share a window of `window` tokens among sections.

    Each section gets a whole number of tokens within its limits. The result does not depend on the order of the list, and the
    total is the exact sum rounded down. Raises UsageError for a window that is not a whole number of at least 0, ConfigError
    for two sections with the same name, and BudgetExceededError, with the floor of every section, if the floors do not fit.
    """
    _check(window, sections)
    items = _measure(window, sections)
    floors = {item.name: item.floor for item in items}
    if sum(floors.values()) > window:
        raise BudgetExceededError(window, floors)
    sizes = _round(_resolve(window, items))
    if sum(sizes.values()) < window and any(item.spare for item in items):
        sizes, items = _with_spare(window, items, sizes)
    return Budget(window, MappingProxyType(sizes), tuple(items))


def settle(budget: Budget, window: int, allotted: Mapping[str, int]) -> Budget:
    """Restate a negotiation so that its outcome is `allotted`, the tokens by section that a ledger shows.

    A negotiation works with upper bounds, and packing passes on the tokens that a section leaves unused; the original numbers
    would contradict the ledger next to them. So each section's limits are capped at its allotted tokens. If its numbers would
    still give another size, the section becomes rigid. Sections that were allotted nothing stay, with 0. Raises UsageError if
    `allotted` adds up to more than `window`.
    """
    if sum(allotted.values()) > window:
        raise UsageError(f"{sum(allotted.values())} tokens are allotted in a window of {window}.", hint="Give a larger window.")
    negotiated = {item.name: item for item in budget.items}
    items = {name: _capped(negotiated.get(name), name, tokens) for name, tokens in allotted.items()}
    while True:
        outcome = _round(_resolve(window, list(items.values()))) if items else {}
        moved = [name for name, tokens in allotted.items() if outcome[name] != tokens]
        if not moved:
            return Budget(window, MappingProxyType(outcome), tuple(items.values()))
        items |= {name: _rigid(name, allotted[name]) for name in moved}


def _capped(item: FlexItem | None, name: str, tokens: int) -> FlexItem:
    """Cap the limits of an item at `tokens`. Sections written by the model may keep a higher maximum: they end where the window does."""
    if item is None or item.min >= item.max:
        return _rigid(name, tokens)
    most = item.max if name in WRITTEN else tokens
    return replace(item, min=min(item.min, tokens), max=most, spare=0.0, most=most)


def _rigid(name: str, tokens: int) -> FlexItem:
    return FlexItem(name, basis=tokens, min=tokens, max=tokens, grow=0.0, shrink=0.0, spare=0.0, most=tokens)


def _check(window: int, sections: Sequence[Section]) -> None:
    if not isinstance(window, int) or isinstance(window, bool) or window < 0:
        raise UsageError(f"A window must be a whole number of tokens, 0 or more, not {window!r}.", hint="Give a whole number of tokens.")
    twice = [name for name, times in Counter(section.name for section in sections).items() if times > 1]
    if twice:
        raise ConfigError(f"Two sections have the name {min(twice)!r}.", hint="Give every section a different name.")


def _measure(window: int, sections: Sequence[Section]) -> list[FlexItem]:
    """Convert percentages to tokens, rounded down, and a missing max to one that cannot bind."""
    whole = container(window, sections)
    return [_item(section, window, whole) for section in sections]


def _item(section: Section, window: int, whole: int) -> FlexItem:
    content = section.content
    base, low = tokens_of(content or 0 if section.basis is None else section.basis, whole), tokens_of(section.min, whole)
    high = max(window, base) if section.max is None else tokens_of(section.max, whole)
    if content is not None:
        low, high = min(low, content), min(high, content)
    most = max(high, window if content is None else content)
    return FlexItem(section.name, base, low, high, section.grow, section.shrink, section.spare, most)


def container(window: int, sections: Sequence[Section]) -> int:
    """Return the tokens that percentages refer to: the window less the fixed sections."""
    return max(0, window - sum(section.basis for section in sections if section.is_fixed and isinstance(section.basis, int)))


def _resolve(window: int, items: Sequence[FlexItem]) -> dict[str, Exact]:
    """Compute exact sizes: freeze rigid items, share the free space, freeze items that hit a limit, and repeat until nothing moves."""
    growing = sum(item.hypothetical for item in items) <= window
    weights = {item.name: item.weight(growing=growing) for item in items}
    sizes: dict[str, Exact] = {item.name: item.hypothetical for item in items if not weights[item.name] or _is_stuck(item, growing=growing)}
    active = [item for item in items if item.name not in sizes]
    initial = window - sum(sizes.values()) - sum(item.basis for item in active)
    while active:
        free = window - sum(sizes.values()) - sum(item.basis for item in active)
        rate = Fraction(free) / sum(weights[item.name] for item in active)
        if growing:
            rate = min(rate, Fraction(initial))  # grow factors below 1 in total take only that fraction of it
        shares = [item.basis + rate * weights[item.name] for item in active]
        limited = [item.clamp(share) for item, share in zip(active, shares, strict=True)]
        violation = sum(size - share for share, size in zip(shares, limited, strict=True) if size != share)
        for item, share, size in zip(active, shares, limited, strict=True):
            if violation == 0 or (size - share) * violation > 0:
                sizes[item.name] = size
        active = [item for item in active if item.name not in sizes]
    return {item.name: sizes[item.name] for item in items}


def _with_spare(window: int, items: Sequence[FlexItem], sizes: Mapping[str, int]) -> tuple[dict[str, int], list[FlexItem]]:
    """Share leftover tokens among the sections that ask for them; no section gets fewer than before.

    An item that took more now starts from its new size, so that a browser lays the items out in the same sizes.
    """
    fixed_items = [replace(item, basis=sizes[item.name], min=sizes[item.name], max=sizes[item.name], grow=0.0) for item in items]
    asking = [replace(item, max=max(item.most, item.basis), grow=item.spare) for item in fixed_items]
    grown = _round(_resolve(window, asking))
    changed = [item if grown[item.name] == sizes[item.name] else _taking(item, grown[item.name]) for item in items]
    if any(0 < item.grow < 1 for item in items):  # these took a fraction of the free space, which is smaller now
        changed = [replace(item, basis=grown[item.name], grow=0.0) if item.grow else item for item in changed]
    return grown, changed


def _taking(item: FlexItem, size: int) -> FlexItem:
    return replace(item, basis=size, max=max(item.most, size), grow=0.0)


def _is_stuck(item: FlexItem, *, growing: bool) -> bool:
    """Tell whether a limit already holds the item on the far side of its basis, so that flexing would only bring it back."""
    return item.basis > item.hypothetical if growing else item.basis < item.hypothetical


def _round(sizes: Mapping[str, Exact]) -> dict[str, int]:
    """Round to whole tokens by largest remainder, ties by name. Limits hold: they are whole, and only fractions are rounded up."""
    whole = {name: floor(size) for name, size in sizes.items()}
    remaining_tokens = floor(sum(sizes.values())) - sum(whole.values())
    for name in sorted(sizes, key=lambda name: (whole[name] - sizes[name], name))[:remaining_tokens]:
        whole[name] += 1
    return whole
