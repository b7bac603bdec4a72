"""The result of a reader: text, sections, and where each stretch of the text is found in the file."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
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


MAX_TEXT_CHARS = 20_000_000
MAX_NAME_CHARS = 200
"""Longest heading, title or field. A heading path is stored with every chunk, so one long heading would multiply the text."""

MAX_PLACES = 1_048_576  # the row limit of spreadsheets
MAX_HEADINGS = 100_000

_MAX_RANGES = 20  # ranges of numbers to list
_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")  # zero width, bidi control, tags
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")  # a lone half of a surrogate pair cannot be stored as UTF-8
_UNFIT_ENCODINGS = frozenset({"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape"})


class Mark(NamedTuple):
    """A heading at characters `start` to `body` of a text. Level 1 is the highest. Without a name it only begins a new section."""

    start: int
    body: int
    level: int
    name: str


@dataclass(slots=True)
class Draft:
    """A Reading under construction. Writing raises UnreadableError once the text exceeds MAX_TEXT_CHARS."""

    size: int = 0
    marks: list[Mark] = field(default_factory=list)
    places: list[Locator] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    def write(self, text: str) -> None:
        """Append text, without invisible characters."""
        text = clean(text)
        self.size += len(text)
        check_size(self.size)
        self._parts.append(text)

    def heading(self, level: int, name: str, text: str | None = None) -> None:
        """Begin a section. `text` is the heading as written to the text, by default its name and an empty line."""
        start = self.size
        self.write(f"{name}\n\n" if text is None else text)
        self.marks.append(Mark(start, self.size, level, one_line(name)))

    def place(self, kind: str, number: int) -> None:
        """Set the place of the text written from here on."""
        self.places.append(Locator(self.size, kind, number))

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
        """Return the finished Reading. Heading paths begin with `prefix`, by default the title."""
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
    """Builds a Reading from headings, paragraphs and places in document order. Raises UnreadableError once a limit is exceeded."""

    def __init__(self) -> None:
        self._draft = Draft()
        self._place: tuple[str, int] | None = None
        self._first_heading = ""

    def heading(self, level: int, name: str) -> None:
        """Add a heading, which closes those of its level and deeper. Level 0 is the document's title.

        Without a name it only begins a new section.
        """
        name = one_line(name)
        if len(self._draft.marks) == MAX_HEADINGS:
            raise UnreadableError(f"it has more than {MAX_HEADINGS:,} headings")
        if level <= 1:
            self._first_heading = self._first_heading or name
        if name:
            self._begin("\n\n")
        self._draft.heading(level, name, text=name)

    def paragraph(self, text: str) -> None:
        """Add text after an empty line."""
        self._add(text, "\n\n")

    def line(self, text: str) -> None:
        """Add text on the next line."""
        self._add(text, "\n")

    def place(self, kind: str, number: int) -> None:
        """Set the place in the file of the text added next."""
        self._place = (kind, number)

    def reading(self, title: str = "", fields: tuple[tuple[str, str], ...] = (), missing: tuple[str, ...] = ()) -> Reading:
        """Return the finished Reading. `title`, by default the first heading of level 0 or 1, begins every heading path."""
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
    """Yield a section from each heading to the next, that heading included, beginning at character `begin`.

    A heading without text of its own joins the next section. Raises UnreadableError if the heading paths exceed the size limit of a text.
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
        check_size(num_path_chars)  # a long heading is repeated in the path of every heading below it
        # Text before `body` may be dropped because the path repeats it, but only if the path holds every heading there.
        is_in_path = all(step in path for step in joined if step.start < step.body)
        yield Section(start, end, heading, mark.body if is_in_path else 0)
        start = end
        joined.clear()


def check_size(num_chars: int) -> None:
    """Raise UnreadableError if a text of this size is over the limit."""
    if num_chars > MAX_TEXT_CHARS:
        raise UnreadableError(f"it holds more than {MAX_TEXT_CHARS // 1_000_000} MB of text")


def clean(text: str) -> str:
    """Normalise line ends, replace control characters with spaces and remove invisible characters."""
    return _CONTROL.sub(" ", _INVISIBLE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def one_line(text: str) -> str:
    """Return a name on one line, truncated to MAX_NAME_CHARS."""
    return " ".join(clean(text[: MAX_NAME_CHARS * 10]).split())[:MAX_NAME_CHARS].rstrip()


def flat(text: str) -> str:
    """Collapse white space, so that the text is on one line."""
    return " ".join(text.split())


def shortened(text: str) -> str:
    """Truncate a name that is repeated in every row."""
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 1] + "…"


def decode_as(data: bytes, encoding: str) -> str | None:
    """Decode text in the encoding that a file declares; None if that is not a text encoding or does not fit the bytes."""
    try:
        name = codecs.lookup(encoding).name
        if name.replace("-", "_") in _UNFIT_ENCODINGS:  # slow on long text, or an escape syntax
            return None
        if name in ("ascii", "iso8859-1"):  # often Windows-1252 in fact; browsers treat it so
            name = "cp1252"
        return data.decode(name)
    except (LookupError, ValueError):
        return None


def numbered(kind: str, numbers: Sequence[int], one: str, many: str) -> str:
    """Say something about pages or slides, by their ascending numbers: "page 4 is …", "pages 2-6 and 9 are …"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:_MAX_RANGES]]
    if len(ranges) > _MAX_RANGES:
        parts.append(f"{sum(last - first + 1 for first, last in ranges[_MAX_RANGES:])} more")
    listing = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"{kind} {listing} {one}" if len(numbers) == 1 else f"{kind}s {listing} {many}"


_SAMPLE_ROWS = 25  # rows to look at when deciding whether the first one is a header
_MAX_HEADER_CHARS = 80
_VALUE = re.compile(r"[^\w]*\d[\d\W_]*[A-Za-z]{0,3}")  # a number, an amount, a date, a time: digits and signs, perhaps a unit
_YEAR = re.compile(r"(?:19|20)\d\d")


Row = dict[int, str]
"""Column → text of the cells of a row that are not empty, in order."""


class Table:
    """Writes one row per line as `Header: value; Header: value`, so that a row makes sense wherever the table is cut.

    Without a header row, values are separated by bars. The header row is also written as a line, so that nothing is lost if values were
    mistaken for headers. `sheet` means that the rows come from a spreadsheet: a header is then expected even above two columns of text,
    and caption lines above it are skipped. `kind` names the places of rows; rows without a number have no place.
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
        """Add a row of (column, text) cells, at row `number` of the file. `header` means that the file marks it as a header."""
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
        """End the table and write the rows that are still held back."""
        if self._waiting is not None:
            self._decide()

    def _decide(self) -> None:
        """Find the header among the first rows, and write them."""
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
    """Whether the first row names the columns: short, distinct names, none of them a value or repeated in its column.

    In a document, two columns of text are as likely to be names and values, so there a header needs a column of numbers below it.
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
