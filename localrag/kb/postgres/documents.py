"""What is written about documents: the rows of one transaction. localrag/kb/documents.py says what each of these does."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

from localrag.kb.chunking import Passage
from localrag.kb.documents import NUM_STAMPS, DocumentRow, GivenText, Origin, Unread, kept_of
from localrag.kb.filters import folded
from localrag.kb.postgres.database import Database, vector
from localrag.kb.postgres.full_text import indexed

_ADOPT_PATH = """UPDATE documents SET machine = %(machine)s WHERE machine = '' AND path = %(path)s
    AND NOT EXISTS (SELECT 1 FROM documents WHERE machine = %(machine)s AND path = %(path)s)"""

_PUT = """INSERT INTO documents (path, machine, source, folded, sha256, num_bytes, title, mtime_ns, cutter)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (path, machine) DO UPDATE SET sha256 = excluded.sha256, num_bytes = excluded.num_bytes, title = excluded.title,
    mtime_ns = excluded.mtime_ns, cutter = excluded.cutter RETURNING id"""

_PUT_TEXT = """INSERT INTO texts (document_id, id, metadata, text) VALUES (%s, %s, %s, %s)
    ON CONFLICT (document_id) DO UPDATE SET metadata = excluded.metadata, text = excluded.text"""

_ADD_CHUNK = """WITH added AS (
        INSERT INTO chunks (document_id, ordinal, "start", "end", place, heading, text, sha256, words, characters)
        VALUES (%s, %s, %s, %s, %s, %s, %s, %s, to_tsvector('words', %s::text), to_tsvector('simple', %s::text)) RETURNING id
    ) INSERT INTO vectors (chunk_id, embedding) SELECT id, %s FROM added"""


def count_generation(db: Database) -> None:
    generation = db.one("UPDATE state SET generation = generation + 1 RETURNING generation")
    db.rows("INSERT INTO generations (generation, stamp) VALUES (%s, %s)", (generation, secrets.randbits(63)))
    db.rows("DELETE FROM generations WHERE generation <= %s", (generation - NUM_STAMPS,))


def put_document(db: Database, row: DocumentRow, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> int:
    machine = db.address.machine if row.given is None else ""
    if machine:
        db.rows(_ADOPT_PATH, {"machine": machine, "path": row.path})
    values = (row.path, machine, row.source, folded(row.source), row.sha256, row.num_bytes, _storable(row.title), row.mtime_ns, row.cutter)
    document_id = int(db.one(_PUT, values))
    set_fields(db, document_id, (*(("tag", tag) for tag in row.tags), *row.fields), "file")
    if row.given is not None:
        _put_given(db, document_id, row.source, row.given)
    _put_chunks(db, document_id, passages, vectors)
    return document_id


def adopt(db: Database, ids: Sequence[int]) -> None:
    db.rows("UPDATE documents SET machine = %s WHERE machine = '' AND id = ANY(%s::bigint[])", (db.address.machine, list(ids)))


def move_document(db: Database, document_id: int, path: str, source: str) -> None:
    machine = db.address.machine
    db.rows("DELETE FROM documents WHERE path = %s AND machine IN (%s, '') AND id != %s", (path, machine, document_id))
    db.rows(
        "UPDATE documents SET path = %s, machine = %s, source = %s, folded = %s WHERE id = %s",
        (path, machine, source, folded(source), document_id),
    )


def drop_chunks(db: Database, ids: Sequence[int]) -> list[str]:
    found = db.rows(
        "SELECT DISTINCT d.id, source FROM documents d JOIN chunks c ON document_id = d.id WHERE c.id = ANY(%s::bigint[])", (list(ids),)
    )
    db.rows("DELETE FROM chunks WHERE id = ANY(%s::bigint[])", (list(ids),))
    db.rows("UPDATE documents SET cutter = 0, mtime_ns = NULL WHERE id = ANY(%s::bigint[])", ([one for one, _ in found],))
    return sorted(source for _, source in found)


def set_unread(db: Database, gone: Iterable[str], found: Mapping[str, Unread]) -> None:
    machine = db.address.machine
    db.rows("DELETE FROM unread WHERE machine = %s AND path = ANY(%s::text[])", (machine, [*gone, *found]))
    db.many(
        "INSERT INTO unread (path, machine, num_bytes, mtime_ns, cutter, reason) VALUES (%s, %s, %s, %s, %s, %s)",
        [(path, machine, one.num_bytes, one.mtime_ns, one.cutter, _storable(one.reason)) for path, one in found.items()],
    )


def set_fields(db: Database, document_id: int, fields: Sequence[tuple[str, str]], origin: Origin) -> bool:
    wanted = {(_storable(key), _storable(value)) for key, value in fields if value}
    present = set(db.rows("SELECT key, value FROM fields WHERE document_id = %s AND origin = %s", (document_id, origin)))
    if wanted == present:
        return False
    db.rows("DELETE FROM fields WHERE document_id = %s AND origin = %s", (document_id, origin))
    db.many(
        "INSERT INTO fields (document_id, key, value, folded, origin) VALUES (%s, %s, %s, %s, %s)",
        [(document_id, key, value, folded(value), origin) for key, value in sorted(wanted)],
    )
    return True


def _put_given(db: Database, document_id: int, source: str, given: GivenText) -> None:
    db.rows("UPDATE documents SET source = %s, folded = %s WHERE id = %s", (source, folded(source), document_id))
    db.rows(_PUT_TEXT, (document_id, given.id, given.metadata, given.text))
    db.rows("DELETE FROM entries WHERE document_id = %s", (document_id,))
    db.many("INSERT INTO entries (document_id, entry) VALUES (%s, %s)", [(document_id, entry) for entry in sorted(given.entries)])


def _put_chunks(db: Database, document_id: int, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> None:
    statement = "SELECT id, sha256, heading FROM chunks WHERE document_id = %s ORDER BY ordinal DESC"
    present = [(int(chunk_id), bytes(sha256), str(heading)) for chunk_id, sha256, heading in db.rows(statement, (document_id,))]
    kept, left = kept_of(present, passages)
    if present:
        db.rows("DELETE FROM chunks WHERE id = ANY(%s::bigint[])", (left,))
        # No two chunks of a document have one ordinal, not even between two statements: those that stay are moved out of the way first.
        db.rows("UPDATE chunks SET ordinal = -1 - ordinal WHERE document_id = %s", (document_id,))
    moved, added = [], []
    for ordinal, (passage, chunk_id) in enumerate(zip(passages, kept, strict=True)):
        where = (ordinal, passage.start, passage.end, passage.place)
        if chunk_id is None:
            texts = (passage.heading, passage.text, passage.sha256, *indexed(passage.heading, passage.text))
            added.append((document_id, *where, *texts, vector(vectors[passage.sha256])))
        else:
            moved.append((*where, chunk_id))
    db.many('UPDATE chunks SET ordinal = %s, "start" = %s, "end" = %s, place = %s WHERE id = %s', moved)
    db.many(_ADD_CHUNK, added)


def _storable(text: str) -> str:
    """PostgreSQL keeps no NUL; what readers give as the text of a file has none."""
    return text.replace("\0", "\ufffd")
