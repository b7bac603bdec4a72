"""A small JSON object in the home: what was measured or found out once, by key."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path

from localrag.files import make_private_folder, open_private


class JsonCache:
    """At most `most` values by key, the one written last at the end; none are kept where `path` is None.

    A file that is damaged or cannot be read is empty, one that cannot be written stays as it is. It is replaced as a whole, so two
    processes cannot damage it; of two that write at once, one can lose its last entry.
    """

    def __init__(self, path: Path | None, *, most: int) -> None:
        self.path = path
        self.most = most

    def read(self) -> dict[str, object]:
        with suppress(OSError, ValueError, RecursionError):
            kept = {} if self.path is None else json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(kept, dict):
                return kept
        return {}

    def put(self, key: str, value: object) -> None:
        if self.path is None:
            return
        kept = self.read()
        kept.pop(key, None)
        kept[key] = value
        for old in list(kept)[: -self.most]:
            del kept[old]
        with suppress(OSError):
            replace_text(self.path, json.dumps(kept, separators=(",", ":")))


def replace_text(path: Path, text: str) -> None:
    """Have a file hold this text, or what it held before, and leave nothing beside it. OSError where it cannot be written."""
    part = path.with_name(f".{path.stem}-{os.getpid()}-{threading.get_ident()}")
    make_private_folder(path.parent)
    try:
        with open_private(part, "w", encoding="utf-8") as out:
            out.write(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
