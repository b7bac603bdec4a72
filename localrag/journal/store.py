"""The journal: every ask with its ledger, every run of a council, conversations and memories, in one SQLite file.

Write-ahead log and `synchronous = FULL`, so that what was committed survives a crash of the process and of the machine. An ask is
one BEGIN IMMEDIATE transaction: it is there whole or not at all, and a second writer waits for the first. So is an event of a council.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from localrag.budget import Ledger
from localrag.journal.conversations import Conversations
from localrag.journal.councils import Councils
from localrag.journal.database import connect, explained, legible, transaction
from localrag.journal.memories import Memories
from localrag.journal.records import Allotment, AskRecord, EvidenceRecord, SessionRow, StoredAsk
from localrag.journal.rows import json_of, storable
from localrag.journal.summaries import Summaries

FILE_NAME = "journal.sqlite"
MAX_QUESTION_CHARS = 10_000

_PLAIN: dict[str, type] = {
    "session": str, "command": str, "model": str, "model_sha256": str, "question": str, "started_at": float, "window": int,
    "finish_reason": str, "strategy": str, "bound": str, "prompt_tokens": int, "completion_tokens": int, "cached_tokens": int,
}  # fmt: skip
_JSON = ("ledger", "sections", "timings")
_EVIDENCE: dict[str, type] = {
    "label": str, "source": str, "kb": str, "chunk_id": int, "tokens": int, "relevance": float, "tier": str, "level": str,
    "state": str, "cited": int,
}  # fmt: skip
_NULLABLE = ("model_sha256", "relevance")


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608  # names written above


_INSERT_ASK = _insert("asks", (*_PLAIN, *_JSON))
_INSERT_EVIDENCE = _insert("evidence", ("ask_id", "position", *_EVIDENCE))


class Journal:
    """One journal file. Every failure of it arrives as a ConfigError with a way out. It belongs to the thread that opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = connect(path)
        self.summaries = Summaries(self._db, path)
        self.conversations = Conversations(self._db, path)
        self.memories = Memories(self._db, path)
        self.councils = Councils(self._db, path)

    @classmethod
    def open(cls, home: Path) -> Self:
        """The journal of a home; folder and file are made if they are not there."""
        return cls(home / FILE_NAME)

    def record(self, entry: AskRecord) -> int:
        """Keeps an ask, whole or not at all, and returns its id. ValueError, our own bug, for a time that is no finite number."""
        entry = replace(entry, question=entry.question[:MAX_QUESTION_CHARS])
        plain = [_cell(kind, getattr(entry, name)) for name, kind in _PLAIN.items()]
        kept = (entry.ledger.to_dict(), [asdict(each) for each in entry.sections], {name: float(s) for name, s in entry.timings.items()})
        evidence = [[_cell(kind, getattr(each, name)) for name, kind in _EVIDENCE.items()] for each in entry.evidence]
        with transaction(self._db, self.path):
            ask_id = int(self._db.execute(_INSERT_ASK, [*plain, *map(json_of, kept)]).lastrowid or 0)
            self._db.executemany(_INSERT_EVIDENCE, ((ask_id, at, *row) for at, row in enumerate(evidence)))
        return ask_id

    def asks(self, session: str | None = None, last: int | None = None) -> list[StoredAsk]:
        """The last so many asks, of one session or of all, in the order of recording: the newest is the last."""
        where = "" if session is None else " WHERE session = ?"
        chosen = f"FROM asks{where} ORDER BY id DESC LIMIT ?"
        evidence = f"SELECT ask_id, {', '.join(_EVIDENCE)} FROM evidence WHERE ask_id IN (SELECT id {chosen}) ORDER BY ask_id, position"  # noqa: S608  # our own words
        values = [*([] if session is None else [storable(session)]), -1 if last is None else max(0, last)]
        with transaction(self._db, self.path, "DEFERRED"):
            rows = self._db.execute(f"SELECT id, {', '.join((*_PLAIN, *_JSON))} {chosen}", values).fetchall()
            offered = self._db.execute(evidence, values).fetchall()
        with legible(self.path):
            by_ask = {ask_id: tuple(_evidence(row) for row in group) for ask_id, group in groupby(offered, key=lambda row: row[0])}
            return [_ask(row, by_ask.get(row[0], ())) for row in reversed(rows)]

    def sessions(self) -> list[SessionRow]:
        """Every session, that of the newest ask last."""
        statement = "SELECT session, count(*), min(started_at), max(started_at) FROM asks GROUP BY session ORDER BY max(id)"
        with explained(self.path), legible(self.path):
            return [SessionRow(str(name), int(num), float(first), float(last)) for name, num, first, last in self._db.execute(statement)]

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cell(kind: type, value: Any) -> object:  # noqa: ANN401  # a field of a record
    """The value as SQLite takes it: a number may come from numpy, a text from the name of a file."""
    return value if value is None else storable(value) if kind is str else kind(value)


def _ask(row: Sequence[Any], evidence: tuple[EvidenceRecord, ...]) -> StoredAsk:
    ask_id, cells = row[0], _typed(_PLAIN, row[1 : 1 + len(_PLAIN)])
    ledger, sections, timings = (json.loads(each) for each in row[-len(_JSON) :])
    return StoredAsk(
        id=ask_id,
        **cells,
        ledger=Ledger.from_dict(ledger),
        sections=tuple(Allotment(**each) for each in sections),
        evidence=evidence,
        timings={str(name): float(seconds) for name, seconds in timings.items()},
    )


def _evidence(row: Sequence[Any]) -> EvidenceRecord:
    cells = _typed(_EVIDENCE, row[1:])
    return EvidenceRecord(**cells | {"cited": bool(cells["cited"])})


def _typed(columns: Mapping[str, type], row: Sequence[Any]) -> dict[str, Any]:
    """Cells by column. SQLite gives back whatever a damaged file holds, so what a column may hold is checked (TypeError)."""
    cells = dict(zip(columns, row, strict=True))
    for name, kind in columns.items():
        if not isinstance(cells[name], kind) and not (cells[name] is None and name in _NULLABLE):
            raise TypeError(f"{name} is {cells[name]!r:.60}")
    return cells
