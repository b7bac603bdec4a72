"""Read XLSX: the rows of the sheets of a workbook."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta

from localrag.kb.readers.base import Composer, Reading, Table, UnreadableError
from localrag.kb.readers.package import Package, XmlHandler, properties

_MAX_SHEETS = 1_000
_MAX_STRING_CHARS = 64 * 1024 * 1024  # total of the shared strings
_MAX_COLUMNS = 16_384

_CELL = re.compile(r"([A-Z]{1,3})\d{1,7}")
_NOT_FORMAT = re.compile(r'"[^"]*"|\\.|_.|\*.|\[(?![hms]+\])[^\]]*\]', re.IGNORECASE)  # text, padding, colours and conditions
_DATE, _TIME, _ELAPSED, _PERCENT = "date", "time", "elapsed", "percent"
_Kind = frozenset[str]
_PLAIN: _Kind = frozenset()
_BUILT_IN: dict[int, _Kind] = {
    **dict.fromkeys((9, 10), frozenset({_PERCENT})),
    **dict.fromkeys((14, 15, 16, 17, *range(27, 32), 36, *range(50, 59)), frozenset({_DATE})),
    **dict.fromkeys((18, 19, 20, 21, 32, 33, 34, 35, 45, 47), frozenset({_TIME})),
    22: frozenset({_DATE, _TIME}),
    46: frozenset({_ELAPSED}),
}


def read(data: bytes) -> Reading:
    """Read a workbook. Each sheet is a section under its name, with one line per row (see `draft.Table`); places are row numbers.

    Formulas are represented by their saved values. Hidden sheets are left out. Raises UnreadableError if the file is damaged, protected
    or over the limits.
    """
    package = Package(data, "XLSX")
    main = package.main("xl/workbook.xml")
    title, fields = properties(package)
    workbook = _Workbook()
    package.parse(main, workbook)
    if len(workbook.sheets) > _MAX_SHEETS:
        raise UnreadableError(f"it has more than {_MAX_SHEETS:,} sheets")
    formats, strings = _Formats(), _Strings()
    for kind, handler in (("styles", formats), ("sharedStrings", strings)):
        if part := package.related(main, kind):
            package.parse(part, handler)
    parts = {relation.id: relation.target for relation in package.relations(main) if relation.type == "worksheet"}
    composer = Composer()
    for name, sheet_id in workbook.sheets:
        if sheet_id in parts:
            composer.place("row", 1)
            composer.heading(2, name)
            sheet = _Sheet(Table(composer, sheet=True), strings.strings, formats.kinds, is_1904=workbook.is_1904)
            package.parse(parts[sheet_id], sheet)
            sheet.close()
    return composer.reading(title, fields)


class _Workbook(XmlHandler):
    """Collects (name, relation id) of the visible sheets."""

    def __init__(self) -> None:
        self.sheets: list[tuple[str, str]] = []
        self.is_1904 = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "x:sheet" and attributes.get("state", "visible") == "visible":
            self.sheets.append((attributes.get("name", ""), attributes.get("r:id", "")))
        elif name == "x:workbookPr":
            self.is_1904 = attributes.get("date1904", "0") in ("1", "true")


class _Formats(XmlHandler):
    """Collects the kind of number that each cell style shows: a set of date, time, elapsed and percent; empty for plain numbers."""

    def __init__(self) -> None:
        self.kinds: list[_Kind] = []
        self._own: dict[int, _Kind] = {}
        self._is_in_cells = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "x:numFmt":
            self._own[_int(attributes.get("numFmtId"), -1)] = kind_of_format(attributes.get("formatCode", ""))
        elif name == "x:cellXfs":
            self._is_in_cells = True
        elif name == "x:xf" and self._is_in_cells:
            number = _int(attributes.get("numFmtId"), 0)
            self.kinds.append(self._own.get(number, _BUILT_IN.get(number, _PLAIN)))

    def end(self, name: str) -> None:
        if name == "x:cellXfs":
            self._is_in_cells = False


def kind_of_format(code: str) -> frozenset[str]:
    """Return what a number format such as `yyyy-mm-dd` shows. `m` means minutes next to hours or seconds, otherwise months."""
    code = _NOT_FORMAT.sub("", code[:255]).partition(";")[0].lower()
    if "[" in code:
        return frozenset({_ELAPSED})
    code = code.replace("am/pm", "h").replace("a/p", "h").replace("general", "")
    has_time = "h" in code or "s" in code
    has_date = "y" in code or "d" in code or ("m" in code and not has_time)
    return frozenset(kind for kind, holds in ((_DATE, has_date), (_TIME, has_time), (_PERCENT, "%" in code)) if holds)


class _Text(XmlHandler):
    """Collects the text of `t` elements, without pronunciation guides."""

    skipped = frozenset({"x:rPh", "x:extLst"})

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._is_text = False

    def start(self, name: str, _attributes: dict[str, str], /) -> None:
        if name == "x:t":
            self._is_text = True

    def text(self, data: str) -> None:
        if self._is_text:
            self._pieces.append(data)

    def end(self, name: str) -> None:
        if name == "x:t":
            self._is_text = False


class _Strings(_Text):
    """Collects the shared strings, which cells refer to by index."""

    def __init__(self) -> None:
        super().__init__()
        self.strings: list[str] = []
        self._num_chars = 0

    def end(self, name: str) -> None:
        super().end(name)
        if name == "x:si":
            text = "".join(self._pieces)
            self._pieces.clear()
            self.strings.append(text)
            self._num_chars += len(text)
            if self._num_chars > _MAX_STRING_CHARS:
                raise UnreadableError(f"it holds more than {_MAX_STRING_CHARS // 1024 // 1024} MB of strings")


class _Sheet(_Text):
    """Writes the rows of one sheet to a table."""

    def __init__(self, table: Table, strings: list[str], kinds: list[_Kind], *, is_1904: bool) -> None:
        super().__init__()
        self._table = table
        self._strings = strings
        self._kinds = kinds
        self._is_1904 = is_1904
        self._row = 0
        self._column = -1
        self._cells: list[tuple[int, str]] = []
        self._type = ""
        self._style = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name in ("x:v", "x:t"):
            self._is_text = True
        elif name == "x:c":
            self._column = _column(attributes.get("r", ""), self._column + 1)
            self._type = attributes.get("t", "n")
            self._style = _int(attributes.get("s"), 0)
            self._pieces.clear()
        elif name == "x:row":
            self._row = max(_int(attributes.get("r"), self._row + 1), 1)
            self._column = -1
            self._cells = []

    def end(self, name: str) -> None:
        if name in ("x:v", "x:t"):
            self._is_text = False
        elif name == "x:c":
            if self._pieces and (value := self._value("".join(self._pieces))):
                self._cells.append((self._column, value))
            self._pieces.clear()
        elif name == "x:row":
            self._table.row(self._cells, self._row)

    def close(self) -> None:
        self._table.close()

    def _value(self, text: str) -> str:
        if self._type == "s":
            index = _int(text, -1)
            return self._strings[index] if 0 <= index < len(self._strings) else ""
        if self._type == "b":
            return "TRUE" if text.strip() == "1" else "FALSE"
        if self._type != "n":
            return text
        kind = self._kinds[self._style] if 0 <= self._style < len(self._kinds) else _PLAIN
        return number_as_text(text.strip(), kind, is_1904=self._is_1904)


def number_as_text(text: str, kind: frozenset[str], *, is_1904: bool = False) -> str:
    """Format a number as a sheet shows it, dates and times in ISO 8601. Days count from the end of 1899, or of 1903 if `is_1904`."""
    try:
        number = float(text[:64])
    except ValueError:
        return text
    if _PERCENT in kind:
        return f"{number * 100:.10g}%"
    if _ELAPSED in kind and 0 <= number < 1e6:
        seconds = round(number * 86_400)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if kind & {_DATE, _TIME} and 0 <= number < 2_958_466:
        return _date(number, kind, is_1904=is_1904)
    return text if text.lstrip("-").isdigit() else f"{number:.15g}"


def _date(number: float, kind: frozenset[str], *, is_1904: bool) -> str:
    if _DATE not in kind and number < 1:
        return f"{datetime(1900, 1, 1) + timedelta(seconds=round(number * 86_400) % 86_400):%H:%M:%S}"  # noqa: DTZ001  # as below
    if is_1904:
        number += 1_462
    elif number < 60:  # the format counts 29 February 1900, which did not exist
        number += 1
    with suppress(OverflowError):
        moment = datetime(1899, 12, 30) + timedelta(seconds=round(number * 86_400))  # noqa: DTZ001  # a sheet knows no time zone
        return moment.isoformat(" ") if _TIME in kind else moment.date().isoformat()
    return f"{number:.15g}"


def _column(cell: str, otherwise: int) -> int:
    """Return the column of a cell reference, from 0 (27 for AB3); `otherwise` if the reference is invalid."""
    match = _CELL.fullmatch(cell)
    if not match:
        return min(otherwise, _MAX_COLUMNS)
    number = 0
    for letter in match[1]:
        number = number * 26 + ord(letter) - 64
    return number - 1


def _int(text: str | None, otherwise: int) -> int:
    with suppress(ValueError):
        return int((text or "")[:12])
    return otherwise
