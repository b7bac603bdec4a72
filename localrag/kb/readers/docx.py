"""Read DOCX: the paragraphs, headings, lists, tables and notes of a Word document."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field

from localrag.kb.readers.base import Composer, Reading, Table, flat
from localrag.kb.readers.package import Package, XmlHandler, properties

_CONTENTS = re.compile(r"toc \d|toc heading")
_MAX_INDENT = 8

_SKIPPED = frozenset(
    # deleted or moved text; fallbacks for older programs; earlier formatting
    """w:del w:moveFrom mc:Fallback w:rPrChange w:pPrChange w:tblPrChange w:trPrChange w:tcPrChange w:sectPrChange w:numberingChange
    w:rt""".split()  # noqa: SIM905  # a word list reads better as words
)
_NO_HEADING = 9  # the outline level of body text

_HEADING = re.compile(r"heading ([1-9])")


def read(data: bytes) -> Reading:
    """Read a Word document. Headings are recognised by outline level, which works for styles in any language.

    Places are not known, since the file has no pages. Deleted and hidden text, comments, the table of contents, headers and footers are
    left out. Footnotes and endnotes follow the paragraph that refers to them. Raises UnreadableError if the file is damaged, protected or
    over the limits.
    """
    package = Package(data, "DOCX")
    main = package.main("word/document.xml")
    title, fields = properties(package)
    styles = _Styles()
    if part := package.related(main, "styles"):
        package.parse(part, styles)
    notes: dict[str, str] = {}
    for kind in ("footnote", "endnote"):
        if part := package.related(main, f"{kind}s"):
            reader = _Notes(styles, kind)
            package.parse(part, reader)
            notes |= reader.notes
    composer = Composer()
    body = _Body(styles, composer, notes)
    package.parse(main, body)
    return composer.reading(title or body.title, fields)


def _is_on(attributes: dict[str, str]) -> bool:
    """Return the value of an on/off property. An element without a value means on."""
    return attributes.get("w:val", "true").lower() not in ("0", "false", "off", "none")


def _whole(text: str | None, otherwise: int, most: int = 9) -> int:
    """Parse a number and clamp it to 0 … `most`; return `otherwise` if it is not a number."""
    with suppress(ValueError):
        return min(max(int((text or "")[:9]), 0), most)
    return otherwise


@dataclass(slots=True)
class _Style:
    """The properties of one style; None or empty if the style does not set them."""

    name: str = ""
    based_on: str = ""
    level: int | None = None  # outline level; heading 1 has level 0
    hidden: bool | None = None
    in_list: bool | None = None


class _Styles(XmlHandler):
    """The styles that paragraphs inherit from. Built-in styles have English names in files of any language; their ids vary."""

    skipped = _SKIPPED

    def __init__(self) -> None:
        self._styles: dict[str, _Style] = {}
        self._resolved: dict[str, _Style] = {}
        self._style = _Style()

    def start(self, name: str, attributes: dict[str, str]) -> None:
        value = attributes.get("w:val", "")
        if name == "w:style":
            self._style = self._styles[attributes.get("w:styleId", "")] = _Style()
        elif name == "w:name":
            self._style.name = value.casefold()
            if match := _HEADING.fullmatch(self._style.name):
                self._style.level = int(match[1]) - 1
        elif name == "w:basedOn":
            self._style.based_on = value
        elif name == "w:outlineLvl":
            self._style.level = _whole(value, _NO_HEADING)
        elif name == "w:vanish":
            self._style.hidden = _is_on(attributes)
        elif name == "w:numId":
            self._style.in_list = value != "0"

    def __getitem__(self, style_id: str) -> _Style:
        """Return a style with the properties inherited from the styles it is based on."""
        if style_id not in self._resolved:
            result, style_ids, at = _Style(), set[str](), style_id
            while at in self._styles and at not in style_ids and len(style_ids) < 16:
                style_ids.add(at)
                style = self._styles[at]
                result.name = result.name or style.name
                result.level = style.level if result.level is None else result.level
                result.hidden = style.hidden if result.hidden is None else result.hidden
                result.in_list = style.in_list if result.in_list is None else result.in_list
                at = style.based_on
            self._resolved[style_id] = result
        return self._resolved[style_id]


@dataclass(slots=True)
class _Paragraph:
    pieces: list[str] = field(default_factory=list)
    style: str = ""
    level: int | None = None
    in_list: bool | None = None
    indent: int = 0
    notes: list[str] = field(default_factory=list)
    is_around_hidden: bool = False  # the enclosing run is hidden: a text box lies inside a run of another paragraph
    is_in_run: bool = False


@dataclass(slots=True)
class _TableState:
    """A table being read, with its current row and cell."""

    table: Table | None  # None for a table nested in a cell
    merged: dict[int, str] = field(default_factory=dict)  # column → text of a cell that spans several rows
    cells: list[tuple[int, str]] = field(default_factory=list)
    is_header: bool = False
    column: int = 0
    paragraphs: list[str] = field(default_factory=list)
    num_columns: int = 1
    merge: str = ""

    def take(self, name: str, attributes: dict[str, str]) -> None:
        """Apply an element that begins or describes a row or a cell."""
        value = attributes.get("w:val")
        if name == "w:tr":
            self.cells, self.column, self.is_header = [], 0, False
        elif name == "w:tc":
            self.paragraphs, self.num_columns, self.merge = [], 1, ""
        elif name == "w:gridSpan":
            self.num_columns = max(_whole(value, 1, 63), 1)
        elif name == "w:vMerge":
            self.merge = value or "continue"
        elif name == "w:tblHeader":
            self.is_header = _is_on(attributes)

    def end_cell(self) -> None:
        text = " ".join(self.paragraphs)
        if self.merge == "restart":
            self.merged[self.column] = text
        self.cells.append((self.column, self.merged.get(self.column, "") if self.merge == "continue" else text))
        self.column += self.num_columns


class _Story(XmlHandler):
    """A sequence of paragraphs: the body of the document, or a note."""

    skipped = _SKIPPED

    def __init__(self, styles: _Styles) -> None:
        self._styles = styles
        self._open: list[_Paragraph] = []  # a stack: a text box lies inside a paragraph and has paragraphs of its own
        self._is_text = False
        self._is_in_run = False
        self._hidden = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "w:p":
            self._open.append(_Paragraph(is_around_hidden=self._hidden, is_in_run=self._is_in_run))
            self._is_in_run = False
        elif not self._open:
            return
        elif name in ("w:t", "m:t"):
            self._is_text = not self._hidden
        elif name == "w:r":
            self._is_in_run = True
            self._hidden = self._open[-1].is_around_hidden or self._styles[self._open[-1].style].hidden is True
        elif self._is_in_run:
            self._run_property(name, attributes)
        else:
            self._paragraph_property(name, attributes)

    def _run_property(self, name: str, attributes: dict[str, str]) -> None:
        if name == "w:rStyle":
            hidden = self._styles[attributes.get("w:val", "")].hidden
            self._hidden = self._hidden if hidden is None else hidden
        elif name == "w:vanish":
            self._hidden = _is_on(attributes) or self._open[-1].is_around_hidden
        elif self._hidden:
            return
        elif mark := _MARKS.get(name):
            self._open[-1].pieces.append(mark)
        elif name in ("w:footnoteReference", "w:endnoteReference"):
            self._refer(name[2:-9], attributes.get("w:id", ""))

    def _paragraph_property(self, name: str, attributes: dict[str, str]) -> None:
        value = attributes.get("w:val")
        if name == "w:pStyle":
            self._open[-1].style = value or ""
        elif name == "w:outlineLvl":
            self._open[-1].level = _whole(value, _NO_HEADING)
        elif name == "w:ilvl":
            self._open[-1].indent = min(_whole(value, 0), _MAX_INDENT)
        elif name == "w:numId":
            self._open[-1].in_list = value != "0"

    def _refer(self, kind: str, note_id: str) -> None:
        """Handle a reference to a note in the text."""

    def text(self, data: str) -> None:
        if self._is_text:
            self._open[-1].pieces.append(data)

    def end(self, name: str) -> None:
        if name in ("w:t", "m:t"):
            self._is_text = False
        elif name == "w:r":
            self._is_in_run = self._hidden = False
        elif name == "w:p" and self._open:
            paragraph = self._open.pop()
            self._is_in_run, self._hidden = paragraph.is_in_run, paragraph.is_around_hidden
            self._paragraph("".join(paragraph.pieces).strip(), paragraph)

    def _paragraph(self, text: str, paragraph: _Paragraph, /) -> None:
        """Handle a complete paragraph."""


_MARKS = {"w:tab": "\t", "w:br": "\n", "w:cr": "\n", "w:noBreakHyphen": "-"}


class _Notes(_Story):
    """Footnotes or endnotes. `notes` maps kind and id to text."""

    def __init__(self, styles: _Styles, kind: str) -> None:
        super().__init__(styles)
        self._kind = kind
        self._texts: list[str] = []
        self._id = ""
        self.notes: dict[str, str] = {}

    def start(self, name: str, attributes: dict[str, str]) -> None:
        super().start(name, attributes)
        if name == f"w:{self._kind}":
            self._texts = []
            self._id = "" if "w:type" in attributes and attributes["w:type"] != "normal" else attributes.get("w:id", "")

    def end(self, name: str) -> None:
        super().end(name)
        if name == f"w:{self._kind}" and self._id:
            self.notes[self._kind + self._id] = flat(" ".join(self._texts))

    def _paragraph(self, text: str, _paragraph: _Paragraph, /) -> None:
        self._texts.append(text)


class _Body(_Story):
    """The body of the document, written to a composer."""

    def __init__(self, styles: _Styles, composer: Composer, notes: dict[str, str]) -> None:
        super().__init__(styles)
        self._composer = composer
        self._notes = notes
        self._num_notes = 0
        self._tables: list[_TableState] = []
        self._after_item = False
        self.title = ""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "w:tbl":
            self._tables.append(_TableState(None if self._tables else Table(self._composer, sheet=False)))
        elif self._tables:
            self._tables[-1].take(name, attributes)
        super().start(name, attributes)

    def end(self, name: str) -> None:
        super().end(name)
        if not self._tables or name not in ("w:tc", "w:tr", "w:tbl"):
            return
        state = self._tables[-1]
        if name == "w:tc":
            state.end_cell()
        elif name == "w:tr":
            self._row(state)
        else:
            self._tables.pop()
            if state.table:
                state.table.close()
                self._after_item = False

    def _row(self, state: _TableState) -> None:
        if state.table:
            state.table.row(state.cells, header=state.is_header)
        elif len(self._tables) > 1:
            self._tables[-2].paragraphs.append(" | ".join(text for _, text in state.cells if text))

    def _refer(self, kind: str, note_id: str) -> None:
        note = self._notes.pop(kind + note_id, "")  # written once, however often it is referred to
        if note:
            self._num_notes += 1
            self._open[-1].pieces.append(f"[{self._num_notes}]")
            self._open[-1].notes.append(f"[{self._num_notes}] {note}")

    def _paragraph(self, text: str, paragraph: _Paragraph) -> None:
        style = self._styles[paragraph.style]
        if not text or _CONTENTS.fullmatch(style.name):
            return
        if self._tables:
            self._tables[-1].paragraphs += [text, *paragraph.notes]
            return
        level = style.level if paragraph.level is None else paragraph.level
        in_list = style.in_list if paragraph.in_list is None else paragraph.in_list
        if style.name == "title":
            self.title = self.title or flat(text)
            self._composer.heading(0, text)
        elif level is not None and level < _NO_HEADING:
            self._composer.heading(level + 1, text)
        elif in_list:
            add = self._composer.line if self._after_item else self._composer.paragraph
            add(f"{'  ' * paragraph.indent}- {text}")
        else:
            self._composer.paragraph(text)
        self._after_item = bool(in_list)
        for note in paragraph.notes:
            self._composer.line(note)
