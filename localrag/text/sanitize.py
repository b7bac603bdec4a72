"""Make untrusted text safe: it cannot control a terminal, reverse the writing direction, or hide from readers.

File names, documents, model answers and messages of other programs pass through here before they are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""A character class: control characters except tab and line feed, direction marks and surrogates. U+009B starts the same terminal
commands as Escape and "[".
"""
HIDDEN = r"\u061c\u200b\u2028\u2029\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f"
"""A character class: characters that have no width, break lines invisibly, or can hide text."""

_CONTROL = re.compile(f"[{CONTROL}]")
_HIDDEN = re.compile(f"[{HIDDEN}]")


def safe(text: str) -> str:
    """Remove control characters, direction marks and surrogates. Line feeds, tabs and hidden characters stay."""
    return _CONTROL.sub("", text)


def visible(text: str) -> str:
    """Like `safe`, and also remove hidden characters."""
    return _HIDDEN.sub("", safe(text))


def one_line(text: object, max_chars: int = 0) -> str:
    """Like `safe`, on one line: each run of white space or hidden characters becomes a space. `max_chars` above 0 shortens it, with "…"."""
    line = " ".join(_HIDDEN.sub(" ", safe(str(text).replace("\r", " "))).split())
    return line if not max_chars or len(line) <= max_chars else line[: max_chars - 1] + "…"


_PATH = re.compile(r"(?<![\w.:/\\-])(?:~|[A-Za-z]:)?(?:[\\/][^\s\\/'\"]+)*[\\/]([^\s\\/'\"]*)")
"""An absolute path without spaces, and its last part."""


class Redactor:
    """Removes paths of this machine from text. Known `folders` may have spaces in their names; other paths may not."""

    def __init__(self, folders: Iterable[Path]) -> None:
        prefixes = {f"{folder}{mark}" for folder in folders if folder != Path(folder.anchor) for mark in "/\\"}
        self._known = sorted(prefixes, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for folder in self._known:
            text = text.replace(folder, "")
        return _PATH.sub(r"\1", text)
