"""The SQLite file of a knowledge base: its schema as numbered migrations, opening, transactions, checks, and its errors.

`PRAGMA user_version` is the number of migrations applied to a file. Each migration is a function that is applied once, in one transaction
together with that number, so that a file is never between two versions. A released migration is never edited; a change is a new migration.

With a write-ahead log and `synchronous = FULL`, commits survive a crash of the process or the machine. A second writer waits for the
first.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from localrag.errors import KnowledgeBaseBusyError, KnowledgeBaseError
from localrag.files import (
    Migration,
    apply_missing,
    create_private,
    disk_error,
    file_error,
    locked,
    make_private_folder,
    prepare_sqlite,
    sqlite_transaction,
)
from localrag.kb.filters import folded
from localrag.text.languages import LANGUAGES, language_of, stemmed
from localrag.text.terms import CJK, spaced

CJK_GLOB = f"*{CJK.pattern}*"
"""Matches text with Chinese, Japanese or Korean characters. Part of the schema, so changing it takes a new migration."""


def embedded(heading: str, text: str) -> str:
    """Return the text to embed for a chunk: the heading path on a line of its own, then the text."""
    return f"{heading}\n{text}" if heading else text


def embedded_sha256(heading: str, text: str) -> bytes:
    """Return the digest that identifies a chunk."""
    return hashlib.sha256(embedded(heading, text).encode("utf-8", "surrogatepass")).digest()


def create_tables(db: sqlite3.Connection) -> None:
    """Create the tables of documents, chunks, vectors and full text, and the single row of state.

    `state.generation` grows by one with every writing transaction. Ids are AUTOINCREMENT, so that an id cited to a person is never reused.
    The full-text index stores no copy of the text; triggers keep it in step with `chunks`.
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


_FIELDS = (
    """CREATE TABLE fields (
        document_id INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
        key TEXT NOT NULL,                      -- "tag", and what a file says of itself: "author", "date" …
        value TEXT NOT NULL,
        origin TEXT NOT NULL CHECK (origin IN ('file', 'rule', 'given')),
        PRIMARY KEY (document_id, key, value, origin)
    ) WITHOUT ROWID""",
    "CREATE INDEX fields_by_key ON fields (key, value)",
    "INSERT OR IGNORE INTO fields SELECT d.id, 'tag', t.value, 'file' FROM documents d, json_each(d.tags) t",
    "ALTER TABLE documents DROP COLUMN tags",
)
"""Adds fields, which filters match."""

_KNOWN_AGAIN = (
    "ALTER TABLE documents ADD COLUMN mtime_ns INTEGER",  # NULL: unknown, so the file is read to see whether it changed
    "ALTER TABLE documents ADD COLUMN cutter INTEGER NOT NULL DEFAULT 0",  # version of the code that read and cut it
    "ALTER TABLE chunks ADD COLUMN place TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE chunks ADD COLUMN sha256 BLOB NOT NULL DEFAULT x''",  # digest of the embedded text
    "UPDATE chunks SET sha256 = embedded_sha256(heading, text)",
    "CREATE INDEX chunks_by_sha256 ON chunks (sha256)",
)
"""Adds columns that recognise unchanged documents and chunks, and the place of a chunk in its file."""

_FEEDBACK = (
    """CREATE TABLE feedback (
        chunk_id INTEGER PRIMARY KEY REFERENCES chunks (id) ON DELETE CASCADE,
        retrieved INTEGER NOT NULL DEFAULT 0,
        supplied INTEGER NOT NULL DEFAULT 0,
        cited INTEGER NOT NULL DEFAULT 0,
        useful INTEGER NOT NULL DEFAULT 0,
        useless INTEGER NOT NULL DEFAULT 0
    )""",
)
"""Adds feedback on chunks."""

_IS_CJK, _NEW_IS_CJK, _OLD_IS_CJK = (f"{row}heading GLOB '{CJK_GLOB}' OR {row}text GLOB '{CJK_GLOB}'" for row in ("", "new.", "old."))
_CHARACTERS = (
    f"CREATE VIEW chunks_cjk AS SELECT id, spaced(heading) AS heading, spaced(text) AS text FROM chunks WHERE {_IS_CJK}",  # noqa: S608  # our own ranges
    """CREATE VIRTUAL TABLE chunks_characters USING fts5 (
        heading, text, content = 'chunks_cjk', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2'
    )""",
    "INSERT INTO chunks_characters (chunks_characters) VALUES ('rebuild')",
    f"""CREATE TRIGGER chunks_cjk_inserted AFTER INSERT ON chunks WHEN {_NEW_IS_CJK} BEGIN
        INSERT INTO chunks_characters (rowid, heading, text) VALUES (new.id, spaced(new.heading), spaced(new.text));
    END""",  # noqa: S608  # our own ranges
    f"""CREATE TRIGGER chunks_cjk_deleted AFTER DELETE ON chunks WHEN {_OLD_IS_CJK} BEGIN
        INSERT INTO chunks_characters (chunks_characters, rowid, heading, text)
        VALUES ('delete', old.id, spaced(old.heading), spaced(old.text));
    END""",  # noqa: S608  # our own ranges
)
"""Adds an index of single characters. Chinese, Japanese and Korean have no spaces between words, so `chunks_fts` takes whole clauses for
words. Chunks with such text are also indexed character by character in `chunks_characters`. It reads them through a view, so that FTS5's
own integrity check and rebuild see the same text."""

_UNREAD = (
    """CREATE TABLE unread (
        path TEXT PRIMARY KEY,                  -- absolute
        num_bytes INTEGER NOT NULL,             -- of the file that could not be read, with the next two
        mtime_ns INTEGER NOT NULL,
        cutter INTEGER NOT NULL,
        reason TEXT NOT NULL
    ) WITHOUT ROWID""",
)
"""Adds the list of files without text, which are not read again until they change."""

_GENERATIONS = (
    "CREATE TABLE generations (generation INTEGER PRIMARY KEY, stamp INTEGER NOT NULL)",
    "INSERT INTO generations SELECT generation, random() >> 1 & 0x7fffffffffffffff FROM state",
)
"""Adds a random stamp for each recent generation, which distinguishes a file from its restored backup at the same generation."""


def add_fields_places_and_characters(db: sqlite3.Connection) -> None:
    """Add fields, places, digests, feedback and the characters index.

    Chunk ids increase over time and the vector of an id never changes: a chunk that is embedded again gets a new id.
    """
    for statement in (*_FIELDS, *_KNOWN_AGAIN, *_FEEDBACK, *_CHARACTERS, *_UNREAD, *_GENERATIONS):
        db.execute(statement)


def add_min_similarity(db: sqlite3.Connection) -> None:
    """Add the least cosine similarity of a relevant chunk for the embedder of this file; NULL if unknown."""
    db.execute("ALTER TABLE state ADD COLUMN min_similarity REAL")


_TEXTS = (
    """CREATE TABLE texts (
        document_id INTEGER PRIMARY KEY REFERENCES documents (id) ON DELETE CASCADE,
        id TEXT NOT NULL UNIQUE,                -- as whoever gave it knows it
        metadata TEXT NOT NULL,                 -- a JSON object
        text TEXT NOT NULL                      -- whole, as it was given
    )""",
    """CREATE TABLE entries (
        document_id INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
        entry BLOB NOT NULL,                    -- sha256 of one key of the metadata and its value
        PRIMARY KEY (document_id, entry)
    ) WITHOUT ROWID""",
    "CREATE INDEX entries_by_entry ON entries (entry)",
)


def add_texts(db: sqlite3.Connection) -> None:
    """Add documents that are texts instead of files. Their `path` is "text:" and the id; their `sha256` covers text and metadata."""
    for statement in _TEXTS:
        db.execute(statement)


def _words_of(row: str) -> str:
    """Return the SQL values of a row of `chunks_words`, made from a row of `chunks`."""
    words = (f"CASE {row}.language WHEN '' THEN {row}.{column} ELSE '' END" for column in ("heading", "text"))
    stems = (f"CASE {row}.language WHEN '' THEN '' ELSE stemmed({row}.{column}, {row}.language) END" for column in ("heading", "text"))
    return ", ".join((f"{row}.id", *words, *stems))


_COLUMNS = "heading, text, heading_stems, text_stems"
_ADD_WORDS = f"INSERT INTO chunks_fts (rowid, {_COLUMNS}) VALUES ({_words_of('new')});"  # noqa: S608  # our own names
_DELETE_WORDS = f"INSERT INTO chunks_fts (chunks_fts, rowid, {_COLUMNS}) VALUES ('delete', {_words_of('old')});"  # noqa: S608  # our own names
_DROP_WORDS = ("DROP TRIGGER chunks_inserted", "DROP TRIGGER chunks_deleted", "DROP TABLE chunks_fts")
_WORDS = (
    f"CREATE VIEW chunks_words (id, {_COLUMNS}) AS SELECT {_words_of('chunks')} FROM chunks",  # noqa: S608  # our own names
    f"""CREATE VIRTUAL TABLE chunks_fts USING fts5 (
        {_COLUMNS}, content = 'chunks_words', content_rowid = 'id', tokenize = 'porter unicode61 remove_diacritics 2'
    )""",
    "INSERT INTO chunks_fts (chunks_fts) VALUES ('rebuild')",
    *(
        f"CREATE TRIGGER chunks_{name} {event} ON chunks BEGIN {''.join(statements)} END"
        for name, event, statements in (
            ("inserted", "AFTER INSERT", (_ADD_WORDS,)),
            ("deleted", "AFTER DELETE", (_DELETE_WORDS,)),
            ("changed_language", "AFTER UPDATE OF language", (_DELETE_WORDS, _ADD_WORDS)),
        )
    ),
)


def add_languages(db: sqlite3.Connection) -> None:
    """Add the language of its document to each chunk, and index the stems of that language instead of the words.

    "" is English, several languages or an unknown one. Stems stand in columns of their own, so that a search can tell them from words, but
    in the same table, so that BM25 has one number of chunks and one mean length. The language stands with the chunk, since triggers can no
    longer read a document that is being deleted.
    """
    db.execute("ALTER TABLE chunks ADD COLUMN language TEXT NOT NULL DEFAULT ''")
    db.execute("CREATE INDEX chunks_by_language ON chunks (language) WHERE language != ''")
    rows = db.execute("SELECT document_id, text FROM chunks ORDER BY document_id, ordinal")
    languages = {document_id: language_of(text for _, text in chunks) for document_id, chunks in groupby(rows, key=itemgetter(0))}
    for statement in _DROP_WORDS:
        db.execute(statement)
    values = [(language, document_id) for document_id, language in languages.items() if language]
    db.executemany("UPDATE chunks SET language = ? WHERE document_id = ?", values)
    for statement in _WORDS:
        db.execute(statement)


MIGRATIONS: tuple[Migration, ...] = (create_tables, add_fields_places_and_characters, add_min_similarity, add_texts, add_languages)


def migrate(db: sqlite3.Connection, migrations: tuple[Migration, ...] = MIGRATIONS) -> None:
    """Apply the missing migrations. Raises KnowledgeBaseError for a file of a newer localrag, without changing the file."""

    def newer(schema: int) -> KnowledgeBaseError:
        return KnowledgeBaseError(
            f"This knowledge base has schema {schema}, written by a newer localrag. This version supports schemas up to {len(migrations)}.",
            hint="Upgrade localrag, or index the documents into a knowledge base of another name.",
            schema=schema,
            known_schema=len(migrations),
        )

    db.create_function("embedded_sha256", 2, embedded_sha256, deterministic=True)
    db.create_function("spaced", 1, spaced, deterministic=True)  # called by triggers, as the next one
    db.create_function("stemmed", 2, stemmed, deterministic=True)
    apply_missing(db, migrations, newer)


_BATCH = 500  # ids in one statement; SQLite takes 32,766 parameters, older builds 999

Row = tuple[Any, ...]

_MAX_PROBLEMS = 20
_MAX_NUMBER = 2**53  # largest id or count: the limit of exact integers in JSON, well below SQLite's last id, 2^63 - 1
_NUMBERS = {
    "state": ("generation", "coalesce(dim, 1)"),
    "documents": ("id", "num_bytes", "cutter"),
    "chunks": ("id",),
    "feedback": ("retrieved", "supplied", "cited", "useful", "useless"),
    "sqlite_sequence": ("seq",),
}
"""Columns that hold integers from 0 to _MAX_NUMBER. Ids begin at 1, but an id of 0 does no harm."""
_KNOWN_LANGUAGES = ", ".join(f"'{language}'" for language in ("", *sorted(LANGUAGES)))


class SqliteFile:
    """A connection to a file with the current schema. Failures of SQLite are raised as KnowledgeBaseErrors with a hint."""

    def __init__(self, path: Path, *, create: bool, wait_s: float) -> None:
        """Open a file and migrate it. With `create`, a missing file and its folder are created. A writer waits up to `wait_s` seconds."""
        self._path = path
        if create:
            make_folder(path.parent)
        with explained(path):
            if create:
                create_private(path)  # its -wal and -shm files inherit the mode
            mode = "rwc" if create else "rw"
            self.connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=wait_s, isolation_level=None)
            try:
                prepare_sqlite(self.connection, migrate, wait_s=wait_s)
                self.connection.create_function("folded", 1, folded, deterministic=True)
            except BaseException:
                self.connection.close()
                raise

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read from one snapshot."""
        with explained(self._path):
            self.connection.execute("BEGIN")
            try:
                yield
            finally:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run one transaction, all or nothing. There is one writer at a time."""
        with explained(self._path), sqlite_transaction(self.connection):
            yield

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[Row]:
        """Run a statement and return all rows."""
        with explained(self._path):
            return self.connection.execute(statement, values).fetchall()

    def each(self, statement: str, values: Sequence[object] = ()) -> Iterator[Row]:
        """Run a statement and yield its rows."""
        with explained(self._path):
            yield from self.connection.execute(statement, values)

    def rows_in(self, statement: str, members: Sequence[object], *values: object) -> Iterator[Row]:
        """Run a statement that ends with IN, in batches for any number of `members`, and yield its rows. `values` precede them."""
        for at in range(0, len(members), _BATCH):
            batch = members[at : at + _BATCH]
            yield from self.rows(f"{statement} ({', '.join('?' * len(batch))})", (*values, *batch))

    def one(self, statement: str, values: Sequence[object] = ()) -> Any:  # noqa: ANN401  # a value as SQLite gives it
        """Run a statement and return the single value of its single row."""
        return self.rows(statement, values)[0][0]

    def problems(self) -> list[str]:
        """Return the distinct errors found by SQLite's checks, and numbers that localrag never writes."""
        db = self.connection
        try:
            problems = [line for (line,) in db.execute("PRAGMA integrity_check") if line != "ok"]
            if not problems:
                problems = [
                    f"a row of {table} refers to a missing row of {parent}"
                    for table, _, parent, _ in db.execute("PRAGMA foreign_key_check")
                ]
            if not problems:
                problems = [
                    f"a number in its table {table!r} is not one that localrag writes"
                    for table, columns in _NUMBERS.items()
                    if db.execute(f"SELECT 1 FROM {table} WHERE {' OR '.join(map(_cannot_be, columns))} LIMIT 1").fetchone()  # noqa: S608  # our own names
                ]
            if not problems and db.execute(f"SELECT 1 FROM chunks WHERE language NOT IN ({_KNOWN_LANGUAGES}) LIMIT 1").fetchone():  # noqa: S608  # as above
                problems = ["a chunk is in a language that localrag does not know"]
        except sqlite3.DatabaseError as error:
            problems = [str(error)]
        return list(dict.fromkeys(problems))[:_MAX_PROBLEMS]


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn failures of SQLite into KnowledgeBaseErrors about the file `path`, with a hint."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if SQLite's message repeats damaged text
        if (cause := disk_error(error, path)) is not None:
            message = f"The knowledge base file {path} cannot be used: {cause.reason}."
            raise KnowledgeBaseError(message, hint=cause.hint, **cause.numbers) from error
        kind = getattr(error, "sqlite_errorname", "") or ""
        raise KnowledgeBaseError(f"The knowledge base file {path} cannot be used: {error}.", hint=_way_out(kind)) from error


def make_folder(folder: Path) -> None:
    """Create a private folder and its parents. Raises KnowledgeBaseError if that fails."""
    try:
        make_private_folder(folder)
    except OSError as error:
        raise unwritable(f"Cannot create the folder {folder}", error, folder) from error


def unwritable(what: str, error: OSError, path: Path) -> KnowledgeBaseError:
    """Make the error for an action (`what`, such as "Cannot create the folder X") that the file system refused at `path`."""
    cause = file_error(error, path, hint=_way_out(""))
    return KnowledgeBaseError(f"{what}: {cause.reason}.", hint=cause.hint, **cause.numbers)


def _way_out(kind: str) -> str:
    """Return the hint for an error of SQLite by its name. `localrag.files.disk_error` covers errors of the disk."""
    name = kind.removeprefix("SQLITE_").split("_")[0]
    return {
        "NOTADB": "It is not a knowledge base, or it is damaged. Remove it (localrag kb remove) and index the documents again.",
        "CORRUPT": "It is damaged. Remove it (localrag kb remove) and index the documents again.",
    }.get(name, "Check that the folder exists and can be written to, or set LOCALRAG_HOME to one that can.")


def _cannot_be(column: str) -> str:
    return f"typeof({column}) != 'integer' OR {column} NOT BETWEEN 0 AND {_MAX_NUMBER}"


INDEX_WAIT_S = 30.0
"""Seconds that an indexer waits for another one to finish."""

_FILE = "index.lock"


@contextmanager
def taken(folder: Path, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the index lock of the knowledge base in `folder`, which is created if it is missing. The system frees it if the process dies.

    `on_wait` is called if another process holds the lock. KnowledgeBaseBusyError if it still does after `wait_s` seconds.
    """
    end = time.monotonic() + wait_s
    with ExitStack() as stack:
        while not _enter(stack, folder, max(0.0, end - time.monotonic()), on_wait):
            stack.close()
        yield


def _enter(stack: ExitStack, folder: Path, wait_s: float, on_wait: Callable[[], None] | None) -> bool:
    """Take the lock. Return False if the folder was removed meanwhile, which makes the lock useless."""
    make_folder(folder)
    path = folder / _FILE
    with suppress(FileNotFoundError):
        try:
            descriptor = stack.enter_context(locked(path, wait_s=wait_s, on_wait=on_wait))
            return os.path.samestat(os.fstat(descriptor), path.stat())
        except TimeoutError:
            raise KnowledgeBaseBusyError(
                f"Another localrag is indexing into knowledge base {folder.name!r}.",
                hint="Wait for it to finish, then run the same command again.",
                kb=folder.name,
            ) from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unwritable(f"Cannot write to the folder {folder}", error, path) from error
    return False
