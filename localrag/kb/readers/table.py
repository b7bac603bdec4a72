"""Rows with their header, and CSV and its kin."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice, pairwise
from typing import Literal

from localrag.kb.readers.base import Reading, Section, UnreadableError
from localrag.kb.readers.draft import Composer, flat, shortened
from localrag.kb.readers.text import decode

MAX_FIELD_CHARS = 1024 * 1024  # a quote that is never closed makes the rest of the file one field

_DELIMITERS = "\t;|,"  # best first where several divide all lines alike: numbers and sentences hold commas
_SAMPLE_CHARS = 64 * 1024
_SAMPLE_RECORDS = 100
_SAMPLE_ROWS = 25  # of a table, to tell whether its first row is a header
_MAX_HEADER_CHARS = 80
_VALUE = re.compile(r"[^\w]*\d[\d\W_]*[A-Za-z]{0,3}")  # a number, an amount, a date, a time: digits and signs, perhaps a unit
_END = "\N{END OF TRANSMISSION}"
_YEAR = re.compile(r"(?:19|20)\d\d")


Row = dict[int, str]
"""The cells of a row that hold something, by column, in their order. One cell far to the right is one entry."""


_Quoting = Literal[0, 3]  # csv.QUOTE_MINIMAL or csv.QUOTE_NONE


class Table:
    """Rows, one a line: `Header: value; Header: value`, so that a row is understood wherever the table is cut.

    Without a header, the values stand with bars between them. The header's own row stands as such a line too, so that nothing is lost
    where values were taken for one. `sheet` says that rows come from a spreadsheet: headers are then the rule, also above text in two
    columns, and lines above them (a caption) are passed over. `kind` is what places are called; rows without a number have none.
    """

    def __init__(self, composer: Composer, *, sheet: bool, kind: str = "row") -> None:
        self._composer = composer
        self._sheet = sheet
        self._kind = kind
        self._waiting: list[tuple[Row, int | None]] | None = []
        self._header: Row = {}
        self._marked = False
        self._begun = False

    def row(self, cells: Iterable[tuple[int, str]], number: int | None = None, *, header: bool = False) -> None:
        """The next row: (column, text) of its cells, at `number` in the file; `header` says that the file itself calls it one."""
        row = {column: value for column, text in cells if (value := flat(text))}
        if not row:
            return
        if self._waiting is None:
            self._write(row, number)
            return
        self._marked = self._marked or (header and not self._waiting)
        self._waiting.append((row, number))
        if len(self._waiting) == _SAMPLE_ROWS:
            self._decide()

    def close(self) -> None:
        """The table ends."""
        if self._waiting is not None:
            self._decide()

    def _decide(self) -> None:
        """Finds the header among the rows that wait, and writes them."""
        rows, self._waiting = self._waiting or [], None
        at = 0
        if self._sheet:  # captions have one cell
            at = next((index for index, (row, _) in enumerate(rows) if len(row) > 1), 0)
        below = [row for row, _ in rows[at + 1 :]]
        is_header = bool(rows) and (self._marked or is_header_of(rows[at][0], below, sheet=self._sheet))
        for index, (row, number) in enumerate(rows):
            self._write(row, number)
            if is_header and index == at:
                self._header = {column: shortened(name.rstrip(": ")) for column, name in row.items()}

    def _write(self, row: Row, number: int | None) -> None:
        if number is not None:
            self._composer.place(self._kind, number)
        if self._header:
            names = self._header
            text = "; ".join(f"{names[column]}: {value}" if column in names else value for column, value in row.items())
        else:
            text = " | ".join(row.values())
        (self._composer.line if self._begun else self._composer.paragraph)(text)
        self._begun = True


def is_header_of(first: Row, below: list[Row], *, sheet: bool) -> bool:
    """Whether a first row names the columns of the rows below: short, different names, no values, none of them found below it again.

    In a document, two columns of text are as often names beside values: there it takes a column of numbers to tell.
    """
    names = [name.casefold() for name in first.values()]
    if len(names) < 2 or not below or len(set(names)) < len(names) or names[0].endswith(":"):
        return False
    values = [name for name in names if _VALUE.fullmatch(name)]
    if any(len(name) > _MAX_HEADER_CHARS for name in names) or (values and not _are_years(values)):
        return False
    columns = {column: [row[column] for row in below if column in row] for column in first}
    if any(name.casefold() in (value.casefold() for value in columns[column]) for column, name in first.items()):
        return False
    has_numbers = any(column and sum(bool(_VALUE.fullmatch(value)) for value in column) * 2 > len(column) for column in columns.values())
    return sheet or has_numbers or len(names) > 2


def _are_years(values: list[str]) -> bool:
    if len(values) < 2 or not all(_YEAR.fullmatch(value) for value in values):
        return False
    return {int(two) - int(one) for one, two in pairwise(values)} in ({1}, {-1})


def read(data: bytes) -> Reading:
    """CSV, TSV and the like: what divides the fields is told from the first lines. A place is the line of the file where a row begins.

    Text that nothing divides alike is read as text. UnreadableError for a field over MAX_FIELD_CHARS.
    """
    text = decode(data, known=True)
    body, delimiter = _dialect(text)
    if not delimiter:
        return Reading(text, (Section(0, len(text)),), own_lines=True)
    before = csv.field_size_limit(MAX_FIELD_CHARS)
    try:
        try:
            return _rows(text, body, delimiter, csv.QUOTE_MINIMAL)
        except csv.Error:  # a quote that is never closed: then quotes are characters like others
            return _rows(text, body, delimiter, csv.QUOTE_NONE)
    except csv.Error:
        raise UnreadableError(f"a field in it is longer than {MAX_FIELD_CHARS // 1024 // 1024} MB, or is not text") from None
    finally:
        csv.field_size_limit(before)


def _rows(text: str, body: int, delimiter: str, quoting: _Quoting) -> Reading:
    composer = Composer()
    table = Table(composer, sheet=True)
    num_lines = text.count("\n", 0, body)
    for number, cells in _records(text[body:], delimiter, quoting):
        table.row(enumerate(cells), number + num_lines)
    table.close()
    return composer.reading()


def _records(text: str, delimiter: str, quoting: _Quoting) -> Iterator[tuple[int, list[str]]]:
    """(line where it begins, fields) of each record. csv.Error for a field that is too long, or a quote that is still open at the end."""
    # A line of our own shows by itself at the end, unless an open quote took it in; `strict` would refuse much that can be read.
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
    """Where the records begin, and what divides their fields ("" if nothing does)."""
    told = re.match(r"sep=([\t;|,])\r?\n", text)  # a line that Excel writes and reads
    if told:
        return told.end(), told[1]
    sample = text[:_SAMPLE_CHARS]
    if len(sample) < len(text):  # the last line may be cut
        sample = sample[: max(sample.rfind("\n"), sample.rfind("\r")) + 1] or sample
    best, score = "", 0.0
    for delimiter in _DELIMITERS:
        alike = _alike(sample, delimiter)
        if alike > score + 0.01:
            best, score = delimiter, alike
    return 0, best if score > 0.5 else ""


def _alike(sample: str, delimiter: str) -> float:
    """The share of records with as many fields as most have, if that is more than one."""
    widths: list[int] = []
    with suppress(csv.Error):  # the sample may end within quotes
        widths += (len(cells) for _, cells in islice(_records(sample, delimiter, csv.QUOTE_MINIMAL), _SAMPLE_RECORDS) if any(cells))
    width, num = Counter(widths).most_common(1)[0] if widths else (1, 0)
    return num / len(widths) if width > 1 else 0.0
