"""A piece of an outline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["heading", "class", "function", "type", "field", "import", "doc", "detail", "text", "list", "table", "omitted"]
"""`doc` is the first paragraph of a docstring or comment and `detail` the rest; `omitted` says what was not read."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters `start` to `end` (exclusive) of a text, with the indentation they stand in: `text` is just these.

    Of kind "omitted", `text` says in words what was left unread from `start` to `end`. `path` is the path of Markdown headings
    above, joined by " > ".
    """

    start: int
    end: int
    text: str
    kind: Kind
    path: str = ""


def omitted(text: str, start: int) -> Piece:
    """The piece that says that a text was not read from `start` on."""
    num_lines = text.count("\n", start) + (not text.endswith("\n"))
    return Piece(start, len(text), f"… {num_lines:,} more lines were not read", "omitted")
