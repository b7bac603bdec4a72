"""The store of a knowledge base: one SQLite file with documents, chunks, full text and vectors. All other files are derived from it.

Every change is one transaction that also increments the generation. Derived files record the generation that they were derived from.

An unchanged chunk keeps its id, and with it its vector, full text and feedback. Chunks are compared by heading path and by the sha256 of
the embedded text.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import Passage
from localrag.kb.database import SqliteFile, explained
from localrag.kb.filters import Where
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
from localrag.kb.query import Term, Variant, has_phrase, variants
from localrag.text.languages import language_of
from localrag.types import Chunk

WAIT_S = 30.0
"""Seconds that a writer waits for another one."""

NUM_STAMPS = 10_000  # recent generations whose stamps are kept, about 15 bytes each

_FEW = 1000
_IS_FILE = "id NOT IN (SELECT document_id FROM texts)"
_CHUNK = (
    'SELECT c.id, document_id, ordinal, text, start, "end", source, heading, place FROM chunks c JOIN documents d ON d.id = document_id'
)
_TEXTS = "FROM texts t JOIN documents d ON d.id = t.document_id"
_ENTRIES = "(SELECT group_concat(hex(entry), ' ') FROM entries e WHERE e.document_id = d.id)"
_ALL_TEXTS = f"SELECT t.id, text, length(text), metadata, sha256, {_ENTRIES} {_TEXTS} ORDER BY d.id"

LANGUAGES = """WITH RECURSIVE present (language) AS (
    SELECT min(language) FROM chunks WHERE language != ''
    UNION ALL
    SELECT (SELECT min(language) FROM chunks WHERE language != '' AND language > present.language) FROM present WHERE language IS NOT NULL
) SELECT language FROM present WHERE language IS NOT NULL"""
"""Selects the languages of chunks, in SQLite and PostgreSQL. Steps from one to the next in the index, all of which DISTINCT would read."""

_HAS_PHRASE = "AND (SELECT language = '' OR has_phrase(?, heading, text) FROM chunks WHERE id = chunks_fts.rowid)"
"""Leaves out chunks in other languages than English in which a phrase has other forms of its words."""

_BODIES = """SELECT t.id AS text_id, source, metadata, sha256, coalesce(t.text, (SELECT group_concat(text, char(10, 10)) FROM
    (SELECT text FROM chunks c WHERE c.document_id = d.id ORDER BY ordinal)), '') AS body
    FROM documents d LEFT JOIN texts t ON t.document_id = d.id"""


_STAGING = (
    """CREATE TABLE IF NOT EXISTS staged_embedder (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        embedder TEXT NOT NULL,
        dim INTEGER NOT NULL
    )""",
    "CREATE TABLE IF NOT EXISTS staged_vectors (sha256 BLOB NOT NULL UNIQUE, vector BLOB NOT NULL)",
)
"""Makes the tables of vectors of another embedder, which exist only while they are filled."""
_UNSTAGED = "SELECT id, sha256, heading, text FROM chunks WHERE NOT EXISTS (SELECT 1 FROM staged_vectors s WHERE s.sha256 = chunks.sha256)"


class Store:
    """One knowledge base file. Implements `AnyStore`. With `create`, a missing file and its folder are created.

    Failures of SQLite are raised as KnowledgeBaseErrors with a hint. A Store belongs to the thread that opened it.
    """

    is_local = True
    """Whether all documents are files of this machine, so that a missing file has been deleted."""

    full_texts = ("chunks_fts", "chunks_characters")
    """Names of the full-text indexes, for `full_text_is_sound` and `rebuild_full_text`."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self._file = SqliteFile(path, create=create, wait_s=WAIT_S)
        self._db = self._file.connection
        self._db.create_function("has_phrase", 3, has_phrase, deterministic=True)
        self.texts = SqliteTexts(self._file)
        """The documents given as texts."""

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read from one snapshot, so that all reads agree with each other and with `generation`."""
        with self._file.reading():
            yield

    @contextmanager
    def writing(self, *, moves_on: bool = True) -> Iterator[None]:
        """Run one transaction, all or nothing. It increments the generation unless `moves_on` is false, if no chunks change."""
        with self._file.writing():
            yield
            if moves_on:
                self._count_generation()

    # Reads. Wrap several reads that must agree in one `reading()`.

    @property
    def generation(self) -> int:
        return int(self._file.one("SELECT generation FROM state"))

    @property
    def embedder(self) -> tuple[str, int] | None:
        """(fingerprint, dim) of the embedder whose vectors are stored; None until something is indexed."""
        fingerprint, dim = self._file.rows("SELECT embedder, dim FROM state")[0]
        return None if fingerprint is None else (str(fingerprint), int(dim))

    @property
    def min_similarity(self) -> float | None:
        """The least cosine similarity between a question and a relevant chunk for this embedder; None if it was not measured."""
        value = self._file.one("SELECT min_similarity FROM state")
        return None if value is None else float(value)

    @property
    def num_documents(self) -> int:
        return int(self._file.one("SELECT count(*) FROM documents"))

    @property
    def num_chunks(self) -> int:
        return int(self._file.one("SELECT count(*) FROM chunks"))

    def sources(self, where: Where | None = None) -> list[tuple[str, int]]:
        """Return (source, number of chunks) of every matching document, ordered by source."""
        selection, values = (where or Where()).to_sql()
        return self._file.rows(
            "SELECT source, count(c.id) FROM documents d LEFT JOIN chunks c ON document_id = d.id "  # noqa: S608  # no values in it
            f"WHERE d.id IN ({selection}) GROUP BY d.id ORDER BY source, d.id",
            values,
        )

    def documents(self) -> dict[str, StoredDocument]:
        """Return absolute path → document, for every document that is a file."""
        rows = self._file.rows(f"SELECT path, id, sha256, num_bytes, mtime_ns, cutter FROM documents WHERE {_IS_FILE}")  # noqa: S608  # no values in it
        return {path: StoredDocument(*rest) for path, *rest in rows}

    def unread(self) -> dict[str, UnreadFile]:
        """Return absolute path → record, for every file without text."""
        rows = self._file.rows("SELECT path, num_bytes, mtime_ns, cutter, reason FROM unread")
        return {path: UnreadFile(*rest) for path, *rest in rows}

    def fields(self, where: Where | None = None) -> dict[str, dict[str, list[str]]]:
        """Return source → key → sorted values, for every matching document that has fields. Tags are the values of "tag"."""
        selection, values = (where or Where()).to_sql()
        fields: dict[str, dict[str, list[str]]] = {}
        for source, key, value in self._file.rows(
            f"SELECT DISTINCT source, key, value FROM fields JOIN documents ON id = document_id WHERE document_id IN ({selection}) "  # noqa: S608  # no values in it
            "ORDER BY source, key, value",
            values,
        ):
            fields.setdefault(source, {}).setdefault(key, []).append(value)
        return fields

    def fields_by_origin(self) -> dict[tuple[int, Origin], set[tuple[str, str]]]:
        """Return (document id, origin) → fields."""
        fields: dict[tuple[int, Origin], set[tuple[str, str]]] = {}
        for document_id, origin, key, value in self._file.rows("SELECT document_id, origin, key, value FROM fields"):
            fields.setdefault((document_id, origin), set()).add((key, value))
        return fields

    def paths(self) -> dict[str, str]:
        """Return source → absolute path of every file of this machine. If several files share a source, one of them is returned."""
        return dict(self._file.rows(f"SELECT source, path FROM documents WHERE {_IS_FILE}"))  # noqa: S608  # no values in it

    def stamp(self, generation: int) -> int | None:
        """Return the random stamp of a generation; None if this file never reached the generation, or the generation is very old."""
        rows = self._file.rows("SELECT stamp FROM generations WHERE generation = ?", (generation,))
        return int(rows[0][0]) if rows else None

    def vectors(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (chunk id, vector) of every chunk with an id greater than `after`, ordered by id."""
        yield from self._file.each("SELECT chunk_id, vector FROM vectors WHERE chunk_id > ? ORDER BY chunk_id", (after,))

    def existing(self, ids: Sequence[int]) -> list[int]:
        """Return those of the chunk ids that are stored."""
        return [row[0] for row in self._file.rows_in("SELECT id FROM chunks WHERE id IN", ids)]

    def vectors_of(self, sha256s: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return sha256 of the embedded text → vector, for the chunks that are stored."""
        return dict(self._file.rows_in("SELECT sha256, vector FROM chunks JOIN vectors ON chunk_id = id WHERE sha256 IN", sha256s))

    def allowed(self, where: Where | None) -> list[int] | None:
        """Return the ids of the chunks of matching documents, ascending; None if there is no filter."""
        if not where:
            return None
        selection, values = where.to_sql()
        statement = f"SELECT id FROM chunks WHERE document_id IN ({selection}) ORDER BY id"  # noqa: S608  # no values in it
        return [row[0] for row in self._file.rows(statement, values)]

    def passing(self, where: Where | None) -> list[int]:
        """Return the ids of the chunks of matching documents, ordered by source and position."""
        selection, values = where.to_sql() if where else ("SELECT id FROM documents", ())
        order = "ORDER BY d.source, d.id, c.ordinal"
        statement = f"SELECT c.id FROM chunks c JOIN documents d ON d.id = c.document_id WHERE d.id IN ({selection}) {order}"  # noqa: S608  # no values in it
        return [row[0] for row in self._file.rows(statement, values)]

    def keyword_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]:
        """Return (chunk id, BM25 score) of the chunks that best match any of the terms, best first, ties by id. Higher is better."""
        return self._best("chunks_fts", terms, limit, where)

    def character_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]:
        """Like `keyword_ids`, for Chinese, Japanese and Korean text, where each character counts as a word (`terms.spaced`)."""
        return self._best("chunks_characters", terms, limit, where)

    def keyword_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return for each term the number of chunks that match it, and the ids in `among` that do."""
        return [self._holders("chunks_fts", term, among) for term in terms]

    def character_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Like `keyword_holders`, for Chinese, Japanese and Korean text."""
        return [self._holders("chunks_characters", term, among) for term in terms]

    def _best(self, table: str, terms: Sequence[Term], limit: int, where: Where | None) -> list[tuple[int, float]]:
        selection, values = "", list[str | bytes]()
        if where:
            passing, values = where.to_sql()
            # without the +, SQLite searches the full text once per matching chunk: 380 ms instead of 8 for 500 of 5,000
            selection = f"AND +rowid IN (SELECT id FROM chunks WHERE document_id IN ({passing}))"  # noqa: S608  # no values in it
        languages = self._languages(table)
        phrases = [term for term in terms if term.is_phrase] if languages else []
        if not phrases:
            statement = f"SELECT rowid, -rank FROM {table} WHERE {table} MATCH ? {selection} ORDER BY rank, rowid LIMIT ?"  # noqa: S608  # our own names
            return self._file.rows(statement, (fts5_query(terms, languages), *values, limit))
        parts, part_values = [], list[object]()
        if others := [term for term in terms if not term.is_phrase]:
            parts.append("")
            part_values += [fts5_query(others, languages), *values]
        for term in phrases:
            parts.append(_HAS_PHRASE)
            part_values += [fts5_query((term,), languages), term.text, *values]
        union = " UNION ALL ".join(f"SELECT rowid, -rank AS score FROM {table} WHERE {table} MATCH ? {part} {selection}" for part in parts)  # noqa: S608  # our own names
        statement = f"SELECT rowid, sum(score) AS score FROM ({union}) GROUP BY rowid ORDER BY score DESC, rowid LIMIT ?"  # noqa: S608  # our own names
        return self._file.rows(statement, (*part_values, limit))

    def _languages(self, table: str) -> list[str]:
        """Return the languages whose stems a full-text index holds."""
        return [row[0] for row in self._file.rows(LANGUAGES)] if table == "chunks_fts" else []

    def _holders(self, table: str, term: Term, among: Sequence[int]) -> tuple[int, list[int]]:
        languages = self._languages(table)
        matching, values = f"FROM {table} WHERE {table} MATCH ?", [fts5_query((term,), languages)]  # our own names
        if languages and term.is_phrase:
            matching, values = f"{matching} {_HAS_PHRASE}", [*values, term.text]
        few = [row[0] for row in self._file.rows(f"SELECT rowid {matching} LIMIT {_FEW + 1}", values)]
        if len(few) <= _FEW:  # faster than looking up each id in the full text
            candidates = set(among)
            return len(few), [one for one in few if one in candidates]
        rows = self._file.rows_in(f"SELECT rowid {matching} AND rowid IN", among, *values)
        return int(self._file.one(f"SELECT count(*) {matching}", values)), [row[0] for row in rows]

    def chunks(self, ids: Sequence[int], *, kb: str = "") -> list[Chunk]:
        """Return the chunks with these ids, in the order of `ids`. Unknown ids are left out."""
        chunks: dict[int, Chunk] = {}
        for row in self._file.rows_in(f"{_CHUNK} WHERE c.id IN", ids):
            chunk_id, document_id, ordinal, text, start, end, source, heading, place = row
            chunks[chunk_id] = Chunk(chunk_id, document_id, ordinal, text, start, end, source, heading, kb, place=place)
        return [chunks[one] for one in ids if one in chunks]

    def around(self, chunk_id: int, before: int, behind: int) -> list[int]:
        """Return the ids of a chunk and its neighbours in the document: up to `before` chunks before it and `behind` chunks after it."""
        rows = self._file.rows(
            "SELECT n.id FROM chunks c JOIN chunks n USING (document_id) "
            "WHERE c.id = ? AND n.ordinal BETWEEN c.ordinal - ? AND c.ordinal + ? ORDER BY n.ordinal",
            (chunk_id, before, behind),
        )
        return [row[0] for row in rows]

    def feedback(self, ids: Sequence[int] | None = None) -> dict[int, Feedback]:
        """Return the feedback of these chunks, or of all. Chunks without feedback are left out."""
        statement = "SELECT chunk_id, retrieved, supplied, cited, useful, useless FROM feedback"
        rows = self._file.rows(statement) if ids is None else self._file.rows_in(f"{statement} WHERE chunk_id IN", ids)
        return {one: Feedback(*counts) for one, *counts in rows}

    # For `localrag kb verify` and `export`.

    def all_rows(self) -> Iterator[StoredChunk]:
        """Yield every chunk, ordered by id."""
        statement = (
            'SELECT id, ordinal, start, "end", place, heading, text, sha256, vector '
            "FROM chunks LEFT JOIN vectors ON chunk_id = id ORDER BY id"
        )
        yield from map(StoredChunk._make, self._file.each(statement))

    def positions(self) -> Iterator[Position]:
        """The place of every chunk, document by document, in the order in which the chunks were cut."""
        statement = (
            'SELECT c.id, document_id, ordinal, start, "end", place, source, num_bytes '
            "FROM chunks c JOIN documents d ON d.id = document_id ORDER BY document_id, ordinal"
        )
        yield from map(Position._make, self._file.each(statement))

    def titles(self) -> list[tuple[str, str]]:
        """(source, title) of every document, ordered by source."""
        return self._file.rows("SELECT source, title FROM documents ORDER BY source, id")

    def source_paths(self) -> list[tuple[str, str]]:
        """Return (source, absolute path) of every document that is a file, ordered by source."""
        return self._file.rows(f"SELECT source, path FROM documents WHERE {_IS_FILE} ORDER BY source, path")  # noqa: S608  # no values in it

    def elsewhere(self) -> dict[str, int]:
        """Return machine → number of documents, for other machines. All other methods return only paths of this machine."""
        return {}

    def problems(self) -> list[str]:
        """Return the errors in the pages, indexes, references and numbers of the file."""
        return self._file.problems()

    def full_text_is_sound(self, name: str) -> bool:
        """Whether a full-text index agrees with the chunks."""
        try:
            self._db.execute(f"INSERT INTO {name} ({name}, rank) VALUES ('integrity-check', 1)")  # noqa: S608  # our own names
        except sqlite3.DatabaseError:
            return False
        return True

    def copy_to(self, path: Path) -> None:
        """Copy one snapshot of the file. Others may write to the file at the same time."""
        with explained(path), closing(sqlite3.connect(path, isolation_level=None)) as copy:
            self._db.backup(copy)

    # Writes, inside `writing()`.

    def claim_embedder(self, fingerprint: str, dim: int, min_similarity: float | None = None) -> None:
        """Record the embedder and its relevance threshold. Raises KnowledgeBaseError if another embedder was recorded."""
        self.check_embedder(fingerprint, dim)
        self._db.execute(
            "UPDATE state SET embedder = ?, dim = ?, min_similarity = ? WHERE embedder IS NULL", (fingerprint, dim, min_similarity)
        )

    def check_embedder(self, fingerprint: str, dim: int) -> None:
        """Raise KnowledgeBaseError for an embedder whose vectors cannot be compared with the stored ones."""
        embedder = self.embedder
        if embedder is not None and embedder != (fingerprint, dim):
            raise other_embedder(self.path.parent.name, embedder, (fingerprint, dim))

    def stage_embedder(self, fingerprint: str, dim: int) -> None:
        """Begin to keep vectors of another embedder beside those in use, or go on if they are of the same one."""
        for statement in _STAGING:
            self._db.execute(statement)
        if self._db.execute("SELECT embedder, dim FROM staged_embedder").fetchone() != (fingerprint, dim):
            self._db.execute("DELETE FROM staged_vectors")
            self._db.execute("INSERT OR REPLACE INTO staged_embedder (one, embedder, dim) VALUES (1, ?, ?)", (fingerprint, dim))

    def unstaged(self, after: int, limit: int) -> list[Unstaged]:
        """Return up to `limit` chunks with ids greater than `after` whose text has no staged vector, ordered by id."""
        rows = self._file.rows(f"{_UNSTAGED} AND id > ? ORDER BY id LIMIT ?", (after, limit))
        return [Unstaged._make(row) for row in rows]

    def stage_vectors(self, vectors: Mapping[bytes, bytes]) -> None:
        """Keep vectors of the staged embedder by the sha256 of their texts."""
        self._db.executemany("INSERT OR REPLACE INTO staged_vectors (sha256, vector) VALUES (?, ?)", vectors.items())

    def switch_embedder(self, min_similarity: float | None) -> None:
        """Put the staged vectors and embedder in the place of those in use. Every chunk must have a staged vector."""
        if self._db.execute(f"{_UNSTAGED} LIMIT 1").fetchone() is not None:
            raise KnowledgeBaseError("Some passages have not been embedded yet.", hint="Run the same command again.")
        self._db.execute("DELETE FROM vectors")
        self._db.execute(
            "INSERT INTO vectors (chunk_id, vector) SELECT id, s.vector FROM chunks JOIN staged_vectors s USING (sha256) ORDER BY id"
        )
        self._db.execute("UPDATE state SET (embedder, dim) = (SELECT embedder, dim FROM staged_embedder)")
        self._db.execute("UPDATE state SET min_similarity = ?", (min_similarity,))
        for table in ("staged_vectors", "staged_embedder"):
            self._db.execute(f"DROP TABLE {table}")

    def put_document(self, row: DocumentRow, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> int:
        """Store a document with its chunks, replacing the one with the same path; return its id.

        `vectors` maps the sha256 of a passage to its vector. Passages that the document already has need no vector. A file keeps its first
        `source`.
        """
        old = self._db.execute("SELECT id FROM documents WHERE path = ?", (row.path,)).fetchone()
        values = (row.sha256, row.num_bytes, row.title, row.mtime_ns, row.cutter)
        if old is None:
            added = self._db.execute(
                "INSERT INTO documents (sha256, num_bytes, title, mtime_ns, cutter, path, source) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*values, row.path, row.source),
            )
            document_id = int(added.lastrowid or 0)
        else:
            document_id = int(old[0])
            self._db.execute(
                "UPDATE documents SET sha256 = ?, num_bytes = ?, title = ?, mtime_ns = ?, cutter = ? WHERE id = ?", (*values, document_id)
            )
        self.set_fields(document_id, (*(("tag", tag) for tag in row.tags), *row.fields), "file")
        if row.given is not None:
            self._put_given(document_id, row.source, row.given)
        self._put_chunks(document_id, passages, vectors, language_of(passage.text for passage in passages))
        return document_id

    def move_document(self, document_id: int, path: str, source: str) -> None:
        """Rename a document, which keeps its chunks. Another document at that path is removed."""
        self._db.execute("DELETE FROM documents WHERE path = ? AND id != ?", (path, document_id))
        self._db.execute("UPDATE documents SET path = ?, source = ? WHERE id = ?", (path, source, document_id))

    def adopt(self, ids: Sequence[int]) -> None:
        """Assign documents without a machine to this machine, which has their files. A local store has no such documents."""

    def stamp_documents(self, stamps: Iterable[tuple[int, int | None]]) -> None:
        """Record (document id, mtime_ns) of files that were read and found unchanged."""
        self._db.executemany("UPDATE documents SET mtime_ns = ? WHERE id = ?", [(mtime_ns, one) for one, mtime_ns in stamps])

    def set_unread(self, gone_paths: Iterable[str], unread: Mapping[str, UnreadFile]) -> None:
        """Record files without text by absolute path (`unread`), and remove the records of others (`gone_paths`)."""
        self._db.executemany("DELETE FROM unread WHERE path = ?", [(path,) for path in gone_paths])
        self._db.executemany(
            "INSERT OR REPLACE INTO unread (path, num_bytes, mtime_ns, cutter, reason) VALUES (?, ?, ?, ?, ?)",
            [(path, one.num_bytes, one.mtime_ns, one.cutter, one.reason) for path, one in unread.items()],
        )

    def drop_chunks(self, ids: Sequence[int]) -> list[str]:
        """Delete chunks and return the sources of their documents, which are marked to be indexed again."""
        documents = set()
        for one in ids:
            documents |= set(
                self._db.execute("SELECT d.id, source FROM documents d JOIN chunks c ON document_id = d.id WHERE c.id = ?", (one,))
            )
            self._db.execute("DELETE FROM chunks WHERE id = ?", (one,))
        self._db.executemany(
            "UPDATE documents SET cutter = 0, mtime_ns = NULL WHERE id = ?", [(document_id,) for document_id, _ in documents]
        )
        return sorted(source for _, source in documents)

    def rebuild_full_text(self, name: str) -> None:
        self._db.execute(f"INSERT INTO {name} ({name}) VALUES ('rebuild')")  # noqa: S608  # our own names

    def set_fields(self, document_id: int, fields: Sequence[tuple[str, str]], origin: Origin) -> bool:
        """Replace the fields of one origin. Return whether that changed anything."""
        new = {(key, value) for key, value in fields if value}
        old = set(self._db.execute("SELECT key, value FROM fields WHERE document_id = ? AND origin = ?", (document_id, origin)))
        if new == old:
            return False
        self._db.execute("DELETE FROM fields WHERE document_id = ? AND origin = ?", (document_id, origin))
        self._db.executemany(
            "INSERT INTO fields (document_id, key, value, origin) VALUES (?, ?, ?, ?)",
            [(document_id, *pair, origin) for pair in sorted(new)],
        )
        return True

    def add_feedback(self, counts: Mapping[int, Feedback]) -> None:
        """Add counts to the feedback of chunks. Ids that no longer exist are ignored."""
        self._db.executemany(
            "INSERT INTO feedback SELECT id, ?, ?, ?, ?, ? FROM chunks WHERE id = ? ON CONFLICT (chunk_id) DO UPDATE SET "
            "retrieved = retrieved + excluded.retrieved, supplied = supplied + excluded.supplied, cited = cited + excluded.cited, "
            "useful = useful + excluded.useful, useless = useless + excluded.useless",
            [(*feedback, chunk_id) for chunk_id, feedback in counts.items()],
        )

    def reset_feedback(self) -> None:
        self._db.execute("DELETE FROM feedback")

    def remove_documents(self, paths: Iterable[str]) -> None:
        """Delete documents with their chunks, vectors and full text."""
        self._db.executemany("DELETE FROM documents WHERE path = ?", [(path,) for path in paths])

    def _count_generation(self) -> None:
        """Begin the next generation, with a random stamp."""
        (generation,) = self._db.execute("UPDATE state SET generation = generation + 1 RETURNING generation").fetchone()
        self._db.execute("INSERT OR REPLACE INTO generations (generation, stamp) VALUES (?, ?)", (generation, secrets.randbits(63)))
        self._db.execute("DELETE FROM generations WHERE generation <= ?", (generation - NUM_STAMPS,))

    def _put_given(self, document_id: int, source: str, text: GivenText) -> None:
        self._db.execute("UPDATE documents SET source = ? WHERE id = ?", (source, document_id))
        values = (document_id, text.id, text.metadata, text.text)
        self._db.execute("INSERT OR REPLACE INTO texts (document_id, id, metadata, text) VALUES (?, ?, ?, ?)", values)
        self._db.execute("DELETE FROM entries WHERE document_id = ?", (document_id,))
        self._db.executemany(
            "INSERT INTO entries (document_id, entry) VALUES (?, ?)", [(document_id, entry) for entry in sorted(text.entries)]
        )

    def _put_chunks(self, document_id: int, passages: Sequence[Passage], vectors: Mapping[bytes, bytes], language: str) -> None:
        statement = "SELECT id, sha256, heading FROM chunks WHERE document_id = ? ORDER BY ordinal DESC"
        chunk_ids, stale_ids = match_chunks(self._db.execute(statement, (document_id,)), passages)
        self._db.executemany("DELETE FROM chunks WHERE id = ?", [(one,) for one in stale_ids])
        # The ordinals of a document are unique after every statement, so first move those of the remaining chunks out of the way.
        self._db.execute("UPDATE chunks SET ordinal = -1 - ordinal WHERE document_id = ?", (document_id,))
        self._db.execute("UPDATE chunks SET language = ?1 WHERE document_id = ?2 AND language != ?1", (language, document_id))
        for ordinal, (passage, chunk_id) in enumerate(zip(passages, chunk_ids, strict=True)):
            where = (ordinal, passage.start, passage.end, passage.place)
            if chunk_id is not None:
                self._db.execute('UPDATE chunks SET ordinal = ?, start = ?, "end" = ?, place = ? WHERE id = ?', (*where, chunk_id))
                continue
            added = self._db.execute(
                'INSERT INTO chunks (document_id, ordinal, start, "end", place, heading, text, sha256, language) '
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (document_id, *where, passage.heading, passage.text, passage.sha256, language),
            )
            self._db.execute("INSERT INTO vectors (chunk_id, vector) VALUES (?, ?)", (added.lastrowid, vectors[passage.sha256]))


class SqliteTexts:
    """The documents given as texts, by id. Implements `AnyTexts`. `Store.put_document` writes them."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    def known(self, ids: Sequence[str]) -> dict[str, StoredDocument]:
        """Return id → document, for those of the ids that are stored."""
        rows = self._file.rows_in(f"SELECT t.id, d.id, sha256, num_bytes, mtime_ns, cutter {_TEXTS} WHERE t.id IN", ids)
        return {text_id: StoredDocument(*rest) for text_id, *rest in rows}

    def outdated(self, cutter: int) -> list[str]:
        """Return the ids of texts that another version cut, oldest first."""
        return [row[0] for row in self._file.rows(f"SELECT t.id {_TEXTS} WHERE cutter != ? ORDER BY d.id", (cutter,))]

    def whole(self, ids: Sequence[str]) -> dict[str, TextRow]:
        """Return id → row with the whole text, for those of the ids that are stored."""
        rows = self._file.rows_in(f"SELECT t.id, text, length(text), metadata, sha256 {_TEXTS} WHERE t.id IN", ids)
        return {row[0]: TextRow(*row) for row in rows}

    def page(self, where: Where, *, offset: int, limit: int, max_chars: int) -> list[TextRow]:
        """Return a page of matching documents, files included, oldest first, each with the first `max_chars` characters of its text."""
        selection, values = where.to_sql()
        rows = self._file.rows(
            f"SELECT text_id, source, substr(body, 1, ?), length(body), metadata, sha256 FROM ({_BODIES} WHERE d.id IN ({selection}) "  # noqa: S608  # no values in it
            "ORDER BY d.id LIMIT ? OFFSET ?)",
            (max_chars, *values, limit, offset),
        )
        return [TextRow.listed(*row) for row in rows]

    def count(self, where: Where) -> int:
        """Return the number of matching documents, files included."""
        selection, values = where.to_sql()
        return int(self._file.one(f"SELECT count(*) FROM ({selection})", values))  # noqa: S608  # no values in it

    def names(self, document_ids: Sequence[int]) -> dict[int, tuple[str, str | None, str | None]]:
        """Return document id → (source, text id, metadata). The last two are None for files."""
        rows = self._file.rows_in(
            "SELECT d.id, source, t.id, metadata FROM documents d LEFT JOIN texts t ON t.document_id = d.id WHERE d.id IN", document_ids
        )
        return {document_id: (source, text_id, metadata) for document_id, source, text_id, metadata in rows}

    def all(self) -> Iterator[tuple[TextRow, frozenset[bytes]]]:
        """Yield every text with the digests of its metadata."""
        for text_id, *rest, entries in self._file.each(_ALL_TEXTS):
            yield TextRow(text_id, *rest), frozenset(bytes.fromhex(entry) for entry in (entries or "").split())


def match_chunks(present: Iterable[tuple[int, bytes, str]], passages: Sequence[Passage]) -> tuple[list[int | None], list[int]]:
    """Match the passages of a document with its stored chunks. Return the chunk id of each passage, or None, and the unmatched ids.

    `present` lists (chunk id, sha256, heading) of the stored chunks in reverse order, so that equal chunks keep their order.
    """
    ids: defaultdict[tuple[bytes, str], list[int]] = defaultdict(list)
    for chunk_id, sha256, heading in present:
        ids[sha256, heading].append(chunk_id)
    chunk_ids = [same.pop() if (same := ids[passage.sha256, passage.heading]) else None for passage in passages]
    return chunk_ids, [one for same in ids.values() for one in same]


def fts5_query(terms: Iterable[Term], languages: Sequence[str] = ()) -> str:
    """Return the FTS5 expression that matches any of these terms, in words or in the stems of these languages."""
    return " OR ".join(_expression(variant) for term in terms for variant in variants(term, languages))


_COLUMNS = {"all": "", "words": "{heading text} : ", "stems": "{heading_stems text_stems} : "}


def _expression(variant: Variant) -> str:
    return _COLUMNS[variant.scope] + _quoted(variant.text) + "*" * variant.is_prefix


def _quoted(text: str) -> str:
    """Quote a text as an FTS5 string, in which only quotation marks are special."""
    return '"' + text.replace('"', '""') + '"'
