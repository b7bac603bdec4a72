"""The result of a reader: text, sections, and where each stretch of the text is found in the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class UnreadableError(Exception):
    """Raised if a file has no text to index. The message is the reason, worded to follow the file's name.

    `lasts` is true if the reason lies in the file alone, so that it holds until the file changes.
    """

    def __init__(self, reason: str, *, lasts: bool = True) -> None:
        super().__init__(reason)
        self.lasts = lasts


@dataclass(frozen=True, slots=True)
class Section:
    """Characters `start` to `end` (exclusive) of a text. `heading` is the path of headings above them, joined by " > ".

    If the section begins with its own heading, `body` is the offset where that heading ends.
    """

    start: int
    end: int
    heading: str = ""
    body: int = 0


class Locator(NamedTuple):
    """The place in the file of the text from character `start` up to the next locator, such as page 3, slide 2 or row 7.

    `number` counts from 1; `kind` is "page", "slide", "row" and so on.
    """

    start: int
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The text of a file and the sections it may be cut at. Sections are in order and never overlap; no chunk crosses a section border.

    Characters outside all sections, such as front matter, are not indexed. `markdown` is true if the text has the block structure of
    Markdown; `language` is its programming language, one of `localrag.outline.LANGUAGES`. `fields` are the file's own properties
    (author, date …), for filters.

    `places`, in order, map stretches of the text to places in the file. If there are none and `own_lines` is set, the text is the file
    itself and line numbers agree. `missing` lists, for people, content of the file that the text lacks, such as "pages 2-6 hold no text;
    they look scanned".
    """

    text: str
    sections: tuple[Section, ...]
    title: str = ""
    tags: tuple[str, ...] = ()
    markdown: bool = False
    language: str | None = None
    places: tuple[Locator, ...] = ()
    own_lines: bool = False
    fields: tuple[tuple[str, str], ...] = field(default=())
    missing: tuple[str, ...] = ()
