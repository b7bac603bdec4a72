"""The documents on a server that were given as texts. localrag/kb/text_rows.py says what each of these does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localrag.kb.documents import Known
from localrag.kb.filters import Where
from localrag.kb.postgres.database import Database
from localrag.kb.postgres.full_text import passing
from localrag.kb.text_rows import TextRow

_FROM = "FROM texts t JOIN documents d ON d.id = t.document_id"
_SOME = f"""SELECT d.id, (SELECT array_agg(entry) FROM entries e WHERE e.document_id = d.id), t.id, text, length(text), metadata, sha256
    {_FROM} WHERE d.id > %s ORDER BY d.id LIMIT %s"""  # noqa: S608  # no values in it
_AT_ONCE = 100


class PostgresTexts:
    def __init__(self, db: Database) -> None:
        self._db = db

    def known(self, ids: Sequence[str]) -> dict[str, Known]:
        rows = self._db.rows(f"SELECT t.id, d.id, sha256, num_bytes, mtime_ns, cutter {_FROM} WHERE t.id = ANY(%s::text[])", (list(ids),))
        return {text_id: Known(*rest) for text_id, *rest in rows}

    def outdated(self, cutter: int) -> list[str]:
        return [row[0] for row in self._db.rows(f"SELECT t.id {_FROM} WHERE cutter != %s ORDER BY d.id", (cutter,))]

    def whole(self, ids: Sequence[str]) -> dict[str, TextRow]:
        rows = self._db.rows(f"SELECT t.id, text, length(text), metadata, sha256 {_FROM} WHERE t.id = ANY(%s::text[])", (list(ids),))
        return {row[0]: TextRow(*row) for row in rows}

    def page(self, where: Where, *, offset: int, limit: int, max_chars: int) -> list[TextRow]:
        chosen, values = passing(where)
        rows = self._db.rows(
            f"SELECT t.id, left(text, %s), length(text), metadata, sha256 {_FROM} WHERE d.id IN ({chosen}) "  # no values in it
            "ORDER BY d.id LIMIT %s OFFSET %s",
            (max_chars, *values, limit, offset),
        )
        return [TextRow(*row) for row in rows]

    def count(self, where: Where) -> int:
        chosen, values = passing(where)
        return int(self._db.one(f"SELECT count(*) FROM texts WHERE document_id IN ({chosen})", values))  # noqa: S608  # no values in it

    def names(self, document_ids: Sequence[int]) -> dict[int, tuple[str, str | None, str | None]]:
        rows = self._db.rows(
            "SELECT d.id, source, t.id, metadata FROM documents d LEFT JOIN texts t ON t.document_id = d.id WHERE d.id = ANY(%s::bigint[])",
            (list(document_ids),),
        )
        return {document_id: (source, text_id, metadata) for document_id, source, text_id, metadata in rows}

    def all(self) -> Iterator[tuple[TextRow, frozenset[bytes]]]:
        after = 0
        while rows := self._db.rows(_SOME, (after, _AT_ONCE)):
            for _, entries, *row in rows:
                yield TextRow(*row), frozenset(bytes(each) for each in entries or ())
            after = rows[-1][0]
