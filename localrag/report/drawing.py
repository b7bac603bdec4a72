"""One ask's window, drawn: what was negotiated, what became of it, and the numbers of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localrag.budget import Entry
from localrag.journal import Allotment, StoredAsk
from localrag.report.flexbox import item_style, shrink_multiple
from localrag.report.markup import number_cell, plain, table, text
from localrag.report.style import COLOURS, OTHER_COLOUR, SPARE_COLOUR

_LABELLED, _LABELLED_ON_A_PHONE = 0.06, 0.18
"""A section that has less of the window than this has no letters in it; the table says what it is."""
_NAMED = 12
"""How many of the things left out stand in the open."""


def drawing(ask: StoredAsk) -> str:
    """The two bars, the table that is their legend, and the numbers that went into the negotiation."""
    order = {entry.name: at for at, entry in enumerate(ask.ledger.entries)}
    sections = sorted(ask.sections, key=lambda each: order.get(each.name, len(order)))  # a drawing does not depend on it
    multiple = shrink_multiple(ask.window, sections)
    return "".join(
        (
            "<figure>",
            _negotiated(ask, sections, multiple) if sections else "",
            _used(ask),
            f'<div class="axis" aria-hidden="true"><span>0</span><span>{ask.window:,} tokens</span></div></figure>',
            _accounts(ask),
            _numbers(sections, multiple) if sections else "",
        )
    )


def _colour(name: str) -> str:
    return COLOURS.get(name, OTHER_COLOUR)


def _negotiated(ask: StoredAsk, sections: Sequence[Allotment], multiple: float) -> str:
    items = []
    for each in sections:
        share = each.allotted / max(1, ask.window)
        size = "" if share >= _LABELLED_ON_A_PHONE else ' class="small"'
        label = f"<span{size}><b>{plain(each.name)}</b>{each.allotted:,}</span>" if share >= _LABELLED else ""
        hint = f"{plain(each.name)}: {each.allotted:,} tokens"
        items.append(f'<div class="section" style="{item_style(each, multiple)};--c:{_colour(each.name)}" title="{hint}">{label}</div>')
    said = ", ".join(f"{plain(each.name)} {each.allotted:,}" for each in sections)
    bar = f'<div class="window given" role="img" aria-label="Negotiated: {said}" style="--width:{ask.window}px">{"".join(items)}</div>'
    return f'<figcaption>Negotiated</figcaption><div class="frame">{bar}</div>'


def _used(ask: StoredAsk) -> str:
    items = [
        f'<div style="flex:none;width:{each.allotted}px;--c:{_colour(each.name)}" '
        f'title="{plain(each.name)}: {each.used:,} of {each.allotted:,} tokens used"><i style="width:{each.used}px"></i></div>'
        for each in ask.ledger.entries
    ]
    said = ", ".join(f"{plain(each.name)} {each.used:,} of {each.allotted:,}" for each in ask.ledger.entries)
    bar = f'<div class="window used" role="img" aria-label="Used: {said}" style="--width:{ask.ledger.window}px">{"".join(items)}</div>'
    return f'<figcaption>Used, after packing</figcaption><div class="frame">{bar}</div>'


def _accounts(ask: StoredAsk) -> str:
    rows = [row for entry in ask.ledger.entries for row in _entry_rows(entry)]
    swatch = f'<i class="swatch spare" style="background:{SPARE_COLOUR}"></i>'
    rows.append([f'<th scope="row">{swatch}spare</th>', "<td></td>", number_cell(f"{ask.ledger.spare:,}"), "<td></td>", "<td></td>"])
    return table(("Section", "#Wanted", "#Allotted", "#Used", "Left out"), rows)


def _entry_rows(entry: Entry) -> Iterator[list[str]]:
    """A section's line, and one for each of its tiers."""
    swatch = f'<i class="swatch" style="background:{_colour(entry.name)}"></i>'
    yield [f'<th scope="row">{swatch}{text(entry.name)}</th>', *_amounts(entry)]
    for part in entry.parts:
        yield [f'<th scope="row" class="part">{text(part.name)}</th>', *_amounts(part)]


def _amounts(entry: Entry) -> list[str]:
    shortened = [f"{each.id} to {each.level} ({each.tokens:,} of {each.of:,})" for each in entry.shortened]
    said = (("", entry.omitted), ("shortened: ", shortened), ("summarized: ", entry.covered))
    left_out = "".join(f"<div>{start}{_names(names)}</div>" for start, names in said if names)
    numbers = (number_cell(f"{value:,}") for value in (entry.wanted, entry.allotted, entry.used))
    return [*numbers, f'<td class="wide">{left_out}</td>']


def _names(names: Sequence[str]) -> str:
    """All of them, the first in the open."""
    first, rest = (", ".join(map(text, each)) for each in (names[:_NAMED], names[_NAMED:]))
    more = f"<details><summary>and {len(names) - _NAMED:,} more</summary>{rest}</details>" if rest else ""
    return f"{first}{more}"


def _numbers(sections: Sequence[Allotment], multiple: float) -> str:
    rows = [
        [
            f'<th scope="row">{text(each.name)}</th>',
            *map(number_cell, (f"{each.basis:,}", f"{each.min:,}", "none" if each.max is None else f"{each.max:,}")),
            *map(number_cell, (f"{each.grow:g}", f"{each.shrink:g}", f"{each.allotted:,}")),
        ]
        for each in sections
    ]
    note = ""
    if multiple != 1:
        note = (
            f'<p class="soft">Drawn with all shrink factors times {multiple:.4g}, their ratio unchanged: they add up to less than 1, '
            "and CSS would overflow where localrag never does.</p>"
        )
    columns = ("Section", "#Basis", "#Min", "#Max", "#Grow", "#Shrink", "#Given")
    return f"<details><summary>The numbers of the negotiation</summary>{table(columns, rows)}</details>{note}"
