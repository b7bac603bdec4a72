"""Read Markdown and reStructuredText: sections by heading, and document properties. The text stays as it is."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from localrag.kb.readers.base import Mark, Reading, clean, one_line, sections
from localrag.kb.readers.text import decode

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_ATX = re.compile(r" {0,3}(#{1,6})(?=[ \t]|$)")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)$")
_NOT_PARAGRAPH = re.compile(r" {4}|\t| {0,3}(?:[-*+>|#]|\d{1,9}[.)][ \t])")  # a line that is not a heading even if underlined
_FIELD = re.compile(r"([A-Za-z][\w-]{0,63})[ \t]*:[ \t]*(.*)$")
_ITEM = re.compile(r"[ \t]*-[ \t]+(.*)$")
_MAX_FRONT_MATTER = 64 * 1024


def read(data: bytes) -> Reading:
    """Read a Markdown file. `title`, `tags` and `fields` come from the front matter; the default title is the first heading of level 1.

    A section extends from one heading to the next, its own heading included. A heading without text of its own joins the next section.
    """
    text = decode(data, known=True)
    fields, body = front_matter(text)
    marks = list(headings(text, body))
    title = fields.get("title", "") or next((mark.name for mark in marks if mark.level == 1), "")
    return Reading(
        text,
        tuple(sections(text, marks, title, begin=body)),
        title,
        _list(fields.get("tags", "")),
        markdown=True,
        own_lines=True,
        fields=tuple(_others(fields)),
    )


def front_matter(text: str) -> tuple[dict[str, str], int]:
    """Parse the front matter: `key: value` lines between two `---` lines at the very top. Return the fields and the offset of the body.

    Without front matter the result is ({}, 0). This is the subset of YAML that front matter uses; other lines are ignored. Keys become
    lower case. `- item` lines below a key without a value are joined by commas as its value.
    """
    first = _LINE.match(text)
    if first is None or first.group().rstrip() != "---":
        return {}, 0
    fields: dict[str, str] = {}
    lists: dict[str, list[str]] = {}
    items: list[str] | None = None  # of the key above, if it has no value
    at = first.end()
    while at < min(len(text), _MAX_FRONT_MATTER):
        line = _LINE.match(text, at)
        assert line is not None
        at = line.end()
        content = clean(line.group()).rstrip()
        if content in ("---", "..."):
            return fields | {key: f"[{', '.join(values)}]" for key, values in lists.items() if values}, at
        if field := _FIELD.match(content):
            key, value = field[1].lower(), _unquoted(field[2])
            lists.pop(key, None)
            fields[key], items = value, None if value else lists.setdefault(key, [])
        elif items is not None and (item := _ITEM.match(content)):
            items.append(item[1])
    return {}, 0


def headings(text: str, start: int = 0) -> Iterator[Mark]:
    """Yield the headings from `start` on, with `#` or underlined, except those in fenced code blocks."""
    fence = ""
    previous, previous_at, after_blank = "", start, True
    at = start
    while at < len(text):
        match = _LINE.match(text, at)
        assert match is not None
        line, end = match.group().rstrip("\r\n"), match.end()
        marker = _FENCE.match(line)
        if fence:
            if marker and marker[1].startswith(fence) and not marker[2].strip():
                fence = ""
            line = ""
        elif marker and not (marker[1][0] == "`" and "`" in marker[2]):
            fence = marker[1]
            line = ""
        elif marks := _ATX.match(line):
            yield Mark(at, end, len(marks[1]), _without_closing_marks(clean(line[marks.end() :])))
            line = ""
        elif (under := _UNDERLINE.match(line)) and previous.strip() and after_blank and not _NOT_PARAGRAPH.match(previous):
            yield Mark(previous_at, end, 1 if under[1][0] == "=" else 2, clean(previous).strip())
            line = ""
        after_blank = not previous.strip()
        previous, previous_at, at = line, at, end


def _without_closing_marks(name: str) -> str:
    name = name.strip()
    bare = name.rstrip("#")
    return bare.rstrip() if not bare or bare[-1] in " \t" else name


def _others(fields: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the fields of the front matter other than title and tags, one pair per list item."""
    for key, value in fields.items():
        if key not in ("title", "tags"):
            values = _list(value) if value.startswith("[") and value.endswith("]") else (value,)
            yield from ((key, one) for one in values if one)


def _list(value: str) -> tuple[str, ...]:
    """Split `[a, b]` or `a, b` into its items."""
    inner = value.removeprefix("[").removesuffix("]")
    return tuple(dict.fromkeys(tag for part in inner.split(",") if (tag := _unquoted(part.strip()))))


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value


# reStructuredText

_ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1*[ \t]*$")
_RST_FIELD = re.compile(r":([A-Za-z][\w -]{0,63}):[ \t]+(.+)$")
_MAX_RST_FIELD_LINES = 32
_SHORT_CHARS = 4  # an adornment shorter than this and shorter than its title is text


def read_rst(data: bytes) -> Reading:
    """Read a reStructuredText file. `title` is the first title of the highest level; `fields` come from the field list below it."""
    text = decode(data, known=True)
    marks = list(titles(text))
    title = next((mark.name for mark in marks if mark.level == 1), "")
    fields = tuple(_rst_fields(text, marks[0].body if marks else 0))
    return Reading(text, tuple(sections(text, marks, title)), title, own_lines=True, fields=fields)


def titles(text: str) -> Iterator[Mark]:
    """Yield the titles of a text: lines with an underline, or with an underline and an overline.

    Levels follow the order in which each kind of adornment first occurs.
    """
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


def _rst_fields(text: str, start: int) -> Iterator[tuple[str, str]]:
    """Yield the field list directly below the title (in docutils, the bibliographic fields)."""
    for num, match in enumerate(_LINE.finditer(text, start)):
        line = match.group().strip()
        if num > _MAX_RST_FIELD_LINES or (line and not line.startswith(":")):
            return
        if field := _RST_FIELD.match(line):
            yield field[1].lower(), one_line(field[2])
