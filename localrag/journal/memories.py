"""Facts that a person keeps across conversations, in the journal's file."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from localrag.errors import UsageError
from localrag.journal.database import explained, legible, storable, transaction

MAX_CHARS = 2000
DEFAULT_IMPORTANCE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMemory:
    """A fact. `importance` is 0 to 1; times are in seconds since the epoch."""

    id: int
    text: str
    importance: float
    created_at: float
    updated_at: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Memories:
    """Facts by id. Failures of the file arrive as ConfigError."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    def add(self, text: str, importance: float = DEFAULT_IMPORTANCE) -> int:
        """Keeps a fact and returns its id. UsageError for one that is empty or too long, and for an importance that is not 0 to 1."""
        text, importance, now = _checked(text), _share(importance), time.time()
        statement = "INSERT INTO memories (text, importance, created_at, updated_at) VALUES (?, ?, ?, ?)"
        with transaction(self._db, self._path):
            return int(self._db.execute(statement, (text, importance, now, now)).lastrowid or 0)

    def edit(self, memory_id: int, *, text: str | None = None, importance: float | None = None) -> None:
        """Changes what is given, and the time at which it was true last. UsageError as for `add`, and for an id that there is not."""
        new_text, new_importance = None if text is None else _checked(text), None if importance is None else _share(importance)
        statement = "UPDATE memories SET text = coalesce(?, text), importance = coalesce(?, importance), updated_at = ? WHERE id = ?"
        with transaction(self._db, self._path):
            _check_found(memory_id, self._db.execute(statement, (new_text, new_importance, time.time(), memory_id)).rowcount)

    def forget(self, memory_id: int) -> None:
        """UsageError for an id that there is not."""
        with transaction(self._db, self._path):
            _check_found(memory_id, self._db.execute("DELETE FROM memories WHERE id = ?", (memory_id,)).rowcount)

    def all(self) -> list[StoredMemory]:
        """Every fact, the oldest first."""
        with explained(self._path), legible(self._path):
            rows = self._db.execute("SELECT id, text, importance, created_at, updated_at FROM memories ORDER BY id").fetchall()
            return [
                StoredMemory(id=int(key), text=str(text), importance=float(weight), created_at=float(made), updated_at=float(changed))
                for key, text, weight, made, changed in rows
            ]


def _checked(text: str) -> str:
    text = " ".join(text.split())
    if not text or len(text) > MAX_CHARS:
        raise UsageError(f"A memory is a text of 1 to {MAX_CHARS} characters.", hint="Say it shorter, or in several.")
    return storable(text)


def _share(importance: float) -> float:
    if not 0 <= importance <= 1:
        raise UsageError(f"The importance of a memory is 0 to 1, not {importance!r}.")
    return float(importance)


def _check_found(memory_id: int, num_found: int) -> None:
    if not num_found:
        raise UsageError(f"There is no memory {memory_id}.", hint="To see them: localrag memory list")
