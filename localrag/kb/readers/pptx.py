"""Read PPTX: the slides of a presentation, with their notes."""

from __future__ import annotations

from localrag.kb.readers.base import Composer, Reading, Table, UnreadableError, numbered
from localrag.kb.readers.package import Package, XmlHandler, properties

_TITLES = ("title", "ctrTitle")
_FURNITURE = ("sldNum", "dt", "ftr", "hdr", "sldImg")  # placeholders that repeat on every slide
_NO_TITLES = ("powerpoint presentation", "presentation")  # default titles of programs
_MAX_SLIDES = 5_000


def read(data: bytes) -> Reading:
    """Read a presentation. Each slide is a section under its title; places are slide numbers.

    Hidden slides and hidden shapes are left out. Raises UnreadableError if the file is damaged, protected or over the limits.
    """
    package = Package(data, "PPTX")
    main = package.main("ppt/presentation.xml")
    title, fields = properties(package)
    slides = _Slides()
    package.parse(main, slides)
    if len(slides.ids) > _MAX_SLIDES:
        raise UnreadableError(f"it has more than {_MAX_SLIDES:,} slides")
    parts = {relation.id: relation.target for relation in package.relations(main)}
    composer = Composer()
    pictures = []
    for number, slide_id in enumerate(slides.ids, start=1):
        if slide_id in parts:
            composer.place("slide", number)
            if _slide(package, parts[slide_id], composer):
                pictures.append(number)
    missing = (numbered("slide", pictures, "holds pictures and no text", "hold pictures and no text"),) if pictures else ()
    return composer.reading("" if title.casefold() in _NO_TITLES else title, fields, missing)


def _slide(package: Package, part: str, composer: Composer) -> bool:
    """Write a slide with its diagrams and notes. Return whether it shows pictures and has no text at all."""
    slide = _Shapes()
    package.parse(part, slide)
    if slide.is_hidden:
        return False
    related = package.relations(part)
    composer.heading(2, " ".join(slide.title))
    slide.write(composer)
    has_text = slide.has_text
    for relation in related:
        if relation.type in ("diagramData", "notesSlide") and relation.target in package:
            shapes = _Shapes(is_notes=relation.type == "notesSlide")
            package.parse(relation.target, shapes)
            shapes.write(composer, "Notes: " if relation.type == "notesSlide" else "")
            has_text = has_text or shapes.has_text
    return slide.has_picture and not has_text


class _Slides(XmlHandler):
    """Collects the ids of the slides, in order."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "p:sldId":
            self.ids.append(attributes.get("r:id", ""))


class _Shapes(XmlHandler):
    """Collects the text of a slide, a diagram, or the notes of a notes page: shapes with paragraphs, and tables."""

    skipped = frozenset({"mc:Fallback"})

    def __init__(self, *, is_notes: bool = False) -> None:
        self._is_notes = is_notes
        self.is_hidden = False
        self.has_picture = False
        self.title: list[str] = []
        self._shapes: list[list[str | list[str]]] = []  # lines, or rows of a table
        self._lines: list[str] = []  # of the current shape or cell
        self._pieces: list[str] = []
        self._is_text = False
        self._left_out = False
        self._kind = ""
        self._rows: list[list[str]] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "p:sld":
            self.is_hidden = attributes.get("show", "1").lower() in ("0", "false")
        elif name == "p:pic":
            self.has_picture = True
        elif name in ("p:sp", "p:graphicFrame", "dgm:pt"):
            self._lines, self._kind, self._left_out = [], "", False
        elif name == "p:cNvPr":
            self._left_out = attributes.get("hidden", "0").lower() in ("1", "true")
        elif name == "p:ph":
            self._kind = attributes.get("type", "body")
        else:
            self._start_text(name)

    def _start_text(self, name: str) -> None:
        if name == "a:p":
            self._pieces = []
        elif name == "a:t":
            self._is_text = True
        elif name == "a:br":
            self._pieces.append("\n")
        elif name == "a:tbl":
            self._rows = []
        elif name == "a:tr":
            self._rows.append([])
        elif name == "a:tc":
            self._lines = []

    def text(self, data: str) -> None:
        if self._is_text:
            self._pieces.append(data)

    def end(self, name: str) -> None:
        if name == "a:t":
            self._is_text = False
        elif name == "a:p":
            if line := "".join(self._pieces).strip():
                self._lines.append(line)
            self._pieces = []
        elif name == "a:tc" and self._rows:
            self._rows[-1].append(" ".join(self._lines))
            self._lines = []
        elif name == "a:tbl":
            if not self._left_out:
                self._shapes.append([*self._rows])
            self._rows = []
        elif name in ("p:sp", "dgm:pt"):
            self._shape()

    def _shape(self) -> None:
        lines, self._lines = self._lines, []
        if self._left_out or self._kind in _FURNITURE or (self._is_notes and self._kind != "body"):
            return
        if self._kind in _TITLES and not self._is_notes:
            self.title += lines
        else:
            self._shapes.append([*lines])

    @property
    def has_text(self) -> bool:
        return any(self.title) or any(any(line) for shape in self._shapes for line in shape)

    def write(self, composer: Composer, mark: str = "") -> None:
        """Write everything but the title, with `mark` before the first line."""
        for shape in self._shapes:
            table = Table(composer, sheet=False)
            for index, line in enumerate(shape):
                if isinstance(line, list):
                    table.row(enumerate(line))
                else:
                    (composer.line if index else composer.paragraph)(mark + line)
                    mark = ""
            table.close()
