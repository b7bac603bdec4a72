"""Council runs, stored in the journal's file. Each event is on disk as soon as it happens."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from localrag.journal.database import began, explained, json_of, legible, object_of, runs, storable, transaction

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
        told = "SELECT event FROM council_events WHERE council_id = ? ORDER BY ordinal"
        with transaction(self._db, self._path, "DEFERRED"):
            row = self._db.execute(f"SELECT {_COLUMNS}, about FROM councils WHERE id = ?", (council_id,)).fetchone()  # noqa: S608  # our own words
            events = self._db.execute(told, (council_id,)).fetchall() if row else []
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
