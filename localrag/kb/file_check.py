"""What is wrong with the pages, the indices and the references of a SQLite file."""

from __future__ import annotations

import sqlite3

_MOST = 20


def problems(db: sqlite3.Connection) -> list[str]:
    """What SQLite's own checks say, each once; nothing if all is well."""
    try:
        found = [line for (line,) in db.execute("PRAGMA integrity_check") if line != "ok"]
        if not found:
            found = [
                f"a row of {table} refers to a row of {parent} that is not there"
                for table, _, parent, _ in db.execute("PRAGMA foreign_key_check")
            ]
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    return list(dict.fromkeys(found))[:_MOST]
