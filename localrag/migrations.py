"""Numbered migrations of a SQLite file, each applied once, and the write-ahead log."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence

from localrag.errors import LocalragError

Migration = Callable[[sqlite3.Connection], None]


def version(db: sqlite3.Connection) -> int:
    """How many migrations the file has had."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def apply_missing(db: sqlite3.Connection, migrations: Sequence[Migration], newer: Callable[[int], LocalragError]) -> None:
    """Applies the migrations that are missing, each in one transaction. A file from a newer localrag is left as it is, and `newer` of
    its version is raised.
    """
    while (found := version(db)) < len(migrations):
        db.execute("BEGIN IMMEDIATE")
        try:
            if version(db) == found:  # else another process has just applied it
                migrations[found](db)
                db.execute(f"PRAGMA user_version = {found + 1}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
    if found > len(migrations):
        raise newer(found)


def use_write_ahead_log(db: sqlite3.Connection, *, wait_s: float) -> None:
    """Several processes can make the file at once, and SQLite refuses this step at once where it would wait for any other."""
    end = time.monotonic() + wait_s
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return
