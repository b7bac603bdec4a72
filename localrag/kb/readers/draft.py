"""Text that a reader puts together piece by piece, with its headings and places: bounded, and fit to be stored.

A Composer also sees to what stands between paragraphs, lines and rows.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, zip_longest
from typing import Literal, NamedTuple

from localrag.kb.readers.base import Place, Reading, Section, UnreadableError
from localrag.kb.readers.text import decode

MAX_TEXT_CHARS = 20_000_000
MAX_NAME_CHARS = 200
"""Of a heading in a path, a title or a field: a path is stored with every chunk, and one long name would multiply the text."""

MAX_PLACES = 1_048_576  # the rows of the longest sheet
MAX_HEADINGS = 100_000

_MAX_RANGES = 20  # of numbers that are named
_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")  # zero width, bidi control, tags
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")  # a lone half of a surrogate pair cannot be stored as UTF-8
_UNFIT_ENCODINGS = frozenset({"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape"})


class Mark(NamedTuple):
    """A heading: its lines are characters `start` to `body` of the text; `level` 1 is the highest. Without a name it is only a border."""

    start: int
    body: int
    level: int
    name: str


@dataclass(slots=True)
class Draft:
    """A Reading in the making. UnreadableError once its text is over MAX_TEXT_CHARS."""

    size: int = 0
    marks: list[Mark] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    def write(self, text: str) -> None:
        """Adds text, without characters that a person cannot see."""
        text = clean(text)
        self.size += len(text)
        check_size(self.size)
        self._parts.append(text)

    def heading(self, level: int, name: str, shown: str | None = None) -> None:
        """Begins a section. `shown` is what stands for the heading in the text: by default its name, and an empty line."""
        start = self.size
        self.write(f"{name}\n\n" if shown is None else shown)
        self.marks.append(Mark(start, self.size, level, one_line(name)))

    def place(self, kind: str, number: int) -> None:
        """What is written from here on stands at `number` of `kind`."""
        self.places.append(Place(self.size, kind, number))

    def reading(
        self,
        *,
        title: str = "",
        prefix: str | None = None,
        tags: Sequence[str] = (),
        fields: Sequence[tuple[str, str]] = (),
        markdown: bool = False,
        missing: Sequence[str] = (),
    ) -> Reading:
        """What was written. Heading paths begin with `prefix`, by default the title."""
        text, title = "".join(self._parts), one_line(title)
        return Reading(
            text,
            tuple(sections(text, self.marks, title if prefix is None else one_line(prefix))),
            title,
            tuple(dict.fromkeys(tag for tag in map(one_line, tags) if tag)),
            markdown=markdown,
            places=tuple(self.places),
            fields=tuple((key, value) for key, value in ((key, one_line(value)) for key, value in fields) if value),
            missing=tuple(missing),
        )


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

    def reading(self, title: str = "", fields: tuple[tuple[str, str], ...] = (), missing: tuple[str, ...] = ()) -> Reading:
        """All of it. `title` goes in front of the heading paths; the first heading of level 0 or 1 stands in for a missing one."""
        return self._draft.reading(title=title or self._first_heading, fields=fields, missing=missing)

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


def sections(text: str, marks: Sequence[Mark], prefix: str = "", *, begin: int = 0) -> Iterator[Section]:
    """From character `begin` on, one from each heading to the next, its own heading included; a heading without text of its own joins
    the section after it.

    UnreadableError if the paths take more room than a text may.
    """
    start = marks[0].start if marks else len(text)  # without headings, one section
    if text[begin:start].strip():
        yield Section(begin, start, prefix)
    path: list[Mark] = []
    joined: list[Mark] = []  # the headings that the section begins with
    num_path_chars = 0
    for mark, following in zip_longest(marks, marks[1:]):
        path = [above for above in path if above.level < mark.level] + [mark]
        joined.append(mark)
        end = following.start if following else len(text)
        if following and not text[mark.body : end].strip():
            continue
        names = [step.name for step in path if step.name]
        heading = " > ".join(names if not prefix or names[:1] == [prefix] else [prefix, *names])
        num_path_chars += len(heading)
        check_size(num_path_chars)  # long headings above many short ones are repeated with each
        # What stands before `body` can be left to the path: not so a heading that is not in the path.
        is_in_path = all(each in path for each in joined if each.start < each.body)
        yield Section(start, end, heading, mark.body if is_in_path else 0)
        start = end
        joined.clear()


def check_size(num_chars: int) -> None:
    """UnreadableError if that is more text than a file may hold."""
    if num_chars > MAX_TEXT_CHARS:
        raise UnreadableError(f"it holds more than {MAX_TEXT_CHARS // 1_000_000} MB of text")


def clean(text: str) -> str:
    """Text without control characters, and without those that are there and cannot be seen."""
    return _CONTROL.sub(" ", _INVISIBLE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def one_line(text: str) -> str:
    """A name, on one line and not too long."""
    return " ".join(clean(text[: MAX_NAME_CHARS * 10]).split())[:MAX_NAME_CHARS].rstrip()


def flat(text: str) -> str:
    """Text on one line."""
    return " ".join(text.split())


def shortened(text: str) -> str:
    """A name that is repeated in every row, bounded."""
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 1] + "…"


def decode_as(data: bytes, encoding: str) -> str | None:
    """Text in an encoding that a file names; None where that is no encoding of text, or not the one of this text."""
    try:
        name = codecs.lookup(encoding).name
        if name.replace("-", "_") in _UNFIT_ENCODINGS:  # slow on long text, or an escape syntax
            return None
        if name in ("ascii", "iso8859-1"):  # what calls itself so is often Windows-1252, as browsers know
            name = "cp1252"
        return data.decode(name)
    except (LookupError, ValueError):
        return None


def numbered(kind: str, numbers: Sequence[int], one: str, many: str) -> str:
    """What is said of pages or slides, by their numbers in order: "page 4 is …", "pages 2-6 and 9 are …"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:_MAX_RANGES]]
    if len(ranges) > _MAX_RANGES:
        shown.append(f"{sum(last - first + 1 for first, last in ranges[_MAX_RANGES:])} more")
    named = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    return f"{kind} {named} {one}" if len(numbers) == 1 else f"{kind}s {named} {many}"


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
