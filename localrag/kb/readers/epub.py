"""Read EPUB: the chapters of a book."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from localrag.kb.readers import html
from localrag.kb.readers.base import Locator, Reading, Section, UnreadableError, check_size, one_line
from localrag.kb.readers.package import Package, Values, XmlHandler, resolved

_MAX_CHAPTERS = 5_000
_FIELDS = {
    "dc:title": "title", "dc:creator": "author", "dc:date": "date", "dc:language": "language", "dc:subject": "subject",
    "dc:publisher": "publisher", "dc:identifier": "identifier",
}  # fmt: skip
_XHTML = ("application/xhtml+xml", "text/html", "text/x-oeb1-document")


def read(data: bytes) -> Reading:
    """Read a book. Chapters are in reading order, under their titles from the table of contents; places are chapter numbers.

    Raises UnreadableError if the book is damaged, protected or over the limits, or has too many chapters.
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
    """Finds the name of the package document, which describes the book."""

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
    """The package document: the items of a book and their reading order."""

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
        """Yield the names of the chapters in reading order, each once, without the table of contents."""
        names = (self.items[item_id] for item_id in dict.fromkeys(self._order) if item_id in self.items)
        return (item.name for item in names if item.media_type in _XHTML and "nav" not in item.properties)

    def contents(self) -> Iterator[str]:
        """Yield the names of files that may hold the table of contents: the navigation document first, then the older NCX."""
        yield from (item.name for item in self.items.values() if "nav" in item.properties)
        if self._ncx in self.items:
            yield self.items[self._ncx].name


class _Contents(XmlHandler):
    """Collects file name → chapter title from a navigation document or an NCX."""

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
    """Collects the names of encrypted members. Obfuscated fonts are among them and do no harm."""

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
            except UnreadableError:  # a book is readable without its table of contents
                continue
            if handler.titles:
                return handler.titles
    return {}


@dataclass(slots=True)
class _Volume:
    """Joins chapters into one text."""

    title: str
    titles: dict[str, str]
    _pieces: list[str] = field(default_factory=list)
    _num_chars: int = 0
    _num_path_chars: int = 0
    _sections: list[Section] = field(default_factory=list)
    _places: list[Locator] = field(default_factory=list)
    _is_markdown: bool = False

    def add(self, number: int, name: str, chapter: Reading) -> None:
        if not chapter.text.strip():
            return
        at = self._num_chars
        title = self.titles.get(name.lower(), "")
        self._places.append(Locator(at, "chapter", number))
        for section in chapter.sections:
            names = section.heading.split(" > ") if section.heading else []
            if chapter.title and names[:1] == [chapter.title]:  # the page title is often just that of the book or the file name
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
    """Join headings to a path. A name equal to the one before it, such as a chapter title repeated as its first heading, is dropped."""
    path: list[str] = []
    for name in names:
        if name and not (path and path[-1].casefold() == name.casefold()):
            path.append(name)
    return " > ".join(path)
