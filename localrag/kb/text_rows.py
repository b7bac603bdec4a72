"""The documents of a knowledge base file that were given as texts. What writes them is in localrag/kb/documents.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from localrag.errors import KnowledgeBaseError
from localrag.kb.documents import Known
from localrag.kb.filters import Where
from localrag.kb.sqlite_file import SqliteFile

_FROM = "FROM texts t JOIN documents d ON d.id = t.document_id"
_ENTRIES = "(SELECT group_concat(hex(entry), ' ') FROM entries e WHERE e.document_id = d.id)"
_ALL = f"SELECT t.id, text, length(text), metadata, sha256, {_ENTRIES} {_FROM} ORDER BY d.id"


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text as it is stored, or its beginning: `num_chars` is the number of characters of all of it, `sha256` is of text and metadata."""

    id: str
    text: str
    num_chars: int
    metadata_json: str
    sha256: str

    @property
    def metadata(self) -> dict[str, Any]:
        """KnowledgeBaseError for what is damaged."""
        return loaded(self.metadata_json)

    @property
    def is_whole(self) -> bool:
        return len(self.text) == self.num_chars


def loaded(metadata: str) -> dict[str, Any]:
    """Metadata as it is stored, read. KnowledgeBaseError for what is damaged."""
    try:
        found = json.loads(metadata)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    raise KnowledgeBaseError("The metadata of a text is damaged.", hint="See which: localrag kb verify NAME")


class TextRows:
    """What is stored of texts, by the ids that they were given."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    def known(self, ids: Sequence[str]) -> dict[str, Known]:
        """What is known of those that are there."""
        rows = self._file.rows_in(f"SELECT t.id, d.id, sha256, num_bytes, mtime_ns, cutter {_FROM} WHERE t.id IN", ids)
        return {text_id: Known(*rest) for text_id, *rest in rows}

    def outdated(self, cutter: int) -> list[str]:
        """The ids of those that another version cut, the first given first."""
        return [row[0] for row in self._file.rows(f"SELECT t.id {_FROM} WHERE cutter != ? ORDER BY d.id", (cutter,))]

    def whole(self, ids: Sequence[str]) -> dict[str, TextRow]:
        """Those that are there, whole."""
        rows = self._file.rows_in(f"SELECT t.id, text, length(text), metadata, sha256 {_FROM} WHERE t.id IN", ids)
        return {row[0]: TextRow(*row) for row in rows}

    def page(self, where: Where, *, offset: int, limit: int, max_chars: int) -> list[TextRow]:
        """Of those that pass, the first given first, `limit` from the one at `offset` on; of each the first `max_chars` characters."""
        chosen, values = where.to_sql()
        rows = self._file.rows(
            f"SELECT t.id, substr(text, 1, ?), length(text), metadata, sha256 {_FROM} WHERE d.id IN ({chosen}) "  # no values in it
            "ORDER BY d.id LIMIT ? OFFSET ?",
            (max_chars, *values, limit, offset),
        )
        return [TextRow(*row) for row in rows]

    def count(self, where: Where) -> int:
        """How many pass."""
        chosen, values = where.to_sql()
        return int(self._file.one(f"SELECT count(*) FROM texts WHERE document_id IN ({chosen})", values))  # noqa: S608  # no values in it

    def names(self, document_ids: Sequence[int]) -> dict[int, tuple[str, str | None, str | None]]:
        """(source, id, metadata) of documents of any kind, by their numbers; the last two of texts alone."""
        rows = self._file.rows_in(
            "SELECT d.id, source, t.id, metadata FROM documents d LEFT JOIN texts t ON t.document_id = d.id WHERE d.id IN", document_ids
        )
        return {document_id: (source, text_id, metadata) for document_id, source, text_id, metadata in rows}

    def all(self) -> Iterator[tuple[TextRow, frozenset[bytes]]]:
        """Every text with the digests that its metadata is found by."""
        for text_id, *rest, entries in self._file.each(_ALL):
            yield TextRow(text_id, *rest), frozenset(bytes.fromhex(each) for each in (entries or "").split())
