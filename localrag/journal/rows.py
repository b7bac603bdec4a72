"""What a cell of the journal's tables holds: text that SQLite takes, and JSON."""

from __future__ import annotations

import json
from typing import Any


def storable(text: str) -> str:
    """Text as SQLite takes it. A file name that is no UTF-8 brings in half characters; each becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def json_of(data: object) -> str:
    """Data as JSON. ValueError for a number that is none, TypeError for what JSON has no form for."""
    return storable(json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def object_of(text: str) -> dict[str, Any]:
    """The JSON object that was kept. ValueError or TypeError for what a damaged file put there."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"{text!r:.60} is no object")
    return found
