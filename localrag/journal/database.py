"""The journal's SQLite file: its schema as numbered migrations, opening and transactions, and helpers for its cells.

`PRAGMA user_version` counts the migrations that a file has had. Each is one function, applied once, in one transaction together
with the count, so a file is never between two versions. Never edit a released migration: add a new one.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from localrag.errors import ConfigError
from localrag.files import Migration, apply_missing, create_private, disk_error, make_private_folder, prepare_sqlite, sqlite_transaction


def create_tables(db: sqlite3.Connection) -> None:
    """Create tables for asks with their ledgers, the evidence of each, and cached summaries."""
    statements = (
        """CREATE TABLE asks (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            session TEXT NOT NULL,
            command TEXT NOT NULL,
            model TEXT NOT NULL,
            model_sha256 TEXT,
            question TEXT NOT NULL,                 -- the first 10,000 characters
            started_at REAL NOT NULL,               -- seconds since the epoch
            window INTEGER NOT NULL,                -- tokens, as all counts below
            finish_reason TEXT NOT NULL,
            strategy TEXT NOT NULL,
            bound TEXT NOT NULL,                    -- what capped the window
            ledger TEXT NOT NULL,                   -- JSON, as in `ask --json`
            sections TEXT NOT NULL,                 -- a JSON array: what went into the negotiation, and its outcome
            prompt_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            timings TEXT NOT NULL                   -- JSON: seconds by name
        )""",
        "CREATE INDEX asks_by_session ON asks (session, id, started_at)",
        """CREATE TABLE evidence (
            ask_id INTEGER NOT NULL REFERENCES asks (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,              -- in the order in which it was offered
            label TEXT NOT NULL,
            source TEXT NOT NULL,
            kb TEXT NOT NULL,
            chunk_id INTEGER NOT NULL,
            tokens INTEGER NOT NULL,
            relevance REAL,
            tier TEXT NOT NULL,
            level TEXT NOT NULL,
            state TEXT NOT NULL CHECK (state IN ('used', 'shortened', 'omitted')),
            cited INTEGER NOT NULL,
            PRIMARY KEY (ask_id, position)
        ) WITHOUT ROWID""",
        """CREATE TABLE summaries (
            id INTEGER PRIMARY KEY AUTOINCREMENT,   -- the lowest is the oldest, whatever the clock says
            key TEXT NOT NULL UNIQUE,
            text TEXT NOT NULL,
            num_bytes INTEGER NOT NULL,
            created_at REAL NOT NULL
        )""",
    )
    for statement in statements:
        db.execute(statement)


def add_councils(db: sqlite3.Connection) -> None:
    """Create tables for council runs and their events."""
    statements = (
        """CREATE TABLE councils (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL,
            task TEXT NOT NULL,                     -- the first 10,000 characters
            about TEXT NOT NULL,                    -- JSON
            started_at REAL NOT NULL,               -- seconds since the epoch
            ended_at REAL,
            state TEXT NOT NULL CHECK (state IN ('running', 'decided', 'cancelled', 'failed')),
            pid INTEGER NOT NULL,                   -- of the process that holds it
            pid_started_at REAL NOT NULL
        )""",
        """CREATE TABLE council_events (
            council_id INTEGER NOT NULL REFERENCES councils (id) ON DELETE CASCADE,
            ordinal INTEGER NOT NULL,               -- in the order of telling, from 1
            event TEXT NOT NULL,                    -- JSON, as in `council --json`
            PRIMARY KEY (council_id, ordinal)
        )""",
    )
    for statement in statements:
        db.execute(statement)


def add_conversations(db: sqlite3.Connection) -> None:
    """Create tables for conversations, their turns with full text, and memories."""
    statements = (
        """CREATE TABLE conversations (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL UNIQUE,
            about TEXT NOT NULL,                    -- JSON: what it was held with
            created_at REAL NOT NULL,               -- seconds since the epoch, as all times below
            updated_at REAL NOT NULL
        )""",
        """CREATE TABLE turns (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            conversation_id INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
            question TEXT NOT NULL,
            answer TEXT NOT NULL,                   -- as far as it was written
            state TEXT NOT NULL CHECK (state IN ('running', 'done', 'stopped', 'failed')),
            about TEXT NOT NULL,                    -- JSON: sources, model, seed
            is_pinned INTEGER NOT NULL DEFAULT 0,
            is_undone INTEGER NOT NULL DEFAULT 0,   -- taken back: kept, and not part of the conversation any more
            began_at REAL NOT NULL,
            pid INTEGER NOT NULL,                   -- of the process that writes the answer
            pid_started_at REAL NOT NULL
        )""",
        "CREATE INDEX turns_by_conversation ON turns (conversation_id, id)",
        "CREATE VIRTUAL TABLE turns_fts USING fts5 (question, answer, tokenize = 'porter unicode61 remove_diacritics 2')",
        """CREATE TABLE memories (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            text TEXT NOT NULL,
            importance REAL NOT NULL CHECK (importance BETWEEN 0 AND 1),
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL
        )""",
    )
    for statement in statements:
        db.execute(statement)


def rename_scaffold(db: sqlite3.Connection) -> None:
    """Rename the section "scaffold" to "template"."""
    old, new = '"name":"scaffold"', '"name":"template"'
    db.execute("UPDATE asks SET ledger = replace(ledger, ?, ?), sections = replace(sections, ?, ?)", (old, new, old, new))
    db.execute("UPDATE council_events SET event = replace(event, ?, ?)", (old, new))


MIGRATIONS: tuple[Migration, ...] = (create_tables, add_councils, add_conversations, rename_scaffold)


def migrate(db: sqlite3.Connection, path: Path, migrations: tuple[Migration, ...] = MIGRATIONS) -> None:
    """Apply the missing migrations. Raises ConfigError for a file from a newer localrag, which stays unchanged."""

    def newer(schema: int) -> ConfigError:
        return ConfigError(
            f"The journal {path} has schema {schema}, written by a newer localrag; this version supports up to {len(migrations)}.",
            hint=f"Upgrade localrag, or move {path} away: the next ask starts a new journal.",
            schema=schema,
            known_schema=len(migrations),
        )

    apply_missing(db, migrations, newer)


def storable(text: str) -> str:
    """Make text storable in SQLite: lone surrogates, for example from file names that are not UTF-8, become question marks."""
    return text.encode("utf-8", "replace").decode()


def json_of(data: object) -> str:
    """Serialise data as JSON. Raises ValueError for NaN and infinity, TypeError for a type that JSON does not have."""
    return storable(json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def object_of(text: str) -> dict[str, Any]:
    """Parse a stored JSON object. Raises ValueError or TypeError for the contents of a damaged file."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError(f"{text!r:.60} is not an object")
    return data


_SAME_START_S = 10.0
"""Tolerance for the start time of a process, because the clock can be adjusted meanwhile."""


def began(pid: int) -> float:
    """Return when a process started, in seconds since the epoch; 0 if unknown."""
    import psutil  # noqa: PLC0415  # weight

    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, OSError, ValueError, OverflowError):
        return 0.0


def runs(pid: int, since: float) -> bool:
    """Tell whether the process is still running, and its pid has not been reused."""
    return bool(now := began(pid)) and abs(now - since) <= _SAME_START_S


WAIT_S = 30.0
"""How long a writer waits for another one, in seconds."""


def connect(path: Path) -> sqlite3.Connection:
    """Open the file, creating it with all its tables if necessary. Raises ConfigError if it cannot be used."""
    with explained(path):
        make_private_folder(path.parent)
        create_private(path)  # its -wal and -shm files get the same mode
        db = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
        try:
            prepare_sqlite(db, partial(migrate, path=path), wait_s=WAIT_S)
        except BaseException:
            db.close()
            raise
        return db


@contextmanager
def transaction(db: sqlite3.Connection, path: Path, kind: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE") -> Iterator[None]:
    """Run a transaction (localrag/files.py) and turn its errors into a ConfigError. A second writer waits for the first."""
    with explained(path), sqlite_transaction(db, kind):
        yield


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into a ConfigError with a hint."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:  # sqlite3 raises UnicodeDecodeError if a message quotes damaged text
        if (fault := disk_error(error, path)) is not None:
            raise ConfigError(f"The journal {path} cannot be used: {fault.reason}.", hint=fault.hint, **fault.numbers) from error
        kind = "SQLITE_CORRUPT" if isinstance(error, UnicodeDecodeError) else getattr(error, "sqlite_errorname", "") or ""
        raise ConfigError(f"The journal {path} cannot be used: {error}.", hint=_way_out(kind, path)) from error


@contextmanager
def legible(path: Path) -> Iterator[None]:
    """Turn errors in reading rows into a ConfigError: a damaged file can contain anything."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"The journal {path} has a row that cannot be read: {error}.", hint=_way_out("SQLITE_CORRUPT", path)) from error


def _way_out(kind: str, path: Path) -> str:
    """Return a hint. Only damage to the file itself is a reason to give it up; disk_error covers other causes."""
    name = kind.removeprefix("SQLITE_").split("_")[0]
    if name in {"", "CANTOPEN"}:
        return f"Check that {path} is a file in a folder. LOCALRAG_HOME moves the whole home."
    damaged = "It is damaged, or it is not a journal" if name == "NOTADB" else "It is damaged"
    return f"{damaged}: move {path} away, with any -wal and -shm file next to it. The next ask starts a new journal."
