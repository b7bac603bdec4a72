"""A knowledge base on a server, as a `Place`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.errors import KnowledgeBaseBusyError, KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb.names import not_found
from localrag.kb.postgres import tables
from localrag.kb.postgres.address import parse
from localrag.kb.postgres.database import Database
from localrag.kb.postgres.store import PostgresStore

if TYPE_CHECKING:
    from localrag.kb.postgres.index import PostgresIndex


class ServerPlace:
    """The `Place` of an address such as `postgresql://user@host:port/database#name`; the default name is "default".

    `open` connects. Raises KnowledgeBaseError, without the password, for an invalid address and for a server that cannot be reached, wants
    another password or has no pgvector.
    """

    def __init__(self, text: str) -> None:
        self._address = parse(text)
        self.name = self._address.name
        self.address = self._address.shown
        self.store: PostgresStore | None = None
        self._schema = tables.schema_of(self.name)
        self._connected: Database | None = None
        self._index: PostgresIndex | None = None

    @property
    def _db(self) -> Database:
        if self._connected is None:
            self._connected = Database(self._address)
        return self._connected

    def open(self) -> None:
        if tables.enter(self._db, self.name):
            self.store = PostgresStore(self._db, self._schema)

    def follow(self) -> None:
        if not tables.enter(self._db, self.name):
            self.store = None
        elif self.store is None:
            self.store = PostgresStore(self._db, self._schema)

    def make(self) -> PostgresStore:
        tables.enter(self._db, self.name, create=True)
        self.store = PostgresStore(self._db, self._schema)
        return self.store

    def close(self) -> None:
        if self._connected is not None:
            self._connected.close()

    def taken(self, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        def refused() -> KnowledgeBaseError:
            return KnowledgeBaseBusyError(
                f"Another localrag is indexing into knowledge base {self.address!r}.",
                hint="Wait for that one to end, then run the same command again.",
                kb=self.address,
            )

        return self._db.turn(self._schema, wait_s=wait_s, on_wait=on_wait, refused=refused)

    def not_found(self) -> KnowledgeBaseNotFoundError:
        return not_found(self.address, self.name, tables.names(self._db))

    def index(self) -> PostgresIndex | None:
        from localrag.kb.postgres.index import PostgresIndex  # noqa: PLC0415  # imports numpy

        assert self.store is not None
        if self.store.embedder is None:
            return None
        if self._index is None or self._index.generation != self.store.generation:
            self._index = PostgresIndex(self._db)
        return self._index

    def index_problems(self) -> list[str]:
        from localrag.kb.postgres.index import index_problems  # noqa: PLC0415  # imports numpy

        self._index = None
        return index_problems(self._db, self._schema)

    def tend(self) -> None:
        from localrag.kb.postgres.index import tend  # noqa: PLC0415  # imports numpy

        tend(self._db, self._schema)

    def export(self, file: Path) -> None:
        raise KnowledgeBaseError(
            f"{self.address} is on a server, and only a knowledge base of the home can be exported to {file.name}.",
            hint=f"Save it with PostgreSQL's own tool: pg_dump --schema={self._schema}",
        )

    def remove(self) -> None:
        with self.taken(wait_s=0):
            tables.drop(self._db, self.name)
        self.close()
        self.store = None
