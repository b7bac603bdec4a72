"""The tables of a knowledge base, as numbered migrations.

`PRAGMA user_version` counts the migrations that a file has had. Each is one function, applied once, in one transaction together with
that count, so that a file is never between two versions. A migration that was released is never edited: a change is a new one.
"""

from __future__ import annotations

import sqlite3

from localrag.errors import KnowledgeBaseError
from localrag.migrations import Migration, apply_missing


def create_tables(db: sqlite3.Connection) -> None:
    """Documents, their chunks, the chunks' vectors and full text, and the one row of state.

    `state.generation` grows by one with every writing transaction. Ids are AUTOINCREMENT: an id that a person has seen in a citation
    never comes to mean something else. The full text holds no copy of the words; triggers keep it to what `chunks` says.
    """
    statements = (
        """CREATE TABLE state (
            one INTEGER PRIMARY KEY CHECK (one = 1),
            generation INTEGER NOT NULL,
            embedder TEXT,                          -- the fingerprint; NULL until something is indexed
            dim INTEGER
        )""",
        "INSERT INTO state (one, generation) VALUES (1, 0)",
        """CREATE TABLE documents (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            path TEXT NOT NULL UNIQUE,              -- absolute, to read the file again
            source TEXT NOT NULL,                   -- as a person knows it
            sha256 TEXT NOT NULL,                   -- of the file's bytes
            num_bytes INTEGER NOT NULL,
            title TEXT NOT NULL,
            tags TEXT NOT NULL                      -- a JSON array of strings
        )""",
        """CREATE TABLE chunks (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            document_id INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
            ordinal INTEGER NOT NULL,
            start INTEGER NOT NULL,                 -- characters of the document's text, end exclusive
            "end" INTEGER NOT NULL,
            heading TEXT NOT NULL,
            text TEXT NOT NULL,
            UNIQUE (document_id, ordinal)
        )""",
        """CREATE TABLE vectors (
            chunk_id INTEGER PRIMARY KEY REFERENCES chunks (id) ON DELETE CASCADE,
            vector BLOB NOT NULL                    -- float32, little-endian, length 1
        )""",
        """CREATE VIRTUAL TABLE chunks_fts USING fts5 (
            heading, text, content = 'chunks', content_rowid = 'id', tokenize = 'porter unicode61 remove_diacritics 2'
        )""",
        """CREATE TRIGGER chunks_inserted AFTER INSERT ON chunks BEGIN
            INSERT INTO chunks_fts (rowid, heading, text) VALUES (new.id, new.heading, new.text);
        END""",
        """CREATE TRIGGER chunks_deleted AFTER DELETE ON chunks BEGIN
            INSERT INTO chunks_fts (chunks_fts, rowid, heading, text) VALUES ('delete', old.id, old.heading, old.text);
        END""",
    )
    for statement in statements:
        db.execute(statement)


MIGRATIONS: tuple[Migration, ...] = (create_tables,)


def migrate(db: sqlite3.Connection, migrations: tuple[Migration, ...] = MIGRATIONS) -> None:
    """Applies the migrations that are missing. A file from a newer localrag is refused and left as it is (KnowledgeBaseError)."""

    def newer(found: int) -> KnowledgeBaseError:
        return KnowledgeBaseError(
            f"This knowledge base has schema {found}, written by a newer localrag; this one knows schemas up to {len(migrations)}.",
            hint="Upgrade localrag, or index the documents into a knowledge base of another name.",
            schema=found,
            known_schema=len(migrations),
        )

    apply_missing(db, migrations, newer)
