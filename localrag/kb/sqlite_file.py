"""Open, check and query the SQLite file of a knowledge base, and turn its failures into KnowledgeBaseErrors.

With a write-ahead log and `synchronous = FULL`, commits survive a crash of the process or the machine. A second writer waits for the
first.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from localrag.errors import KnowledgeBaseBusyError, KnowledgeBaseError
from localrag.files import create_private, disk_error, file_error, locked, make_private_folder
from localrag.kb.filters import folded
from localrag.kb.schema import migrate
from localrag.migrations import use_write_ahead_log, version

_BATCH = 500  # ids in one statement; SQLite takes 32,766 parameters, older builds 999

Row = tuple[Any, ...]

_MAX_PROBLEMS = 20
_MAX_NUMBER = 2**53  # largest id or count: the limit of exact integers in JSON, well below SQLite's last id, 2^63 - 1
_NUMBERS = {
    "state": ("generation", "coalesce(dim, 1)"),
    "documents": ("id", "num_bytes", "cutter"),
    "chunks": ("id",),
    "feedback": ("retrieved", "supplied", "cited", "useful", "useless"),
    "sqlite_sequence": ("seq",),
}
"""Columns that hold integers from 0 to _MAX_NUMBER. Ids begin at 1, but an id of 0 does no harm."""


class SqliteFile:
    """A connection to a file with the current schema. Failures of SQLite are raised as KnowledgeBaseErrors with a hint."""

    def __init__(self, path: Path, *, create: bool, wait_s: float) -> None:
        """Open a file and migrate it. With `create`, a missing file and its folder are created. A writer waits up to `wait_s` seconds."""
        self._path = path
        if create:
            make_folder(path.parent)
        with explained(path):
            if create:
                create_private(path)  # its -wal and -shm files inherit the mode
            mode = "rwc" if create else "rw"
            self.connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=wait_s, isolation_level=None)
            try:
                if version(self.connection) == 0:  # new, or its creator was killed; the journal mode is stored in the file
                    use_write_ahead_log(self.connection, wait_s=wait_s)
                migrate(self.connection)
                self.connection.execute("PRAGMA synchronous = FULL")
                self.connection.execute("PRAGMA foreign_keys = ON")
                self.connection.create_function("folded", 1, folded, deterministic=True)
            except BaseException:
                self.connection.close()
                raise

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read from one snapshot."""
        with explained(self._path):
            self.connection.execute("BEGIN")
            try:
                yield
            finally:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run one transaction, all or nothing. There is one writer at a time."""
        with explained(self._path):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[Row]:
        """Run a statement and return all rows."""
        with explained(self._path):
            return self.connection.execute(statement, values).fetchall()

    def each(self, statement: str, values: Sequence[object] = ()) -> Iterator[Row]:
        """Run a statement and yield its rows."""
        with explained(self._path):
            yield from self.connection.execute(statement, values)

    def rows_in(self, statement: str, members: Sequence[object], *values: object) -> Iterator[Row]:
        """Run a statement that ends with IN, in batches for any number of `members`, and yield its rows. `values` precede them."""
        for at in range(0, len(members), _BATCH):
            batch = members[at : at + _BATCH]
            yield from self.rows(f"{statement} ({', '.join('?' * len(batch))})", (*values, *batch))

    def one(self, statement: str, values: Sequence[object] = ()) -> Any:  # noqa: ANN401  # a value as SQLite gives it
        """Run a statement and return the single value of its single row."""
        return self.rows(statement, values)[0][0]

    def problems(self) -> list[str]:
        """Return the distinct errors found by SQLite's checks, and numbers that localrag never writes."""
        db = self.connection
        try:
            problems = [line for (line,) in db.execute("PRAGMA integrity_check") if line != "ok"]
            if not problems:
                problems = [
                    f"a row of {table} refers to a missing row of {parent}"
                    for table, _, parent, _ in db.execute("PRAGMA foreign_key_check")
                ]
            if not problems:
                problems = [
                    f"a number in its table {table!r} is not one that localrag writes"
                    for table, columns in _NUMBERS.items()
                    if db.execute(f"SELECT 1 FROM {table} WHERE {' OR '.join(map(_cannot_be, columns))} LIMIT 1").fetchone()  # noqa: S608  # our own names
                ]
        except sqlite3.DatabaseError as error:
            problems = [str(error)]
        return list(dict.fromkeys(problems))[:_MAX_PROBLEMS]


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn failures of SQLite into KnowledgeBaseErrors about the file `path`, with a hint."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if SQLite's message repeats damaged text
        if (known := disk_error(error, path)) is not None:
            message = f"The knowledge base file {path} cannot be used: {known.reason}."
            raise KnowledgeBaseError(message, hint=known.hint, **known.numbers) from error
        kind = getattr(error, "sqlite_errorname", "") or ""
        raise KnowledgeBaseError(f"The knowledge base file {path} cannot be used: {error}.", hint=_way_out(kind)) from error


def make_folder(folder: Path) -> None:
    """Create a private folder and its parents. Raises KnowledgeBaseError if that fails."""
    try:
        make_private_folder(folder)
    except OSError as error:
        raise unwritable(f"Cannot create the folder {folder}", error, folder) from error


def unwritable(what: str, error: OSError, path: Path) -> KnowledgeBaseError:
    """Make the error for an action (`what`, such as "Cannot create the folder X") that the file system refused at `path`."""
    known = file_error(error, path, hint=_way_out(""))
    return KnowledgeBaseError(f"{what}: {known.reason}.", hint=known.hint, **known.numbers)


def _way_out(kind: str) -> str:
    """Return the hint for an error of SQLite by its name. `localrag.files.disk_error` covers errors of the disk."""
    name = kind.removeprefix("SQLITE_").split("_")[0]
    return {
        "NOTADB": "It is not a knowledge base, or it is damaged. Remove it (localrag kb remove) and index the documents again.",
        "CORRUPT": "It is damaged. Remove it (localrag kb remove) and index the documents again.",
    }.get(name, "Check that the folder exists and can be written to, or set LOCALRAG_HOME to one that can.")


def _cannot_be(column: str) -> str:
    return f"typeof({column}) != 'integer' OR {column} NOT BETWEEN 0 AND {_MAX_NUMBER}"


INDEX_WAIT_S = 30.0
"""Seconds that an indexer waits for another one to finish."""

_FILE = "index.lock"


@contextmanager
def taken(folder: Path, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the index lock of the knowledge base in `folder`, which is created if it is missing. The system frees it if the process dies.

    `on_wait` is called if another process holds the lock. KnowledgeBaseBusyError if it still does after `wait_s` seconds.
    """
    end = time.monotonic() + wait_s
    with ExitStack() as stack:
        while not _enter(stack, folder, max(0.0, end - time.monotonic()), on_wait):
            stack.close()
        yield


def _enter(stack: ExitStack, folder: Path, wait_s: float, on_wait: Callable[[], None] | None) -> bool:
    """Take the lock. Return False if the folder was removed meanwhile, which makes the lock useless."""
    make_folder(folder)
    path = folder / _FILE
    with suppress(FileNotFoundError):
        try:
            descriptor = stack.enter_context(locked(path, wait_s=wait_s, on_wait=on_wait))
            return os.path.samestat(os.fstat(descriptor), path.stat())
        except TimeoutError:
            raise KnowledgeBaseBusyError(
                f"Another localrag is indexing into knowledge base {folder.name!r}.",
                hint="Wait for it to finish, then run the same command again.",
                kb=folder.name,
            ) from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unwritable(f"Cannot write to the folder {folder}", error, path) from error
    return False
