"""Plain text and source code."""

from __future__ import annotations

import codecs

from localrag.kb.readers.base import Reading, Section, UnreadableError

SUFFIXES = frozenset(
    """.txt .text .log .rst .adoc .org .tex .csv .tsv .json .jsonl .yaml .yml .toml .ini .cfg .conf .xml .html .htm .css
    .py .pyi .js .mjs .ts .tsx .jsx .java .kt .kts .scala .groovy .c .h .cc .cpp .cxx .hpp .hh .cs .go .rs .rb .php .pl .pm .lua .r .jl
    .swift .m .mm .dart .hs .ml .mli .clj .ex .exs .erl .elm .f .f90 .pas .sql .sh .bash .zsh .fish .ps1 .bat .cmake .mk .gradle
    .proto .graphql .tf .nix .vue .svelte .scad .gcode""".split()  # noqa: SIM905  # a word list reads better as words
)
"""Endings of files that are text whatever their encoding. Another file is text if it is valid UTF-8, or UTF-16 with its mark."""

_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def decode(data: bytes, *, known: bool) -> str:
    """The text of a file: by its byte order mark, else UTF-8, else (only if `known` to be text) Windows-1252 or Latin-1.

    Line ends stay as they are, so that offsets count the characters of the file without its mark. UnreadableError if it is not text.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError:
                raise UnreadableError(f"it begins like {encoding.removesuffix('-sig').upper()}, but is not valid") from None
    if b"\0" in data:
        raise UnreadableError("binary file")
    for encoding in ("utf-8", "cp1252", "latin-1") if known else ("utf-8",):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise UnreadableError("binary file, or text in an encoding that is not known")


def read(data: bytes, *, known: bool) -> Reading:
    """The whole file as one section without a heading."""
    text = decode(data, known=known)
    return Reading(text, (Section(0, len(text)),))
