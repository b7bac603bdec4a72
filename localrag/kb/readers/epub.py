"""EPUB: the chapters of a book."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from localrag.kb.readers import html
from localrag.kb.readers.base import Place, Reading, Section, UnreadableError
from localrag.kb.readers.draft import check_size, one_line
from localrag.kb.readers.package import Package, Values, XmlHandler, resolved

_MAX_CHAPTERS = 5_000
_FIELDS = {
    "dc:title": "title", "dc:creator": "author", "dc:date": "date", "dc:language": "language", "dc:subject": "subject",
    "dc:publisher": "publisher", "dc:identifier": "identifier",
}  # fmt: skip
_XHTML = ("application/xhtml+xml", "text/html", "text/x-oeb1-document")


def read(data: bytes) -> Reading:
    """A book: its chapters in reading order, under their titles in its table of contents; a place is a chapter's number in that order.

    UnreadableError if it is damaged, protected or over the bounds, or has no text.
    """
    package = Package(data, "EPUB")
    container = _Container()
    package.parse("META-INF/container.xml", container)
    book, values = _Book(posixpath.dirname(container.root)), Values(_FIELDS)
    package.parse(container.root, book)
    package.parse(container.root, values)
    chapters = [(number, name) for number, name in enumerate(book.chapters(), start=1) if name in package]
    if len(chapters) > _MAX_CHAPTERS:
        raise UnreadableError(f"it has more than {_MAX_CHAPTERS:,} chapters")
    encrypted = _encrypted(package)
    if encrypted.intersection(name for _, name in chapters):
        raise UnreadableError("it is protected against copying")
    fields = {key: one_line("; ".join(texts)) for key, texts in values.values.items()}
    volume = _Volume(fields.pop("title", ""), _contents(package, book))
    for number, name in chapters:
        volume.add(number, name, html.read(package.read(name)))
    return volume.reading(tuple((key, value) for key, value in fields.items() if value))


class _Container(XmlHandler):
    """The name of the file that describes the book."""

    root = "content.opf"

    def __init__(self) -> None:
        self._is_found = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "ocf:rootfile" and not self._is_found:
            self._is_found = True
            self.root = resolved("", attributes.get("full-path", ""))


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    media_type: str
    properties: list[str]


class _Book(XmlHandler):
    """What a book is made of, and in which order."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.items: dict[str, _Item] = {}
        self._order: list[str] = []
        self._ncx = ""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "opf:item":
            target = resolved(self._folder, attributes.get("href", ""))
            self.items[attributes.get("id", "")] = _Item(target, attributes.get("media-type", ""), attributes.get("properties", "").split())
        elif name == "opf:itemref":
            self._order.append(attributes.get("idref", ""))
        elif name == "opf:spine":
            self._ncx = attributes.get("toc", "")

    def chapters(self) -> Iterator[str]:
        """The names of the chapters in order, each once; the table of contents is none."""
        names = (self.items[item_id] for item_id in dict.fromkeys(self._order) if item_id in self.items)
        return (item.name for item in names if item.media_type in _XHTML and "nav" not in item.properties)

    def contents(self) -> Iterator[str]:
        """The names of the files that can hold the table of contents, the newer form first."""
        yield from (item.name for item in self.items.values() if "nav" in item.properties)
        if self._ncx in self.items:
            yield self.items[self._ncx].name


class _Contents(XmlHandler):
    """The titles of chapters by the name of their file, from a navigation document or an NCX."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.titles: dict[str, str] = {}
        self._pieces: list[str] = []
        self._label = ""
        self._target = ""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "h:a":
            self._pieces, self._target = [], attributes.get("href", "")
        elif name == "ncx:text":
            self._pieces = []
        elif name == "ncx:content":
            self._add(attributes.get("src", ""), self._label)

    def text(self, data: str) -> None:
        self._pieces.append(data)

    def end(self, name: str) -> None:
        if name == "h:a":
            self._add(self._target, "".join(self._pieces))
        elif name == "ncx:text":
            self._label = "".join(self._pieces)

    def _add(self, target: str, title: str) -> None:
        if title := one_line(title):
            self.titles.setdefault(resolved(self._folder, target).lower(), title)


class _Encryption(XmlHandler):
    """The names of members that are encrypted; scrambled fonts count too, and do not matter."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "enc:CipherReference":
            self.names.add(resolved("", attributes.get("URI", "")))


def _encrypted(package: Package) -> set[str]:
    handler = _Encryption()
    if "META-INF/encryption.xml" in package:
        package.parse("META-INF/encryption.xml", handler)
    return handler.names


def _contents(package: Package, book: _Book) -> dict[str, str]:
    for name in book.contents():
        if name in package:
            handler = _Contents(posixpath.dirname(name))
            try:
                package.parse(name, handler)
            except UnreadableError:  # a book can be read without its table of contents
                continue
            if handler.titles:
                return handler.titles
    return {}


@dataclass(slots=True)
class _Volume:
    """Chapters joined into one text."""

    title: str
    titles: dict[str, str]
    _pieces: list[str] = field(default_factory=list)
    _num_chars: int = 0
    _num_path_chars: int = 0
    _sections: list[Section] = field(default_factory=list)
    _places: list[Place] = field(default_factory=list)
    _is_markdown: bool = False

    def add(self, number: int, name: str, chapter: Reading) -> None:
        if not chapter.text.strip():
            return
        at = self._num_chars
        title = self.titles.get(name.lower(), "")
        self._places.append(Place(at, "chapter", number))
        for section in chapter.sections:
            names = section.heading.split(" > ") if section.heading else []
            if chapter.title and names[:1] == [chapter.title]:  # the title of the page, often only the book's or the file's
                names = names[1:] or ([] if title else names)
            path = _joined((self.title, title, *names))
            self._sections.append(Section(at + section.start, at + section.end, path, at + section.body if section.body else 0))
            self._num_path_chars += len(path)
        self._pieces.append(chapter.text + "\n\n")
        self._num_chars += len(self._pieces[-1])
        self._is_markdown = self._is_markdown or chapter.markdown
        check_size(self._num_chars + self._num_path_chars)

    def reading(self, fields: tuple[tuple[str, str], ...]) -> Reading:
        return Reading(
            "".join(self._pieces), tuple(self._sections), self.title, markdown=self._is_markdown, places=tuple(self._places), fields=fields
        )


def _joined(names: Iterable[str]) -> str:
    """A path of headings. A name that repeats the one before it, as a chapter's title does in its first heading, stands once."""
    path: list[str] = []
    for name in names:
        if name and not (path and path[-1].casefold() == name.casefold()):
            path.append(name)
    return " > ".join(path)
