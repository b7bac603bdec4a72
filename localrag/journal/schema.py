"""The tables of the journal, as numbered migrations.

`PRAGMA user_version` counts the migrations that a file has had. Each is one function, applied once, in one transaction together with
that count, so that a file is never between two versions. A migration that was released is never edited: a change is a new one.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from localrag.errors import ConfigError
from localrag.migrations import Migration, apply_missing


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


MIGRATIONS: tuple[Migration, ...] = (create_tables, add_councils, add_conversations)


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
