"""The tables of a knowledge base on a server, in a schema of its own, as numbered migrations."""

from __future__ import annotations

from localrag.errors import KnowledgeBaseError
from localrag.kb.postgres.database import Database

_SCHEMA = "localrag_"
_CREATING = "tables"
_STATES = "SELECT nspname FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid WHERE relname = 'state'"

# Words are reduced to their stems as in PostgreSQL's own "english", but none is left out: a phrase may need each of them.
# Words and characters are given to it with nothing but spaces between them (localrag/kb/postgres/full_text.py).
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
        ef_search integer,                      -- how far the index of vectors is followed; NULL without one
        recall double precision,                -- of the 10 nearest, measured for that
        num_measured bigint                     -- the number of chunks there were then
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
        mtime_ns bigint,                        -- NULL: the file is read before it is taken for unchanged
        cutter integer NOT NULL                 -- the version of what read and cut it
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
        sha256 bytea NOT NULL,                  -- of what was embedded
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

# A document is a file of one machine. '' is any: the document was indexed before its machine was noted.
_ADD_MACHINES = (
    "ALTER TABLE documents ADD COLUMN machine text NOT NULL DEFAULT ''",
    "ALTER TABLE documents DROP CONSTRAINT documents_path_key",
    "ALTER TABLE documents ADD UNIQUE (path, machine)",
    "DELETE FROM unread",  # it only spares work
    "ALTER TABLE unread ADD COLUMN machine text NOT NULL",
    "ALTER TABLE unread DROP CONSTRAINT unread_pkey",
    "ALTER TABLE unread ADD PRIMARY KEY (path, machine)",
)

_ADD_MIN_SIMILARITY = ("ALTER TABLE state ADD COLUMN min_similarity double precision",)  # of a relevant chunk; NULL: not known

# Documents that are no files. Their machine is '', which is any.
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

MIGRATIONS = (_CREATE, _ADD_MACHINES, _ADD_MIN_SIMILARITY, _ADD_TEXTS)
"""The statements of each migration, applied once. A released one is never edited: a change is a new one."""


def schema_of(name: str) -> str:
    """The schema of the knowledge base `name`."""
    return f"{_SCHEMA}{name}"


def names(db: Database) -> list[str]:
    """The knowledge bases of a database, sorted."""
    found = db.rows(f"{_STATES} AND starts_with(nspname, %s)", (_SCHEMA,))
    return sorted(name.removeprefix(_SCHEMA) for (name,) in found)


def enter(db: Database, name: str, *, create: bool = False) -> bool:
    """Enter the schema of a knowledge base and migrate its tables; return False if it does not exist and `create` is not set.

    Raises KnowledgeBaseError if pgvector is not installed on the server, or a newer localrag made the tables.
    """
    schema = schema_of(name)
    is_there = _is_there(db, schema)
    if not (is_there or create):
        return False
    if not is_there:
        with db.writing(_CREATING):
            if not _is_there(db, schema):  # else another process has just made it
                _add_vectors(db)
                db.rows(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
                db.rows("SELECT set_config('search_path', %s, true)", (_path(db, schema),))
                for statement in MIGRATIONS[0]:
                    db.rows(statement)
                db.rows("UPDATE state SET version = 1")
    db.use(_path(db, schema))
    _migrate(db, schema)
    return True


def drop(db: Database, name: str) -> None:
    """Delete a knowledge base, atomically."""
    with db.writing(schema_of(name)):
        db.rows(f'DROP SCHEMA "{schema_of(name)}" CASCADE')


def _is_there(db: Database, schema: str) -> bool:
    return bool(db.rows(f"{_STATES} AND nspname = %s", (schema,)))


def _path(db: Database, schema: str) -> str:
    """The search path: this schema, and that of the vectors."""
    found = db.rows("SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE extname = 'vector'")
    if not found:
        raise _no_vectors(db)
    return ", ".join(f'"{each}"' for each in (schema, found[0][0]))


def _add_vectors(db: Database) -> None:
    available = db.rows("SELECT installed_version, current_setting('server_encoding') FROM pg_available_extensions WHERE name = 'vector'")
    if not available:
        raise _no_vectors(db)
    installed, encoding = available[0]
    if encoding != "UTF8":
        raise KnowledgeBaseError(
            f"The database of {db.address.shown} keeps text as {encoding}, and a knowledge base needs UTF8.",
            hint="Make one with: createdb --encoding=UTF8 --template=template0 NAME",
        )
    if installed is None:
        try:
            db.rows("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
        except KnowledgeBaseError as error:
            raise _no_vectors(db) from error


def _no_vectors(db: Database) -> KnowledgeBaseError:
    return KnowledgeBaseError(
        f"The database of {db.address.shown} has no pgvector, which keeps the vectors.",
        hint="Install pgvector on the server, and let an administrator of the database run: CREATE EXTENSION vector",
    )


def _migrate(db: Database, schema: str) -> None:
    found = db.one("SELECT version FROM state")
    if found > len(MIGRATIONS):
        raise KnowledgeBaseError(
            f"This knowledge base has schema {found}, written by a newer localrag; this one knows schemas up to {len(MIGRATIONS)}.",
            hint="Upgrade localrag, or index the documents into a knowledge base of another name.",
            schema=found,
            known_schema=len(MIGRATIONS),
        )
    while found < len(MIGRATIONS):
        with db.writing(schema):
            if db.one("SELECT version FROM state") == found:  # else another process has just applied it
                for statement in MIGRATIONS[found]:
                    db.rows(statement)
                db.rows("UPDATE state SET version = %s", (found + 1,))
        found = db.one("SELECT version FROM state")
