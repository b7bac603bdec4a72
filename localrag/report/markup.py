"""Small pieces of HTML. All that comes from outside goes through `text`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(value: str) -> str:
    """Text for an attribute."""
    return escape(_CONTROL.sub("", value))


def text(value: str) -> str:
    """Text that is isolated, so that its direction of writing stays its own."""
    return f"<bdi>{plain(value)}</bdi>" if value else ""


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def count(num: int, thing: str) -> str:
    return f"{num:,} {thing}{'' if num == 1 else 's'}"


def number_cell(value: str) -> str:
    return f'<td class="n">{value}</td>'


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are HTML. A column that begins with # holds numbers. A wide table scrolls by itself, with the keyboard too."""
    heads = "".join(f'<th scope="col" class="n">{c[1:]}</th>' if c.startswith("#") else f'<th scope="col">{c}</th>' for c in columns)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
