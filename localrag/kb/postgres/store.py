"""The truth of a knowledge base on a PostgreSQL server. localrag/kb/store.py says what each of these does.

Every change is one transaction for text, full text, vectors and generation; a second writer waits for the first.

A document is a file of one machine (`Address.machine`), and whoever indexes has to do with those of its own: what another machine has
under the same path is another document, which it neither changes nor removes. All of them are searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from localrag.kb.chunking import Passage
from localrag.kb.documents import DocumentRow, Known, Origin, Unread
from localrag.kb.failures import other_embedder
from localrag.kb.filters import Where
from localrag.kb.postgres import documents, search
from localrag.kb.postgres.database import Database, raw
from localrag.kb.postgres.full_text import FULL_TEXTS, FullText, passing
from localrag.kb.postgres.texts import PostgresTexts
from localrag.kb.query import Term
from localrag.kb.store import Feedback
from localrag.passages import Chunk

_AT_ONCE = 500  # rows that are fetched with their vectors
_CHUNK = (
    'SELECT c.id, document_id, ordinal, text, "start", "end", source, heading, place '
    "FROM chunks c JOIN documents d ON d.id = document_id WHERE c.id = ANY(%s::bigint[])"
)
_OURS = "machine IN (%s, '')"  # '' is any machine: see localrag/kb/postgres/tables.py
_OUR_FILES = f"{_OURS} AND id NOT IN (SELECT document_id FROM texts)"  # noqa: S608  # no values in it
_ADD_FEEDBACK = """INSERT INTO feedback SELECT id, %s, %s, %s, %s, %s FROM chunks WHERE id = %s ON CONFLICT (chunk_id) DO UPDATE SET
    retrieved = feedback.retrieved + excluded.retrieved, supplied = feedback.supplied + excluded.supplied,
    cited = feedback.cited + excluded.cited, useful = feedback.useful + excluded.useful, useless = feedback.useless + excluded.useless"""


class PostgresStore:
    """One knowledge base of a server, whose tables `db` has entered (localrag/kb/postgres/tables.py)."""

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
                documents.count_generation(self._db)

    @property
    def generation(self) -> int:
        return int(self._db.one("SELECT generation FROM state"))

    @property
    def embedder(self) -> tuple[str, int] | None:
        fingerprint, dim = self._db.rows("SELECT embedder, dim FROM state")[0]
        return None if fingerprint is None else (str(fingerprint), int(dim))

    @property
    def min_similarity(self) -> float | None:
        found = self._db.one("SELECT min_similarity FROM state")
        return None if found is None else float(found)

    @property
    def num_documents(self) -> int:
        return int(self._db.one("SELECT count(*) FROM documents"))

    @property
    def num_chunks(self) -> int:
        return int(self._db.one("SELECT count(*) FROM chunks"))

    def sources(self, where: Where | None = None) -> list[tuple[str, int]]:
        chosen, values = passing(where or Where())
        rows = self._db.rows(
            "SELECT source, count(c.id) FROM documents d LEFT JOIN chunks c ON document_id = d.id "  # noqa: S608  # no values in it
            f'WHERE d.id IN ({chosen}) GROUP BY d.id ORDER BY source COLLATE "C", d.id',
            values,
        )
        return [(source, num) for source, num in rows]

    def documents(self) -> dict[str, Known]:
        rows = self._db.rows(
            f"SELECT path, id, sha256, num_bytes, mtime_ns, cutter FROM documents WHERE {_OUR_FILES} ORDER BY machine",  # noqa: S608  # no values in it
            (self._machine,),
        )
        return {path: Known(*rest) for path, *rest in rows}

    def unread(self) -> dict[str, Unread]:
        rows = self._db.rows("SELECT path, num_bytes, mtime_ns, cutter, reason FROM unread WHERE machine = %s", (self._machine,))
        return {path: Unread(*rest) for path, *rest in rows}

    def fields(self, where: Where | None = None) -> dict[str, dict[str, list[str]]]:
        chosen, values = passing(where or Where())
        rows = self._db.rows(
            f"SELECT DISTINCT source, key, value FROM fields JOIN documents ON id = document_id WHERE document_id IN ({chosen})",  # noqa: S608  # no values in it
            values,
        )
        found: dict[str, dict[str, list[str]]] = {}
        for source, key, value in sorted(rows):
            found.setdefault(source, {}).setdefault(key, []).append(value)
        return found

    def fields_by_origin(self) -> dict[tuple[int, Origin], set[tuple[str, str]]]:
        found: dict[tuple[int, Origin], set[tuple[str, str]]] = {}
        for document_id, origin, key, value in self._db.rows("SELECT document_id, origin, key, value FROM fields WHERE origin != 'file'"):
            found.setdefault((document_id, origin), set()).add((key, value))
        return found

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
        for chunk_id, vector in self._by_id(statement, after):
            yield chunk_id, raw(vector)

    def existing(self, ids: Sequence[int]) -> list[int]:
        return [one for (one,) in self._db.rows("SELECT id FROM chunks WHERE id = ANY(%s::bigint[])", (list(ids),))]

    def vectors_of(self, sha256s: Sequence[bytes]) -> dict[bytes, bytes]:
        statement = "SELECT sha256, embedding FROM chunks JOIN vectors ON chunk_id = id WHERE sha256 = ANY(%s::bytea[])"
        return {bytes(sha256): raw(vector) for sha256, vector in self._db.rows(statement, (list(sha256s),), binary=True)}

    def allowed(self, where: Where | None) -> list[int] | None:
        if not where:
            return None
        chosen, values = passing(where)
        rows = self._db.rows(f"SELECT id FROM chunks WHERE document_id IN ({chosen}) ORDER BY id", values)  # noqa: S608  # no values in it
        return [one for (one,) in rows]

    def keyword_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]:
        return search.best(self._db, "words", terms, limit, where)

    def character_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]:
        return search.best(self._db, "characters", terms, limit, where)

    def keyword_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
        return search.holders(self._db, "words", terms, among)

    def character_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
        return search.holders(self._db, "characters", terms, among)

    def chunks(self, ids: Sequence[int], *, kb: str = "") -> list[Chunk]:
        found: dict[int, Chunk] = {}
        for chunk_id, document_id, ordinal, text, start, end, source, heading, place in self._db.rows(_CHUNK, (list(ids),)):
            found[chunk_id] = Chunk(chunk_id, document_id, ordinal, text, start, end, source, heading, kb, place=place)
        return [found[one] for one in ids if one in found]

    def around(self, chunk_id: int, before: int, behind: int) -> list[int]:
        statement = (
            "SELECT n.id FROM chunks c JOIN chunks n USING (document_id) "
            "WHERE c.id = %s::bigint AND n.ordinal BETWEEN c.ordinal - %s::integer AND c.ordinal + %s::integer ORDER BY n.ordinal"
        )
        return [one for (one,) in self._db.rows(statement, (chunk_id, before, behind))]

    def feedback(self, ids: Sequence[int] | None = None) -> dict[int, Feedback]:
        statement = "SELECT chunk_id, retrieved, supplied, cited, useful, useless FROM feedback"
        chosen = "" if ids is None else " WHERE chunk_id = ANY(%s::bigint[])"
        return {one: Feedback(*counts) for one, *counts in self._db.rows(statement + chosen, () if ids is None else (list(ids),))}

    def all_rows(self) -> Iterator[tuple[int, str, str, bytes, bytes | None]]:
        statement = (
            "SELECT id, heading, text, sha256, embedding FROM chunks LEFT JOIN vectors ON chunk_id = id WHERE id > %s ORDER BY id LIMIT %s"
        )
        for chunk_id, heading, text, sha256, vector in self._by_id(statement, 0):
            yield chunk_id, heading, text, bytes(sha256), None if vector is None else raw(vector)

    def problems(self) -> list[str]:
        """None to look for: the server answers for its pages and references, and says so when what is damaged is read."""
        return []

    def index_problems(self) -> list[str]:
        from localrag.kb.postgres.index import index_problems  # noqa: PLC0415  # imports numpy

        return index_problems(self._db, self._schema)

    def full_text_is_sound(self, name: str) -> bool:
        return search.is_sound(self._db, _full_text(name), self._texts())

    def rebuild_full_text(self, name: str) -> None:
        search.rebuild(self._db, _full_text(name), self._texts())

    def check_embedder(self, fingerprint: str, dim: int) -> None:
        known = self.embedder
        if known is not None and known != (fingerprint, dim):
            raise other_embedder(self._db.address.shown, known, (fingerprint, dim))

    def claim_embedder(self, fingerprint: str, dim: int, min_similarity: float | None = None) -> None:
        self.check_embedder(fingerprint, dim)
        self._db.rows(
            "UPDATE state SET embedder = %s, dim = %s, min_similarity = %s WHERE embedder IS NULL", (fingerprint, dim, min_similarity)
        )

    def put_document(self, row: DocumentRow, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> int:
        return documents.put_document(self._db, row, passages, vectors)

    def move_document(self, document_id: int, path: str, source: str) -> None:
        documents.move_document(self._db, document_id, path, source)

    def adopt(self, ids: Sequence[int]) -> None:
        documents.adopt(self._db, ids)

    def stamp_documents(self, stamps: Iterable[tuple[int, int | None]]) -> None:
        self._db.many("UPDATE documents SET mtime_ns = %s WHERE id = %s", [(mtime_ns, one) for one, mtime_ns in stamps])

    def set_unread(self, gone: Iterable[str], found: Mapping[str, Unread]) -> None:
        documents.set_unread(self._db, gone, found)

    def remove_documents(self, paths: Iterable[str]) -> None:
        self._db.rows(f"DELETE FROM documents WHERE {_OURS} AND path = ANY(%s::text[])", (self._machine, list(paths)))  # noqa: S608  # no values in it

    def drop_chunks(self, ids: Sequence[int]) -> list[str]:
        return documents.drop_chunks(self._db, ids)

    def set_fields(self, document_id: int, fields: Sequence[tuple[str, str]], origin: Origin) -> bool:
        return documents.set_fields(self._db, document_id, fields, origin)

    def add_feedback(self, counts: Mapping[int, Feedback]) -> None:
        self._db.many(_ADD_FEEDBACK, [(*each, one) for one, each in counts.items()])

    def reset_feedback(self) -> None:
        self._db.rows("DELETE FROM feedback")

    def _texts(self) -> Iterator[list[tuple[int, str, str]]]:
        """(chunk id, heading, text) of all chunks, some at a time."""
        after, statement = 0, "SELECT id, heading, text FROM chunks WHERE id > %s ORDER BY id LIMIT %s"
        while rows := self._db.rows(statement, (after, _AT_ONCE)):
            yield [(chunk_id, heading, text) for chunk_id, heading, text in rows]
            after = rows[-1][0]

    def _by_id(self, statement: str, after: int) -> Iterator[tuple[Any, ...]]:
        """The rows of a statement that takes the id after which it begins, and how many rows it gives."""
        while rows := self._db.rows(statement, (after, _AT_ONCE), binary=True):
            yield from rows
            after = rows[-1][0]


def _full_text(name: str) -> FullText:
    return "words" if name == "words" else "characters"
