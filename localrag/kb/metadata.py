"""What somebody says of a text that he gives: any JSON object, bounded. It is kept whole.

Values are equal as JSON: numbers by their value, and all else to the letter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from localrag.errors import UsageError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32


def dumped(metadata: Mapping[str, Any]) -> str:
    """The JSON that is stored. UsageError for what is no JSON, too long or too deep."""
    check_depth(metadata)
    try:
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        num_bytes = len(text.encode())
    except (TypeError, ValueError) as error:  # NaN is a ValueError, and so is a lone half of a surrogate pair
        raise UsageError("The metadata is not JSON that can be kept.", hint="Numbers are finite, and text is Unicode.") from error
    if num_bytes > MAX_BYTES:
        raise UsageError(f"The metadata has {num_bytes} bytes, and the limit is {MAX_BYTES}.", num_bytes=num_bytes)
    return text


def check_depth(metadata: Mapping[str, Any]) -> None:
    """UsageError for objects and lists within each other to more than MAX_DEPTH."""
    level: list[Any] = [metadata]
    for _ in range(MAX_DEPTH):
        level = [inside for each in level for inside in _inside(each)]
    if any(isinstance(each, (dict, list)) for each in level):
        raise UsageError(f"The metadata is nested deeper than {MAX_DEPTH} levels.", limit=MAX_DEPTH)


def canonical(value: object) -> str:
    """JSON that is the same for equal values. UsageError for a number that is none."""
    try:
        return json.dumps(_plain(value), sort_keys=True, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise UsageError("The metadata is not JSON: its numbers are finite.") from None


def entry_of(key: str, value: str) -> bytes:
    """What a document is found by whose metadata has under `key` what is `value` in canonical JSON."""
    return hashlib.sha256(f"{canonical(key)}:{value}".encode()).digest()


def entries_of(metadata: Mapping[str, Any]) -> frozenset[bytes]:
    """What a document of this metadata is found by."""
    return frozenset(entry_of(key, canonical(value)) for key, value in metadata.items())


def _inside(value: object) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _plain(value: object) -> object:
    """With whole numbers as integers, however they were written."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
