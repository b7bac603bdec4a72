"""Read OpenDocument: the texts, spreadsheets and presentations of LibreOffice (.odt, .ods, .odp and their templates)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from localrag.kb.readers.base import Composer, Reading, Table, UnreadableError, flat, one_line
from localrag.kb.readers.package import Package, Values, XmlHandler

_MAX_REPEATED = 100  # copies of a repeated cell to write; empty cells are only counted
_MAX_INDENT = 8
_META = {
    "dc:title": "title", "meta:initial-creator": "author", "dc:creator": "editor", "dc:subject": "subject", "meta:keyword": "keywords",
    "dc:language": "language", "meta:creation-date": "created", "dc:date": "date",
}  # fmt: skip


def read(data: bytes) -> Reading:
    """Read a text, a spreadsheet or a presentation. Places are the rows of each sheet or the slides of the file; a text has none.

    Deleted and hidden text, hidden sheets and slides, comments, tables of contents, headers and footers are left out. Footnotes follow
    the paragraph that refers to them. Raises UnreadableError if the file is damaged, protected or over the limits.
    """
    package = Package(data, "OpenDocument")
    if "META-INF/manifest.xml" in package and b"encryption-data" in package.read("META-INF/manifest.xml"):
        raise UnreadableError("it is protected by a password")
    values, styles = Values(_META), _Styles()
    for name, handler in (("meta.xml", values), ("styles.xml", styles), ("content.xml", styles)):
        if name in package:
            package.parse(name, handler)
    composer = Composer()
    package.parse("content.xml", _Content(composer, styles))
    about = {key: one_line("; ".join(texts)) for key, texts in values.values.items()}
    about["author"] = about.get("author") or about.pop("editor", "")
    about.pop("editor", None)
    title = about.pop("title", "")
    dates = {key: about.pop(key, "")[:10] for key in ("created", "date")}
    fields = {**about, "created": dates["created"], "date": dates["date"] or dates["created"]}
    return composer.reading(title, tuple((key, value) for key, value in fields.items() if value))


@dataclass(slots=True)
class _Style:
    parent: str = ""
    hidden: bool | None = None


class _Styles(XmlHandler):
    """Collects the styles, by family and name, and whether each hides its content."""

    def __init__(self) -> None:
        self._styles: dict[tuple[str, str], _Style] = {}
        self._style = _Style()
        self._family = ""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "style:style":
            self._family = attributes.get("style:family", "")
            self._style = _Style(attributes.get("style:parent-style-name", ""))
            self._styles[self._family, attributes.get("style:name", "")] = self._style
        elif name == "style:text-properties" and "text:display" in attributes:
            self._style.hidden = attributes["text:display"] == "none"
        elif name == "style:table-properties" and "table:display" in attributes:
            self._style.hidden = attributes["table:display"] == "false"
        elif name == "style:drawing-page-properties" and "pres:visibility" in attributes:
            self._style.hidden = attributes["pres:visibility"] == "hidden"

    def hide(self, family: str, style: str) -> bool:
        """Whether a style hides its content. A style that does not say inherits from its parent."""
        for _ in range(16):
            properties = self._styles.get((family, style))
            if properties is None:
                return False
            if properties.hidden is not None:
                return properties.hidden
            style = properties.parent
        return False


@dataclass(slots=True)
class _Paragraph:
    pieces: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    level: int = 0  # of a heading


@dataclass(slots=True)
class _TableState:
    """A table being read, with its current row and cell."""

    table: Table | None  # None for a table nested in a cell
    row: int = 0
    num_rows: int = 1
    cells: list[tuple[int, str]] = field(default_factory=list)
    column: int = 0
    num_columns: int = 1
    value: str = ""  # of a cell with a date
    paragraphs: list[str] = field(default_factory=list)
    is_header: bool = False

    def end_cell(self) -> None:
        text = self.value or " ".join(self.paragraphs)
        if text:
            self.cells += [(self.column + nth, text) for nth in range(min(self.num_columns, _MAX_REPEATED))]
        self.column += self.num_columns


_SKIPPED = frozenset(
    """text:tracked-changes table:tracked-changes office:annotation office:forms office:scripts office:font-face-decls
    office:automatic-styles text:note-citation text:ruby-text text:table-of-content text:illustration-index text:table-index
    text:object-index text:user-index text:alphabetical-index text:bibliography text:hidden-text table:content-validations
    table:label-ranges ?:title ?:desc text:variable-decls text:sequence-decls text:user-field-decls pres:header-decl pres:footer-decl
    pres:date-time-decl""".split()  # noqa: SIM905  # a word list reads better as words
)
_HIDING = {  # elements that a style can hide, with the family of the style
    "text:span": ("text", "text:style-name"), "text:p": ("paragraph", "text:style-name"), "text:h": ("paragraph", "text:style-name"),
    "draw:page": ("drawing-page", "draw:style-name"), "table:table": ("table", "table:style-name"),
}  # fmt: skip


class _Content(XmlHandler):
    """The body of a document, written to a composer."""

    skipped = _SKIPPED

    def __init__(self, composer: Composer, styles: _Styles) -> None:
        self._composer = composer
        self._styles = styles
        self._unseen = 0  # nesting depth inside a hidden element
        self._kind = ""
        self._open: list[_Paragraph] = []  # a stack: notes and text boxes lie inside a paragraph
        self._tables: list[_TableState] = []
        self._notes: list[list[str]] = []
        self._num_notes = self._num_pages = self._depth = 0
        self._after_item = self._is_title = False
        self._mark = ""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "draw:page":
            self._num_pages += 1
        if self._unseen or self._hides(name, attributes):
            self._unseen += 1
        elif name in ("text:p", "text:h"):
            level = _whole(attributes.get("text:outline-level"), 1) if name == "text:h" else 0
            self._open.append(_Paragraph(level=level))
        elif name == "text:note-body":
            self._notes.append([])
        elif self._open and name in _SPACES:
            self._open[-1].pieces.append(_SPACES[name] * min(_whole(attributes.get("text:c"), 1), 100))
        elif name == "text:list":
            self._depth += 1
        elif name.startswith("table:"):
            self._start_table(name, attributes)
        else:
            self._start_drawing(name, attributes)

    def _hides(self, name: str, attributes: dict[str, str]) -> bool:
        if name == "text:section" or name.startswith("text:hidden"):
            return attributes.get("text:display", "true") == "none" or attributes.get("text:is-hidden") == "true"
        family, style = _HIDING.get(name, ("", ""))
        return bool(family) and self._styles.hide(family, attributes.get(style, ""))

    def _start_table(self, name: str, attributes: dict[str, str]) -> None:
        if name == "table:table":
            is_sheet = self._kind == "office:spreadsheet" and not self._tables
            if is_sheet:
                self._composer.place("row", 1)
                self._composer.heading(2, attributes.get("table:name", ""))
            self._tables.append(_TableState(None if self._tables else Table(self._composer, sheet=is_sheet)))
        elif not self._tables:
            return
        state = self._tables[-1]
        if name == "table:table-row":
            state.row, state.cells, state.column = state.row + state.num_rows, [], 0
            state.num_rows = _whole(attributes.get("table:number-rows-repeated"), 1)
        elif name == "table:table-header-rows":
            state.is_header = True
        elif name in ("table:table-cell", "table:covered-table-cell"):
            state.num_columns = _whole(attributes.get("table:number-columns-repeated"), 1)
            state.value = attributes.get("office:date-value", "").replace("T00:00:00", "").replace("T", " ")
            state.paragraphs = []

    def _start_drawing(self, name: str, attributes: dict[str, str]) -> None:
        if name in ("office:text", "office:spreadsheet", "office:presentation", "office:drawing"):
            self._kind = name
        elif name == "draw:page":
            self._composer.place("slide", self._num_pages)
            self._composer.heading(2, "")  # begins a section; the title may follow later
        elif name == "pres:notes":
            self._mark = "Notes: "
        elif name == "draw:frame":
            self._is_title = attributes.get("pres:class") == "title" and not self._mark

    def text(self, data: str) -> None:
        if self._open and not self._unseen:
            self._open[-1].pieces.append(" ".join(data.split("\n")))

    def end(self, name: str) -> None:
        if self._unseen:
            self._unseen -= 1
        elif name in ("text:p", "text:h"):
            paragraph = self._open.pop()
            if text := "".join(paragraph.pieces).strip():
                self._paragraph(text, paragraph)
        elif name == "text:note-body":
            note = flat(" ".join(self._notes.pop()))
            if note and self._open:
                self._num_notes += 1
                self._open[-1].pieces.append(f"[{self._num_notes}]")
                self._open[-1].notes.append(f"[{self._num_notes}] {note}")
        elif name == "text:list":
            self._depth -= 1
        elif name.startswith("table:") and self._tables:
            self._end_table(name)
        elif name == "draw:frame":
            self._is_title = False
        elif name == "pres:notes":
            self._mark = ""

    def _end_table(self, name: str) -> None:
        state = self._tables[-1]
        if name in ("table:table-cell", "table:covered-table-cell"):
            state.end_cell()
        elif name == "table:table-row" and state.table:
            state.table.row(state.cells, state.row if self._kind == "office:spreadsheet" else None, header=state.is_header)
        elif name == "table:table-row":
            self._tables[-2].paragraphs.append(" | ".join(text for _, text in state.cells))
        elif name == "table:table-header-rows":
            state.is_header = False
        elif name == "table:table":
            self._tables.pop()
            if state.table:
                state.table.close()
            self._after_item = False

    def _paragraph(self, text: str, paragraph: _Paragraph) -> None:
        if self._notes:
            self._notes[-1].append(text)
        elif self._tables:
            self._tables[-1].paragraphs += [text, *paragraph.notes]
        elif self._is_title or paragraph.level:
            self._composer.heading(2 if self._is_title else paragraph.level, text)
            self._after_item = False
        else:
            is_item = bool(self._depth) and self._kind == "office:text"
            line = f"{'  ' * min(self._depth - 1, _MAX_INDENT)}- {text}" if is_item else self._mark + text
            (self._composer.line if is_item and self._after_item else self._composer.paragraph)(line)
            self._after_item = is_item
            self._mark = ""
        for note in paragraph.notes if not self._tables and not self._notes else ():
            self._composer.line(note)


_SPACES = {"text:s": " ", "text:tab": "\t", "text:line-break": "\n"}


def _whole(text: str | None, otherwise: int) -> int:
    with suppress(ValueError):
        return max(int((text or "")[:9]), 1)
    return otherwise
