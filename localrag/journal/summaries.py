"""Summaries that were written once and are kept, in the journal's file."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from localrag.journal.database import explained, legible, transaction
from localrag.journal.rows import storable

MAX_BYTES = 64 * 1024 * 1024
"""How much text is kept; beyond it, the oldest goes first."""


class Summaries:
    """Text by key. Failures of the file arrive as ConfigError."""

    def __init__(self, db: sqlite3.Connection, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._db = db
        self._path = path
        self._max_bytes = max_bytes

    def get(self, key: str, max_age_s: float | None = None) -> str | None:
        """The text that was put under that key, unless it is older than `max_age_s` seconds; None if there is none."""
        with explained(self._path), legible(self._path):
            row = self._db.execute("SELECT text, created_at FROM summaries WHERE key = ?", (storable(key),)).fetchone()
            if row is None or (max_age_s is not None and time.time() - float(row[1]) > max_age_s):
                return None
            return str(row[0])

    def put(self, key: str, text: str) -> None:
        """Keeps a text in place of what was under that key."""
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
