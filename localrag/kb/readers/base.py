"""What a reader returns."""

from __future__ import annotations

from dataclasses import dataclass


class UnreadableError(Exception):
    """A file has no text to index; the message is the reason, to stand after the file's name."""


@dataclass(frozen=True, slots=True)
class Section:
    """Characters `start` to `end` (exclusive) of a text, under `heading`, the path of headings joined by " > ".

    Its own heading, if it begins with one, reaches up to `body`.
    """

    start: int
    end: int
    heading: str = ""
    body: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """A file's text and where it may be cut: in order, sections never overlap, and no chunk crosses the border of one.

    Characters outside all sections (front matter) are not indexed. `markdown` says whose block structure the text has.
    """

    text: str
    sections: tuple[Section, ...]
    title: str = ""
    tags: tuple[str, ...] = ()
    markdown: bool = False
