"""Tables of a web page as lines of text, each cell with its header."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_NESTED = 8
"""Tables inside of tables; what is deeper is text of its cell."""

_MAX_COLUMNS = 1000
_MAX_SPAN = 100
_MAX_HEADER_CHARS = 100
_MAX_REPEATED_CHARS = 200  # of a cell that reaches over several rows
_MAX_GROWTH = 20  # a table that would come out this many times longer than its cells is not written with headers
_LONG_CELL_CHARS = 500  # a table without headers and with such a cell places paragraphs on a page


class Block(NamedTuple):
    """A paragraph, heading (`level` from 1), list item or row; `tight` ones stand on lines without empty lines between."""

    text: str
    zone: int = 0
    level: int = 0
    tight: bool = False


@dataclass(slots=True)
class _Cell:
    """Blocks `start` to `end` of the page."""

    start: int
    is_header: bool
    colspan: int
    rowspan: int
    end: int = -1


class _Text(NamedTuple):
    text: str
    is_header: bool = False
    colspan: int = 1
    rowspan: int = 1


@dataclass(slots=True)
class Table:
    """A table whose first block is number `start` of the page. A `layout` table places things; its cells are no values."""

    start: int
    layout: bool = False
    rows: list[list[_Cell]] = field(default_factory=list)

    def begin_row(self) -> None:
        self.rows.append([])

    def begin_cell(self, at: int, attributes: Mapping[str, str], *, is_header: bool) -> None:
        self.end_cell(at)
        if not self.rows:
            self.begin_row()
        spans = (_span(attributes.get(name, "")) for name in ("colspan", "rowspan"))
        self.rows[-1].append(_Cell(at, is_header, *spans))

    def end_cell(self, at: int) -> None:
        if self.rows and self.rows[-1] and self.rows[-1][-1].end < 0:
            self.rows[-1][-1].end = at

    def laid_out(self, blocks: list[Block]) -> list[Block]:
        """The table as blocks: what stands outside of its cells, then a line a row. `blocks` are those from `start` on."""
        cells = [cell for row in self.rows for cell in row]
        if self.layout or not cells or not blocks:
            return blocks
        outside: list[Block] = []
        at = self.start
        for cell in cells:
            cell.end = max(cell.end, cell.start)
            outside += blocks[at - self.start : cell.start - self.start]
            at = cell.end
        outside += blocks[at - self.start :]
        texts = [[self._text(cell, blocks) for cell in row] for row in self.rows]
        if max(map(len, texts)) < 2 or (
            not any(cell.is_header for cell in cells) and any(len(cell.text) > _LONG_CELL_CHARS for row in texts for cell in row)
        ):
            return blocks
        room = _MAX_GROWTH * sum(len(block.text) for block in blocks) + 10_000
        lines: list[Block] = []
        for line in _lines(texts):
            room -= len(line)
            if room < 0:
                return blocks
            lines.append(Block(line, blocks[0].zone, tight=True))
        return outside + lines

    def _text(self, cell: _Cell, blocks: list[Block]) -> _Text:
        inside = blocks[cell.start - self.start : cell.end - self.start]
        return _Text(" ".join(" ".join(block.text.split()) for block in inside), cell.is_header, cell.colspan, cell.rowspan)


def _span(value: str) -> int:
    return min(int(value), _MAX_SPAN) if value.isdecimal() and 0 < len(value) < 5 and int(value) else 1


def _lines(rows: list[list[_Text]]) -> Iterator[str]:
    """The first rows are the header where all their cells are; a header row that says one thing is a line of its own."""
    header: list[str] = []
    num_rows = 0
    for row in _grid(rows):
        if not num_rows and row and all(cell.is_header for cell in row):
            texts = [cell.text[:_MAX_HEADER_CHARS] for cell in row]
            if len(set(texts)) == 1:
                yield row[0].text
            else:
                above = header + [""] * (len(texts) - len(header))
                header = [name if name == text else f"{name} {text}".strip() for name, text in zip(above, texts, strict=False)]
        elif line := _line(row, header):
            num_rows += 1
            yield line
    if header and not num_rows:
        yield "; ".join(name for name in header if name)


def _grid(rows: list[list[_Text]]) -> Iterator[list[_Text]]:
    """Each row by columns: a cell that reaches over several rows stands in each, a header over several columns in each."""
    carried: dict[int, _Text] = {}
    for row in rows:
        columns: list[_Text] = []
        for cell in [*row, None]:
            while (above := carried.pop(len(columns), None)) is not None:
                if above.rowspan > 1:
                    carried[len(columns)] = above._replace(rowspan=above.rowspan - 1)
                columns.append(above)
            if cell is None:
                break
            for nth in range(min(cell.colspan, _MAX_COLUMNS - len(columns))):
                shown = cell if nth == 0 or cell.is_header else _Text("")
                if cell.rowspan > 1 and len(cell.text) <= _MAX_REPEATED_CHARS:
                    carried[len(columns)] = shown._replace(rowspan=cell.rowspan - 1)
                columns.append(shown)
        yield columns


def _line(row: list[_Text], header: list[str]) -> str:
    parts = []
    for column, cell in enumerate(row):
        name = header[column] if column < len(header) else ""
        if cell.text:
            parts.append(f"{name}: {cell.text}" if name and name != cell.text else cell.text)
    if not header and len(parts) > 1 and row[0].is_header and row[0].text:
        return f"{parts[0]}: {'; '.join(parts[1:])}"
    return "; ".join(parts)
