"""Files to text, a format a file. A reader is a function from bytes to a Reading; `read` finds the one for a file's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from localrag.kb.readers import markdown, text
from localrag.kb.readers.base import Reading, UnreadableError

_FORMATS: dict[str, Callable[[bytes], Reading]] = dict.fromkeys((".md", ".markdown", ".mdown", ".mkd"), markdown.read)

# Documents whose bytes are sometimes valid text, and never the text that a person sees.
_NOT_TEXT = frozenset({".pdf", ".docx", ".pptx", ".xlsx", ".odt", ".ods", ".odp", ".epub", ".rtf", ".ps", ".eps", ".svg"})


def read(name: str, data: bytes) -> Reading:
    """The text of a file by the ending of its name. UnreadableError says why there is none."""
    suffix = PurePath(name).suffix.lower()
    if suffix in _NOT_TEXT:
        raise UnreadableError(f"{suffix[1:].upper()} files are not read")
    reading = _FORMATS[suffix](data) if suffix in _FORMATS else text.read(data, known=suffix in text.SUFFIXES)
    if not reading.text.strip():
        raise UnreadableError("it holds no text")
    return reading


__all__ = ["Reading", "UnreadableError", "read"]
