"""How the journal's SQLite file is opened and written to, and what its failures are called."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localrag.errors import ConfigError
from localrag.journal.schema import migrate
from localrag.migrations import use_write_ahead_log, version

WAIT_S = 30.0
"""How long a writer waits for another one."""


def connect(path: Path) -> sqlite3.Connection:
    """Opens the file, made if it is not there, with all its tables. ConfigError if it cannot be used."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
        try:
            if version(db) == 0:  # new, or its maker was killed; the journal mode stays with the file
                use_write_ahead_log(db, wait_s=WAIT_S)
            migrate(db, path)
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            db.close()
            raise
        return db


@contextmanager
def transaction(db: sqlite3.Connection, path: Path, kind: str = "IMMEDIATE") -> Iterator[None]:
    """All or nothing; a second writer waits for the first. DEFERRED is one snapshot for all reads inside."""
    with explained(path):
        db.execute(f"BEGIN {kind}")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns what SQLite and the file system say into an error that a person can act on."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:  # the last is what sqlite3 raises where a message quotes damaged text
        kind = "SQLITE_CORRUPT" if isinstance(error, UnicodeDecodeError) else getattr(error, "sqlite_errorname", "") or ""
        raise ConfigError(f"The journal {path} cannot be used: {error}.", hint=_way_out(kind, path)) from error


@contextmanager
def legible(path: Path) -> Iterator[None]:
    """Around what makes sense of rows that were read: a damaged file can hold anything."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"The journal {path} holds a row that cannot be read: {error}.", hint=_way_out("SQLITE_CORRUPT", path)) from error


def _way_out(kind: str, path: Path) -> str:
    move = f"move {path} away, with any -wal and -shm file beside it: the next ask begins a new journal."
    name = kind.removeprefix("SQLITE_").split("_")[0]
    return {
        "BUSY": f"Another localrag is writing to it. Wait for that one to end and try again; else {move}",
        "FULL": "The disk is full. Free some space and try again.",
        "NOTADB": f"It is damaged, or it is no journal: {move}",
        "CORRUPT": f"It is damaged: {move}",
    }.get(name, f"Check that it is a file that can be written to, or {move} LOCALRAG_HOME moves the whole home.")
