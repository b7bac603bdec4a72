"""Markdown: front matter, and sections by heading."""

from __future__ import annotations

import re
from collections.abc import Iterator

from localrag.kb.readers.base import Reading
from localrag.kb.readers.draft import Mark, clean, sections
from localrag.kb.readers.text import decode

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_ATX = re.compile(r" {0,3}(#{1,6})(?=[ \t]|$)")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)$")
_NOT_PARAGRAPH = re.compile(r" {4}|\t| {0,3}(?:[-*+>|#]|\d{1,9}[.)][ \t])")  # a line that an underline does not make a heading
_FIELD = re.compile(r"([A-Za-z][\w-]{0,63})[ \t]*:[ \t]*(.*)$")
_ITEM = re.compile(r"[ \t]*-[ \t]+(.*)$")
_MAX_FRONT_MATTER = 64 * 1024


def read(data: bytes) -> Reading:
    """A Markdown file. `title`, `tags` and `fields` come from its front matter, the title else from its first heading of level 1.

    A section reaches from one heading to the next, its own heading included; a heading without text of its own joins the section after it.
    """
    text = decode(data, known=True)
    fields, body = front_matter(text)
    found = list(headings(text, body))
    title = fields.get("title", "") or next((heading.name for heading in found if heading.level == 1), "")
    return Reading(
        text,
        tuple(sections(text, found, title, begin=body)),
        title,
        _list(fields.get("tags", "")),
        markdown=True,
        own_lines=True,
        fields=tuple(_others(fields)),
    )


def front_matter(text: str) -> tuple[dict[str, str], int]:
    """The `key: value` lines between two `---` lines at the very top, and the offset where the body begins (0 if there are none).

    This is the small part of YAML that front matter is made of; other lines are passed over. Keys are in lower case. The `- item` lines
    below a key without a value are its value, joined by commas.
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
            return fields | {key: f"[{', '.join(found)}]" for key, found in lists.items() if found}, at
        if field := _FIELD.match(content):
            key, value = field[1].lower(), _unquoted(field[2])
            lists.pop(key, None)
            fields[key], items = value, None if value else lists.setdefault(key, [])
        elif items is not None and (item := _ITEM.match(content)):
            items.append(item[1])
    return {}, 0


def headings(text: str, start: int = 0) -> Iterator[Mark]:
    """The headings from `start` on, with `#` or underlined. What stands in a fenced code block is code."""
    fence = ""
    previous, previous_at, after_blank = "", start, True
    at = start
    while at < len(text):
        match = _LINE.match(text, at)
        assert match is not None
        line, end = match.group().rstrip("\r\n"), match.end()
        opened = _FENCE.match(line)
        if fence:
            if opened and opened[1].startswith(fence) and not opened[2].strip():
                fence = ""
            line = ""
        elif opened and not (opened[1][0] == "`" and "`" in opened[2]):
            fence = opened[1]
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
    """What the front matter says besides title and tags, each item of a list for itself."""
    for key, value in fields.items():
        if key not in ("title", "tags"):
            values = _list(value) if value.startswith("[") and value.endswith("]") else (value,)
            yield from ((key, one) for one in values if one)


def _list(value: str) -> tuple[str, ...]:
    """`[a, b]` or `a, b`."""
    inner = value.removeprefix("[").removesuffix("]")
    return tuple(dict.fromkeys(tag for part in inner.split(",") if (tag := _unquoted(part.strip()))))


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value
