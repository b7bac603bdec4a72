"""The truth of a knowledge base: one SQLite file with documents, chunks, full text and vectors.

Write-ahead log and `synchronous = FULL`, so that what was committed survives a crash of the process and of the machine. Every change
is one BEGIN IMMEDIATE transaction that also counts the generation up; a second writer waits for the first. What is derived from the
file names the generation that it was derived from.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import Passage
from localrag.kb.schema import migrate
from localrag.migrations import use_write_ahead_log, version
from localrag.passages import Chunk

WAIT_S = 30.0
"""How long a writer waits for another one."""

_BATCH = 500  # ids in one statement; SQLite takes 32,766 parameters, older builds 999
_CHUNK = 'SELECT c.id, document_id, ordinal, text, start, "end", source, heading FROM chunks c JOIN documents d ON d.id = document_id'


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A document as it is to be stored. `path` is absolute and identifies it; `sha256` is of the file's `num_bytes` bytes."""

    path: str
    source: str
    sha256: str
    num_bytes: int
    title: str = ""
    tags: tuple[str, ...] = ()


class Store:
    """One knowledge base file. Opening one that is not there needs `create`, and makes its folder.

    Every failure of SQLite arrives as a KnowledgeBaseError with a way out. A Store belongs to the thread that opened it.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        if create:
            _make_folder(path.parent)
        with _explained(path):
            mode = "rwc" if create else "rw"
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=WAIT_S, isolation_level=None)
            try:
                if version(self._db) == 0:  # new, or its maker was killed; the journal mode stays with the file
                    use_write_ahead_log(self._db, wait_s=WAIT_S)
                migrate(self._db)
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA foreign_keys = ON")
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One snapshot for all reads inside: they agree with each other and with `generation`."""
        with _explained(self.path):
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction, all or nothing, with the next generation."""
        with _explained(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("UPDATE state SET generation = generation + 1")
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    # What is there. Several reads that must agree belong into one `reading()`.

    @property
    def generation(self) -> int:
        return int(self._one("SELECT generation FROM state"))

    @property
    def embedder(self) -> tuple[str, int] | None:
        """(fingerprint, dim) of the embedder whose vectors are stored; None as long as nothing was indexed."""
        fingerprint, dim = self._rows("SELECT embedder, dim FROM state")[0]
        return None if fingerprint is None else (str(fingerprint), int(dim))

    @property
    def num_documents(self) -> int:
        return int(self._one("SELECT count(*) FROM documents"))

    @property
    def num_chunks(self) -> int:
        return int(self._one("SELECT count(*) FROM chunks"))

    def sources(self) -> list[tuple[str, int]]:
        """(source, number of chunks) of every document, by source."""
        return self._rows(
            "SELECT source, count(c.id) FROM documents d LEFT JOIN chunks c ON document_id = d.id GROUP BY d.id ORDER BY source, d.id"
        )

    def documents(self) -> dict[str, str]:
        """Absolute path to sha256 of every document."""
        return dict(self._rows("SELECT path, sha256 FROM documents"))

    def paths(self) -> dict[str, str]:
        """Source to absolute path of every document; of two with one source, one."""
        return dict(self._rows("SELECT source, path FROM documents"))

    def vectors(self) -> Iterator[tuple[int, bytes]]:
        """(chunk id, vector) of every chunk, by id."""
        with _explained(self.path):
            yield from self._db.execute("SELECT chunk_id, vector FROM vectors ORDER BY chunk_id")

    def keyword_ids(self, match: str, limit: int) -> list[tuple[int, float]]:
        """(chunk id, BM25 score, higher for better) of the best matches of an FTS5 expression; ties by id."""
        return self._rows(
            "SELECT rowid, -rank FROM chunks_fts WHERE chunks_fts MATCH ? ORDER BY rank, rowid LIMIT ?",
            (match, limit),
        )

    def num_matches(self, match: str) -> int:
        """The number of chunks that match an FTS5 expression."""
        return int(self._one("SELECT count(*) FROM chunks_fts WHERE chunks_fts MATCH ?", (match,)))

    def matching(self, match: str, ids: Sequence[int]) -> list[int]:
        """Those of these chunks that match an FTS5 expression."""
        found: list[int] = []
        for at in range(0, len(ids), _BATCH):
            batch = ids[at : at + _BATCH]
            marks = ", ".join("?" * len(batch))
            statement = f"SELECT rowid FROM chunks_fts WHERE chunks_fts MATCH ? AND rowid IN ({marks})"  # noqa: S608  # question marks only
            found += [row[0] for row in self._rows(statement, (match, *batch))]
        return found

    def chunks(self, ids: Sequence[int], *, kb: str = "") -> list[Chunk]:
        """The chunks of these ids, in the order asked for; an id that is not there is left out."""
        found: dict[int, Chunk] = {}
        for at in range(0, len(ids), _BATCH):
            batch = ids[at : at + _BATCH]
            marks = ", ".join("?" * len(batch))
            for row in self._rows(f"{_CHUNK} WHERE c.id IN ({marks})", batch):
                chunk_id, document_id, ordinal, text, start, end, source, heading = row
                found[chunk_id] = Chunk(chunk_id, document_id, ordinal, text, start, end, source, heading, kb)
        return [found[one] for one in ids if one in found]

    # What changes, inside `writing()`.

    def claim_embedder(self, fingerprint: str, dim: int) -> None:
        """Notes whose vectors are stored here; another embedder than before is refused (KnowledgeBaseError)."""
        self.check_embedder(fingerprint, dim)
        self._db.execute("UPDATE state SET embedder = ?, dim = ? WHERE embedder IS NULL", (fingerprint, dim))

    def check_embedder(self, fingerprint: str, dim: int) -> None:
        """Refuses an embedder whose vectors do not compare with the stored ones (KnowledgeBaseError)."""
        known = self.embedder
        if known is not None and known != (fingerprint, dim):
            name = self.path.parent.name
            raise KnowledgeBaseError(
                f"Knowledge base {name!r} was indexed with another embedder ({known[1]} dimensions, {known[0][:12]}…) "
                f"than this one ({dim} dimensions, {fingerprint[:12]}…), so their vectors do not compare.",
                hint=f"Use the embedder it was indexed with, or index the documents into a new one: localrag index PATH --kb {name}-2",
                dim=known[1],
                given_dim=dim,
            )

    def put_document(self, row: DocumentRow, passages: Sequence[Passage], vectors: Sequence[bytes]) -> None:
        """Stores a document with its chunks and their vectors, in place of what was known of the same path.

        `source` stays as it was first. If the same bytes are stored already, by another writer in the meantime, nothing changes.
        """
        values = (row.sha256, row.num_bytes, row.title, json.dumps(row.tags, ensure_ascii=False))
        old = self._rows("SELECT id, sha256 FROM documents WHERE path = ?", (row.path,))
        if old and old[0][1] == row.sha256:
            return
        if old:
            document_id = old[0][0]
            self._db.execute("DELETE FROM chunks WHERE document_id = ?", (document_id,))
            self._db.execute("UPDATE documents SET sha256 = ?, num_bytes = ?, title = ?, tags = ? WHERE id = ?", (*values, document_id))
        else:
            document_id = self._db.execute(
                "INSERT INTO documents (sha256, num_bytes, title, tags, path, source) VALUES (?, ?, ?, ?, ?, ?)",
                (*values, row.path, row.source),
            ).lastrowid
        for ordinal, (passage, vector) in enumerate(zip(passages, vectors, strict=True)):
            chunk_id = self._db.execute(
                'INSERT INTO chunks (document_id, ordinal, start, "end", heading, text) VALUES (?, ?, ?, ?, ?, ?)',
                (document_id, ordinal, passage.start, passage.end, passage.heading, passage.text),
            ).lastrowid
            self._db.execute("INSERT INTO vectors (chunk_id, vector) VALUES (?, ?)", (chunk_id, vector))

    def remove_documents(self, paths: Iterable[str]) -> None:
        """Documents, their chunks, vectors and full text."""
        self._db.executemany("DELETE FROM documents WHERE path = ?", [(path,) for path in paths])

    def _rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple]:  # type: ignore[type-arg]  # rows as SQLite gives them
        with _explained(self.path):
            return self._db.execute(statement, values).fetchall()

    def _one(self, statement: str, values: Sequence[object] = ()) -> int:
        return self._rows(statement, values)[0][0]  # type: ignore[no-any-return]


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns what SQLite and the file system say into an error that a person can act on."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite's message repeats damaged text
        kind = getattr(error, "sqlite_errorname", "") or ""
        raise KnowledgeBaseError(f"The knowledge base file {path} cannot be used: {error}.", hint=_way_out(kind)) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KnowledgeBaseError(f"Cannot make the folder {folder}: {error.strerror or error}.", hint=_way_out("")) from error


def _way_out(kind: str) -> str:
    name = kind.removeprefix("SQLITE_").split("_")[0]
    return {
        "BUSY": "Another localrag is writing to it. Wait for that one to end, then try again.",
        "FULL": "The disk is full. Free some space and run the same command again: it goes on where it stopped.",
        "NOTADB": "It is not a knowledge base, or it is damaged. Remove it (localrag kb remove) and index the documents again.",
        "CORRUPT": "It is damaged. Remove it (localrag kb remove) and index the documents again.",
    }.get(name, "Check that the folder exists and can be written to, or set LOCALRAG_HOME to one that can.")
