"""Read documents that are XML files in a ZIP container: members, XML events, relations between parts, and properties.

The standard library's expat parses the XML as a stream, within limits. Nothing outside the container is ever opened, which rules out
external entities.
"""

from __future__ import annotations

import io
import posixpath
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote
from xml.parsers import expat

from localrag.kb.readers.base import UnreadableError, flat, one_line

MAX_MEMBERS = 10_000
MAX_UNPACKED_BYTES = 256 * 1024 * 1024  # total of the members that are read
MAX_MEMBER_BYTES = 20 * 1024 * 1024  # a member that is read whole
MAX_RATIO = 500  # deflate reaches 1,032; a sheet of similar rows stays below 200
_BLOCK_BYTES = 64 * 1024

_RATIO_FROM_BYTES = 8 * 1024 * 1024
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BOMB = "it unpacks to far more than its size (a zip bomb)"

# Errors that zipfile has raised for damaged containers. Unknown compression methods raise a kind of RuntimeError.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError, IndexError, OverflowError, RuntimeError)

# Limits of the XML
MAX_DEPTH = 200
MAX_ELEMENTS = 3_500_000  # up to 9 µs of CPU each on a busy machine
MAX_NAMES = 20_000  # distinct names of elements and attributes, all of which expat keeps
MAX_TAG_BYTES = 1024 * 1024  # expat rescans an unfinished tag from its start with every block

# The transitional and the strict form of the standard share prefixes.
_PREFIXES = {
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main": "w",
    "http://purl.oclc.org/ooxml/wordprocessingml/main": "w",
    "http://schemas.openxmlformats.org/drawingml/2006/main": "a",
    "http://purl.oclc.org/ooxml/drawingml/main": "a",
    "http://schemas.openxmlformats.org/presentationml/2006/main": "p",
    "http://purl.oclc.org/ooxml/presentationml/main": "p",
    "http://schemas.openxmlformats.org/spreadsheetml/2006/main": "x",
    "http://purl.oclc.org/ooxml/spreadsheetml/main": "x",
    "http://schemas.openxmlformats.org/officeDocument/2006/relationships": "r",
    "http://purl.oclc.org/ooxml/officeDocument/relationships": "r",
    "http://schemas.openxmlformats.org/officeDocument/2006/math": "m",
    "http://purl.oclc.org/ooxml/officeDocument/math": "m",
    "http://schemas.openxmlformats.org/markup-compatibility/2006": "mc",
    "http://schemas.openxmlformats.org/drawingml/2006/diagram": "dgm",
    "http://schemas.openxmlformats.org/package/2006/metadata/core-properties": "cp",
    "http://purl.org/dc/elements/1.1/": "dc",
    "http://purl.org/dc/terms/": "dcterms",
    "http://schemas.openxmlformats.org/package/2006/relationships": "rel",
    "urn:oasis:names:tc:opendocument:xmlns:container": "ocf",
    "http://www.idpf.org/2007/opf": "opf",
    "http://www.idpf.org/2007/ops": "epub",
    "http://www.daisy.org/z3986/2005/ncx/": "ncx",
    "http://www.w3.org/1999/xhtml": "h",
    "http://www.w3.org/2001/04/xmlenc#": "enc",
    "urn:oasis:names:tc:opendocument:xmlns:office:1.0": "office",
    "urn:oasis:names:tc:opendocument:xmlns:meta:1.0": "meta",
    "urn:oasis:names:tc:opendocument:xmlns:style:1.0": "style",
    "urn:oasis:names:tc:opendocument:xmlns:text:1.0": "text",
    "urn:oasis:names:tc:opendocument:xmlns:table:1.0": "table",
    "urn:oasis:names:tc:opendocument:xmlns:drawing:1.0": "draw",
    "urn:oasis:names:tc:opendocument:xmlns:presentation:1.0": "pres",
}


class XmlHandler:
    """Receives the events of one XML file. The elements named in `skipped` are left out with all their contents.

    Names are `prefix:local` with the prefixes above, `local` without a namespace, and `?:local` in any other namespace.
    """

    skipped: frozenset[str] = frozenset()

    def start(self, name: str, attributes: dict[str, str], /) -> None:
        """Handle the start of an element."""

    def end(self, name: str) -> None:
        """Handle the end of an element."""

    def text(self, data: str) -> None:
        """Handle characters. A run of text may come in several calls."""


class Relation(NamedTuple):
    """A reference from one part to another. `type` is the last segment of the type URI, `target` the member's full name."""

    id: str
    type: str
    target: str


class Package:
    """The members of a document, by name. `kind`, such as "DOCX", appears in errors.

    All unpacked bytes count towards `max_unpacked_bytes` and all XML elements towards `max_elements`. Raises UnreadableError if the data
    are not a ZIP file or hold too many members.
    """

    def __init__(self, data: bytes, kind: str, *, max_elements: int = MAX_ELEMENTS, max_unpacked_bytes: int = MAX_UNPACKED_BYTES) -> None:
        self.kind = kind
        self._max_unpacked_bytes = max_unpacked_bytes
        self._num_bytes = 0
        self._max_elements = max_elements
        self._num_elements = 0
        if not data.startswith(b"PK"):
            raise UnreadableError(f"it is not a {kind} file" if data else "it is empty")
        if data.count(b"PK\x01\x02") > MAX_MEMBERS:  # before zipfile builds an object for each
            raise UnreadableError(f"it holds more than {MAX_MEMBERS:,} files")
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except _ZIP_ERRORS:
            raise UnreadableError(f"it is damaged or cut off and cannot be opened as a {kind} file") from None
        self._members = {_plain(info.filename): info for info in self._zip.infolist()}

    def __contains__(self, name: str) -> bool:
        return _plain(name) in self._members

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield a member's bytes in blocks. Raises UnreadableError if it is missing, encrypted, damaged or a zip bomb."""
        info = self._members.get(_plain(name))
        if info is None:
            raise UnreadableError(f"it is not a complete {self.kind} file: {_shown(name)} is missing")
        if info.flag_bits & 1:
            raise UnreadableError("it is protected by a password")
        if info.compress_type not in _METHODS:
            raise UnreadableError(f"{_shown(name)} in it uses an unsupported compression method")
        num_bytes = 0
        try:
            with self._zip.open(info) as member:
                while block := member.read(_BLOCK_BYTES):
                    num_bytes += len(block)
                    self._num_bytes += len(block)
                    too_dense = num_bytes > _RATIO_FROM_BYTES and num_bytes > MAX_RATIO * info.compress_size
                    if too_dense or self._num_bytes > self._max_unpacked_bytes:
                        raise UnreadableError(_BOMB if too_dense else _unpacked(self._max_unpacked_bytes))
                    yield block
        except _ZIP_ERRORS:
            raise UnreadableError(f"it is damaged: {_shown(name)} in it cannot be unpacked") from None

    def read(self, name: str, max_bytes: int = MAX_MEMBER_BYTES) -> bytes:
        """Read a member of at most `max_bytes`. Raises UnreadableError as `blocks` does, and for a larger one."""
        pieces, num_bytes = [], 0
        for block in self.blocks(name):
            num_bytes += len(block)
            if num_bytes > max_bytes:
                raise UnreadableError(f"{_shown(name)} in it is larger than {max_bytes // 1024 // 1024} MB")
            pieces.append(block)
        return b"".join(pieces)

    def parse(self, name: str, handler: XmlHandler) -> None:
        """Parse an XML member with a handler. Raises UnreadableError if it is malformed, declares entities or is over the limits."""
        parser = _Parser(handler, self._max_elements - self._num_elements)
        try:
            for block in self.blocks(name):
                parser.feed(block)
            parser.feed(b"", last=True)
        except (expat.ExpatError, LookupError, ValueError) as error:
            raise UnreadableError(f"it is damaged: {_shown(name)} in it is not XML ({flat(str(error))[:120]})") from None
        self._num_elements += parser.num_elements

    def relations(self, part: str) -> list[Relation]:
        """Return the relations from `part` to other members; with "", those of the container itself."""
        folder, base = posixpath.split(part)
        name = posixpath.join(folder, "_rels", f"{base}.rels")
        handler = _Relations(folder)
        if name in self:
            self.parse(name, handler)
        return handler.relations

    def related(self, part: str, kind: str) -> str | None:
        """Return the first existing member that `part` refers to by a relation of this type; None if there is none."""
        return next((relation.target for relation in self.relations(part) if relation.type == kind and relation.target in self), None)

    def main(self, otherwise: str) -> str:
        """Return the name of the main part, `otherwise` if the container does not name one."""
        return self.related("", "officeDocument") or otherwise


class _Parser:
    """Runs expat within limits. A bare DOCTYPE is ignored; one with declarations is refused, which rules out entity expansion attacks."""

    def __init__(self, handler: XmlHandler, max_elements: int) -> None:
        self._handler = handler
        self._max_elements = max_elements
        self.num_elements = 0
        self._depth = 0
        self._skip_from = 0  # depth of the skipped element being read; 0 outside one
        self._num_fed = 0
        self._names: dict[str, str] = {}
        self._expat = expat.ParserCreate(namespace_separator=" ")
        self._expat.buffer_text = True
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        self._expat.CharacterDataHandler = handler.text
        self._expat.StartDoctypeDeclHandler = _doctype
        self._expat.EntityDeclHandler = _refuse_entities

    def feed(self, block: bytes, *, last: bool = False) -> None:
        self._expat.Parse(block, last)
        self._num_fed += len(block)
        if self._num_fed - self._expat.CurrentByteIndex > MAX_TAG_BYTES + _BLOCK_BYTES:
            raise UnreadableError(f"a tag in it is longer than {MAX_TAG_BYTES // 1024 // 1024} MB")
        if len(self._expat.intern) > MAX_NAMES:
            raise UnreadableError(f"its XML has more than {MAX_NAMES:,} different names")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        self.num_elements += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError(f"its XML is more than {MAX_DEPTH} elements deep")
        if self.num_elements > self._max_elements:
            raise UnreadableError(f"its XML has over {MAX_ELEMENTS:,} elements")
        if self._skip_from:
            return
        name = self._names.get(name) or self._short(name)
        if name in self._handler.skipped:
            self._skip_from = self._depth
            self._expat.CharacterDataHandler = None
            return
        if attributes:
            attributes = {self._names.get(key) or self._short(key): value for key, value in attributes.items()}
        self._handler.start(name, attributes)

    def _end(self, name: str) -> None:
        self._depth -= 1
        if not self._skip_from:
            self._handler.end(self._names[name])
        elif self._depth < self._skip_from:
            self._skip_from = 0
            self._expat.CharacterDataHandler = self._handler.text

    def _short(self, name: str) -> str:
        uri, separator, local = name.rpartition(" ")
        short = f"{_PREFIXES.get(uri, '?')}:{local}" if separator else name
        self._names[name] = short
        return short


def _doctype(_name: str, _system: str | None, _public: str | None, has_internal_subset: object) -> None:
    if has_internal_subset:
        _refuse_entities()


def _refuse_entities(*_declaration: object) -> None:
    raise UnreadableError("its XML declares entities")


class _Relations(XmlHandler):
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.relations: list[Relation] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "rel:Relationship" and attributes.get("TargetMode") != "External":
            target = resolved(self._folder, attributes.get("Target", ""))
            self.relations.append(Relation(attributes.get("Id", ""), attributes.get("Type", "").rpartition("/")[2], target))


def resolved(folder: str, reference: str) -> str:
    """Resolve a reference from within `folder` to a member name. Callers only look it up among the members."""
    path = unquote(reference.partition("#")[0])
    return posixpath.normpath(posixpath.join("/", folder, path)).lstrip("/")


def properties(package: Package) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the title and the other core properties of an Office document: author, date (of the last change, ISO 8601), subject …"""
    part = package.related("", "core-properties")
    if part is None:
        return "", ()
    handler = Values(_CORE_FIELDS)
    package.parse(part, handler)
    values = {key: one_line("; ".join(texts)) for key, texts in handler.values.items()}
    created, modified = values.pop("created", "")[:10], values.pop("modified", "")[:10]
    title = values.pop("title", "")
    return title, tuple((key, value) for key, value in {**values, "created": created, "date": modified or created}.items() if value)


_CORE_FIELDS = {
    "dc:title": "title", "dc:creator": "author", "dc:subject": "subject", "cp:keywords": "keywords", "cp:category": "category",
    "dc:language": "language", "dcterms:created": "created", "dcterms:modified": "modified",
}  # fmt: skip


class Values(XmlHandler):
    """Collects the texts of elements. `keys` maps the names of elements to keys of `values`."""

    def __init__(self, keys: dict[str, str]) -> None:
        self._keys = keys
        self._pieces: list[str] | None = None
        self.values: dict[str, list[str]] = {}

    def start(self, name: str, _attributes: dict[str, str]) -> None:
        if name in self._keys:
            self._pieces = []

    def text(self, data: str) -> None:
        if self._pieces is not None:
            self._pieces.append(data)

    def end(self, name: str) -> None:
        if name in self._keys and self._pieces is not None:
            self.values.setdefault(self._keys[name], []).append("".join(self._pieces))
            self._pieces = None


def _plain(name: str) -> str:
    """Normalise a member name: names are compared case-insensitively, and some programs write backslashes."""
    return name.replace("\\", "/").lstrip("/").lower()


def _shown(name: str) -> str:
    """Escape and truncate a member name for an error message."""
    return name[:80].encode("ascii", "backslashreplace").decode()


def _unpacked(max_bytes: int) -> str:
    return f"it unpacks to more than {max_bytes // 1024 // 1024} MB"
