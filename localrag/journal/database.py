"""The journal's SQLite file: its tables as numbered migrations, how it is opened and written, and what its cells hold.

`PRAGMA user_version` counts the migrations that a file has had. Each is one function, applied once, in one transaction together with
that count, so that a file is never between two versions. Never edit a migration that was released: add a new one.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localrag.errors import ConfigError
from localrag.files import create_private, disk_error, make_private_folder
from localrag.migrations import Migration, apply_missing, use_write_ahead_log, version


def create_tables(db: sqlite3.Connection) -> None:
    """Asks with their ledgers, the evidence that each was offered, and the cache of summaries."""
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
    """Runs of councils, and what was told of each."""
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
    """Conversations turn by turn, with their full text, and memories."""
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
    """The section that was called scaffold is called template."""
    old, new = '"name":"scaffold"', '"name":"template"'
    db.execute("UPDATE asks SET ledger = replace(ledger, ?, ?), sections = replace(sections, ?, ?)", (old, new, old, new))
    db.execute("UPDATE council_events SET event = replace(event, ?, ?)", (old, new))


MIGRATIONS: tuple[Migration, ...] = (create_tables, add_councils, add_conversations, rename_scaffold)


def migrate(db: sqlite3.Connection, path: Path, migrations: tuple[Migration, ...] = MIGRATIONS) -> None:
    """Applies the migrations that are missing. A file from a newer localrag is refused and left as it is (ConfigError)."""

    def newer(found: int) -> ConfigError:
        return ConfigError(
            f"The journal {path} has schema {found}, written by a newer localrag; this one knows schemas up to {len(migrations)}.",
            hint=f"Upgrade localrag, or move {path} away: the next ask begins a new journal.",
            schema=found,
            known_schema=len(migrations),
        )

    apply_missing(db, migrations, newer)


def storable(text: str) -> str:
    """Text as SQLite takes it. A file name that is no UTF-8 brings in half characters; each becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def json_of(data: object) -> str:
    """Data as JSON. ValueError for NaN and infinity, TypeError for a type that JSON lacks."""
    return storable(json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def object_of(text: str) -> dict[str, Any]:
    """The JSON object that was kept. ValueError or TypeError for what a damaged file put there."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"{text!r:.60} is no object")
    return found


_SAME_START_S = 10.0
"""The clock by which a process began can be set meanwhile."""


def began(pid: int) -> float:
    """When a process began, in seconds since the epoch; 0 where that is not to be known."""
    import psutil  # noqa: PLC0415  # weight

    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, OSError, ValueError, OverflowError):
        return 0.0


def runs(pid: int, since: float) -> bool:
    """Whether that process still runs, and is not another one that has its number now."""
    return bool(now := began(pid)) and abs(now - since) <= _SAME_START_S


WAIT_S = 30.0
"""How long a writer waits for another one."""


def connect(path: Path) -> sqlite3.Connection:
    """Opens the file, made if it is not there, with all its tables. ConfigError if it cannot be used."""
    with explained(path):
        make_private_folder(path.parent)
        create_private(path)  # its -wal and -shm files take its mode over
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
        if (known := disk_error(error, path)) is not None:
            raise ConfigError(f"The journal {path} cannot be used: {known.reason}.", hint=known.hint, **known.numbers) from error
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
    """Only what is wrong with the file itself is a reason to give it up: disk_errors.py has the rest."""
    name = kind.removeprefix("SQLITE_").split("_")[0]
    if name in {"", "CANTOPEN"}:
        return f"Check that {path} is a file in a folder. LOCALRAG_HOME moves the whole home."
    damaged = "It is damaged, or it is not a journal" if name == "NOTADB" else "It is damaged"
    return f"{damaged}: move {path} away, with any -wal and -shm file beside it. The next ask begins a new journal."
