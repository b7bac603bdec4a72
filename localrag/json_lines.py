"""Files of JSON objects, one a line, that somebody else wrote: each line bounded, read strictly, and refused by what is wrong with it."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localrag.errors import UsageError

_PIECE_BYTES = 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def check_regular(path: Path, hint: str) -> None:
    """UsageError unless it is a file that can be read; `hint` is the way out for what is no file."""
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        if is_file:
            path.open("rb").close()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.", hint="Check the path and its permissions.") from None
    if not is_file:
        raise UsageError(f"{path} is not a file.", hint=hint)


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Every line that is not blank, with its number from 1; None in place of one that is longer than `max_bytes`."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(max_bytes + 1):
            number += 1
            if len(raw) > max_bytes and not raw.endswith(b"\n"):
                while (rest := file.readline(_PIECE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
            elif text := (raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw).strip():
                yield number, text


def read_object(raw: bytes, like: str) -> dict[str, Any]:
    """The object in a line; `like` shows a good one. UsageError for what is no UTF-8 or no JSON, for a key twice, and for NaN."""
    hint = f"Write {like} on each line."
    try:
        row = json.loads(raw.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise UsageError(f"it is not UTF-8 text (byte {error.start}).") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not JSON: {str(error)[:200]}.", hint=hint) from None
    if not isinstance(row, dict):
        raise UsageError("it is not a JSON object.", hint=hint)
    return row


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key is there twice")
    return row
