"""Untrusted text made harmless: it cannot control a terminal, turn the direction of writing, or hide from whoever reads it.

File names, documents, answers of a model and messages of other programs go through here before anybody sees them.
"""

from __future__ import annotations

import re

CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""A character class: control characters but for tab and line feed, direction marks and half characters. U+009B begins the same
commands as Escape and "[".
"""
HIDDEN = r"\u061c\u200b\u2028\u2029\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f"
"""A character class: what has no width, breaks lines unseen, or can hold a hidden text."""

_CONTROL = re.compile(f"[{CONTROL}]")
_HIDDEN = re.compile(f"[{HIDDEN}]")


def safe(text: str) -> str:
    """Remove control characters, direction marks and half characters. Lines, tabs and hidden characters stay."""
    return _CONTROL.sub("", text)


def visible(text: str) -> str:
    """As `safe`, and remove hidden characters too."""
    return _HIDDEN.sub("", safe(text))


def one_line(text: object, max_chars: int = 0) -> str:
    """As `safe`, on one line: any run of white space or hidden characters becomes a space. `max_chars` cuts it, with "…"; 0 does not."""
    line = " ".join(_HIDDEN.sub(" ", safe(str(text).replace("\r", " "))).split())
    return line if not max_chars or len(line) <= max_chars else line[: max_chars - 1] + "…"
