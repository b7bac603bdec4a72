"""Paragraphs, lines and rows into a Draft: the separators between them, and places that wait for the text that stands there."""

from __future__ import annotations

from localrag.kb.readers.base import Reading, UnreadableError
from localrag.kb.readers.draft import MAX_NAME_CHARS, Draft, one_line

MAX_PLACES = 1_048_576  # the rows of the longest sheet
MAX_HEADINGS = 100_000


class Composer:
    """Takes headings, paragraphs and places in their order. UnreadableError as soon as there is too much of them."""

    def __init__(self) -> None:
        self._draft = Draft()
        self._place: tuple[str, int] | None = None
        self._first_heading = ""

    def heading(self, level: int, name: str) -> None:
        """A heading; it ends those of its level and below. 0 is the level of a document's title. Without a name it is only a border."""
        name = one_line(name)
        if len(self._draft.marks) == MAX_HEADINGS:
            raise UnreadableError(f"it has more than {MAX_HEADINGS:,} headings")
        if level <= 1:
            self._first_heading = self._first_heading or name
        if name:
            self._begin("\n\n")
        self._draft.heading(level, name, shown=name)

    def paragraph(self, text: str) -> None:
        """Text after an empty line."""
        self._add(text, "\n\n")

    def line(self, text: str) -> None:
        """Text on the line after the text before it."""
        self._add(text, "\n")

    def place(self, kind: str, number: int) -> None:
        """What is added next stands at this place of the file."""
        self._place = (kind, number)

    def reading(self, title: str = "", fields: tuple[tuple[str, str], ...] = ()) -> Reading:
        """All of it. `title` goes in front of the heading paths; the first heading of level 0 or 1 stands in for a missing one."""
        return self._draft.reading(title=title or self._first_heading, fields=fields)

    def _add(self, text: str, separator: str) -> None:
        text = text.strip("\r\n").rstrip()
        if text and self._place is None and self._draft.size:  # the common case, with one write
            self._draft.write(separator + text)
        elif text:
            self._begin(separator)
            self._draft.write(text)

    def _begin(self, separator: str) -> None:
        if self._draft.size:
            self._draft.write(separator)
        if self._place is not None:
            self._draft.place(*self._place)
            self._place = None
            if len(self._draft.places) > MAX_PLACES:
                raise UnreadableError(f"it has more than {MAX_PLACES:,} rows")


def flat(text: str) -> str:
    """Text on one line."""
    return " ".join(text.split())


def shortened(text: str) -> str:
    """A name that is repeated in every row, bounded."""
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 1] + "…"
