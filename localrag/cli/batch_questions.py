"""The questions of a batch: a JSON object a line, each checked for itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from localrag.decoding import SamplingParams
from localrag.errors import UsageError
from localrag.json_lines import check_regular, read_lines, read_object
from localrag.session import Options, Request
from localrag.session.finding import MAX_DEPTH
from localrag.settings import MAX_TEXT_BYTES

Id = str | int

MAX_ID_CHARS = 1000
_LIKE = '{"id": 1, "question": "…"}'
_SAMPLING = {"max_tokens": (int,), "seed": (int,), "temperature": (int, float)}
_OPTIONS = {"system": (str,), "top_k": (int, str), "context_ratio": (int, float)}
_KINDS: dict[str, tuple[type, ...]] = {"id": (str, int), "question": (str,), **_SAMPLING, **_OPTIONS}
_SAID = {
    (str,): "a text",
    (int,): "a whole number",
    (int, float): "a number",
    (str, int): "a text or a whole number",
    (int, str): "a whole number or fit",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One line of IN: its number from 1, its id if it has a legible one, and a request or else what is wrong. `mark` tells whether
    the line still says what it said.
    """

    line: int
    id: Id | None
    mark: str
    request: Request | UsageError


def read_requests(path: Path, sampling: SamplingParams, options: Options) -> Iterator[Asked]:
    """Every line of IN that is not blank; `sampling` and `options` are in force where a line says nothing else."""
    for number, raw in read_lines(path, MAX_TEXT_BYTES):
        if raw is None:
            yield Asked(number, None, "", UsageError(f"Line {number} is longer than {MAX_TEXT_BYTES // 1024 // 1024} MiB.", line=number))
        else:
            yield _asked(number, raw, sampling, options)


def _asked(number: int, raw: bytes, sampling: SamplingParams, options: Options) -> Asked:
    known: Id | None = None
    try:
        row = read_object(raw, _LIKE)
        known = _id(row)
        request = _request(known, row, sampling, options)
    except UsageError as error:
        return Asked(number, known, "", UsageError(f"Line {number}: {error.message}", hint=error.hint, line=number))
    said = json.dumps({key: row[key] for key in sorted(row)}, separators=(",", ":"))
    return Asked(number, known, blake2b(said.encode(), digest_size=8).hexdigest(), request)


def _id(row: Mapping[str, Any]) -> Id:
    found = row.get("id")
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise UsageError("it has no id that is a text or a whole number." if "id" in row else "it has no id.")
    if isinstance(found, str) and not 0 < len(found) <= MAX_ID_CHARS:
        raise UsageError(f"an id has 1 to {MAX_ID_CHARS} characters, not {len(found)}.")
    if isinstance(found, int) and abs(found) >= 2**63:
        raise UsageError("an id that is a number has at most 63 bits.")
    return found


def _request(known: Id, row: Mapping[str, Any], sampling: SamplingParams, options: Options) -> Request:
    for key, value in row.items():
        kinds = _KINDS.get(key)
        if kinds is None:
            raise UsageError(f"there is no key {key[:80]!r}.", hint=f"The keys are {', '.join(_KINDS)}.")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UsageError(f"{key} is {_SAID[kinds]}, not {json.dumps(value)[:80]}.")
    if "question" not in row:
        raise UsageError("it has no question.")
    top_k = row.get("top_k", "fit")
    if top_k != "fit" and not (isinstance(top_k, int) and 1 <= top_k <= MAX_DEPTH):
        raise UsageError(f"top_k is {json.dumps(top_k)[:80]}, but must be 1 to {MAX_DEPTH}, or fit.")
    if not 0 <= row.get("context_ratio", 0) <= 1:
        raise UsageError(f"context_ratio is {row['context_ratio']}, but must be 0 to 1.")
    return Request(
        id=known,
        question=row["question"],
        sampling=replace(sampling, **{key: row[key] for key in _SAMPLING if key in row}),
        options={**options, **{key: row[key] for key in _OPTIONS if key in row}},  # type: ignore[typeddict-item]  # checked above
    )


@dataclass(slots=True)
class Questions:
    """What IN holds: how many lines, the mark of each good line by its id, and the lines whose id an earlier one has."""

    num_lines: int = 0
    marks: dict[Id, str] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    @classmethod
    def scan(cls, path: Path, sampling: SamplingParams, options: Options) -> Self:
        """Reads IN once; only ids and marks stay in memory. UsageError for a file that is none or cannot be read."""
        check_regular(path, "A batch is read from a file, so that it can go on when it was interrupted.")
        found = cls()
        for asked in read_requests(path, sampling, options):
            found.num_lines += 1
            if asked.id is not None and isinstance(asked.request, Request):
                if asked.id in found.marks:
                    found.repeated.add(asked.line)
                else:
                    found.marks[asked.id] = asked.mark
        return found
