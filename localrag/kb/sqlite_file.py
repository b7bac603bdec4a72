"""The SQLite file of a knowledge base: opened, asked and changed in transactions.

Write-ahead log and `synchronous = FULL`, so that what was committed survives a crash of the process and of the machine. A second writer
waits for the first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localrag.kb.failures import explained, make_folder
from localrag.kb.filters import folded
from localrag.kb.schema import migrate
from localrag.migrations import use_write_ahead_log, version

_BATCH = 500  # ids in one statement; SQLite takes 32,766 parameters, older builds 999

Row = tuple[Any, ...]


class SqliteFile:
    """One connection to one file with the tables of today. Every failure of SQLite arrives as a KnowledgeBaseError with a way out."""

    def __init__(self, path: Path, *, create: bool, wait_s: float) -> None:
        """With `create`, a file that is not there is made, and its folder. A writer waits `wait_s` seconds for another one."""
        self._path = path
        if create:
            make_folder(path.parent)
        with explained(path):
            mode = "rwc" if create else "rw"
            self.connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=wait_s, isolation_level=None)
            try:
                if version(self.connection) == 0:  # new, or its maker was killed; the journal mode stays with the file
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
        """One snapshot for all that is read inside."""
        with explained(self._path):
            self.connection.execute("BEGIN")
            try:
                yield
            finally:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction, all or nothing; one at a time."""
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
        """What a statement gives."""
        with explained(self._path):
            return self.connection.execute(statement, values).fetchall()

    def each(self, statement: str, values: Sequence[object] = ()) -> Iterator[Row]:
        """The same row by row, where they are many."""
        with explained(self._path):
            yield from self.connection.execute(statement, values)

    def rows_in(self, statement: str, wanted: Sequence[object], *values: object) -> Iterator[Row]:
        """The rows of a statement that ends with IN, for any number of wanted values."""
        for at in range(0, len(wanted), _BATCH):
            batch = wanted[at : at + _BATCH]
            yield from self.rows(f"{statement} ({', '.join('?' * len(batch))})", (*values, *batch))

    def one(self, statement: str, values: Sequence[object] = ()) -> Any:  # noqa: ANN401  # a value as SQLite gives it
        """The one value of the one row."""
        return self.rows(statement, values)[0][0]
