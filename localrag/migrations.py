"""Numbered SQLite migrations, each applied once in one transaction, and write-ahead logging."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence

from localrag.errors import LocalragError

Migration = Callable[[sqlite3.Connection], None]


def version(db: sqlite3.Connection) -> int:
    """Return the number of migrations that the file has had."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def apply_missing(db: sqlite3.Connection, migrations: Sequence[Migration], newer: Callable[[int], LocalragError]) -> None:
    """Apply the missing migrations, each in one transaction.

    A file from a newer localrag is left unchanged, and the error that `newer` makes of its version is raised.
    """
    while (found := version(db)) < len(migrations):
        db.execute("BEGIN IMMEDIATE")
        try:
            if version(db) == found:  # otherwise another process has just applied it
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
    """Turn on write-ahead logging, waiting up to `wait_s` seconds for other processes.

    Several processes can create the file at the same time, and SQLite's busy timeout does not cover this step.
    """
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
