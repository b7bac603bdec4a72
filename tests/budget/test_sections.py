"""The table of sections: whole, and in colours that can be told apart wherever they are shown."""

import math
import re
from itertools import combinations

import pytest
from rich.color import Color, ColorSystem

from localrag.budget import SECTIONS, Entry, Ledger, Section, negotiate
from localrag.budget.sections import LIMITED, ORDER, PROTECTED, SPECS, colour_of
from localrag.cli import render
from localrag.journal import allotments
from localrag.report import report
from localrag.report.page import STYLE, page
from localrag.server.status import page_text
from tests.journal.asks import made_up
from tests.report.test_figures import stored

COLOURS = {name: spec.colour for name, spec in SPECS.items()}
WHITE, BLACK = "#ffffff", "#000000"


def test_every_section_is_declared_once():
    assert len(set(ORDER)) == len(ORDER) == 18
    assert set(SECTIONS) | set(PROTECTED) | {"gap"} == set(ORDER)
    assert not set(SECTIONS) & set(PROTECTED)
    assert all(spec.flex is None if not spec.cuts else spec.flex.cut in spec.cuts for spec in SPECS.values())
    assert set(LIMITED) < set(PROTECTED)
    assert all(re.fullmatch(r"[A-Z][^\n]{5,70}\.", spec.help) for spec in SPECS.values())


def linear(colour: str) -> list[float]:
    """The light of red, green and blue, 0 to 1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, two: str) -> float:
    """As WCAG 2 defines it, 1 to 21."""
    low, high = sorted(sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear(each), strict=True)) for each in (one, two))
    return (high + 0.05) / (low + 0.05)


def oklab(colour: str) -> tuple[float, float, float]:
    """Björn Ottosson's space, in which a distance of about 0.02 is just seen."""
    red, green, blue = linear(colour)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    medium = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def backgrounds() -> list[str]:
    """The cards of the report and of the page, by day and by night."""
    found = [re.findall(r"--card: (#\w{6})", text) for text in (STYLE, page_text())]
    assert [len(each) for each in found] == [2, 2]
    return [colour for each in found for colour in each]


@pytest.mark.parametrize("name", ORDER)
def test_a_colour_is_seen_by_day_and_by_night_and_carries_white_letters(name):
    assert contrast(COLOURS[name], WHITE) >= 4.5
    assert contrast(COLOURS[name], BLACK) >= 3.5
    assert all(contrast(COLOURS[name], card) >= 3 for card in backgrounds())


def test_no_two_sections_look_alike():
    distances = {pair: math.dist(oklab(COLOURS[pair[0]]), oklab(COLOURS[pair[1]])) for pair in combinations(ORDER, 2)}
    closest = min(distances, key=distances.__getitem__)
    assert distances[closest] >= 0.055, (closest, distances[closest])
    numbers = [Color.parse(colour).downgrade(ColorSystem.EIGHT_BIT).number for colour in COLOURS.values()]
    assert len(set(numbers)) == len(numbers), "on a terminal of 256 colours"


def whole_ledger() -> Ledger:
    return Ledger(window=18_000, entries=tuple(Entry(name, 900, 900, 450) for name in ORDER))


def test_the_terminal_the_report_and_the_page_show_every_section_in_its_colour(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}.items():
        monkeypatch.setenv(name, value)
    render.ledger(whole_ledger())
    out = capsys.readouterr().out
    shown = {name: ";".join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5)) for name, colour in COLOURS.items()}
    for name, colour in shown.items():
        assert re.search(rf"\x1b\[38;2;{colour}m{name}\b", out), name
        assert f"\x1b[7;38;2;{colour}m" in out, name
    sections = allotments(negotiate(18_000, [Section.fixed(name, 900) for name in ORDER]))
    text = page(report(stored(made_up(window=18_000, entries=whole_ledger().entries, sections=sections))))
    for name, colour in COLOURS.items():
        assert text.count(f"--c:{colour}") == 2, name  # in both bars
        assert f'style="background:{colour}"></i><bdi>{name}</bdi><' in text
        assert f'[data-section="{name}"] {{ --c: {colour}; }}' in page_text()


def test_a_section_of_another_version_has_a_colour_too():
    assert re.fullmatch("#[0-9a-f]{6}", colour_of("of another version"))
    assert colour_of("of another version") not in COLOURS.values()
