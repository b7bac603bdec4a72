"""Plain text, in whatever encoding."""

from __future__ import annotations

import codecs

from localrag.kb.readers import encodings
from localrag.kb.readers.base import Reading, Section, UnreadableError

SUFFIXES = frozenset(
    """.txt .text .log .adoc .org .tex .yaml .yml .toml .ini .cfg .conf .properties .xml .css .scss .less
    .groovy .pl .pm .r .jl .swift .m .mm .dart .hs .ml .mli .clj .ex .exs .erl .elm .f .f90 .pas .sql .zsh .fish .ps1 .bat .cmd
    .cmake .mk .gradle .proto .graphql .tf .nix .vue .svelte .scad .gcode .vtt .srt .bib .diff .patch""".split()  # noqa: SIM905  # a word list reads better as words
)
"""Endings of files that are text whatever their encoding. Another file is text if it is valid UTF-8, or UTF-16 for certain."""

_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def decode(data: bytes, *, known: bool) -> str:
    """The text of a file: by its byte order mark, else UTF-8, else (only if `known` to be text) by what it holds.

    The last resort is Windows-1252, then Latin-1. Single bytes that have no meaning become U+FFFD, as NUL characters do, which not every
    store keeps. Line ends stay as they are, so that offsets count the characters of the file without its mark. UnreadableError if it is
    not text.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return data.decode(encoding).replace("\0", "\ufffd")
            except UnicodeDecodeError:
                raise UnreadableError(f"it begins like {encoding.removesuffix('-sig').upper()}, but is not valid") from None
    if b"\0" in data:
        encoding = encodings.utf16_without_mark(data) or ""
        if not encoding:
            raise UnreadableError("binary file")
        return data.decode(encoding, "replace").replace("\0", "\ufffd")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        if known:
            return _decode_other(data)
    raise UnreadableError("binary file, or text in an encoding that is not known")


def _decode_other(data: bytes) -> str:
    if encodings.is_damaged_utf8(data):
        return data.decode("utf-8", "replace")
    encoding = encodings.guess(data)
    if encoding is not None and encoding != "cp1252":
        return data.decode(encoding, "replace")
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def read(data: bytes, *, known: bool) -> Reading:
    """The whole file as one section without a heading."""
    text = decode(data, known=known)
    return Reading(text, (Section(0, len(text)),), own_lines=True)
