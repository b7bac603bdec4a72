"""The structure of a file, read by parsers: what it imports, and the pieces that say what is in it.

Code is parsed by tree-sitter, Markdown by markdown-it-py; each grammar is imported when a file needs it. Nothing here raises for
what stands in a text: broken syntax, deep nesting, NUL characters and lone surrogates give the pieces that were found. The work is
bounded, and what was not read is said in a last piece of kind "omitted".
"""

from __future__ import annotations

from pathlib import PurePath

from localrag.outline.languages import LANGUAGES, SUFFIXES
from localrag.outline.piece import Kind, Piece

__all__ = ["LANGUAGES", "Kind", "Piece", "imports", "language_of", "outline"]


def language_of(path: str | PurePath) -> str | None:
    """The language of a file by its ending, one of `LANGUAGES`; None for any other file."""
    return SUFFIXES.get(PurePath(path).suffix.lower())


def imports(text: str, language: str | None) -> list[str]:
    """What a file imports, as written, in order, each once; empty for Markdown and for a language that is not known.

    - python: `import a.b` is "a.b"; `from a import b` is "a" and "a.b", for b can be a module; `from .a import b` is ".a" and ".a.b";
      `from . import x` is ".x"; `from . import *` is "."
    - javascript, typescript, tsx: the module of `import`, `export … from`, `require("…")` and `import("…")`
    - go: the path; rust: the path of each `use` with its braces multiplied out, and the name of each `mod x;` and `extern crate x;`
    - java, kotlin: the name, with ".*" where it ends so; scala: the name, braces multiplied out; c_sharp: the namespace
    - c, cpp: the file named by `#include`, in quotes or in angle brackets; bash: the file after `source` or `.`
    - ruby: what `require` and `load` name, and after "./" what `require_relative` does; lua: what `require` names
    - php: the names of each `use` outside braces, and the file of each `require` and `include`
    """
    if language is None or language == "markdown" or language not in LANGUAGES:
        return []
    from localrag.outline.imports import find  # noqa: PLC0415  # weight: tree-sitter

    return find(text, language)


def outline(text: str, language: str | None) -> list[Piece]:
    """What the structure of a text is made of, in order and without overlap; empty for a language that is not known.

    Of code: imports, the heads of functions and methods (no bodies), of classes and types with their fields, docstrings and doc
    comments. Of Markdown: headings, the first sentence of each section, the first items of lists, the heads of tables.
    """
    if language == "markdown":
        from localrag.outline.markdown import read  # noqa: PLC0415  # weight: markdown-it-py

        return read(text)
    if language is None or language not in LANGUAGES:
        return []
    from localrag.outline.code import read as read_code  # noqa: PLC0415  # weight: tree-sitter

    return read_code(text, language)
