"""A connection to a PostgreSQL server, with errors that a person can act on; the only `import psycopg`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from localrag.errors import KnowledgeBaseError
from localrag.kb.index_lock import waited
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
_WORK_KB = 64 * 1024  # a question with common words matches most chunks: keep the list of matches off the disk
_SETTINGS = """SELECT set_config('search_path', %s, false), set_config('lock_timeout', %s, false),
    set_config('client_min_messages', 'error', false),
    set_config('work_mem', greatest(%s::bigint, pg_size_bytes(current_setting('work_mem')) / 1024)::text || 'kB', false),
    set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on'
        ELSE current_setting('synchronous_commit') END, false)"""
_TRY_AGAIN = "Run the same command again: what was committed is kept."
_HINTS = {
    "28": "Check the user of the address, and the password in it, in PGPASSWORD or in ~/.pgpass.",
    "3D": "Check the user and the database of the address; a database is made with: createdb NAME",
    "42501": "Ask its administrator for the right to create schemas in this database, or index into one of your own.",
    "53": "The server is out of disk, memory or connections. " + _TRY_AGAIN,
    "55P03": "Another localrag is writing to it. Wait for that one to end, then try again.",
    "57": "The server ended the connection. " + _TRY_AGAIN,
}


class Database:
    """One connection, for one thread. Every failure is raised as a KnowledgeBaseError without the password."""

    def __init__(self, address: Address) -> None:
        self.address = address
        try:
            self._connection = psycopg.connect(
                address.conninfo, autocommit=True, client_encoding="UTF8", fallback_application_name="localrag"
            )
        except psycopg.ProgrammingError:
            raise invalid_address() from None
        except psycopg.Error as error:  # the cause is not kept: it knows what it was called with
            raise self._unreachable(error) from None

    def close(self) -> None:
        self._connection.close()

    def use(self, search_path: str) -> None:
        """Set the search path and register the type of vectors."""
        self.rows(_SETTINGS, (search_path, f"{int(1000 * WAIT_S)}ms", _WORK_KB))
        with self._explained():
            register_vector(self._connection)

    def rows(self, statement: str, values: Sequence[object] | Mapping[str, object] = (), *, binary: bool = False) -> list[Row]:
        """All rows of a statement. With `binary`, numbers and vectors are not sent as text."""
        with self._explained():
            cursor = self._connection.execute(statement, values or None, binary=binary)
            return cursor.fetchall() if cursor.description else []

    def one(self, statement: str, values: Sequence[object] = ()) -> Any:  # noqa: ANN401  # a value as PostgreSQL gives it
        """The one value of the one row."""
        return self.rows(statement, values)[0][0]

    def many(self, statement: str, values: Sequence[Sequence[object]]) -> None:
        """Run a statement for each of `values`, pipelined."""
        if values:
            with self._explained(), self._connection.cursor() as cursor:
                cursor.executemany(statement, values)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One snapshot for all reads inside."""
        with self._transaction(_READING):
            yield

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """One transaction, all or nothing. Those with one name run one at a time; the others wait for WAIT_S seconds."""
        with self._transaction("BEGIN ISOLATION LEVEL READ COMMITTED"):
            self.rows("SELECT pg_advisory_xact_lock(%s::bigint)", (_key("write", name),))
            yield

    @contextmanager
    def turn(
        self, name: str, *, wait_s: float, on_wait: Callable[[], None] | None, refused: Callable[[], KnowledgeBaseError]
    ) -> Iterator[None]:
        """A lock that one connection at a time holds, until it ends. Raises `refused()` if another holds it after `wait_s` seconds."""
        key = _key("index", name)
        ask = partial(self.one, "SELECT pg_try_advisory_lock(%s::bigint)", (key,))
        if not waited(lambda: ask() or None, wait_s=wait_s, on_wait=on_wait):
            raise refused()
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
            return KnowledgeBaseError(f"The PostgreSQL server of {self.address.shown} wants another password: {reason}.", hint=_HINTS["28"])
        if "does not exist" in reason:
            return KnowledgeBaseError(f"The knowledge base {self.address.shown} cannot be used: {reason}.", hint=_HINTS["3D"])
        return KnowledgeBaseError(
            f"The PostgreSQL server of {self.address.shown} cannot be reached: {reason}.",
            hint="Check the host and the port, that the server runs, and that it lets this machine in.",
        )

    def _reason(self, error: psycopg.Error) -> str:
        text = error.diag.message_primary or str(error) or type(error).__name__
        return self.address.redact(text.splitlines()[0].removeprefix("connection failed: ").strip(" .:"))


def vector(data: bytes) -> pgvector.Vector:
    """A vector for the server, from float32 little-endian."""
    import numpy as np  # noqa: PLC0415  # heavy; a search for words needs none

    return pgvector.Vector(np.frombuffer(data, dtype="<f4"))


def raw(value: pgvector.Vector) -> bytes:
    """A vector of the server as float32 little-endian."""
    return value.to_numpy().astype("<f4").tobytes()


def _way_out(error: psycopg.Error) -> str:
    state = error.sqlstate or ("57" if isinstance(error, psycopg.OperationalError) else "")
    hints = (_HINTS.get(state[:num]) for num in (5, 2))
    return next(filter(None, hints), "Check the address, and that the server is one that localrag may use.")


def _key(kind: str, name: str) -> int:
    """The number of a lock, unique in a database for this kind and name."""
    return int.from_bytes(hashlib.sha256(f"localrag {kind} {name}".encode()).digest()[:8], "big", signed=True)
