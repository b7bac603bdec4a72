"""A knowledge base on a PostgreSQL server: its tables, in a schema of its own, and how it is opened, locked and removed.

Migrations are numbered. Each is applied once, in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from localrag.errors import KnowledgeBaseBusyError, KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb.names import MAX_NAME_CHARS, NAME, invalid_name, name_taken, not_found, parse_address
from localrag.kb.postgres.database import Database
from localrag.kb.postgres.search import PostgresIndex, index_problems, maintain_index, set_language
from localrag.kb.postgres.store import PostgresStore
from localrag.text.languages import language_of

_SCHEMA = "localrag_"
_CREATING = "tables"
_STATES = "SELECT nspname FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid WHERE relname = 'state'"

# Words are stemmed as in PostgreSQL's own "english" configuration, but stop words are kept, since a phrase may need them.
# localrag/kb/postgres/search.py prepares words and characters, separated by spaces only.
_CREATE = (
    "CREATE TEXT SEARCH DICTIONARY stems (TEMPLATE = pg_catalog.snowball, LANGUAGE = english)",
    "CREATE TEXT SEARCH CONFIGURATION words (COPY = pg_catalog.english)",
    "ALTER TEXT SEARCH CONFIGURATION words ALTER MAPPING REPLACE english_stem WITH stems",
    """CREATE TABLE state (
        one integer PRIMARY KEY CHECK (one = 1),
        version integer NOT NULL,
        generation bigint NOT NULL,             -- grows by one with every writing transaction
        embedder text,                          -- the fingerprint; NULL until something is indexed
        dim integer,
        ef_search integer,                      -- hnsw.ef_search for the graph of vectors; NULL without a graph
        recall double precision,                -- measured recall@10 for that ef_search
        num_measured bigint                     -- number of chunks at that measurement
    )""",
    "INSERT INTO state (one, version, generation) VALUES (1, 0, 0)",
    "CREATE TABLE generations (generation bigint PRIMARY KEY, stamp bigint NOT NULL)",
    "INSERT INTO generations VALUES (0, (random() * 9007199254740991)::bigint)",
    """CREATE TABLE documents (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        path text NOT NULL UNIQUE,              -- absolute, to read the file again
        source text NOT NULL,                   -- as a person knows it
        folded text NOT NULL,                   -- the source as patterns are compared with it
        sha256 text NOT NULL,                   -- of the file's bytes
        num_bytes bigint NOT NULL,
        title text NOT NULL,
        mtime_ns bigint,                        -- NULL: unknown, so the file is read to see whether it changed
        cutter integer NOT NULL                 -- version of the code that read and cut it
    )""",
    """CREATE TABLE unread (
        path text PRIMARY KEY,
        num_bytes bigint NOT NULL,
        mtime_ns bigint NOT NULL,
        cutter integer NOT NULL,
        reason text NOT NULL
    )""",
    """CREATE TABLE fields (
        document_id bigint NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
        key text NOT NULL,                      -- "tag", and what a file says of itself: "author", "date" …
        value text NOT NULL,
        folded text NOT NULL,                   -- the value as patterns are compared with it
        origin text NOT NULL CHECK (origin IN ('file', 'rule', 'given'))
    )""",
    "CREATE INDEX fields_by_document ON fields (document_id)",
    "CREATE INDEX fields_by_key ON fields (key)",
    """CREATE TABLE chunks (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        document_id bigint NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
        ordinal integer NOT NULL,
        "start" integer NOT NULL,               -- characters of the document's text, end exclusive
        "end" integer NOT NULL,
        place text NOT NULL,
        heading text NOT NULL,
        text text NOT NULL,
        sha256 bytea NOT NULL,                  -- of the embedded text
        words tsvector NOT NULL,
        characters tsvector,                    -- of chunks with Chinese, Japanese or Korean text
        UNIQUE (document_id, ordinal)
    )""",
    "CREATE INDEX chunks_by_sha256 ON chunks (sha256)",
    "CREATE INDEX chunks_words ON chunks USING gin (words)",
    "CREATE INDEX chunks_characters ON chunks USING gin (characters)",
    """CREATE TABLE vectors (
        chunk_id bigint PRIMARY KEY REFERENCES chunks (id) ON DELETE CASCADE,
        embedding vector NOT NULL               -- of length 1
    )""",
    """CREATE TABLE feedback (
        chunk_id bigint PRIMARY KEY REFERENCES chunks (id) ON DELETE CASCADE,
        retrieved bigint NOT NULL,
        supplied bigint NOT NULL,
        cited bigint NOT NULL,
        useful bigint NOT NULL,
        useless bigint NOT NULL
    )""",
)

# A document is a file of one machine. '' means any machine: the document was indexed before machines were recorded.
_ADD_MACHINES = (
    "ALTER TABLE documents ADD COLUMN machine text NOT NULL DEFAULT ''",
    "ALTER TABLE documents DROP CONSTRAINT documents_path_key",
    "ALTER TABLE documents ADD UNIQUE (path, machine)",
    "DELETE FROM unread",  # only a cache
    "ALTER TABLE unread ADD COLUMN machine text NOT NULL",
    "ALTER TABLE unread DROP CONSTRAINT unread_pkey",
    "ALTER TABLE unread ADD PRIMARY KEY (path, machine)",
)

_ADD_MIN_SIMILARITY = ("ALTER TABLE state ADD COLUMN min_similarity double precision",)  # least cosine of a relevant chunk; NULL: unknown

# Documents that are texts instead of files. Their machine is '', which means any.
_ADD_TEXTS = (
    """CREATE TABLE texts (
        document_id bigint PRIMARY KEY REFERENCES documents (id) ON DELETE CASCADE,
        id text NOT NULL UNIQUE,                -- as whoever gave it knows it
        metadata text NOT NULL,                 -- a JSON object
        text text NOT NULL                      -- whole, as it was given
    )""",
    """CREATE TABLE entries (
        document_id bigint NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
        entry bytea NOT NULL,                   -- sha256 of one key of the metadata and its value
        PRIMARY KEY (document_id, entry)
    )""",
    "CREATE INDEX entries_by_entry ON entries (entry)",
)


def _detect_languages(db: Database) -> None:
    for (document_id,) in db.rows("SELECT id FROM documents ORDER BY id"):
        texts = db.rows("SELECT text FROM chunks WHERE document_id = %s ORDER BY ordinal", (document_id,))
        set_language(db, document_id, language_of(text for (text,) in texts))


# The language of its document: "" is English, several languages or an unknown one. Stems of other languages are indexed instead of words.
_ADD_LANGUAGES = (
    "ALTER TABLE chunks ADD COLUMN language text COLLATE \"C\" NOT NULL DEFAULT ''",
    "CREATE INDEX chunks_by_language ON chunks (language) WHERE language != ''",
    _detect_languages,
)

MIGRATIONS: tuple[tuple[str | Callable[[Database], None], ...], ...] = (
    _CREATE,
    _ADD_MACHINES,
    _ADD_MIN_SIMILARITY,
    _ADD_TEXTS,
    _ADD_LANGUAGES,
)
"""The steps of each migration: statements and functions. A released migration is never edited; a change is a new migration."""


def schema_of(name: str) -> str:
    """Return the schema of the knowledge base `name`."""
    return f"{_SCHEMA}{name}"


def names_in(db: Database) -> list[str]:
    """Return the names of the knowledge bases in a database, sorted."""
    rows = db.rows(f"{_STATES} AND starts_with(nspname, %s)", (_SCHEMA,))
    return sorted(name.removeprefix(_SCHEMA) for (name,) in rows)


def enter(db: Database, name: str, *, create: bool = False) -> bool:
    """Enter the schema of a knowledge base and migrate its tables. Return False if it does not exist and `create` is not set.

    Raises KnowledgeBaseError if pgvector is not installed on the server, or if a newer localrag created the tables.
    """
    schema = schema_of(name)
    is_there = _is_there(db, schema)
    if not (is_there or create):
        return False
    if not is_there:
        with db.writing(_CREATING):
            if not _is_there(db, schema):  # otherwise another process has just created it
                _add_vectors(db)
                db.rows(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
                db.rows("SELECT set_config('search_path', %s, true)", (_path(db, schema),))
                _apply(db, MIGRATIONS[0])
                db.rows("UPDATE state SET version = 1")
    db.use(_path(db, schema))
    _migrate(db, schema)
    return True


def drop(db: Database, name: str) -> None:
    """Delete a knowledge base atomically."""
    with db.writing(schema_of(name)):
        db.rows(f'DROP SCHEMA "{schema_of(name)}" CASCADE')


def rename(db: Database, old: str, new: str) -> None:
    """Rename a knowledge base atomically. Raises KnowledgeBaseError if the new name is taken."""
    with db.writing(_CREATING, schema_of(old)):
        if _is_there(db, schema_of(new)):
            raise name_taken(new)
        db.rows(f'ALTER SCHEMA "{schema_of(old)}" RENAME TO "{schema_of(new)}"')


def _is_there(db: Database, schema: str) -> bool:
    return bool(db.rows(f"{_STATES} AND nspname = %s", (schema,)))


def _path(db: Database, schema: str) -> str:
    """Return the search path: this schema and the schema of pgvector."""
    rows = db.rows("SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE extname = 'vector'")
    if not rows:
        raise _no_vectors(db)
    return ", ".join(f'"{name}"' for name in (schema, rows[0][0]))


def _add_vectors(db: Database) -> None:
    available = db.rows("SELECT installed_version, current_setting('server_encoding') FROM pg_available_extensions WHERE name = 'vector'")
    if not available:
        raise _no_vectors(db)
    installed, encoding = available[0]
    if encoding != "UTF8":
        raise KnowledgeBaseError(
            f"The database of {db.address.shown} stores text as {encoding}, but a knowledge base needs UTF8.",
            hint="Create one with: createdb --encoding=UTF8 --template=template0 NAME",
        )
    if installed is None:
        try:
            db.rows("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
        except KnowledgeBaseError as error:
            raise _no_vectors(db) from error


def _no_vectors(db: Database) -> KnowledgeBaseError:
    return KnowledgeBaseError(
        f"The database of {db.address.shown} lacks pgvector, which stores the vectors.",
        hint="Install pgvector on the server, and have an administrator of the database run: CREATE EXTENSION vector",
    )


def _apply(db: Database, steps: Sequence[str | Callable[[Database], None]]) -> None:
    for step in steps:
        if callable(step):
            step(db)
        else:
            db.rows(step)


def _migrate(db: Database, schema: str) -> None:
    version = db.one("SELECT version FROM state")
    if version > len(MIGRATIONS):
        raise KnowledgeBaseError(
            f"This knowledge base has schema {version}, written by a newer localrag. "
            f"This version supports schemas up to {len(MIGRATIONS)}.",
            hint="Upgrade localrag, or index the documents into a knowledge base of another name.",
            schema=version,
            known_schema=len(MIGRATIONS),
        )
    while version < len(MIGRATIONS):
        with db.writing(schema):
            if db.one("SELECT version FROM state") == version:  # otherwise another process has just applied it
                _apply(db, MIGRATIONS[version])
                db.rows("UPDATE state SET version = %s", (version + 1,))
        version = db.one("SELECT version FROM state")


class ServerLocation:
    """A knowledge base at an address such as `postgresql://user@host:port/database#name`. Implements `KbLocation`.

    The default name is "default". `open` connects. Raises KnowledgeBaseError, without the password, for an invalid address and for a
    server that cannot be reached, refuses the password or lacks pgvector.
    """

    def __init__(self, text: str) -> None:
        self._address = parse_address(text)
        self.name = self._address.name
        self.address = self._address.shown
        self.store: PostgresStore | None = None
        self._schema = schema_of(self.name)
        self._connected: Database | None = None
        self._index: PostgresIndex | None = None

    @property
    def _db(self) -> Database:
        if self._connected is None:
            self._connected = Database(self._address)
        return self._connected

    def open(self) -> None:
        if enter(self._db, self.name):
            self.store = PostgresStore(self._db, self._schema)

    def reopen(self) -> None:
        if not enter(self._db, self.name):
            self.store = None
        elif self.store is None:
            self.store = PostgresStore(self._db, self._schema)

    def make(self) -> PostgresStore:
        enter(self._db, self.name, create=True)
        self.store = PostgresStore(self._db, self._schema)
        return self.store

    def close(self) -> None:
        if self._connected is not None:
            self._connected.close()

    def taken(self, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        def refused() -> KnowledgeBaseError:
            return KnowledgeBaseBusyError(
                f"Another localrag is indexing into knowledge base {self.address!r}.",
                hint="Wait until it has finished, then run the same command again.",
                kb=self.address,
            )

        return self._db.lock(self._schema, wait_s=wait_s, on_wait=on_wait, refused=refused)

    def not_found(self) -> KnowledgeBaseNotFoundError:
        return not_found(self.address, self.name, names_in(self._db))

    def index(self) -> PostgresIndex | None:
        assert self.store is not None
        if self.store.embedder is None:
            return None
        if self._index is None or self._index.generation != self.store.generation:
            self._index = PostgresIndex(self._db)
        return self._index

    def index_problems(self) -> list[str]:
        self._index = None
        return index_problems(self._db, self._schema)

    def maintain_index(self) -> None:
        maintain_index(self._db, self._schema)

    def export(self, file: Path) -> None:
        raise KnowledgeBaseError(
            f"{self.address} is on a server. Only a knowledge base of the home can be exported to {file.name}.",
            hint=f"Back it up with PostgreSQL's own tool: pg_dump --schema={self._schema}",
        )

    def rename(self, name: str) -> None:
        if not NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
            raise invalid_name(name)
        with self.taken(wait_s=0):
            rename(self._db, self.name, name)
        self._address = replace(self._address, name=name)
        self.name, self.address, self._schema = name, self._address.shown, schema_of(name)
        self.store = self._index = None
        self.open()

    def remove(self) -> None:
        with self.taken(wait_s=0):
            drop(self._db, self.name)
        self.close()
        self.store = None
