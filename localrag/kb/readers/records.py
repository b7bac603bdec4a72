"""Read structured data: JSON, JSON Lines, CSV and Jupyter notebooks. Each value is written with its path or column name."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import Literal, TypeGuard

from localrag.kb.readers.base import Composer, Draft, Reading, Section, Table, UnreadableError, one_line
from localrag.kb.readers.markdown import headings
from localrag.kb.readers.text import decode

MAX_DEPTH = 64
_SHORT_LIST_CHARS = 200
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def read_json(data: bytes) -> Reading:
    """Read a JSON file. An array of objects, at the top or inside objects, is a list of records; each is a section and a place.

    A file with one JSON value per line is read as JSON Lines. A file that is not JSON (truncated, or with comments) is read as plain text.
    """
    text = decode(data, known=True)
    try:
        value = _parsed(text)
    except ValueError:
        return _lines(text)
    draft = Draft()
    records = [("", value)] if _is_table(value) else list(_write_plain(draft, value, ""))
    for path, items in records:
        for number, record in enumerate(items, start=1):
            draft.place("record", number)
            draft.heading(1, path, "")
            draft.write("\n".join(_flat(record, "")) + "\n\n")
    return draft.reading()


def read_json_lines(data: bytes) -> Reading:
    """Read a JSON Lines file. Each line is a section and a place; a line that is not JSON is kept verbatim."""
    return _lines(decode(data, known=True))


def _lines(text: str) -> Reading:
    draft = Draft()
    num_values = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        draft.place("line", number)
        draft.heading(1, "", "")
        try:
            value = _parsed(line)
        except ValueError:
            draft.write(line.strip() + "\n\n")
        else:
            num_values += isinstance(value, dict | list)
            draft.write("\n".join(_flat(value, "")) + "\n\n")
    if not num_values:
        return Reading(text, (Section(0, len(text)),), own_lines=True)
    return draft.reading()


def _parsed(text: str) -> object:
    """Parse JSON. Raises ValueError if the text is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UnreadableError(_TOO_DEEP) from None


def _is_table(value: object) -> TypeGuard[list[object]]:
    """Whether the file is one list of records, which are objects or rows."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict | list) for item in value)


def _is_records(value: object) -> TypeGuard[list[object]]:
    return _is_table(value) and all(isinstance(item, dict) for item in value)


def _write_plain(draft: Draft, value: object, path: str, depth: int = 0) -> Iterator[tuple[str, list[object]]]:
    """Write the values outside records, and yield (path, records) for each list of records."""
    if depth > MAX_DEPTH:
        raise UnreadableError(_TOO_DEEP)
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if _is_records(item):
                yield _joined_path(path, key), item
            else:
                yield from _write_plain(draft, item, _joined_path(path, key), depth + 1)
    else:
        for line in _flat(value, path, depth):
            draft.write(line + "\n")


def _flat(value: object, path: str, depth: int = 0) -> Iterator[str]:
    """Yield a value as lines "path: value"."""
    if depth > MAX_DEPTH:
        raise UnreadableError(_TOO_DEEP)
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, _joined_path(path, key), depth + 1)
    elif isinstance(value, list) and _holds_objects(value, depth):
        for number, item in enumerate(value, start=1):
            yield from _flat(item, _joined_path(path, str(number)), depth + 1)
    else:
        text = _shown(value)
        yield f"{path}: {text}" if path else text


def _holds_objects(value: object, depth: int) -> bool:
    if depth > MAX_DEPTH:
        raise UnreadableError(_TOO_DEEP)
    return isinstance(value, dict) or (isinstance(value, list) and any(_holds_objects(item, depth + 1) for item in value))


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and not any(isinstance(item, list) for item in value):
        items = [_shown(item) for item in value]
        return (", " if sum(map(len, items)) < _SHORT_LIST_CHARS else "\n").join(items)
    return json.dumps(value, ensure_ascii=False)


def _joined_path(path: str, key: str) -> str:
    return f"{path}.{one_line(key)}" if path else one_line(key)


# CSV

MAX_FIELD_CHARS = 1024 * 1024  # a quote that is never closed makes the rest of the file one field

_DELIMITERS = "\t;|,"  # in order of preference if several fit equally well: numbers and sentences contain commas
_SAMPLE_CHARS = 64 * 1024
_SAMPLE_RECORDS = 100
_END = "\N{END OF TRANSMISSION}"

_Quoting = Literal[0, 3]  # csv.QUOTE_MINIMAL or csv.QUOTE_NONE


def read_csv(data: bytes) -> Reading:
    """Read CSV, TSV and the like. The delimiter is guessed from the first lines; a place is the line of the file where a row begins.

    A file without a consistent delimiter is read as plain text. Raises UnreadableError for a field over MAX_FIELD_CHARS.
    """
    text = decode(data, known=True)
    body, delimiter = _dialect(text)
    if not delimiter:
        return Reading(text, (Section(0, len(text)),), own_lines=True)
    before = csv.field_size_limit(MAX_FIELD_CHARS)
    try:
        try:
            return _csv_rows(text, body, delimiter, csv.QUOTE_MINIMAL)
        except csv.Error:  # an unclosed quote: read quotes as ordinary characters
            return _csv_rows(text, body, delimiter, csv.QUOTE_NONE)
    except csv.Error:
        raise UnreadableError(f"a field in it is longer than {MAX_FIELD_CHARS // 1024 // 1024} MB, or is not text") from None
    finally:
        csv.field_size_limit(before)


def _csv_rows(text: str, body: int, delimiter: str, quoting: _Quoting) -> Reading:
    composer = Composer()
    table = Table(composer, sheet=True)
    num_lines = text.count("\n", 0, body)
    for number, cells in _records(text[body:], delimiter, quoting):
        table.row(enumerate(cells), number + num_lines)
    table.close()
    return composer.reading()


def _records(text: str, delimiter: str, quoting: _Quoting) -> Iterator[tuple[int, list[str]]]:
    """Yield (line where it begins, fields) of each record. Raises csv.Error for a field that is too long or an unclosed quote."""
    # The end marker forms a record of its own unless an unclosed quote swallows it; `strict` would reject many readable files.
    lines = chain(io.StringIO(text, newline=""), [_END])
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, skipinitialspace=True)
    line = 1
    for cells in reader:
        if cells and cells[-1].endswith(_END):
            if cells != [_END]:
                raise csv.Error("a quote is not closed")
            return
        yield line, cells
        line = reader.line_num + 1


def _dialect(text: str) -> tuple[int, str]:
    """Return the offset of the first record and the delimiter, "" if there is none."""
    declared = re.match(r"sep=([\t;|,])\r?\n", text)  # a line that Excel writes and reads
    if declared:
        return declared.end(), declared[1]
    sample = text[:_SAMPLE_CHARS]
    if len(sample) < len(text):  # the last line may be cut
        sample = sample[: max(sample.rfind("\n"), sample.rfind("\r")) + 1] or sample
    best, score = "", 0.0
    for delimiter in _DELIMITERS:
        alike = _share_of_equal_widths(sample, delimiter)
        if alike > score + 0.01:
            best, score = delimiter, alike
    return 0, best if score > 0.5 else ""


def _share_of_equal_widths(sample: str, delimiter: str) -> float:
    """Return the share of records that have the most common number of fields; 0 if that number is one."""
    widths: list[int] = []
    with suppress(csv.Error):  # the sample may end within quotes
        widths += (len(cells) for _, cells in islice(_records(sample, delimiter, csv.QUOTE_MINIMAL), _SAMPLE_RECORDS) if any(cells))
    width, num = Counter(widths).most_common(1)[0] if widths else (1, 0)
    return num / len(widths) if width > 1 else 0.0


# Jupyter notebooks

MAX_OUTPUT_CHARS = 2000
"""Characters to keep of a cell's output: enough for a result or an error, not for a log."""

_TERMINAL_CODES = re.compile(r"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
_EMBEDDED = re.compile(r"data:[\w/+.-]{1,64};base64,[A-Za-z0-9+/=]+")


def read_notebook(data: bytes) -> Reading:
    """Read a notebook of format 3 or 4 as Markdown with fenced code and output.

    Sections follow the headings of the Markdown cells; places are cell numbers.
    """
    try:
        notebook = json.loads(decode(data, known=True))
    except RecursionError:
        raise UnreadableError("it is nested too deep") from None
    except ValueError:
        raise UnreadableError("it is not a valid notebook (not JSON)") from None
    if not isinstance(notebook, dict):
        raise UnreadableError("it is not a valid notebook (no cells)")
    about = _as_mapping(notebook.get("metadata"))
    kernel, spoken = _as_mapping(about.get("kernelspec")), _as_mapping(about.get("language_info"))
    language = _joined_text(spoken.get("name")) or _joined_text(kernel.get("language"))
    draft = Draft()
    for number, cell in enumerate(_cells(notebook), start=1):
        draft.place("cell", number)
        _write_cell(draft, cell, language)
    title = _joined_text(about.get("title")) or next((mark.name for mark in draft.marks if mark.level == 1), "")
    authors = [_joined_text(author.get("name")) for author in map(_as_mapping, _as_list(about.get("authors")))]
    return draft.reading(title=title, fields=[("author", author) for author in authors], markdown=True)


def _write_cell(draft: Draft, cell: Mapping[str, object], language: str) -> None:
    kind = cell.get("cell_type")
    source = _EMBEDDED.sub("", _joined_text(cell.get("source", cell.get("input"))))
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
        for heading in headings(source):
            draft.write(source[at : heading.start])
            draft.heading(heading.level, heading.name, source[heading.start : heading.body])
            at = heading.body
        draft.write(source[at:].rstrip() + "\n\n")
    elif source.strip():
        draft.write(source + "\n\n")


def _outputs(cell: Mapping[str, object]) -> Iterator[str]:
    for output in map(_as_mapping, _as_list(cell.get("outputs"))):
        data = _as_mapping(output.get("data")) or output
        text = _joined_text(data.get("text/plain")) or _joined_text(data.get("text"))
        if output.get("output_type") == "error" or "ename" in output:
            text = f"{_joined_text(output.get('ename'))}: {_joined_text(output.get('evalue'))}"
        if text.strip():
            yield text.rstrip("\n")


def _fenced(draft: Draft, text: str, language: str) -> None:
    if text.strip():
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        draft.write(f"{fence}{language}\n{text.rstrip()}\n{fence}\n\n")


def _cells(notebook: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    sheets = [notebook, *map(_as_mapping, _as_list(notebook.get("worksheets")))]  # format 3 has its cells in worksheets
    for sheet in sheets:
        yield from map(_as_mapping, _as_list(sheet.get("cells")))


def _joined_text(value: object) -> str:
    """Return a multi-line string, which notebooks store whole or as a list of lines."""
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return value if isinstance(value, str) else ""


def _as_mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
