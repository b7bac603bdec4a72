"""reStructuredText: sections by the lines that underline (and overline) their titles. The text stays as it is."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from localrag.kb.readers.base import Reading
from localrag.kb.readers.draft import Mark, one_line, sections
from localrag.kb.readers.text import decode

_ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1*[ \t]*$")
_FIELD = re.compile(r":([A-Za-z][\w -]{0,63}):[ \t]+(.+)$")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_MAX_FIELD_LINES = 32
_SHORT_CHARS = 4  # an adornment shorter than this, and than its title, is text


def read(data: bytes) -> Reading:
    """A reStructuredText file. `title` is its first title of the highest level; `fields` (author, date …) stand in the list below it."""
    text = decode(data, known=True)
    marks = list(titles(text))
    title = next((mark.name for mark in marks if mark.level == 1), "")
    fields = tuple(_fields(text, marks[0].body if marks else 0))
    return Reading(text, tuple(sections(text, marks, title)), title, own_lines=True, fields=fields)


def titles(text: str) -> Iterator[Mark]:
    """The titles of a text. Their levels are in the order in which the kinds of adornment first occur."""
    levels: dict[tuple[str, bool], int] = {}
    over, title = (0, ""), (0, "")  # (start, line without its end) of the two lines before this one
    for match in _LINE.finditer(text):
        start, line = match.start(), match.group().rstrip("\r\n")
        if _ADORNMENT.match(line) and title[1].strip() and not _ADORNMENT.match(title[1]):
            mark = line.rstrip()
            overlined = over[1].rstrip() == mark
            alone = not over[1].strip() and not title[1][0].isspace()  # a paragraph of one line, not indented
            if (overlined or alone) and _reaches(mark, title[1].strip()):
                level = levels.setdefault((mark[0], overlined), len(levels) + 1)
                yield Mark(over[0] if overlined else title[0], match.end(), level, one_line(title[1]))
                line = ""
        over, title = title, (start, line)


def _reaches(adornment: str, title: str) -> bool:
    if len(adornment) >= _SHORT_CHARS:
        return True
    return len(adornment) >= sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in title)


def _fields(text: str, start: int) -> Iterator[tuple[str, str]]:
    """The field list right below the title (docutils calls it the bibliographic fields)."""
    for num, match in enumerate(_LINE.finditer(text, start)):
        line = match.group().strip()
        if num > _MAX_FIELD_LINES or (line and not line.startswith(":")):
            return
        if field := _FIELD.match(line):
            yield field[1].lower(), one_line(field[2])
