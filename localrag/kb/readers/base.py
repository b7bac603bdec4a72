"""What a reader returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class UnreadableError(Exception):
    """A file has no text to index; the message is the reason, to stand after the file's name.

    `lasts`: the reason is in the file alone, and stays as long as the file stays as it is.
    """

    def __init__(self, reason: str, *, lasts: bool = True) -> None:
        super().__init__(reason)
        self.lasts = lasts


@dataclass(frozen=True, slots=True)
class Section:
    """Characters `start` to `end` (exclusive) of a text, under `heading`, the path of headings joined by " > ".

    Its own heading, if it begins with one, reaches up to `body`.
    """

    start: int
    end: int
    heading: str = ""
    body: int = 0


class Place(NamedTuple):
    """From character `start` of a text on, up to the next place, it is found at `number` (from 1) of `kind`: page 3, slide 2, row 7."""

    start: int
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A file's text and where it may be cut: in order, sections never overlap, and no chunk crosses the border of one.

    Characters outside all sections (front matter) are not indexed. `markdown` says whose block structure the text has, `language` the
    programming language that it is written in (one of `localrag.outline.LANGUAGES`). `fields` are what the file says of itself
    (author, date …), for filters. Where `places` is empty and `own_lines` is set, the text is the file's own, and its lines are the
    file's lines; else `places`, in order, tell where a stretch of the text is found in the file. `missing` names, for a person, what the
    file shows and the text does not hold, such as "pages 2-6 hold no text; they look scanned".
    """

    text: str
    sections: tuple[Section, ...]
    title: str = ""
    tags: tuple[str, ...] = ()
    markdown: bool = False
    language: str | None = None
    places: tuple[Place, ...] = ()
    own_lines: bool = False
    fields: tuple[tuple[str, str], ...] = field(default=())
    missing: tuple[str, ...] = ()
