"""The store of a knowledge base on a PostgreSQL server. See localrag/kb/store.py for what each method does.

Every change is one transaction over text, full text, vectors and generation. A second writer waits for the first.

A document is a file of one machine (`Address.machine`). A machine indexes only its own files: a file under the same path on another machine
is another document. A search covers the documents of all machines.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import Passage
from localrag.kb.filters import Where, folded
from localrag.kb.postgres.database import Database, raw, vector
from localrag.kb.postgres.search import (
    FULL_TEXTS,
    NEAREST,
    Body,
    FullText,
    best,
    holders,
    indexed,
    is_sound,
    passing,
    rebuild,
    set_language,
)
from localrag.kb.protocols import (
    DocumentRow,
    Feedback,
    GivenText,
    Origin,
    Position,
    StoredChunk,
    StoredDocument,
    TextRow,
    UnreadFile,
    Unstaged,
    other_embedder,
)
from localrag.kb.query import Term
from localrag.kb.store import NUM_STAMPS, match_chunks
from localrag.text.languages import language_of
from localrag.types import Chunk

_AT_ONCE = 500  # rows to fetch at a time, with their vectors
_CHUNK = (
    'SELECT c.id, document_id, ordinal, text, "start", "end", source, heading, place '
    "FROM chunks c JOIN documents d ON d.id = document_id WHERE c.id = ANY(%s::bigint[])"
)
_OURS = "machine IN (%s, '')"  # '' means any machine: see localrag/kb/postgres/server.py
_OUR_FILES = f"{_OURS} AND id NOT IN (SELECT document_id FROM texts)"  # noqa: S608  # no values in it
_ADD_FEEDBACK = """INSERT INTO feedback SELECT id, %s, %s, %s, %s, %s FROM chunks WHERE id = %s ON CONFLICT (chunk_id) DO UPDATE SET
    retrieved = feedback.retrieved + excluded.retrieved, supplied = feedback.supplied + excluded.supplied,
    cited = feedback.cited + excluded.cited, useful = feedback.useful + excluded.useful, useless = feedback.useless + excluded.useless"""

_ADOPT_PATH = """UPDATE documents SET machine = %(machine)s WHERE machine = '' AND path = %(path)s
    AND NOT EXISTS (SELECT 1 FROM documents WHERE machine = %(machine)s AND path = %(path)s)"""

_PUT = """INSERT INTO documents (path, machine, source, folded, sha256, num_bytes, title, mtime_ns, cutter)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (path, machine) DO UPDATE SET sha256 = excluded.sha256, num_bytes = excluded.num_bytes, title = excluded.title,
    mtime_ns = excluded.mtime_ns, cutter = excluded.cutter RETURNING id"""

_PUT_TEXT = """INSERT INTO texts (document_id, id, metadata, text) VALUES (%s, %s, %s, %s)
    ON CONFLICT (document_id) DO UPDATE SET metadata = excluded.metadata, text = excluded.text"""

_ADD_CHUNK = """WITH added AS (
        INSERT INTO chunks (document_id, ordinal, "start", "end", place, heading, text, sha256, language, words, characters)
        VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, to_tsvector('words', %s::text), to_tsvector('simple', %s::text)) RETURNING id
    ) INSERT INTO vectors (chunk_id, embedding) SELECT id, %s FROM added"""

_TEXTS = "FROM texts t JOIN documents d ON d.id = t.document_id"
_SOME_TEXTS = f"""SELECT d.id, (SELECT array_agg(entry) FROM entries e WHERE e.document_id = d.id),
    t.id, text, length(text), metadata, sha256 {_TEXTS} WHERE d.id > %s ORDER BY d.id LIMIT %s"""  # noqa: S608  # no values in it
_BODIES = r"""SELECT t.id AS text_id, source, metadata, sha256, coalesce(t.text,
    (SELECT string_agg(text, E'\n\n' ORDER BY ordinal) FROM chunks c WHERE c.document_id = d.id), '') AS body
    FROM documents d LEFT JOIN texts t ON t.document_id = d.id"""
_TEXTS_AT_ONCE = 100


_STAGING = (
    "CREATE TABLE IF NOT EXISTS staged_embedder (embedder text NOT NULL, dim integer NOT NULL)",
    "CREATE TABLE IF NOT EXISTS staged_vectors (sha256 bytea PRIMARY KEY, embedding vector NOT NULL)",
)
_UNSTAGED = "SELECT id, sha256, heading, text FROM chunks c WHERE NOT EXISTS (SELECT 1 FROM staged_vectors s WHERE s.sha256 = c.sha256)"


class PostgresStore:
    """One knowledge base on a server. Implements `AnyStore`. `db` has entered its schema (see localrag/kb/postgres/server.py)."""

    is_local = False
    full_texts = FULL_TEXTS

    def __init__(self, db: Database, schema: str) -> None:
        self._db = db
        self._schema = schema
        self.texts = PostgresTexts(db)

    @property
    def _machine(self) -> str:
        return self._db.address.machine

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._db.reading():
            yield

    @contextmanager
    def writing(self, *, moves_on: bool = True) -> Iterator[None]:
        with self._db.writing(self._schema):
            yield
            if moves_on:
                self._count_generation()

    @property
    def generation(self) -> int:
        return int(self._db.one("SELECT generation FROM state"))

    @property
    def embedder(self) -> tuple[str, int] | None:
        fingerprint, dim = self._db.rows("SELECT embedder, dim FROM state")[0]
        return None if fingerprint is None else (str(fingerprint), int(dim))

    @property
    def min_similarity(self) -> float | None:
        value = self._db.one("SELECT min_similarity FROM state")
        return None if value is None else float(value)

    @property
    def num_documents(self) -> int:
        return int(self._db.one("SELECT count(*) FROM documents"))

    @property
    def num_chunks(self) -> int:
        return int(self._db.one("SELECT count(*) FROM chunks"))

    def sources(self, where: Where | None = None) -> list[tuple[str, int]]:
        selection, values = passing(where or Where())
        rows = self._db.rows(
            "SELECT source, count(c.id) FROM documents d LEFT JOIN chunks c ON document_id = d.id "  # noqa: S608  # no values in it
            f'WHERE d.id IN ({selection}) GROUP BY d.id ORDER BY source COLLATE "C", d.id',
            values,
        )
        return [(source, num) for source, num in rows]

    def documents(self) -> dict[str, StoredDocument]:
        rows = self._db.rows(
            f"SELECT path, id, sha256, num_bytes, mtime_ns, cutter FROM documents WHERE {_OUR_FILES} ORDER BY machine",  # noqa: S608  # no values in it
            (self._machine,),
        )
        return {path: StoredDocument(*rest) for path, *rest in rows}

    def unread(self) -> dict[str, UnreadFile]:
        rows = self._db.rows("SELECT path, num_bytes, mtime_ns, cutter, reason FROM unread WHERE machine = %s", (self._machine,))
        return {path: UnreadFile(*rest) for path, *rest in rows}

    def fields(self, where: Where | None = None) -> dict[str, dict[str, list[str]]]:
        selection, values = passing(where or Where())
        rows = self._db.rows(
            f"SELECT DISTINCT source, key, value FROM fields JOIN documents ON id = document_id WHERE document_id IN ({selection})",  # noqa: S608  # no values in it
            values,
        )
        fields: dict[str, dict[str, list[str]]] = {}
        for source, key, value in sorted(rows):
            fields.setdefault(source, {}).setdefault(key, []).append(value)
        return fields

    def fields_by_origin(self) -> dict[tuple[int, Origin], set[tuple[str, str]]]:
        fields: dict[tuple[int, Origin], set[tuple[str, str]]] = {}
        for document_id, origin, key, value in self._db.rows("SELECT document_id, origin, key, value FROM fields"):
            fields.setdefault((document_id, origin), set()).add((key, value))
        return fields

    def paths(self) -> dict[str, str]:
        return dict(self.source_paths())

    def source_paths(self) -> list[tuple[str, str]]:
        statement = f'SELECT source, path FROM documents WHERE {_OUR_FILES} ORDER BY source COLLATE "C", id'  # noqa: S608  # no values in it
        return [(source, path) for source, path in self._db.rows(statement, (self._machine,))]

    def elsewhere(self) -> dict[str, int]:
        rows = self._db.rows(
            f"SELECT machine, count(*) FROM documents WHERE NOT {_OURS} GROUP BY machine ORDER BY machine",  # noqa: S608  # no values in it
            (self._machine,),
        )
        return dict(rows)

    def stamp(self, generation: int) -> int | None:
        rows = self._db.rows("SELECT stamp FROM generations WHERE generation = %s", (generation,))
        return int(rows[0][0]) if rows else None

    def vectors(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        statement = "SELECT chunk_id, embedding FROM vectors WHERE chunk_id > %s ORDER BY chunk_id LIMIT %s"
        for chunk_id, embedding in self._by_id(statement, after):
            yield chunk_id, raw(embedding)

    def existing(self, ids: Sequence[int]) -> list[int]:
        return [one for (one,) in self._db.rows("SELECT id FROM chunks WHERE id = ANY(%s::bigint[])", (list(ids),))]

    def vectors_of(self, sha256s: Sequence[bytes]) -> dict[bytes, bytes]:
        statement = "SELECT sha256, embedding FROM chunks JOIN vectors ON chunk_id = id WHERE sha256 = ANY(%s::bytea[])"
        return {bytes(sha256): raw(vector) for sha256, vector in self._db.rows(statement, (list(sha256s),), binary=True)}

    def allowed(self, where: Where | None) -> list[int] | None:
        if not where:
            return None
        selection, values = passing(where)
        rows = self._db.rows(f"SELECT id FROM chunks WHERE document_id IN ({selection}) ORDER BY id", values)  # noqa: S608  # no values in it
        return [one for (one,) in rows]

    def passing(self, where: Where | None) -> list[int]:
        selection, values = passing(where) if where else ("SELECT id FROM documents", ())
        order = "ORDER BY d.source, d.id, c.ordinal"
        statement = f"SELECT c.id FROM chunks c JOIN documents d ON d.id = c.document_id WHERE d.id IN ({selection}) {order}"  # noqa: S608  # no values in it
        return [one for (one,) in self._db.rows(statement, values)]

    def keyword_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]:
        return best(self._db, "words", terms, limit, where)

    def character_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]:
        return best(self._db, "characters", terms, limit, where)

    def keyword_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
        return holders(self._db, "words", terms, among)

    def character_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
        return holders(self._db, "characters", terms, among)

    def chunks(self, ids: Sequence[int], *, kb: str = "") -> list[Chunk]:
        chunks: dict[int, Chunk] = {}
        for chunk_id, document_id, ordinal, text, start, end, source, heading, place in self._db.rows(_CHUNK, (list(ids),)):
            chunks[chunk_id] = Chunk(chunk_id, document_id, ordinal, text, start, end, source, heading, kb, place=place)
        return [chunks[one] for one in ids if one in chunks]

    def around(self, chunk_id: int, before: int, behind: int) -> list[int]:
        statement = (
            "SELECT n.id FROM chunks c JOIN chunks n USING (document_id) "
            "WHERE c.id = %s::bigint AND n.ordinal BETWEEN c.ordinal - %s::integer AND c.ordinal + %s::integer ORDER BY n.ordinal"
        )
        return [one for (one,) in self._db.rows(statement, (chunk_id, before, behind))]

    def feedback(self, ids: Sequence[int] | None = None) -> dict[int, Feedback]:
        statement = "SELECT chunk_id, retrieved, supplied, cited, useful, useless FROM feedback"
        selection = "" if ids is None else " WHERE chunk_id = ANY(%s::bigint[])"
        return {one: Feedback(*counts) for one, *counts in self._db.rows(statement + selection, () if ids is None else (list(ids),))}

    def all_rows(self) -> Iterator[StoredChunk]:
        statement = (
            'SELECT id, ordinal, "start", "end", place, heading, text, sha256, embedding '
            "FROM chunks LEFT JOIN vectors ON chunk_id = id WHERE id > %s ORDER BY id LIMIT %s"
        )
        for *values, sha256, embedding in self._by_id(statement, 0):
            yield StoredChunk._make((*values, bytes(sha256), None if embedding is None else raw(embedding)))

    def positions(self) -> Iterator[Position]:
        statement = (
            'SELECT c.id, document_id, ordinal, "start", "end", place, source, num_bytes '
            "FROM chunks c JOIN documents d ON d.id = document_id WHERE document_id = %s ORDER BY ordinal"
        )
        for (document_id,) in self._db.rows("SELECT id FROM documents ORDER BY id"):
            yield from map(Position._make, self._db.rows(statement, (document_id,)))

    def titles(self) -> list[tuple[str, str]]:
        return [(source, title) for source, title in self._db.rows('SELECT source, title FROM documents ORDER BY source COLLATE "C", id')]

    def problems(self) -> list[str]:
        """Return []. The server guarantees its pages and references, and reports damage when it reads them."""
        return []

    def full_text_is_sound(self, name: str) -> bool:
        return is_sound(self._db, _full_text(name), self._texts())

    def rebuild_full_text(self, name: str) -> None:
        rebuild(self._db, _full_text(name), self._texts())

    def check_embedder(self, fingerprint: str, dim: int) -> None:
        embedder = self.embedder
        if embedder is not None and embedder != (fingerprint, dim):
            raise other_embedder(self._db.address.shown, embedder, (fingerprint, dim))

    def claim_embedder(self, fingerprint: str, dim: int, min_similarity: float | None = None) -> None:
        self.check_embedder(fingerprint, dim)
        self._db.rows(
            "UPDATE state SET embedder = %s, dim = %s, min_similarity = %s WHERE embedder IS NULL", (fingerprint, dim, min_similarity)
        )

    def stage_embedder(self, fingerprint: str, dim: int) -> None:
        for statement in _STAGING:
            self._db.rows(statement)
        if self._db.rows("SELECT embedder, dim FROM staged_embedder") != [(fingerprint, dim)]:
            self._db.rows("DELETE FROM staged_vectors")
            self._db.rows("DELETE FROM staged_embedder")
            self._db.rows("INSERT INTO staged_embedder (embedder, dim) VALUES (%s, %s)", (fingerprint, dim))

    def unstaged(self, after: int, limit: int) -> list[Unstaged]:
        rows = self._db.rows(f"{_UNSTAGED} AND id > %s ORDER BY id LIMIT %s", (after, limit))
        return [Unstaged(chunk_id, bytes(sha256), heading, text) for chunk_id, sha256, heading, text in rows]

    def stage_vectors(self, vectors: Mapping[bytes, bytes]) -> None:
        self._db.many(
            "INSERT INTO staged_vectors (sha256, embedding) VALUES (%s, %s) ON CONFLICT (sha256) DO NOTHING",
            [(sha256, vector(data)) for sha256, data in vectors.items()],
        )

    def switch_embedder(self, min_similarity: float | None) -> None:
        if self._db.rows(f"{_UNSTAGED} LIMIT 1"):
            raise KnowledgeBaseError("Some passages have not been embedded yet.", hint="Run the same command again.")
        self._db.rows(f"DROP INDEX IF EXISTS {NEAREST}")  # of vectors with the old number of dimensions
        self._db.rows("DELETE FROM vectors")
        self._db.rows("INSERT INTO vectors (chunk_id, embedding) SELECT id, embedding FROM chunks JOIN staged_vectors USING (sha256)")
        self._db.rows(
            "UPDATE state SET embedder = staged.embedder, dim = staged.dim, min_similarity = %s, ef_search = NULL, recall = NULL, "
            "num_measured = NULL FROM staged_embedder staged",
            (min_similarity,),
        )
        self._db.rows("DROP TABLE staged_vectors, staged_embedder")

    def put_document(self, row: DocumentRow, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> int:
        machine = self._machine if row.given is None else ""
        if machine:
            self._db.rows(_ADOPT_PATH, {"machine": machine, "path": row.path})
        values = (
            row.path,
            machine,
            row.source,
            folded(row.source),
            row.sha256,
            row.num_bytes,
            _storable(row.title),
            row.mtime_ns,
            row.cutter,
        )
        document_id = int(self._db.one(_PUT, values))
        self.set_fields(document_id, (*(("tag", tag) for tag in row.tags), *row.fields), "file")
        if row.given is not None:
            self._put_given(document_id, row.source, row.given)
        self._put_chunks(document_id, passages, vectors, language_of(passage.text for passage in passages))
        return document_id

    def move_document(self, document_id: int, path: str, source: str) -> None:
        machine = self._machine
        self._db.rows("DELETE FROM documents WHERE path = %s AND machine IN (%s, '') AND id != %s", (path, machine, document_id))
        self._db.rows(
            "UPDATE documents SET path = %s, machine = %s, source = %s, folded = %s WHERE id = %s",
            (path, machine, source, folded(source), document_id),
        )

    def adopt(self, ids: Sequence[int]) -> None:
        self._db.rows("UPDATE documents SET machine = %s WHERE machine = '' AND id = ANY(%s::bigint[])", (self._machine, list(ids)))

    def stamp_documents(self, stamps: Iterable[tuple[int, int | None]]) -> None:
        self._db.many("UPDATE documents SET mtime_ns = %s WHERE id = %s", [(mtime_ns, one) for one, mtime_ns in stamps])

    def set_unread(self, gone_paths: Iterable[str], unread: Mapping[str, UnreadFile]) -> None:
        machine = self._machine
        self._db.rows("DELETE FROM unread WHERE machine = %s AND path = ANY(%s::text[])", (machine, [*gone_paths, *unread]))
        self._db.many(
            "INSERT INTO unread (path, machine, num_bytes, mtime_ns, cutter, reason) VALUES (%s, %s, %s, %s, %s, %s)",
            [(path, machine, one.num_bytes, one.mtime_ns, one.cutter, _storable(one.reason)) for path, one in unread.items()],
        )

    def remove_documents(self, paths: Iterable[str]) -> None:
        self._db.rows(f"DELETE FROM documents WHERE {_OURS} AND path = ANY(%s::text[])", (self._machine, list(paths)))  # noqa: S608  # no values in it

    def drop_chunks(self, ids: Sequence[int]) -> list[str]:
        documents = self._db.rows(
            "SELECT DISTINCT d.id, source FROM documents d JOIN chunks c ON document_id = d.id WHERE c.id = ANY(%s::bigint[])", (list(ids),)
        )
        self._db.rows("DELETE FROM chunks WHERE id = ANY(%s::bigint[])", (list(ids),))
        self._db.rows("UPDATE documents SET cutter = 0, mtime_ns = NULL WHERE id = ANY(%s::bigint[])", ([one for one, _ in documents],))
        return sorted(source for _, source in documents)

    def set_fields(self, document_id: int, fields: Sequence[tuple[str, str]], origin: Origin) -> bool:
        new = {(_storable(key), _storable(value)) for key, value in fields if value}
        old = set(self._db.rows("SELECT key, value FROM fields WHERE document_id = %s AND origin = %s", (document_id, origin)))
        if new == old:
            return False
        self._db.rows("DELETE FROM fields WHERE document_id = %s AND origin = %s", (document_id, origin))
        self._db.many(
            "INSERT INTO fields (document_id, key, value, folded, origin) VALUES (%s, %s, %s, %s, %s)",
            [(document_id, key, value, folded(value), origin) for key, value in sorted(new)],
        )
        return True

    def add_feedback(self, counts: Mapping[int, Feedback]) -> None:
        self._db.many(_ADD_FEEDBACK, [(*feedback, chunk_id) for chunk_id, feedback in counts.items()])

    def reset_feedback(self) -> None:
        self._db.rows("DELETE FROM feedback")

    def _texts(self) -> Iterator[list[Body]]:
        """Yield the bodies of all chunks, in batches."""
        after, statement = 0, "SELECT id, heading, text, language FROM chunks WHERE id > %s ORDER BY id LIMIT %s"
        while rows := self._db.rows(statement, (after, _AT_ONCE)):
            yield [(chunk_id, heading, text, language) for chunk_id, heading, text, language in rows]
            after = rows[-1][0]

    def _by_id(self, statement: str, after: int) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a statement in batches. The statement takes the id to start after and the number of rows."""
        while rows := self._db.rows(statement, (after, _AT_ONCE), binary=True):
            yield from rows
            after = rows[-1][0]

    def _count_generation(self) -> None:
        generation = self._db.one("UPDATE state SET generation = generation + 1 RETURNING generation")
        self._db.rows("INSERT INTO generations (generation, stamp) VALUES (%s, %s)", (generation, secrets.randbits(63)))
        self._db.rows("DELETE FROM generations WHERE generation <= %s", (generation - NUM_STAMPS,))

    def _put_given(self, document_id: int, source: str, text: GivenText) -> None:
        self._db.rows("UPDATE documents SET source = %s, folded = %s WHERE id = %s", (source, folded(source), document_id))
        self._db.rows(_PUT_TEXT, (document_id, text.id, text.metadata, text.text))
        self._db.rows("DELETE FROM entries WHERE document_id = %s", (document_id,))
        self._db.many("INSERT INTO entries (document_id, entry) VALUES (%s, %s)", [(document_id, entry) for entry in sorted(text.entries)])

    def _put_chunks(self, document_id: int, passages: Sequence[Passage], vectors: Mapping[bytes, bytes], language: str) -> None:
        statement = "SELECT id, sha256, heading FROM chunks WHERE document_id = %s ORDER BY ordinal DESC"
        present = [(int(chunk_id), bytes(sha256), str(heading)) for chunk_id, sha256, heading in self._db.rows(statement, (document_id,))]
        chunk_ids, stale_ids = match_chunks(present, passages)
        if present:
            self._db.rows("DELETE FROM chunks WHERE id = ANY(%s::bigint[])", (stale_ids,))
            # The ordinals of a document are unique after every statement, so first move those of the remaining chunks out of the way.
            self._db.rows("UPDATE chunks SET ordinal = -1 - ordinal WHERE document_id = %s", (document_id,))
            set_language(self._db, document_id, language)
        moved, added = [], []
        for ordinal, (passage, chunk_id) in enumerate(zip(passages, chunk_ids, strict=True)):
            where = (ordinal, passage.start, passage.end, passage.place)
            if chunk_id is None:
                texts = (passage.heading, passage.text, passage.sha256, language, *indexed(passage.heading, passage.text, language))
                added.append((document_id, *where, *texts, vector(vectors[passage.sha256])))
            else:
                moved.append((*where, chunk_id))
        self._db.many('UPDATE chunks SET ordinal = %s, "start" = %s, "end" = %s, place = %s WHERE id = %s', moved)
        self._db.many(_ADD_CHUNK, added)


class PostgresTexts:
    """The documents on a server that were given as texts. See `SqliteTexts` in localrag/kb/store.py for what each method does."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def known(self, ids: Sequence[str]) -> dict[str, StoredDocument]:
        rows = self._db.rows(f"SELECT t.id, d.id, sha256, num_bytes, mtime_ns, cutter {_TEXTS} WHERE t.id = ANY(%s::text[])", (list(ids),))
        return {text_id: StoredDocument(*rest) for text_id, *rest in rows}

    def outdated(self, cutter: int) -> list[str]:
        return [row[0] for row in self._db.rows(f"SELECT t.id {_TEXTS} WHERE cutter != %s ORDER BY d.id", (cutter,))]

    def whole(self, ids: Sequence[str]) -> dict[str, TextRow]:
        rows = self._db.rows(f"SELECT t.id, text, length(text), metadata, sha256 {_TEXTS} WHERE t.id = ANY(%s::text[])", (list(ids),))
        return {row[0]: TextRow(*row) for row in rows}

    def page(self, where: Where, *, offset: int, limit: int, max_chars: int) -> list[TextRow]:
        selection, values = passing(where)
        rows = self._db.rows(
            f"SELECT text_id, source, left(body, %s), length(body), metadata, sha256 FROM ({_BODIES} WHERE d.id IN ({selection}) "  # noqa: S608  # no values in it
            "ORDER BY d.id LIMIT %s OFFSET %s) AS page",
            (max_chars, *values, limit, offset),
        )
        return [TextRow.listed(*row) for row in rows]

    def count(self, where: Where) -> int:
        selection, values = passing(where)
        return int(self._db.one(f"SELECT count(*) FROM documents WHERE id IN ({selection})", values))  # noqa: S608  # no values in it

    def names(self, document_ids: Sequence[int]) -> dict[int, tuple[str, str | None, str | None]]:
        rows = self._db.rows(
            "SELECT d.id, source, t.id, metadata FROM documents d LEFT JOIN texts t ON t.document_id = d.id WHERE d.id = ANY(%s::bigint[])",
            (list(document_ids),),
        )
        return {document_id: (source, text_id, metadata) for document_id, source, text_id, metadata in rows}

    def all(self) -> Iterator[tuple[TextRow, frozenset[bytes]]]:
        after = 0
        while rows := self._db.rows(_SOME_TEXTS, (after, _TEXTS_AT_ONCE)):
            for _, entries, *row in rows:
                yield TextRow(*row), frozenset(bytes(entry) for entry in entries or ())
            after = rows[-1][0]


def _full_text(name: str) -> FullText:
    return "words" if name == "words" else "characters"


def _storable(text: str) -> str:
    """Replace NUL, which PostgreSQL cannot store. Texts from readers contain none."""
    return text.replace("\0", "\ufffd")
