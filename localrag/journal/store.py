"""Council runs, stored in the journal's file. Each event is on disk as soon as it happens."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Self, get_args

from localrag.budget import Budget, Ledger
from localrag.journal.conversations import Conversations, Memories
from localrag.journal.database import began, connect, explained, json_of, legible, object_of, runs, storable, transaction

MAX_TASK_CHARS = 10_000
Ending = Literal["decided", "cancelled", "failed"]
CouncilState = Literal["running", "interrupted", "decided", "cancelled", "failed"]
""""interrupted": the process ended before the run did."""

_COLUMNS = "id, name, task, started_at, ended_at, state, pid, pid_started_at"


@dataclass(frozen=True, slots=True, kw_only=True)
class CouncilRow:
    """A run in a list. Times are in seconds since the epoch; `ended_at` is None for a run that is running or was interrupted."""

    id: int
    name: str
    task: str
    started_at: float
    ended_at: float | None
    state: CouncilState

    def to_dict(self) -> dict[str, object]:
        """Return the run in `--json` output."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCouncil(CouncilRow):
    """A run with its settings (`about`) and all its events, in order."""

    about: Mapping[str, Any]
    events: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, object]:
        head = {name: getattr(self, name) for name in ("id", "name", "task", "about", "state", "started_at", "ended_at")}
        return {**head, "events": list(self.events)}


class Councils:
    """Council runs by id. File errors are raised as ConfigError."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    def begin(self, name: str, task: str, about: Mapping[str, Any]) -> int:
        """Store a new run of this process and return its id. Only the first 10,000 characters of the task are stored."""
        pid = os.getpid()
        values = (storable(name), storable(task[:MAX_TASK_CHARS]), json_of(_plain(about)), time.time(), pid, began(pid))
        statement = "INSERT INTO councils (name, task, about, started_at, pid, pid_started_at, state) VALUES (?, ?, ?, ?, ?, ?, 'running')"
        with transaction(self._db, self._path):
            return int(self._db.execute(statement, values).lastrowid or 0)

    def add(self, council_id: int, event: Mapping[str, Any]) -> None:
        """Append an event; NaN and infinity become null. It is on disk when this returns. Raises ConfigError for an unknown run."""
        statement = (
            "INSERT INTO council_events (council_id, ordinal, event) "
            "SELECT ?, 1 + coalesce(max(ordinal), 0), ? FROM council_events WHERE council_id = ?"
        )
        text = json_of(_plain(event))
        with transaction(self._db, self._path):
            self._db.execute(statement, (council_id, text, council_id))

    def end(self, council_id: int, state: str) -> None:
        """End a run. A run that has already ended does not change. Raises ValueError, a bug in localrag, for a state that is not
        an Ending.
        """
        if state not in get_args(Ending):
            raise ValueError(f"a council does not end {state}")
        statement = "UPDATE councils SET state = ?, ended_at = ? WHERE id = ? AND state = 'running'"
        with transaction(self._db, self._path):
            self._db.execute(statement, (state, time.time(), council_id))

    def get(self, council_id: int) -> StoredCouncil | None:
        """Return the run with all its events so far; None for an unknown id."""
        statement = "SELECT event FROM council_events WHERE council_id = ? ORDER BY ordinal"
        with transaction(self._db, self._path, "DEFERRED"):
            row = self._db.execute(f"SELECT {_COLUMNS}, about FROM councils WHERE id = ?", (council_id,)).fetchone()  # noqa: S608  # our own words
            events = self._db.execute(statement, (council_id,)).fetchall() if row else []
        if row is None:
            return None
        with legible(self._path):
            return StoredCouncil(**_fields(row[:-1]), about=object_of(row[-1]), events=tuple(object_of(text) for (text,) in events))

    def last(self, num: int) -> list[CouncilRow]:
        """Return the last `num` runs, newest last."""
        statement = f"SELECT {_COLUMNS} FROM councils ORDER BY id DESC LIMIT ?"  # noqa: S608  # our own words
        with explained(self._path):
            rows = self._db.execute(statement, (max(0, num),)).fetchall()
        with legible(self._path):
            return [CouncilRow(**_fields(row)) for row in reversed(rows)]


def _fields(row: tuple[Any, ...]) -> dict[str, Any]:
    """Return the cells of a row by name. Raises TypeError for the contents of a damaged file."""
    council_id, name, task, started_at, ended_at, state, pid, pid_started_at = row
    if not (isinstance(name, str) and isinstance(task, str)) or state not in get_args(CouncilState):
        raise TypeError(f"run {council_id} is {name!r:.60}, {state!r:.60}")
    if state == "running" and not runs(int(pid), float(pid_started_at)):
        state = "interrupted"
    times = {"started_at": float(started_at), "ended_at": None if ended_at is None else float(ended_at)}
    return {"id": int(council_id), "name": name, "task": task, "state": state, **times}


def _plain(value: object) -> object:
    """Convert any value to JSON: numbers that are not finite become null, unknown types their text."""
    match value:
        case str() | bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(each) for each in value]
    item = getattr(value, "item", None)  # a numpy scalar
    return _plain(item()) if callable(item) else str(value)


State = Literal["used", "shortened", "omitted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """A section as it entered the negotiation, with percentages converted to tokens, and the tokens that it was allotted.

    `max` is None for a section without a limit. Changes made by packing are in the ledger. Raises TypeError for a value that is
    not a number.
    """

    name: str
    basis: int
    min: int
    max: int | None
    grow: float
    shrink: float
    allotted: int

    def __post_init__(self) -> None:
        if not all(isinstance(each, int | float) for each in (self.basis, self.min, self.max or 0, self.grow, self.shrink, self.allotted)):
            raise TypeError(f"a section must be described by numbers, not by {self}")


def allotments(budget: Budget) -> tuple[Allotment, ...]:
    """Return a negotiation and its outcome, section by section."""
    return tuple(
        Allotment(
            name=item.name,
            basis=item.basis,
            min=item.min,
            max=item.max,
            grow=item.grow,
            shrink=item.shrink,
            allotted=budget.allocations[item.name],
        )
        for item in budget.items
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRecord:
    """A passage offered to the prompt. `tokens` is what it takes in the prompt or, if omitted, would have taken.

    `label` is its name in that answer, such as `KB#12`; `kb` and `chunk_id` identify it permanently. `relevance`, `tier` and
    `level` are None or empty if unknown. Raises ValueError, a bug in localrag, for a relevance that is not finite.
    """

    label: str
    source: str
    kb: str
    chunk_id: int
    tokens: int
    relevance: float | None = None
    tier: str = ""
    level: str = ""
    state: State = "used"
    cited: bool = False

    def __post_init__(self) -> None:
        if self.relevance is not None and not math.isfinite(self.relevance):
            raise ValueError(f"the relevance of {self.label} is {self.relevance}")

    @property
    def is_in_prompt(self) -> bool:
        return self.state != "omitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRecord:
    """An ask to store. `started_at` is in seconds since the epoch, `timings` are seconds by name.

    `strategy` says how excess content was handled, `bound` which limit determined the window. Only the first 10,000 characters
    of a question are stored.
    """

    session: str
    command: str
    model: str
    model_sha256: str | None
    question: str
    started_at: float
    window: int
    finish_reason: str
    strategy: str
    bound: str
    ledger: Ledger
    sections: Sequence[Allotment]
    evidence: Sequence[EvidenceRecord] = ()
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)

    @property
    def utilization(self) -> float:
        """The share of the window used by prompt and answer, 0 to 1."""
        return (self.prompt_tokens + self.completion_tokens) / self.window if self.window else 0.0

    @property
    def efficiency(self) -> float | None:
        """The share of the evidence in the prompt, in tokens, that the answer cites, 0 to 1; None without evidence."""
        total = sum(each.tokens for each in self.evidence if each.is_in_prompt)
        return sum(each.tokens for each in self.evidence if each.is_in_prompt and each.cited) / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAsk(AskRecord):
    """A stored ask. Ids grow in the order of recording and are never reused."""

    id: int

    def to_dict(self) -> dict[str, object]:
        """Return the ask in `--json` output."""
        names = (
            "id",
            "session",
            "command",
            "model",
            "model_sha256",
            "question",
            "started_at",
            "window",
            "finish_reason",
            "strategy",
            "bound",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "usage": {name: getattr(self, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")},
            "utilization": self.utilization,
            "efficiency": self.efficiency,
            "ledger": self.ledger.to_dict(),
            "sections": [asdict(each) for each in self.sections],
            "evidence": [asdict(each) for each in self.evidence],
            "timings": dict(self.timings),
        }


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session: its number of asks, and the start of the first and the last, in seconds since the epoch."""

    name: str
    num_asks: int
    first_at: float
    last_at: float


MAX_BYTES = 64 * 1024 * 1024
"""Maximum size of all cached text; the oldest is evicted first."""


class Summaries:
    """A cache of texts by key. File errors are raised as ConfigError."""

    def __init__(self, db: sqlite3.Connection, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._db = db
        self._path = path
        self._max_bytes = max_bytes

    def get(self, key: str, max_age_s: float | None = None) -> str | None:
        """Return the text under that key, unless it is older than `max_age_s` seconds; None if there is none."""
        with explained(self._path), legible(self._path):
            row = self._db.execute("SELECT text, created_at FROM summaries WHERE key = ?", (storable(key),)).fetchone()
            if row is None or (max_age_s is not None and time.time() - float(row[1]) > max_age_s):
                return None
            return str(row[0])

    def put(self, key: str, text: str) -> None:
        """Store a text, replacing any other under the same key."""
        text = storable(text)
        with transaction(self._db, self._path):
            self._db.execute(
                "INSERT OR REPLACE INTO summaries (key, text, num_bytes, created_at) VALUES (?, ?, ?, ?)",
                (storable(key), text, len(text.encode()), time.time()),
            )
            total = self._db.execute("SELECT sum(num_bytes) FROM summaries").fetchone()[0]
            if total > self._max_bytes:
                self._db.execute(
                    "DELETE FROM summaries WHERE id IN (SELECT id FROM "
                    "(SELECT id, sum(num_bytes) OVER (ORDER BY id DESC) AS total FROM summaries) WHERE total > ?)",
                    (self._max_bytes,),
                )


FILE_NAME = "journal.sqlite"
MAX_QUESTION_CHARS = 10_000

_PLAIN: dict[str, type] = {
    "session": str, "command": str, "model": str, "model_sha256": str, "question": str, "started_at": float, "window": int,
    "finish_reason": str, "strategy": str, "bound": str, "prompt_tokens": int, "completion_tokens": int, "cached_tokens": int,
}  # fmt: skip
_JSON = ("ledger", "sections", "timings")
_EVIDENCE: dict[str, type] = {
    "label": str, "source": str, "kb": str, "chunk_id": int, "tokens": int, "relevance": float, "tier": str, "level": str,
    "state": str, "cited": int,
}  # fmt: skip
_NULLABLE = ("model_sha256", "relevance")


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608  # names written above


_INSERT_ASK = _insert("asks", (*_PLAIN, *_JSON))
_INSERT_EVIDENCE = _insert("evidence", ("ask_id", "position", *_EVIDENCE))


class Journal:
    """One journal file. All file errors are raised as ConfigError with a hint. Use it only in the thread that opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = connect(path)

    @cached_property
    def summaries(self) -> Summaries:
        return Summaries(self._db, self.path)

    @cached_property
    def conversations(self) -> Conversations:
        return Conversations(self._db, self.path)

    @cached_property
    def memories(self) -> Memories:
        return Memories(self._db, self.path)

    @cached_property
    def councils(self) -> Councils:
        return Councils(self._db, self.path)

    @classmethod
    def open(cls, home: Path) -> Self:
        """Open the journal of a home, creating folder and file if necessary."""
        return cls(home / FILE_NAME)

    def record(self, entry: AskRecord) -> int:
        """Store an ask, completely or not at all, and return its id. Raises ValueError, a bug in localrag, for a time that is not
        finite.
        """
        entry = replace(entry, question=entry.question[:MAX_QUESTION_CHARS])
        plain = [_cell(kind, getattr(entry, name)) for name, kind in _PLAIN.items()]
        objects = (entry.ledger.to_dict(), [asdict(each) for each in entry.sections], {name: float(s) for name, s in entry.timings.items()})
        evidence = [[_cell(kind, getattr(each, name)) for name, kind in _EVIDENCE.items()] for each in entry.evidence]
        with transaction(self._db, self.path):
            ask_id = int(self._db.execute(_INSERT_ASK, [*plain, *map(json_of, objects)]).lastrowid or 0)
            self._db.executemany(_INSERT_EVIDENCE, ((ask_id, at, *row) for at, row in enumerate(evidence)))
        return ask_id

    def asks(self, session: str | None = None, last: int | None = None) -> list[StoredAsk]:
        """Return the last `last` asks (None: all), of one session or of all, in the order of recording, newest last."""
        where = "" if session is None else " WHERE session = ?"
        clause = f"FROM asks{where} ORDER BY id DESC LIMIT ?"
        evidence = f"SELECT ask_id, {', '.join(_EVIDENCE)} FROM evidence WHERE ask_id IN (SELECT id {clause}) ORDER BY ask_id, position"  # noqa: S608  # our own words
        values = [*([] if session is None else [storable(session)]), -1 if last is None else max(0, last)]
        with transaction(self._db, self.path, "DEFERRED"):
            rows = self._db.execute(f"SELECT id, {', '.join((*_PLAIN, *_JSON))} {clause}", values).fetchall()
            evidence_rows = self._db.execute(evidence, values).fetchall()
        with legible(self.path):
            by_ask = {ask_id: tuple(_evidence(row) for row in group) for ask_id, group in groupby(evidence_rows, key=lambda row: row[0])}
            return [_ask(row, by_ask.get(row[0], ())) for row in reversed(rows)]

    def sessions(self) -> list[SessionRow]:
        """Return all sessions, the one with the newest ask last."""
        statement = "SELECT session, count(*), min(started_at), max(started_at) FROM asks GROUP BY session ORDER BY max(id)"
        with explained(self.path), legible(self.path):
            return [SessionRow(str(name), int(num), float(first), float(last)) for name, num, first, last in self._db.execute(statement)]

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cell(kind: type, value: Any) -> object:  # noqa: ANN401  # a field of a record
    """Convert a value for SQLite: numbers may come from numpy, texts from file names."""
    return value if value is None else storable(value) if kind is str else kind(value)


def _ask(row: Sequence[Any], evidence: tuple[EvidenceRecord, ...]) -> StoredAsk:
    ask_id, cells = row[0], _typed(_PLAIN, row[1 : 1 + len(_PLAIN)])
    ledger, sections, timings = (json.loads(each) for each in row[-len(_JSON) :])
    return StoredAsk(
        id=ask_id,
        **cells,
        ledger=Ledger.from_dict(ledger),
        sections=tuple(Allotment(**each) for each in sections),
        evidence=evidence,
        timings={str(name): float(seconds) for name, seconds in timings.items()},
    )


def _evidence(row: Sequence[Any]) -> EvidenceRecord:
    cells = _typed(_EVIDENCE, row[1:])
    return EvidenceRecord(**cells | {"cited": bool(cells["cited"])})


def _typed(columns: Mapping[str, type], row: Sequence[Any]) -> dict[str, Any]:
    """Return cells by column. SQLite returns whatever a damaged file contains, so types are checked (TypeError)."""
    cells = dict(zip(columns, row, strict=True))
    for name, kind in columns.items():
        if not isinstance(cells[name], kind) and not (cells[name] is None and name in _NULLABLE):
            raise TypeError(f"{name} is {cells[name]!r:.60}")
    return cells
