"""A negotiation as a CSS flex container: one pixel is one token, and the browser's own layout shares the window out again."""

from __future__ import annotations

from collections.abc import Sequence

from localrag.journal import Allotment


def shrink_multiple(window: int, sections: Sequence[Allotment]) -> float:
    """By how much the shrink factors are multiplied in a drawing, so that it can be exact; 1 where nothing needs to be.

    Where the shrink factors of the sections that are still flexible add up to less than 1, CSS takes only that fraction of what is
    too much and overflows; localrag never does. With all factors multiplied by one number their ratio is as it was, and the smallest
    is 1. The sections that end between their limits are flexible to the last, so if theirs reach 1, CSS has no such case.
    """
    hypothetical = sum(max(each.min, _capped(each)) for each in sections)
    factors = [each.shrink for each in sections if each.shrink > 0]
    if hypothetical <= window or not factors or min(factors) >= 1:
        return 1.0
    flexible = sum(each.shrink for each in sections if each.min < each.allotted < _capped(each))
    return 1.0 if flexible >= 1 else 1 / min(factors)


def item_style(section: Allotment, multiple: float = 1.0) -> str:
    """The section as a flex item."""
    most = "none" if section.max is None else f"{section.max}px"
    shrink = _number(section.shrink * multiple)
    return f"flex:{_number(section.grow)} {shrink} {section.basis}px;min-width:{section.min}px;max-width:{most}"


def _capped(section: Allotment) -> int:
    return section.basis if section.max is None else min(section.basis, section.max)


def _number(value: float) -> str:
    return f"{value:.12g}" if 1e-6 <= value < 1e15 or not value else f"{value:.15f}"
