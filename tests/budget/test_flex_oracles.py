"""The sharing of a window against two judges that are reckoned in other ways: a common level, and a layout engine."""

from __future__ import annotations

import os
from functools import cache
from random import Random

from stretchable import Node, Style
from stretchable.style import AUTO, PCT, FlexDirection

from localrag.budget import Length, Percent, Section, negotiate
from localrag.errors import BudgetExceededError
from tests.budget.reckoning import limits

# First judge: where the window is too small, there is one level that explains every size.


def sizes_at(level: float, sections: list[Section]) -> dict[str, float]:
    return {s.name: max(s.min, min(s.basis * (1 - level * s.shrink), 20_000 if s.max is None else s.max)) for s in sections}


def test_shrunken_sizes_lie_on_one_level():
    """Sizes are basis x (1 - level x shrink) within the limits, for one level found by bisection. Here shrink factors may be under 1."""
    random = Random(9)
    num_shrunk = 0
    while num_shrunk < 1000:
        sections = []
        for name in "abcdefgh"[: random.randint(1, 8)]:
            low, high = sorted(random.choice([0, random.randint(0, 900)]) for _ in range(2))
            basis, shrink = random.randint(0, 2000), random.choice([0, 0.05, 0.2, 0.25, 0.5, 1, 1.5, 4])
            sections.append(Section(name=name, basis=basis, min=low, max=high if high and random.random() < 0.5 else None, shrink=shrink))
        floor, wanted = (sum(sizes_at(level, sections).values()) for level in (100, 0))
        if floor >= wanted:
            continue
        window = random.randint(int(floor), int(wanted))
        under, over = 0.0, 100.0
        for _ in range(100):
            level = (under + over) / 2
            under, over = (level, over) if sum(sizes_at(level, sections).values()) > window else (under, level)
        exact = sizes_at(over, sections)
        budget = negotiate(window, sections)
        assert budget.spare == 0
        assert all(abs(budget.allocations[name] - exact[name]) < 1 + 1e-6 for name in exact), (window, sections)
        num_shrunk += 1


# Second judge: Taffy, a layout engine that knows nothing of tokens.

NUM_LAYOUTS = int(os.environ.get("LOCALRAG_TEST_LAYOUTS", "1000"))  # 3,000 agreed too
SINGLE_PRECISION = 0.01  # Taffy reckons in 32-bit floats; at 20,000 they are about 0.002 apart

PLAIN = Style()
SHARED = {field: getattr(PLAIN, field) for field in ("inset", "gap", "padding", "border", "margin", "grid_row", "grid_column")}
SHARED |= {f"grid_{field}": [] for field in ("template_rows", "template_columns", "auto_rows", "auto_columns")}
"""What all boxes have in common; stretchable would build it anew for each, which takes most of a minute."""


def random_case(random: Random) -> tuple[int, list[Section]]:
    """A window and sections that CSS lays out without overflow.

    CSS overflows where localrag must not, so those cases have no layout to compare with: floors that do not fit, and shrink
    factors that add up to less than 1, be it only after the others are frozen. So a factor here is 0 or at least 1. A
    percentage comes out whole, since CSS does not round it: it is whole itself, and what it is taken of is a multiple of 100.
    """
    fixed = [Section.fixed(f"fixed{i}", random.randint(0, 1500)) for i in range(random.choice([0, 0, 1, 2]))]
    window = random.randint(1, 160) * 100 + sum(section.basis for section in fixed)
    flexible = []
    for i in range(random.randint(1, 6)):
        is_percent = random.random() < 0.3
        low, high = sorted(random.choice([0, random.randint(0, 40)]) for _ in range(2))
        flexible.append(
            Section(
                name=f"section{i}",
                basis=Percent(random.randint(0, 80)) if random.random() < 0.3 else random.choice([0, random.randint(0, 6000)]),
                min=Percent(low) if is_percent else low * 50,
                max=None if random.random() < 0.4 else Percent(high) if is_percent else high * 100,
                grow=random.choice([0, 0, 0.1, 0.25, 0.4, 1, 2, round(random.uniform(0, 5), 3)]),
                shrink=random.choice([0, 1, 1, 2, round(random.uniform(1, 5), 3)]),
            )
        )
    return window, fixed + flexible


@cache
def extent(width: Length | None, height: int | None) -> object:
    """A width and a height as stretchable's own object, which it takes as it is."""
    return Style(size=(length(width), length(height))).size


def length(value: Length | None) -> object:
    if value is None:
        return AUTO
    return value.value * PCT if isinstance(value, Percent) else value


def lay_out(window: int, sections: list[Section]) -> Node:
    """A row as wide as what the fixed sections leave, since that is what a percentage is of; they are checked apart."""
    sizes = limits(window, sections)
    growing = sum(max(low, min(basis, high)) for basis, low, high in sizes.values()) < window
    boxes = [box(section, growing=growing) for section in sections if not section.is_fixed]
    width = window - sum(section.basis for section in sections if section.is_fixed)
    return Node(*boxes, style=Style(**SHARED, size=extent(width, 1), flex_shrink=0))


def box(section: Section, *, growing: bool) -> Node:
    """CSS freezes at once what has a factor of 0, of the two the one in use. Taffy 0.7 does so only if both are 0, so both are."""
    is_flexible = section.grow if growing else section.shrink
    style = Style(
        **SHARED,
        size=PLAIN.size,
        flex_basis=length(section.basis),
        min_size=extent(section.min, 0),
        max_size=extent(section.max, None),
        flex_grow=section.grow if is_flexible else 0,
        flex_shrink=section.shrink if is_flexible else 0,
    )
    return Node(style=style)


def test_every_size_agrees_with_a_layout_engine():
    random = Random(9)
    cases = []
    while len(cases) < NUM_LAYOUTS:
        window, sections = random_case(random)
        try:
            cases.append((sections, negotiate(window, sections)))
        except BudgetExceededError:
            continue
    rows = [lay_out(budget.window, sections) for sections, budget in cases]
    Node(*rows, flex_direction=FlexDirection.COLUMN, size=(20_000, AUTO)).compute_layout(use_rounding=False)
    seen = dict.fromkeys(("grown", "shrunk", "at min", "at max", "spare", "percent"), 0)
    for (sections, budget), row in zip(cases, rows, strict=True):
        widths = iter(box.border_box.width for box in row)
        for section in sections:
            size = budget.allocations[section.name]
            expected = section.basis if section.is_fixed else next(widths)
            assert abs(size - expected) < 1 + SINGLE_PRECISION, (budget, section, expected)
        note_kinds(seen, sections, budget.window, budget.allocations)
    assert min(seen.values()) > NUM_LAYOUTS // 10, seen


def note_kinds(seen, sections, window, allocations) -> None:
    """Count what a case shows, so that the judge is known to have seen every kind."""
    sizes = limits(window, sections)
    flexible = [(section, allocations[section.name], *sizes[section.name]) for section in sections if not section.is_fixed]
    seen["grown"] += any(size > max(basis, low) for _, size, basis, low, _ in flexible)
    seen["shrunk"] += any(size < min(basis, high) for _, size, basis, _, high in flexible)
    seen["at min"] += any(size == low != basis for _, size, basis, low, _ in flexible)
    seen["at max"] += any(size == high != basis for _, size, basis, _, high in flexible)
    seen["spare"] += sum(allocations.values()) < window
    seen["percent"] += any(isinstance(section.basis, Percent) for section in sections)
