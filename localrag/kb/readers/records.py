"""JSON and JSON Lines: each value on a line of its own after its path, each record a section."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeGuard

from localrag.kb.readers.base import Reading, Section, UnreadableError
from localrag.kb.readers.draft import Draft, one_line
from localrag.kb.readers.text import decode

MAX_DEPTH = 64
_SHORT_LIST_CHARS = 200
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def read(data: bytes) -> Reading:
    """A JSON file. An array of objects, at the top or inside objects, is a list of records: each is a section and a place.

    A file of several JSON values, a line each, is read as such; one that is no JSON (cut off, or with comments) is read as plain text.
    """
    text = decode(data, known=True)
    try:
        value = _parsed(text)
    except ValueError:
        return _lines(text)
    draft = Draft()
    records = [("", value)] if _is_table(value) else list(_write_plain(draft, value, ""))
    for path, items in records:
        for number, record in enumerate(items, start=1):
            draft.place("record", number)
            draft.heading(1, path, "")
            draft.write("\n".join(_flat(record, "")) + "\n\n")
    return draft.reading()


def read_lines(data: bytes) -> Reading:
    """A JSON Lines file: each line is a section and a place. A line that is no JSON stays as it is."""
    return _lines(decode(data, known=True))


def _lines(text: str) -> Reading:
    draft = Draft()
    num_values = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        draft.place("line", number)
        draft.heading(1, "", "")
        try:
            value = _parsed(line)
        except ValueError:
            draft.write(line.strip() + "\n\n")
        else:
            num_values += isinstance(value, dict | list)
            draft.write("\n".join(_flat(value, "")) + "\n\n")
    if not num_values:
        return Reading(text, (Section(0, len(text)),), own_lines=True)
    return draft.reading()


def _parsed(text: str) -> object:
    """ValueError if it is no JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UnreadableError(_TOO_DEEP) from None


def _is_table(value: object) -> TypeGuard[list[object]]:
    """Whether the whole file is a list of records: of objects, or of rows."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict | list) for item in value)


def _is_records(value: object) -> TypeGuard[list[object]]:
    return _is_table(value) and all(isinstance(item, dict) for item in value)


def _write_plain(draft: Draft, value: object, path: str, depth: int = 0) -> Iterator[tuple[str, list[object]]]:
    """Writes what is outside of records, and yields the lists of records with their paths."""
    if depth > MAX_DEPTH:
        raise UnreadableError(_TOO_DEEP)
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if _is_records(item):
                yield _joined(path, key), item
            else:
                yield from _write_plain(draft, item, _joined(path, key), depth + 1)
    else:
        for line in _flat(value, path, depth):
            draft.write(line + "\n")


def _flat(value: object, path: str, depth: int = 0) -> Iterator[str]:
    """The lines "path: value" of a value."""
    if depth > MAX_DEPTH:
        raise UnreadableError(_TOO_DEEP)
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, _joined(path, key), depth + 1)
    elif isinstance(value, list) and _holds_objects(value, depth):
        for number, item in enumerate(value, start=1):
            yield from _flat(item, _joined(path, str(number)), depth + 1)
    else:
        shown = _shown(value)
        yield f"{path}: {shown}" if path else shown


def _holds_objects(value: object, depth: int) -> bool:
    if depth > MAX_DEPTH:
        raise UnreadableError(_TOO_DEEP)
    return isinstance(value, dict) or (isinstance(value, list) and any(_holds_objects(item, depth + 1) for item in value))


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and not any(isinstance(item, list) for item in value):
        items = [_shown(item) for item in value]
        return (", " if sum(map(len, items)) < _SHORT_LIST_CHARS else "\n").join(items)
    return json.dumps(value, ensure_ascii=False)


def _joined(path: str, key: str) -> str:
    return f"{path}.{one_line(key)}" if path else one_line(key)
