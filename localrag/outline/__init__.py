"""Read the structure of a file with parsers: its imports, and an outline of its contents.

Code is parsed by tree-sitter, Markdown by markdown-it-py; each grammar is imported when a file needs it. No text raises an
error: broken syntax, deep nesting, NUL characters or lone surrogates give an incomplete result. The work is bounded, and a last
piece of kind "omitted" says how much was not read.
"""

from __future__ import annotations

from pathlib import PurePath

from localrag.outline.imports import find_imports
from localrag.outline.languages import LANGUAGES, SUFFIXES
from localrag.outline.pieces import Kind, Piece, outline_code, outline_markdown

__all__ = ["LANGUAGES", "Kind", "Piece", "imports", "language_of", "outline"]


def language_of(path: str | PurePath) -> str | None:
    """The language of a file by its ending, one of `LANGUAGES`; None for any other file."""
    return SUFFIXES.get(PurePath(path).suffix.lower())


def imports(text: str, language: str | None) -> list[str]:
    """The imports of a file, as written, in order, each once; [] for Markdown and unknown languages.

    - python: `import a.b` is "a.b"; `from a import b` is "a" and "a.b", since b can be a module; `from .a import b` is ".a" and ".a.b";
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
    return find_imports(text, language)


def outline(text: str, language: str | None) -> list[Piece]:
    """The pieces of a text's structure, in order and without overlap; [] for an unknown language.

    Of code: imports, the heads of functions and methods (no bodies), of classes and types with their fields, docstrings and doc
    comments. Of Markdown: headings, the first sentence of each section, the first items of lists, the heads of tables.
    """
    if language == "markdown":
        return outline_markdown(text)
    if language is None or language not in LANGUAGES:
        return []
    return outline_code(text, language)
