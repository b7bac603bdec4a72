"""What SQLite and the file system say, turned into an error that a person can act on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localrag.errors import KnowledgeBaseError


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Every failure of SQLite inside becomes a KnowledgeBaseError about the file `path`, with a way out."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite's message repeats damaged text
        kind = getattr(error, "sqlite_errorname", "") or ""
        raise KnowledgeBaseError(f"The knowledge base file {path} cannot be used: {error}.", hint=_way_out(kind)) from error


def make_folder(folder: Path) -> None:
    """A folder with those above it. KnowledgeBaseError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KnowledgeBaseError(f"Cannot make the folder {folder}: {error.strerror or error}.", hint=_way_out("")) from error


def other_embedder(name: str, known: tuple[str, int], given: tuple[str, int]) -> KnowledgeBaseError:
    """The error for an embedder whose vectors do not compare with those stored in `name`; both are (fingerprint, dimensions)."""
    return KnowledgeBaseError(
        f"Knowledge base {name!r} was indexed with another embedder ({known[1]} dimensions, {known[0][:12]}…) "
        f"than this one ({given[1]} dimensions, {given[0][:12]}…), so their vectors do not compare.",
        hint=f"Use the embedder it was indexed with, or index the documents into a new one: localrag index PATH --kb {name}-2",
        dim=known[1],
        given_dim=given[1],
    )


def _way_out(kind: str) -> str:
    name = kind.removeprefix("SQLITE_").split("_")[0]
    return {
        "BUSY": "Another localrag is writing to it. Wait for that one to end, then try again.",
        "FULL": "The disk is full. Free some space and run the same command again: it goes on where it stopped.",
        "IOERR": "The disk is full or failing. Free some space and run the same command again: it goes on where it stopped.",
        "NOTADB": "It is not a knowledge base, or it is damaged. Remove it (localrag kb remove) and index the documents again.",
        "CORRUPT": "It is damaged. Remove it (localrag kb remove) and index the documents again.",
    }.get(name, "Check that the folder exists and can be written to, or set LOCALRAG_HOME to one that can.")
