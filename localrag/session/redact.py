"""What programs are told names no path of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_PATH = re.compile(r"(?<![\w.:/\\-])(?:~|[A-Za-z]:)?(?:[\\/][^\s\\/'\"]+)*[\\/]([^\s\\/'\"]*)")
"""An absolute path without spaces, and its last part."""


class Redactor:
    """Takes paths out of text. `folders` are those that are known; they may have spaces in their names."""

    def __init__(self, folders: Iterable[Path]) -> None:
        known = {f"{folder}{mark}" for folder in folders if folder != Path(folder.anchor) for mark in "/\\"}
        self._known = sorted(known, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for folder in self._known:
            text = text.replace(folder, "")
        return _PATH.sub(r"\1", text)
