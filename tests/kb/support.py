"""What several tests of the knowledge base look at."""

import sqlite3
from contextlib import closing

from localrag.text.languages import stemmed


def contents(kb) -> dict[str, list[tuple]]:
    """Every document's chunks, without ids: what two builds of the same folder have in common."""
    with closing(sqlite3.connect(kb.path)) as db:
        rows = db.execute(
            'SELECT path, ordinal, start, "end", heading, c.text, vector FROM documents d '
            "JOIN chunks c ON document_id = d.id JOIN vectors ON chunk_id = c.id ORDER BY path, ordinal"
        ).fetchall()
    found: dict[str, list[tuple]] = {}
    for path, *rest in rows:
        found.setdefault(path, []).append(tuple(rest))
    return found


def documents(path) -> dict[str, dict]:
    """All that is stored of each document, by its path, without ids: its row, its chunks with their vectors, its fields."""
    with closing(sqlite3.connect(path)) as db:
        found = {
            name: {"row": row, "chunks": [], "fields": set()}
            for name, *row in db.execute("SELECT path, source, sha256, num_bytes, title, mtime_ns, cutter FROM documents")
        }
        for name, *chunk in db.execute(
            'SELECT path, ordinal, start, "end", place, heading, c.text, c.sha256, vector FROM documents d '
            "JOIN chunks c ON document_id = d.id LEFT JOIN vectors ON chunk_id = c.id ORDER BY path, ordinal"
        ):
            found[name]["chunks"].append(chunk)
        for name, *field in db.execute("SELECT path, origin, key, value FROM documents d JOIN fields ON document_id = d.id"):
            found[name]["fields"].add(tuple(field))
    return found


def words(path) -> dict[str, list[tuple]]:
    """What each full text holds: every word with the number of chunks that it is in, and how often it is there."""
    found = {}
    with closing(sqlite3.connect(path)) as db:
        for name in ("chunks_fts", "chunks_characters"):
            db.execute(f"CREATE VIRTUAL TABLE temp.{name}_words USING fts5vocab ('main', '{name}', 'row')")
            found[name] = db.execute(f"SELECT term, doc, cnt FROM temp.{name}_words ORDER BY term").fetchall()
    return found


def unread(path) -> list[tuple]:
    """What is known of files without text."""
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT * FROM unread ORDER BY path").fetchall()


def known_chunks(path) -> dict[tuple[str, str, str], int]:
    """The id of every chunk, by its document's path, the sha256 of what was embedded, and its heading path."""
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute(
            "SELECT path, hex(c.sha256), heading, c.id FROM documents d JOIN chunks c ON document_id = d.id ORDER BY c.id"
        ).fetchall()
    return {(name, sha256.lower(), heading): chunk_id for name, sha256, heading, chunk_id in rows}


def chunk_ids(kb) -> dict[str, list[int]]:
    """The chunk ids of every document, by path."""
    with closing(sqlite3.connect(kb.path)) as db:
        rows = db.execute("SELECT path, c.id FROM documents d JOIN chunks c ON document_id = d.id ORDER BY ordinal").fetchall()
    found: dict[str, list[int]] = {}
    for path, chunk_id in rows:
        found.setdefault(path, []).append(chunk_id)
    return found


def problems(path) -> list[str]:
    """What is wrong inside a knowledge base file: its pages, its full text, rows without their counterparts."""
    with closing(sqlite3.connect(path, timeout=30)) as db:
        found = [line for (line,) in db.execute("PRAGMA integrity_check") if line != "ok"]
        db.create_function("stemmed", 2, stemmed, deterministic=True)
        found += [f"foreign key {row}" for row in db.execute("PRAGMA foreign_key_check")]
        try:
            db.execute("INSERT INTO chunks_fts (chunks_fts, rank) VALUES ('integrity-check', 1)")
        except sqlite3.DatabaseError as error:
            found.append(f"full text: {error}")
        found += [f"chunk {one} without vector" for (one,) in db.execute("SELECT id FROM chunks EXCEPT SELECT chunk_id FROM vectors")]
        found += [
            f"document {one} without chunks" for (one,) in db.execute("SELECT id FROM documents EXCEPT SELECT document_id FROM chunks")
        ]
    return found


def write_notes(folder, num: int, *, seed: str = "", num_parts: int = 3) -> None:
    """`num` Markdown notes of so many sections each, every one with a word of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for at in range(num):
        sections = "\n\n".join(
            f"## Part {part}\n\nThe word of note {at} part {part} is zebra{at}x{part}{seed}. " + "It stands among others. " * 3
            for part in range(num_parts)
        )
        (folder / f"note-{at:03}.md").write_text(f"# Note {at}\n\n{sections}\n", encoding="utf-8")
