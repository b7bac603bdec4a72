"""Connect to a PostgreSQL server, and turn its failures into errors with hints. The only module that imports psycopg."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from localrag.errors import KnowledgeBaseError
from localrag.kb.names import Address, invalid_address
from localrag.kb.store import WAIT_S

try:
    import pgvector
    import psycopg
    from pgvector.psycopg import register_vector
except ImportError as error:
    raise KnowledgeBaseError(
        "A knowledge base on a PostgreSQL server needs libraries that are not installed.",
        hint='Install them with: pip install "localrag[postgres]"',
    ) from error

Row = tuple[Any, ...]

_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_LOOK_AGAIN_S = 0.05
_WORK_KB = 64 * 1024  # a question with common words matches most chunks; this keeps the list of matches in memory
_SETTINGS = """SELECT set_config('search_path', %s, false), set_config('lock_timeout', %s, false),
    set_config('client_min_messages', 'error', false),
    set_config('work_mem', greatest(%s::bigint, pg_size_bytes(current_setting('work_mem')) / 1024)::text || 'kB', false),
    set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on'
        ELSE current_setting('synchronous_commit') END, false)"""
_TRY_AGAIN = "Run the same command again; committed work is kept."
_HINTS = {
    "28": "Check the user in the address, and the password in the address, in PGPASSWORD or in ~/.pgpass.",
    "3D": "Check the user and the database in the address. Create a database with: createdb NAME",
    "42501": "Ask the administrator for the right to create schemas in this database, or index into a database of your own.",
    "53": "The server is out of disk, memory or connections. " + _TRY_AGAIN,
    "55P03": "Another localrag is writing to it. Wait until it has finished, then try again.",
    "57": "The server closed the connection. " + _TRY_AGAIN,
}
"""SQLSTATE, or its class → hint."""


class Database:
    """A connection for one thread. Failures are raised as KnowledgeBaseErrors, which never repeat the password."""

    def __init__(self, address: Address) -> None:
        self.address = address
        try:
            self._connection = psycopg.connect(
                address.conninfo, autocommit=True, client_encoding="UTF8", fallback_application_name="localrag"
            )
        except psycopg.ProgrammingError:
            raise invalid_address() from None
        except psycopg.Error as error:  # drop the cause, which holds the connection string
            raise self._unreachable(error) from None

    def close(self) -> None:
        self._connection.close()

    def use(self, search_path: str) -> None:
        """Set the search path and the session's settings, and register the vector type."""
        self.rows(_SETTINGS, (search_path, f"{int(1000 * WAIT_S)}ms", _WORK_KB))
        with self._explained():
            register_vector(self._connection)

    def rows(self, statement: str, values: Sequence[object] | Mapping[str, object] = (), *, binary: bool = False) -> list[Row]:
        """Run a statement and return all rows. With `binary`, the server sends numbers and vectors in binary form."""
        with self._explained():
            cursor = self._connection.execute(statement, values or None, binary=binary)
            return cursor.fetchall() if cursor.description else []

    def one(self, statement: str, values: Sequence[object] = ()) -> Any:  # noqa: ANN401  # a value as PostgreSQL gives it
        """Run a statement and return the single value of its single row."""
        return self.rows(statement, values)[0][0]

    def many(self, statement: str, values: Sequence[Sequence[object]]) -> None:
        """Run a statement once for each item of `values`, pipelined."""
        if values:
            with self._explained(), self._connection.cursor() as cursor:
                cursor.executemany(statement, values)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read from one snapshot."""
        with self._transaction(_READING):
            yield

    @contextmanager
    def writing(self, *names: str) -> Iterator[None]:
        """Run one transaction, all or nothing. Transactions with a name in common run one at a time; others wait up to WAIT_S seconds."""
        with self._transaction("BEGIN ISOLATION LEVEL READ COMMITTED"):
            for name in names:
                self.rows("SELECT pg_advisory_xact_lock(%s::bigint)", (_key("write", name),))
            yield

    @contextmanager
    def lock(
        self, name: str, *, wait_s: float, on_wait: Callable[[], None] | None, refused: Callable[[], KnowledgeBaseError]
    ) -> Iterator[None]:
        """Hold an advisory lock, which the server releases if the connection ends.

        Raises the error made by `refused` if another connection still holds the lock after `wait_s` seconds.
        """
        key = _key("index", name)
        try_lock = partial(self.one, "SELECT pg_try_advisory_lock(%s::bigint)", (key,))
        end = time.monotonic() + wait_s
        while not try_lock():
            if time.monotonic() >= end:
                raise refused()
            if on_wait is not None:
                on_wait()
                on_wait = None
            time.sleep(_LOOK_AGAIN_S)
        try:
            yield
        finally:
            with suppress(psycopg.Error):
                self._connection.execute("SELECT pg_advisory_unlock(%s::bigint)", (key,))

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        with self._explained():
            self._connection.execute(begin)
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(psycopg.Error):
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise KnowledgeBaseError(
                f"The knowledge base {self.address.shown} cannot be used: {self._reason(error)}.", hint=_way_out(error)
            ) from error

    def _unreachable(self, error: psycopg.Error) -> KnowledgeBaseError:
        reason = self._reason(error)
        if "password" in reason:
            return KnowledgeBaseError(f"The PostgreSQL server of {self.address.shown} refuses the password: {reason}.", hint=_HINTS["28"])
        if "does not exist" in reason:
            return KnowledgeBaseError(f"The knowledge base {self.address.shown} cannot be used: {reason}.", hint=_HINTS["3D"])
        return KnowledgeBaseError(
            f"The PostgreSQL server of {self.address.shown} cannot be reached: {reason}.",
            hint="Check the host and the port, that the server is running, and that it accepts connections from this machine.",
        )

    def _reason(self, error: psycopg.Error) -> str:
        text = error.diag.message_primary or str(error) or type(error).__name__
        return self.address.redact(text.splitlines()[0].removeprefix("connection failed: ").strip(" .:"))


def vector(data: bytes) -> pgvector.Vector:
    """Convert little-endian float32 bytes to a vector for the server."""
    import numpy as np  # noqa: PLC0415  # heavy; a keyword search does not need it

    return pgvector.Vector(np.frombuffer(data, dtype="<f4"))


def raw(value: pgvector.Vector) -> bytes:
    """Convert a vector from the server to little-endian float32 bytes."""
    return value.to_numpy().astype("<f4").tobytes()


def _way_out(error: psycopg.Error) -> str:
    state = error.sqlstate or ("57" if isinstance(error, psycopg.OperationalError) else "")
    hints = (_HINTS.get(state[:num]) for num in (5, 2))
    return next(filter(None, hints), "Check the address, and that localrag may use this server.")


def _key(kind: str, name: str) -> int:
    """Return the number of an advisory lock for this kind and name, practically unique in a database."""
    return int.from_bytes(hashlib.sha256(f"localrag {kind} {name}".encode()).digest()[:8], "big", signed=True)
