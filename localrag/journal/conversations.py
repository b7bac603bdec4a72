"""Conversations and memories, stored in the journal's file. A question is stored before it is answered, and its answer while it is
written.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from localrag.errors import UsageError
from localrag.journal.database import began, explained, json_of, legible, object_of, runs, storable, transaction
from localrag.text.terms import words

MAX_NAME_CHARS = 80
MAX_MATCHES = 50
Ending = Literal["done", "stopped", "failed"]
TurnState = Literal["running", "interrupted", "done", "stopped", "failed"]
""""stopped": the user or a time limit ended the answer. "interrupted": the process ended before the answer did."""

_TURN = "id, question, answer, state, about, is_pinned, began_at, pid, pid_started_at"
_NUM_WORDS = 32
_STATES = ("running", "done", "stopped", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """A conversation in a list. `first_question` is empty if nothing has been asked."""

    id: int
    name: str
    about: Mapping[str, Any]
    created_at: float
    updated_at: float
    num_turns: int
    first_question: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """A question with its answer so far. `about` describes how the answer was made: sources, model, seed."""

    id: int
    question: str
    answer: str
    state: TurnState
    about: Mapping[str, Any]
    is_pinned: bool
    began_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMatch:
    """A search hit: its conversation, the number of the turn in it, and a snippet around the match."""

    conversation: str
    number: int
    question: str
    snippet: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Conversations:
    """Conversations by id and by name. File errors are raised as ConfigError."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    # --- conversations ---

    def create(self, name: str, about: Mapping[str, Any]) -> int:
        """Create a conversation without turns and return its id. Raises UsageError for a name that is taken or invalid."""
        name, now = checked_name(name), time.time()
        statement = "INSERT INTO conversations (name, about, created_at, updated_at) VALUES (?, ?, ?, ?)"
        with transaction(self._db, self._path):
            self._check_free(name)
            return int(self._db.execute(statement, (name, json_of(about), now, now)).lastrowid or 0)

    def named(self, name: str) -> ConversationRow | None:
        return next(iter(self._rows("WHERE name = ?", (storable(name),))), None)

    def latest(self) -> ConversationRow | None:
        """Return the conversation that was used last."""
        return next(iter(self._rows("ORDER BY updated_at DESC, id DESC LIMIT 1", ())), None)

    def all(self) -> list[ConversationRow]:
        """Return all conversations, the most recently used last."""
        return self._rows("ORDER BY updated_at, id", ())

    def rename(self, conversation_id: int, name: str) -> None:
        """Rename a conversation. Raises UsageError for a name that is taken or invalid."""
        name = checked_name(name)
        with transaction(self._db, self._path):
            self._check_free(name, conversation_id)
            self._db.execute("UPDATE conversations SET name = ? WHERE id = ?", (name, conversation_id))

    def delete(self, conversation_id: int) -> None:
        """Delete a conversation with all its turns, including undone ones."""
        with transaction(self._db, self._path):
            of_it = "(SELECT id FROM turns WHERE conversation_id = ?)"
            self._db.execute(f"DELETE FROM turns_fts WHERE rowid IN {of_it}", (conversation_id,))  # noqa: S608  # our own words
            self._db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

    def set_about(self, conversation_id: int, about: Mapping[str, Any]) -> None:
        """Replace the settings of a conversation."""
        with transaction(self._db, self._path):
            self._db.execute("UPDATE conversations SET about = ? WHERE id = ?", (json_of(about), conversation_id))

    def fork(self, conversation_id: int, last_turn_id: int, name: str) -> int:
        """Copy a conversation up to and including the given turn, under a new name. Return the new id."""
        name, now = checked_name(name), time.time()
        copied = "question, answer, state, about, is_pinned, began_at, pid, pid_started_at"
        with transaction(self._db, self._path):
            self._check_free(name)
            new_id = self._db.execute(
                "INSERT INTO conversations (name, about, created_at, updated_at) SELECT ?, about, ?, ? FROM conversations WHERE id = ?",
                (name, now, now, conversation_id),
            ).lastrowid
            self._db.execute(
                f"INSERT INTO turns (conversation_id, {copied}) SELECT ?, {copied} FROM turns "  # noqa: S608  # our own words
                "WHERE conversation_id = ? AND id <= ? AND NOT is_undone ORDER BY id",
                (new_id, conversation_id, last_turn_id),
            )
            self._db.execute(
                "INSERT INTO turns_fts (rowid, question, answer) SELECT id, question, answer FROM turns WHERE conversation_id = ?",
                (new_id,),
            )
        return int(new_id or 0)

    # --- turns ---

    def turns(self, conversation_id: int) -> list[StoredTurn]:
        """Return the turns of a conversation in order, without undone ones."""
        statement = f"SELECT {_TURN} FROM turns WHERE conversation_id = ? AND NOT is_undone ORDER BY id"  # noqa: S608  # our own words
        with explained(self._path):
            rows = self._db.execute(statement, (conversation_id,)).fetchall()
        with legible(self._path):
            return [_turn(row) for row in rows]

    def begin_turn(self, conversation_id: int, question: str, about: Mapping[str, Any]) -> int:
        """Store a question that this process is about to answer, and return the turn's id. It is on disk when this returns."""
        now, pid = time.time(), os.getpid()
        statement = (
            "INSERT INTO turns (conversation_id, question, answer, state, about, began_at, pid, pid_started_at) "
            "VALUES (?, ?, '', 'running', ?, ?, ?, ?)"
        )
        with transaction(self._db, self._path):
            values = (conversation_id, storable(question), json_of(about), now, pid, began(pid))
            turn_id = int(self._db.execute(statement, values).lastrowid or 0)
            self._db.execute("INSERT INTO turns_fts (rowid, question, answer) VALUES (?, ?, '')", (turn_id, storable(question)))
            self._db.execute("UPDATE conversations SET updated_at = ? WHERE id = ?", (now, conversation_id))
        return turn_id

    def write(self, turn_id: int, answer: str) -> None:
        """Store the answer so far. If the process is killed later, this part survives."""
        with transaction(self._db, self._path):
            self._db.execute("UPDATE turns SET answer = ? WHERE id = ? AND state = 'running'", (storable(answer), turn_id))

    def end_turn(self, turn_id: int, state: Ending, answer: str, about: Mapping[str, Any]) -> None:
        """Store the final answer. A turn that has already ended does not change."""
        text = storable(answer)
        with transaction(self._db, self._path):
            statement = "UPDATE turns SET state = ?, answer = ?, about = ? WHERE id = ? AND state = 'running'"
            if self._db.execute(statement, (state, text, json_of(about), turn_id)).rowcount:
                self._db.execute("UPDATE turns_fts SET answer = ? WHERE rowid = ?", (text, turn_id))

    def undo(self, turn_ids: Iterable[int]) -> None:
        """Remove turns from the conversation. They stay in the file."""
        with transaction(self._db, self._path):
            self._db.executemany("UPDATE turns SET is_undone = 1 WHERE id = ?", [(each,) for each in turn_ids])

    def pin(self, turn_id: int, *, is_pinned: bool) -> None:
        with transaction(self._db, self._path):
            self._db.execute("UPDATE turns SET is_pinned = ? WHERE id = ?", (int(is_pinned), turn_id))

    # --- search ---

    def search(self, text: str, limit: int = MAX_MATCHES) -> list[TurnMatch]:
        """Return turns that contain all these words, best first. A word may be a prefix. Nothing in `text` is parsed as syntax."""
        looked_for = words(text)[:_NUM_WORDS]
        if not looked_for:
            return []
        expression = " ".join(f'"{word}"*' for word in looked_for)
        statement = (
            "SELECT c.name, t.question, snippet(turns_fts, -1, '', '', ' … ', 16), (SELECT count(*) FROM turns AS e WHERE "
            "e.conversation_id = t.conversation_id AND e.id <= t.id AND NOT e.is_undone) FROM turns_fts "
            "JOIN turns AS t ON t.id = turns_fts.rowid JOIN conversations AS c ON c.id = t.conversation_id "
            "WHERE turns_fts MATCH ? AND NOT t.is_undone ORDER BY bm25(turns_fts), t.id DESC LIMIT ?"
        )
        with explained(self._path), legible(self._path):
            rows = self._db.execute(statement, (expression, max(0, limit))).fetchall()
            return [
                TurnMatch(conversation=str(name), question=str(question), snippet=str(snippet), number=int(number))
                for name, question, snippet, number in rows
            ]

    # --- inside ---

    def _rows(self, clause: str, values: tuple[object, ...]) -> list[ConversationRow]:
        turns = "FROM turns AS t WHERE t.conversation_id = conversations.id AND NOT t.is_undone"
        statement = (
            f"SELECT id, name, about, created_at, updated_at, (SELECT count(*) {turns}), "  # noqa: S608  # our own words
            f"(SELECT t.question {turns} ORDER BY t.id LIMIT 1) FROM conversations {clause}"
        )
        with explained(self._path):
            rows = self._db.execute(statement, values).fetchall()
        with legible(self._path):
            return [
                ConversationRow(
                    id=int(row[0]),
                    name=str(row[1]),
                    about=object_of(row[2]),
                    created_at=float(row[3]),
                    updated_at=float(row[4]),
                    num_turns=int(row[5]),
                    first_question=str(row[6] or ""),
                )
                for row in rows
            ]

    def _check_free(self, name: str, own_id: int | None = None) -> None:
        row = self._db.execute("SELECT id FROM conversations WHERE name = ?", (name,)).fetchone()
        if row is not None and row[0] != own_id:
            raise UsageError(f"There is already a conversation {name!r}.", hint="Choose another name, or delete that one.")


def checked_name(name: str) -> str:
    """Return the name without surrounding white space. Raises UsageError if it is empty, too long, or not printable on one line."""
    name = name.strip()
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise UsageError(f"The name of a conversation must be one line of 1 to {MAX_NAME_CHARS} characters.", hint="Choose another name.")
    return storable(name)


def _turn(row: tuple[Any, ...]) -> StoredTurn:
    """Read a row. Raises TypeError for the contents of a damaged file."""
    turn_id, question, answer, state, about, is_pinned, began_at, pid, pid_started_at = row
    if not (isinstance(question, str) and isinstance(answer, str)) or state not in _STATES:
        raise TypeError(f"turn {turn_id} is {question!r:.60}, {state!r:.60}")
    if state == "running" and not runs(int(pid), float(pid_started_at)):
        state = "interrupted"
    return StoredTurn(
        id=int(turn_id),
        question=question,
        answer=answer,
        state=state,
        about=object_of(about),
        is_pinned=bool(is_pinned),
        began_at=float(began_at),
    )


MAX_MEMORY_CHARS = 2000
DEFAULT_IMPORTANCE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMemory:
    """A fact. `importance` is 0 to 1; times are in seconds since the epoch."""

    id: int
    text: str
    importance: float
    created_at: float
    updated_at: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Memories:
    """Facts by id that are kept across conversations. File errors are raised as ConfigError."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    def add(self, text: str, importance: float = DEFAULT_IMPORTANCE) -> int:
        """Store a fact and return its id. Raises UsageError for a text that is empty or too long, or an importance outside 0 to 1."""
        text, importance, now = _memory_text(text), _importance(importance), time.time()
        statement = "INSERT INTO memories (text, importance, created_at, updated_at) VALUES (?, ?, ?, ?)"
        with transaction(self._db, self._path):
            return int(self._db.execute(statement, (text, importance, now, now)).lastrowid or 0)

    def edit(self, memory_id: int, *, text: str | None = None, importance: float | None = None) -> None:
        """Change the given fields and the time of the last change. Raises UsageError as `add` does, and for an unknown id."""
        new_text, new_importance = None if text is None else _memory_text(text), None if importance is None else _importance(importance)
        statement = "UPDATE memories SET text = coalesce(?, text), importance = coalesce(?, importance), updated_at = ? WHERE id = ?"
        with transaction(self._db, self._path):
            _check_found(memory_id, self._db.execute(statement, (new_text, new_importance, time.time(), memory_id)).rowcount)

    def forget(self, memory_id: int) -> None:
        """Delete a fact. Raises UsageError for an unknown id."""
        with transaction(self._db, self._path):
            _check_found(memory_id, self._db.execute("DELETE FROM memories WHERE id = ?", (memory_id,)).rowcount)

    def all(self) -> list[StoredMemory]:
        """Return all facts, oldest first."""
        with explained(self._path), legible(self._path):
            rows = self._db.execute("SELECT id, text, importance, created_at, updated_at FROM memories ORDER BY id").fetchall()
            return [
                StoredMemory(id=int(key), text=str(text), importance=float(weight), created_at=float(created_at), updated_at=float(changed))
                for key, text, weight, created_at, changed in rows
            ]


def _memory_text(text: str) -> str:
    text = " ".join(text.split())
    if not text or len(text) > MAX_MEMORY_CHARS:
        raise UsageError(f"A memory must have 1 to {MAX_MEMORY_CHARS} characters.", hint="Shorten it, or split it into several.")
    return storable(text)


def _importance(importance: float) -> float:
    if not 0 <= importance <= 1:
        raise UsageError(f"The importance of a memory must be 0 to 1, not {importance!r}.")
    return float(importance)


def _check_found(memory_id: int, num_found: int) -> None:
    if not num_found:
        raise UsageError(f"There is no memory {memory_id}.", hint="List all memories: localrag memory list")
