"""The truth of a knowledge base: one SQLite file with documents, chunks, full text and vectors.

Every change is one transaction that also counts the generation up. What is derived from the file names the generation that it was
derived from.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from localrag.kb import documents, file_check, fts5
from localrag.kb.chunking import Passage
from localrag.kb.documents import DocumentRow, Known, Origin, Unread
from localrag.kb.failures import explained, other_embedder
from localrag.kb.filters import Where
from localrag.kb.query import Term
from localrag.kb.sqlite_file import SqliteFile
from localrag.kb.text_rows import TextRows
from localrag.passages import Chunk

WAIT_S = 30.0
"""How long a writer waits for another one."""

_FEW = 1000
_IS_FILE = "id NOT IN (SELECT document_id FROM texts)"
_CHUNK = (
    'SELECT c.id, document_id, ordinal, text, start, "end", source, heading, place FROM chunks c JOIN documents d ON d.id = document_id'
)


class Feedback(NamedTuple):
    """How often a chunk was found, was in a prompt, was cited, and was marked by a person."""

    retrieved: int = 0
    supplied: int = 0
    cited: int = 0
    useful: int = 0
    useless: int = 0


class Store:
    """One knowledge base file. Opening one that is not there needs `create`, and makes its folder.

    Every failure of SQLite arrives as a KnowledgeBaseError with a way out. A Store belongs to the thread that opened it. What it has in
    common with stores elsewhere is told by `AnyStore` in localrag/kb/truth.py.
    """

    is_local = True
    """Whether all documents are files of this machine: where one is not there, it is gone."""

    full_texts = ("chunks_fts", "chunks_characters")
    """The full texts by their names, for `full_text_is_sound` and `rebuild_full_text`."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self._file = SqliteFile(path, create=create, wait_s=WAIT_S)
        self._db = self._file.connection
        self.texts = TextRows(self._file)
        """What was given as texts."""

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One snapshot for all reads inside: they agree with each other and with `generation`."""
        with self._file.reading():
            yield

    @contextmanager
    def writing(self, *, moves_on: bool = True) -> Iterator[None]:
        """One transaction, all or nothing, with the next generation unless chunks and vectors stay as they are."""
        with self._file.writing():
            yield
            if moves_on:
                documents.count_generation(self._db)

    # What is there. Several reads that must agree belong into one `reading()`.

    @property
    def generation(self) -> int:
        return int(self._file.one("SELECT generation FROM state"))

    @property
    def embedder(self) -> tuple[str, int] | None:
        """(fingerprint, dim) of the embedder whose vectors are stored; None as long as nothing was indexed."""
        fingerprint, dim = self._file.rows("SELECT embedder, dim FROM state")[0]
        return None if fingerprint is None else (str(fingerprint), int(dim))

    @property
    def min_similarity(self) -> float | None:
        """What cosine similarity with a question makes a chunk relevant, by this embedder; None where it was not measured."""
        found = self._file.one("SELECT min_similarity FROM state")
        return None if found is None else float(found)

    @property
    def num_documents(self) -> int:
        return int(self._file.one("SELECT count(*) FROM documents"))

    @property
    def num_chunks(self) -> int:
        return int(self._file.one("SELECT count(*) FROM chunks"))

    def sources(self, where: Where | None = None) -> list[tuple[str, int]]:
        """(source, number of chunks) of every document that passes, by source."""
        chosen, values = (where or Where()).to_sql()
        return self._file.rows(
            "SELECT source, count(c.id) FROM documents d LEFT JOIN chunks c ON document_id = d.id "  # noqa: S608  # no values in it
            f"WHERE d.id IN ({chosen}) GROUP BY d.id ORDER BY source, d.id",
            values,
        )

    def documents(self) -> dict[str, Known]:
        """Every document that is a file, by its absolute path."""
        rows = self._file.rows(f"SELECT path, id, sha256, num_bytes, mtime_ns, cutter FROM documents WHERE {_IS_FILE}")  # noqa: S608  # no values in it
        return {path: Known(*rest) for path, *rest in rows}

    def unread(self) -> dict[str, Unread]:
        """The files that are known to have no text, by absolute path."""
        rows = self._file.rows("SELECT path, num_bytes, mtime_ns, cutter, reason FROM unread")
        return {path: Unread(*rest) for path, *rest in rows}

    def fields(self, where: Where | None = None) -> dict[str, dict[str, list[str]]]:
        """The fields of every document that passes and has any, by source: key to values, sorted; "tag" among the keys."""
        chosen, values = (where or Where()).to_sql()
        found: dict[str, dict[str, list[str]]] = {}
        for source, key, value in self._file.rows(
            f"SELECT DISTINCT source, key, value FROM fields JOIN documents ON id = document_id WHERE document_id IN ({chosen}) "  # noqa: S608  # no values in it
            "ORDER BY source, key, value",
            values,
        ):
            found.setdefault(source, {}).setdefault(key, []).append(value)
        return found

    def fields_by_origin(self) -> dict[tuple[int, Origin], set[tuple[str, str]]]:
        """(document id, origin) to its fields, but for those that files say of themselves."""
        found: dict[tuple[int, Origin], set[tuple[str, str]]] = {}
        for document_id, origin, key, value in self._file.rows("SELECT document_id, origin, key, value FROM fields WHERE origin != 'file'"):
            found.setdefault((document_id, origin), set()).add((key, value))
        return found

    def paths(self) -> dict[str, str]:
        """Source to absolute path of every document of this machine that is a file; of two with one source, one."""
        return dict(self._file.rows(f"SELECT source, path FROM documents WHERE {_IS_FILE}"))  # noqa: S608  # no values in it

    def stamp(self, generation: int) -> int | None:
        """The random number that was drawn when this generation was committed; None if this file never had it, or it is very old."""
        rows = self._file.rows("SELECT stamp FROM generations WHERE generation = ?", (generation,))
        return int(rows[0][0]) if rows else None

    def vectors(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """(chunk id, vector) of every chunk whose id is greater than `after`, by id."""
        yield from self._file.each("SELECT chunk_id, vector FROM vectors WHERE chunk_id > ? ORDER BY chunk_id", (after,))

    def existing(self, ids: Sequence[int]) -> list[int]:
        """Those of these chunk ids that are stored."""
        return [row[0] for row in self._file.rows_in("SELECT id FROM chunks WHERE id IN", ids)]

    def vectors_of(self, sha256s: Sequence[bytes]) -> dict[bytes, bytes]:
        """The vectors of chunks that are known by what was embedded of them."""
        return dict(self._file.rows_in("SELECT sha256, vector FROM chunks JOIN vectors ON chunk_id = id WHERE sha256 IN", sha256s))

    def allowed(self, where: Where | None) -> list[int] | None:
        """The ids of the chunks whose documents pass, ascending; None if all do."""
        if not where:
            return None
        chosen, values = where.to_sql()
        statement = f"SELECT id FROM chunks WHERE document_id IN ({chosen}) ORDER BY id"  # noqa: S608  # no values in it
        return [row[0] for row in self._file.rows(statement, values)]

    def keyword_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]:
        """(chunk id, BM25 score, higher for better) of the chunks that match any of these terms best; ties by id."""
        return self._best("chunks_fts", terms, limit, where)

    def character_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]:
        """The same among the chunks that hold Chinese, Japanese or Korean text, each character of it a word (`schema.spaced`)."""
        return self._best("chunks_characters", terms, limit, where)

    def keyword_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
        """For each term, how many chunks match it, and which of these do."""
        return [self._holders("chunks_fts", term, among) for term in terms]

    def character_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
        """The same among the chunks that hold Chinese, Japanese or Korean text."""
        return [self._holders("chunks_characters", term, among) for term in terms]

    def _best(self, table: str, terms: Sequence[Term], limit: int, where: Where | None) -> list[tuple[int, float]]:
        chosen, values = "", list[str | bytes]()
        if where:
            passing, values = where.to_sql()
            # without the +, the full text is searched once for each that passes: 380 ms for 500 of 5,000, not 8
            chosen = f"AND +rowid IN (SELECT id FROM chunks WHERE document_id IN ({passing}))"  # noqa: S608  # no values in it
        statement = f"SELECT rowid, -rank FROM {table} WHERE {table} MATCH ? {chosen} ORDER BY rank, rowid LIMIT ?"  # noqa: S608  # our own names
        return self._file.rows(statement, (fts5.any_of(terms), *values, limit))

    def _holders(self, table: str, term: Term, among: Sequence[int]) -> tuple[int, list[int]]:
        match = fts5.any_of((term,))
        matching = f"FROM {table} WHERE {table} MATCH ?"  # our own names
        few = [row[0] for row in self._file.rows(f"SELECT rowid {matching} LIMIT {_FEW + 1}", (match,))]
        if len(few) <= _FEW:  # to look each id up in the full text takes longer
            wanted = set(among)
            return len(few), [one for one in few if one in wanted]
        found = self._file.rows_in(f"SELECT rowid {matching} AND rowid IN", among, match)
        return int(self._file.one(f"SELECT count(*) {matching}", (match,))), [row[0] for row in found]

    def chunks(self, ids: Sequence[int], *, kb: str = "") -> list[Chunk]:
        """The chunks of these ids, in the order asked for; an id that is not there is left out."""
        found: dict[int, Chunk] = {}
        for row in self._file.rows_in(f"{_CHUNK} WHERE c.id IN", ids):
            chunk_id, document_id, ordinal, text, start, end, source, heading, place = row
            found[chunk_id] = Chunk(chunk_id, document_id, ordinal, text, start, end, source, heading, kb, place=place)
        return [found[one] for one in ids if one in found]

    def around(self, chunk_id: int, before: int, behind: int) -> list[int]:
        """The ids of a chunk and of so many that stand directly before and behind it in its document, in its order."""
        rows = self._file.rows(
            "SELECT n.id FROM chunks c JOIN chunks n USING (document_id) "
            "WHERE c.id = ? AND n.ordinal BETWEEN c.ordinal - ? AND c.ordinal + ? ORDER BY n.ordinal",
            (chunk_id, before, behind),
        )
        return [row[0] for row in rows]

    def feedback(self, ids: Sequence[int] | None = None) -> dict[int, Feedback]:
        """What is known of how these chunks fared, or all; chunks of which nothing is known are left out."""
        statement = "SELECT chunk_id, retrieved, supplied, cited, useful, useless FROM feedback"
        rows = self._file.rows(statement) if ids is None else self._file.rows_in(f"{statement} WHERE chunk_id IN", ids)
        return {one: Feedback(*counts) for one, *counts in rows}

    # What `localrag kb verify` and `export` look at.

    def all_rows(self) -> Iterator[tuple[int, str, str, bytes, bytes | None]]:
        """(chunk id, heading, text, sha256, vector) of every chunk, by id."""
        yield from self._file.each("SELECT id, heading, text, sha256, vector FROM chunks LEFT JOIN vectors ON chunk_id = id ORDER BY id")

    def source_paths(self) -> list[tuple[str, str]]:
        """(source, absolute path) of every document that is a file, by source."""
        return self._file.rows(f"SELECT source, path FROM documents WHERE {_IS_FILE} ORDER BY source, path")  # noqa: S608  # no values in it

    def elsewhere(self) -> dict[str, int]:
        """The number of documents by machine, but for those of this one. Everything else that is told by path is told of this one's."""
        return {}

    def problems(self) -> list[str]:
        """What is wrong with the pages, the indices and the references of the file itself."""
        return file_check.problems(self._db)

    def index_problems(self) -> list[str]:
        """What was wrong with the files of vectors, which are removed then."""
        from localrag.kb.vector_check import verify_index  # noqa: PLC0415  # imports numpy

        with self.reading():
            return verify_index(self)

    def full_text_is_sound(self, name: str) -> bool:
        """Whether a full text says what the chunks say."""
        try:
            self._db.execute(f"INSERT INTO {name} ({name}, rank) VALUES ('integrity-check', 1)")  # noqa: S608  # our own names
        except sqlite3.DatabaseError:
            return False
        return True

    def copy_to(self, path: Path) -> None:
        """A copy of the file as it is at one instant, whoever writes to it meanwhile."""
        with explained(path), closing(sqlite3.connect(path, isolation_level=None)) as copy:
            self._db.backup(copy)

    # What changes, inside `writing()`.

    def claim_embedder(self, fingerprint: str, dim: int, min_similarity: float | None = None) -> None:
        """Notes whose vectors are stored here, and from where on they are near; another embedder than before is refused."""
        self.check_embedder(fingerprint, dim)
        self._db.execute(
            "UPDATE state SET embedder = ?, dim = ?, min_similarity = ? WHERE embedder IS NULL", (fingerprint, dim, min_similarity)
        )

    def check_embedder(self, fingerprint: str, dim: int) -> None:
        """Refuses an embedder whose vectors do not compare with the stored ones (KnowledgeBaseError)."""
        known = self.embedder
        if known is not None and known != (fingerprint, dim):
            raise other_embedder(self.path.parent.name, known, (fingerprint, dim))

    def put_document(self, row: DocumentRow, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> int:
        """Stores a document in place of what was known of the same path. See localrag/kb/documents.py."""
        return documents.put_document(self._db, row, passages, vectors)

    def move_document(self, document_id: int, path: str, source: str) -> None:
        """Gives a document another name; it keeps its chunks and their ids."""
        documents.move_document(self._db, document_id, path, source)

    def adopt(self, ids: Sequence[int]) -> None:
        """Documents that no machine is noted of become this one's: it has their files. Here all of them are."""

    def stamp_documents(self, stamps: Iterable[tuple[int, int | None]]) -> None:
        """(document id, mtime_ns): the files were read, and are what is stored."""
        self._db.executemany("UPDATE documents SET mtime_ns = ? WHERE id = ?", [(mtime_ns, one) for one, mtime_ns in stamps])

    def set_unread(self, gone: Iterable[str], found: Mapping[str, Unread]) -> None:
        """Remembers files that have no text, and forgets others."""
        documents.set_unread(self._db, gone, found)

    def drop_chunks(self, ids: Sequence[int]) -> list[str]:
        """Takes chunks out that are not what was written; gives the sources of their documents, which are read again next time."""
        return documents.drop_chunks(self._db, ids)

    def rebuild_full_text(self, name: str) -> None:
        self._db.execute(f"INSERT INTO {name} ({name}) VALUES ('rebuild')")  # noqa: S608  # our own names

    def set_fields(self, document_id: int, fields: Sequence[tuple[str, str]], origin: Origin) -> bool:
        """The fields of one origin, in place of those that were; whether that is a change."""
        return documents.set_fields(self._db, document_id, fields, origin)

    def add_feedback(self, counts: Mapping[int, Feedback]) -> None:
        """Adds to what is known of chunks; an id that is not there any more is left out."""
        self._db.executemany(
            "INSERT INTO feedback SELECT id, ?, ?, ?, ?, ? FROM chunks WHERE id = ? ON CONFLICT (chunk_id) DO UPDATE SET "
            "retrieved = retrieved + excluded.retrieved, supplied = supplied + excluded.supplied, cited = cited + excluded.cited, "
            "useful = useful + excluded.useful, useless = useless + excluded.useless",
            [(*each, one) for one, each in counts.items()],
        )

    def reset_feedback(self) -> None:
        self._db.execute("DELETE FROM feedback")

    def remove_documents(self, paths: Iterable[str]) -> None:
        """Documents, their chunks, vectors and full text."""
        self._db.executemany("DELETE FROM documents WHERE path = ?", [(path,) for path in paths])
