"""What is written about documents: the rows of one transaction.

An unchanged chunk keeps its id, and with it its vector, its full text and what was learned of it: a chunk is known again by the sha256 of
what was embedded and by its heading path.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from localrag.kb.chunking import Passage

NUM_STAMPS = 10_000  # generations that are told apart from those of a backup; about 15 bytes each

Origin = str
"""Where a field comes from: "file", "rule" of a folder, or "given" by a person."""


@dataclass(frozen=True, slots=True)
class GivenText:
    """What is kept of a document that was given as text: all of it, its metadata as JSON, and the digests that this is found by."""

    id: str
    text: str
    metadata: str
    entries: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A document as it is to be stored. `path` is absolute and identifies it; `sha256` is of the file's `num_bytes` bytes.

    `mtime_ns` is None if the file may have changed since without that showing; `cutter` is the version of what read and cut it.
    `fields` and `tags` are what the file says of itself. With `given` it is no file: localrag/kb/texts.py says what stands for what.
    """

    path: str
    source: str
    sha256: str
    num_bytes: int
    title: str = ""
    tags: tuple[str, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    mtime_ns: int | None = None
    cutter: int = 0
    given: GivenText | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a stored document."""

    id: int
    sha256: str
    num_bytes: int
    mtime_ns: int | None
    cutter: int


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that has no text to index, and the reason. It stays unread until it is changed, or `cutter` is."""

    num_bytes: int
    mtime_ns: int
    cutter: int
    reason: str


def count_generation(db: sqlite3.Connection) -> None:
    """The next generation, with a random number of its own."""
    (generation,) = db.execute("UPDATE state SET generation = generation + 1 RETURNING generation").fetchone()
    db.execute("INSERT OR REPLACE INTO generations (generation, stamp) VALUES (?, ?)", (generation, secrets.randbits(63)))
    db.execute("DELETE FROM generations WHERE generation <= ?", (generation - NUM_STAMPS,))


def put_document(db: sqlite3.Connection, row: DocumentRow, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> int:
    """Stores a document with its chunks, in place of what was known of the same path; gives its id.

    `vectors` are by the sha256 of the passages; of those that the document has already, none is needed. The `source` of a file stays as
    it was first.
    """
    old = db.execute("SELECT id FROM documents WHERE path = ?", (row.path,)).fetchone()
    values = (row.sha256, row.num_bytes, row.title, row.mtime_ns, row.cutter)
    if old is None:
        added = db.execute(
            "INSERT INTO documents (sha256, num_bytes, title, mtime_ns, cutter, path, source) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*values, row.path, row.source),
        )
        document_id = int(added.lastrowid or 0)
    else:
        document_id = int(old[0])
        db.execute(
            "UPDATE documents SET sha256 = ?, num_bytes = ?, title = ?, mtime_ns = ?, cutter = ? WHERE id = ?", (*values, document_id)
        )
    set_fields(db, document_id, (*(("tag", tag) for tag in row.tags), *row.fields), "file")
    if row.given is not None:
        _put_given(db, document_id, row.source, row.given)
    _put_chunks(db, document_id, passages, vectors)
    return document_id


def move_document(db: sqlite3.Connection, document_id: int, path: str, source: str) -> None:
    """A file has a new name; what was stored of another document under that name goes."""
    db.execute("DELETE FROM documents WHERE path = ? AND id != ?", (path, document_id))
    db.execute("UPDATE documents SET path = ?, source = ? WHERE id = ?", (path, source, document_id))


def drop_chunks(db: sqlite3.Connection, ids: Sequence[int]) -> list[str]:
    """Deletes chunks; their documents, whose sources are returned, count as made by an older version, and so are made again."""
    found = set()
    for one in ids:
        found |= set(db.execute("SELECT d.id, source FROM documents d JOIN chunks c ON document_id = d.id WHERE c.id = ?", (one,)))
        db.execute("DELETE FROM chunks WHERE id = ?", (one,))
    db.executemany("UPDATE documents SET cutter = 0, mtime_ns = NULL WHERE id = ?", [(document_id,) for document_id, _ in found])
    return sorted(source for _, source in found)


def set_unread(db: sqlite3.Connection, gone: Iterable[str], found: Mapping[str, Unread]) -> None:
    """Remembers files that have no text, by absolute path, and forgets others."""
    db.executemany("DELETE FROM unread WHERE path = ?", [(path,) for path in gone])
    db.executemany(
        "INSERT OR REPLACE INTO unread (path, num_bytes, mtime_ns, cutter, reason) VALUES (?, ?, ?, ?, ?)",
        [(path, one.num_bytes, one.mtime_ns, one.cutter, one.reason) for path, one in found.items()],
    )


def set_fields(db: sqlite3.Connection, document_id: int, fields: Sequence[tuple[str, str]], origin: Origin) -> bool:
    """The fields of one origin, in place of those that were; whether that is a change."""
    wanted = {(key, value) for key, value in fields if value}
    present = set(db.execute("SELECT key, value FROM fields WHERE document_id = ? AND origin = ?", (document_id, origin)))
    if wanted == present:
        return False
    db.execute("DELETE FROM fields WHERE document_id = ? AND origin = ?", (document_id, origin))
    db.executemany(
        "INSERT INTO fields (document_id, key, value, origin) VALUES (?, ?, ?, ?)",
        [(document_id, *pair, origin) for pair in sorted(wanted)],
    )
    return True


def kept_of(present: Iterable[tuple[int, bytes, str]], passages: Sequence[Passage]) -> tuple[list[int | None], list[int]]:
    """The id that each passage of a document has already, or None, and the ids of chunks that none of them is.

    `present` are (chunk id, sha256, heading) of its chunks, the last first, so that of equal ones the first stays first.
    """
    ids: defaultdict[tuple[bytes, str], list[int]] = defaultdict(list)
    for chunk_id, sha256, heading in present:
        ids[sha256, heading].append(chunk_id)
    kept = [same.pop() if (same := ids[passage.sha256, passage.heading]) else None for passage in passages]
    return kept, [one for left in ids.values() for one in left]


def _put_given(db: sqlite3.Connection, document_id: int, source: str, given: GivenText) -> None:
    db.execute("UPDATE documents SET source = ? WHERE id = ?", (source, document_id))
    values = (document_id, given.id, given.metadata, given.text)
    db.execute("INSERT OR REPLACE INTO texts (document_id, id, metadata, text) VALUES (?, ?, ?, ?)", values)
    db.execute("DELETE FROM entries WHERE document_id = ?", (document_id,))
    db.executemany("INSERT INTO entries (document_id, entry) VALUES (?, ?)", [(document_id, entry) for entry in sorted(given.entries)])


def _put_chunks(db: sqlite3.Connection, document_id: int, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> None:
    statement = "SELECT id, sha256, heading FROM chunks WHERE document_id = ? ORDER BY ordinal DESC"
    kept, left = kept_of(db.execute(statement, (document_id,)), passages)
    db.executemany("DELETE FROM chunks WHERE id = ?", [(one,) for one in left])
    # No two chunks of a document have one ordinal, not even between two statements: those that stay are moved out of the way first.
    db.execute("UPDATE chunks SET ordinal = -1 - ordinal WHERE document_id = ?", (document_id,))
    for ordinal, (passage, chunk_id) in enumerate(zip(passages, kept, strict=True)):
        where = (ordinal, passage.start, passage.end, passage.place)
        if chunk_id is not None:
            db.execute('UPDATE chunks SET ordinal = ?, start = ?, "end" = ?, place = ? WHERE id = ?', (*where, chunk_id))
            continue
        added = db.execute(
            'INSERT INTO chunks (document_id, ordinal, start, "end", place, heading, text, sha256) VALUES (?, ?, ?, ?, ?, ?, ?, ?)',
            (document_id, *where, passage.heading, passage.text, passage.sha256),
        )
        db.execute("INSERT INTO vectors (chunk_id, vector) VALUES (?, ?)", (added.lastrowid, vectors[passage.sha256]))
