"""Convert files to text. A reader is a function from bytes to a Reading; `read` picks the reader for a file.

Each format has a module here. A reader and the library it needs are imported when the first such file is read.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import PurePath

from localrag.kb.readers import text
from localrag.kb.readers.base import Reading, UnreadableError
from localrag.outline import language_of

_READERS = {
    suffix: reader
    for reader, suffixes in {
        "markdown": ".md .markdown .mdown .mkd",
        "markdown:read_rst": ".rst .rest",
        "html": ".html .htm .xhtml .xht",
        "pdf": ".pdf",
        "docx": ".docx .docm .dotx .dotm",
        "pptx": ".pptx .pptm .ppsx .ppsm .potx .potm",
        "xlsx": ".xlsx .xlsm .xltx .xltm",
        "odf": ".odt .ott .ods .ots .odp .otp",
        "records:read_csv": ".csv .tsv .tab",
        "epub": ".epub",
        "mail": ".eml .mht .mhtml",
        "mail:read_mbox": ".mbox .mbx",
        "records:read_notebook": ".ipynb",
        "records:read_json": ".json",
        "records:read_json_lines": ".jsonl .ndjson",
        "kreuzberg_reader:rtf": ".rtf",
        "kreuzberg_reader:doc": ".doc .dot",
        "kreuzberg_reader:xls": ".xls .xlt",
        "kreuzberg_reader:ppt": ".ppt .pps .pot",
        "kreuzberg_reader:msg": ".msg",
        "kreuzberg_reader:fb2": ".fb2",
    }.items()
    for suffix in suffixes.split()
}
"""File extension → module in this package, with `:function` if the function is not `read`. For kreuzberg_reader, `:kind` of document."""

_BY_LIBRARY = "kreuzberg_reader:"
_BINARY = frozenset({"pdf", "docx", "pptx", "xlsx", "epub", "odf", *(_BY_LIBRARY + kind for kind in ("rtf", "doc", "xls", "ppt", "msg"))})

# Documents whose bytes may be valid text, but never the text that a person sees.
_NOT_TEXT = frozenset(
    ".odg .ps .eps .svg .pages .numbers .key .mobi .azw .djvu".split()  # noqa: SIM905  # a word list reads better as words
)

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_MEMBERS = (
    ("docx", b"word/document"), ("pptx", b"ppt/presentation"), ("xlsx", b"xl/workbook"), ("epub", b"application/epub+zip"),
    *(("odf", b"application/vnd.oasis.opendocument." + kind) for kind in (b"text", b"spreadsheet", b"presentation")),
)  # fmt: skip
"""Bytes that identify the format of a ZIP container. Member names are not compressed, so they appear in the file as written."""
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_STREAMS = tuple(  # the same for OLE containers; formats that are often embedded in others come last
    (_BY_LIBRARY + kind, name.encode("utf-16-le"))
    for kind, name in (
        ("msg", "__substg1.0_"),
        ("ppt", "PowerPoint Document"),
        ("doc", "WordDocument"),
        ("xls", "Workbook"),
        ("xls", "Book"),
    )
)
_HTML = re.compile(rb"(?:\xef\xbb\xbf)?\s{0,100}(?:<!--[^>]{0,1000}-->\s{0,100})?<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_OTHERS = (  # magic numbers of formats without a reader
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\0", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"GGUF\x03", "a GGUF model"),  # with the version byte: a text about such models may begin with "GGUF"
)


def read(name: str, data: bytes) -> Reading:
    """Read a file as text. The format is detected from its first bytes, or else from the extension of `name`.

    Raises UnreadableError, with the reason, if the file has no text.
    """
    suffix = PurePath(name).suffix.lower()
    reader = _reader(suffix, data)
    language = language_of(name)
    if reader is not None:
        reading = _function(reader)(data)
    elif suffix in _NOT_TEXT:
        raise UnreadableError(f"{suffix[1:].upper()} files are not read")
    elif language is not None:
        from localrag.kb.readers import code  # noqa: PLC0415  # heavy: syntax tables of many languages

        reading = code.read(data, language)
    else:
        reading = text.read(data, known=suffix in text.SUFFIXES)
    if not reading.text.strip():
        raise UnreadableError("it holds no text")
    return reading


def needs_threads(name: str, data: bytes) -> bool:
    """Whether the reader of this file uses a library that starts threads."""
    try:
        return (_reader(PurePath(name).suffix.lower(), data) or "").startswith(_BY_LIBRARY)
    except UnreadableError:
        return False


def is_text(name: str) -> bool:
    """Whether a file of this name is text in some encoding: notes, source code, HTML."""
    suffix = PurePath(name).suffix.lower()
    return suffix in text.SUFFIXES or language_of(name) is not None or (suffix in _READERS and _READERS[suffix] not in _BINARY)


def keeps_lines(name: str, place: str) -> bool:
    """Whether a passage at this place of a file has the file's own text, so that its characters are no more than the file's bytes."""
    return place.startswith("line") and _READERS.get(PurePath(name).suffix.lower()) not in ("records:read_csv", "records:read_json_lines")


def is_document(name: str, data: bytes) -> bool:
    """Whether a file is a document whose bytes are not its text, such as a PDF."""
    suffix = PurePath(name).suffix.lower()
    return _READERS.get(suffix, "") in _BINARY or data.startswith((b"%PDF-", *_ZIP, _OLE, b"{\\rtf"))


def _reader(suffix: str, data: bytes) -> str | None:
    """Return the reader of a file, as in _READERS; None for text. Raises UnreadableError for a format without a reader."""
    return _by_content(data, _READERS.get(suffix, ""), suffix) or _READERS.get(suffix)


def _by_content(data: bytes, expected: str, suffix: str) -> str | None:
    """Return the reader that the bytes call for; None if the extension decides. `expected` is the reader that the extension calls for."""
    if data.startswith(b"%PDF-") or (expected == "pdf" and b"%PDF-" in data[:1024]):
        return "pdf"
    if data.startswith(_ZIP):
        return _in_zip(data, expected, suffix)
    if data.startswith(_OLE):
        return _in_ole(data, expected)
    if data.startswith(b"{\\rtf"):
        return _BY_LIBRARY + "rtf"
    for magic, kind in _OTHERS:
        if data.startswith(magic):
            raise UnreadableError(f"binary file: {kind}")
    is_page = (expected in _BINARY or suffix in _NOT_TEXT or not suffix) and _HTML.match(data)
    if is_page:
        return "html"
    if expected in _BINARY and data.strip():
        raise UnreadableError(f"it is not in {suffix[1:].upper()} format, despite its name")
    return None


def _in_zip(data: bytes, expected: str, suffix: str) -> str | None:
    readers = [reader for reader, member in _MEMBERS if member in data]
    if expected in readers:
        return expected  # the other matches come from embedded documents
    if readers:
        return readers[0]
    if expected in _BINARY:
        return expected  # its reader reports what is missing
    if suffix in _NOT_TEXT:
        return None  # such as KEY, which is also a ZIP
    raise UnreadableError("binary file: a ZIP archive")


def _in_ole(data: bytes, expected: str) -> str:
    if "EncryptedPackage".encode("utf-16-le") in data:
        raise UnreadableError("it is protected by a password")
    readers = [reader for reader, stream in _STREAMS if stream in data]
    if not readers:
        raise UnreadableError("binary file: an OLE container")
    return expected if expected in readers else readers[0]


def _function(reader: str) -> Callable[[bytes], Reading]:
    module, _, function = reader.partition(":")
    if reader.startswith(_BY_LIBRARY):
        from localrag.kb.readers import kreuzberg_reader  # noqa: PLC0415  # heavy

        return partial(kreuzberg_reader.read, kind=function)
    read_bytes: Callable[[bytes], Reading] = getattr(importlib.import_module(f"localrag.kb.readers.{module}"), function or "read")
    return read_bytes


__all__ = ["Reading", "UnreadableError", "is_document", "is_text", "needs_threads", "read"]
