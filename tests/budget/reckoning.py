"""What the sections' lengths come to in a window: the tests' own reading, apart from that of the code they test."""

from __future__ import annotations

from fractions import Fraction

from localrag.budget import Length, Percent, Section


def tokens(length: Length, whole: int) -> int:
    """A length in tokens; the tests' own reading of a percentage."""
    return int(Fraction(str(length.value)) / 100 * whole) if isinstance(length, Percent) else length


def limits(window: int, sections: list[Section]) -> dict[str, tuple[int, int, int]]:
    """Basis, least and most of each section in tokens."""
    whole = max(0, window - sum(section.basis for section in sections if section.is_fixed))
    found = {}
    for section in sections:
        basis, low = tokens(section.basis, whole), tokens(section.min, whole)
        high = max(window, basis) if section.max is None else tokens(section.max, whole)
        found[section.name] = basis, low, max(low, high)
    return found
