"""Jupyter notebooks: the text and code of their cells, and what the code printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from localrag.kb.readers import markdown
from localrag.kb.readers.base import Reading, UnreadableError
from localrag.kb.readers.draft import Draft
from localrag.kb.readers.text import decode

MAX_OUTPUT_CHARS = 2000
"""What is kept of a cell's output: enough for a result or an error, not for a log."""

_TERMINAL_CODES = re.compile(r"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
_EMBEDDED = re.compile(r"data:[\w/+.-]{1,64};base64,[A-Za-z0-9+/=]+")


def read(data: bytes) -> Reading:
    """A notebook of format 3 or 4, as Markdown with fenced code. Sections by the headings of its Markdown cells; places are cells."""
    try:
        notebook = json.loads(decode(data, known=True))
    except RecursionError:
        raise UnreadableError("it is nested too deep") from None
    except ValueError:
        raise UnreadableError("it is not a valid notebook (no JSON)") from None
    if not isinstance(notebook, dict):
        raise UnreadableError("it is not a valid notebook (no cells)")
    about = _mapping(notebook.get("metadata"))
    kernel, spoken = _mapping(about.get("kernelspec")), _mapping(about.get("language_info"))
    language = _text(spoken.get("name")) or _text(kernel.get("language"))
    draft = Draft()
    for number, cell in enumerate(_cells(notebook), start=1):
        draft.place("cell", number)
        _write(draft, cell, language)
    title = _text(about.get("title")) or next((mark.name for mark in draft.marks if mark.level == 1), "")
    authors = [_text(author.get("name")) for author in map(_mapping, _list(about.get("authors")))]
    return draft.reading(title=title, fields=[("author", author) for author in authors], markdown=True)


def _write(draft: Draft, cell: Mapping[str, object], language: str) -> None:
    kind = cell.get("cell_type")
    source = _EMBEDDED.sub("", _text(cell.get("source", cell.get("input"))))
    if kind == "code":
        _fenced(draft, source, language if language.isalnum() else "")
        output = _TERMINAL_CODES.sub("", "\n".join(_outputs(cell))).strip("\n")
        if (over := len(output) - MAX_OUTPUT_CHARS) > 0:
            output = f"{output[:MAX_OUTPUT_CHARS]}\n… ({over} more characters)"
        _fenced(draft, output, "")
    elif kind == "heading":  # format 3
        level = cell.get("level")
        draft.heading(level if isinstance(level, int) and 1 <= level <= 6 else 1, source.strip())
    elif kind == "markdown":
        at = 0
        for heading in markdown.headings(source):
            draft.write(source[at : heading.start])
            draft.heading(heading.level, heading.name, source[heading.start : heading.body])
            at = heading.body
        draft.write(source[at:].rstrip() + "\n\n")
    elif source.strip():
        draft.write(source + "\n\n")


def _outputs(cell: Mapping[str, object]) -> Iterator[str]:
    for output in map(_mapping, _list(cell.get("outputs"))):
        shown = _mapping(output.get("data")) or output
        text = _text(shown.get("text/plain")) or _text(shown.get("text"))
        if output.get("output_type") == "error" or "ename" in output:
            text = f"{_text(output.get('ename'))}: {_text(output.get('evalue'))}"
        if text.strip():
            yield text.rstrip("\n")


def _fenced(draft: Draft, text: str, language: str) -> None:
    if text.strip():
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        draft.write(f"{fence}{language}\n{text.rstrip()}\n{fence}\n\n")


def _cells(notebook: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    sheets = [notebook, *map(_mapping, _list(notebook.get("worksheets")))]  # format 3 has its cells in worksheets
    for sheet in sheets:
        yield from map(_mapping, _list(sheet.get("cells")))


def _text(value: object) -> str:
    """A multi-line string: notebooks keep it whole, or as a list of lines."""
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return value if isinstance(value, str) else ""


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
