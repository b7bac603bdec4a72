"""Conversations in the journal's file: a turn is there as soon as it was asked, and its answer as far as it was written."""

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
MAX_FOUND = 50
Ending = Literal["done", "stopped", "failed"]
TurnState = Literal["running", "interrupted", "done", "stopped", "failed"]
"""An answer was "stopped" by a person or a limit of time; it is "interrupted" if its process was gone before it was done."""

_TURN = "id, question, answer, state, about, is_pinned, began_at, pid, pid_started_at"
_NUM_WORDS = 32
_STATES = ("running", "done", "stopped", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """A conversation in a list. `first_question` is empty for one in which nothing was asked."""

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
    """A question with its answer, as far as that was written. `about` is what the answer was made of: sources, model, seed."""

    id: int
    question: str
    answer: str
    state: TurnState
    about: Mapping[str, Any]
    is_pinned: bool
    began_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A turn that matches a search: in which conversation, the how manieth, and the words around what was found."""

    conversation: str
    number: int
    question: str
    snippet: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Conversations:
    """Conversations by id and by name. Failures of the file arrive as ConfigError."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    # --- conversations ---

    def create(self, name: str, about: Mapping[str, Any]) -> int:
        """A new conversation without turns. UsageError for a name that is taken, or is none."""
        name, now = checked_name(name), time.time()
        statement = "INSERT INTO conversations (name, about, created_at, updated_at) VALUES (?, ?, ?, ?)"
        with transaction(self._db, self._path):
            self._check_free(name)
            return int(self._db.execute(statement, (name, json_of(about), now, now)).lastrowid or 0)

    def named(self, name: str) -> ConversationRow | None:
        return next(iter(self._rows("WHERE name = ?", (storable(name),))), None)

    def latest(self) -> ConversationRow | None:
        """The one in which something was done last."""
        return next(iter(self._rows("ORDER BY updated_at DESC, id DESC LIMIT 1", ())), None)

    def all(self) -> list[ConversationRow]:
        """Every conversation, the one that was used last being last."""
        return self._rows("ORDER BY updated_at, id", ())

    def rename(self, conversation_id: int, name: str) -> None:
        """UsageError for a name that is taken or invalid."""
        name = checked_name(name)
        with transaction(self._db, self._path):
            self._check_free(name, conversation_id)
            self._db.execute("UPDATE conversations SET name = ? WHERE id = ?", (name, conversation_id))

    def delete(self, conversation_id: int) -> None:
        """The conversation with all its turns, those taken back as well."""
        with transaction(self._db, self._path):
            of_it = "(SELECT id FROM turns WHERE conversation_id = ?)"
            self._db.execute(f"DELETE FROM turns_fts WHERE rowid IN {of_it}", (conversation_id,))  # noqa: S608  # our own words
            self._db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

    def set_about(self, conversation_id: int, about: Mapping[str, Any]) -> None:
        """What it is held with from now on."""
        with transaction(self._db, self._path):
            self._db.execute("UPDATE conversations SET about = ? WHERE id = ?", (json_of(about), conversation_id))

    def fork(self, conversation_id: int, last_turn_id: int, name: str) -> int:
        """A new conversation that begins as this one does, up to and with that turn."""
        name, now = checked_name(name), time.time()
        copied = "question, answer, state, about, is_pinned, began_at, pid, pid_started_at"
        with transaction(self._db, self._path):
            self._check_free(name)
            made = self._db.execute(
                "INSERT INTO conversations (name, about, created_at, updated_at) SELECT ?, about, ?, ? FROM conversations WHERE id = ?",
                (name, now, now, conversation_id),
            ).lastrowid
            self._db.execute(
                f"INSERT INTO turns (conversation_id, {copied}) SELECT ?, {copied} FROM turns "  # noqa: S608  # our own words
                "WHERE conversation_id = ? AND id <= ? AND NOT is_undone ORDER BY id",
                (made, conversation_id, last_turn_id),
            )
            self._db.execute(
                "INSERT INTO turns_fts (rowid, question, answer) SELECT id, question, answer FROM turns WHERE conversation_id = ?", (made,)
            )
        return int(made or 0)

    # --- turns ---

    def turns(self, conversation_id: int) -> list[StoredTurn]:
        """The turns that are part of it, in order."""
        statement = f"SELECT {_TURN} FROM turns WHERE conversation_id = ? AND NOT is_undone ORDER BY id"  # noqa: S608  # our own words
        with explained(self._path):
            rows = self._db.execute(statement, (conversation_id,)).fetchall()
        with legible(self._path):
            return [_turn(row) for row in rows]

    def begin_turn(self, conversation_id: int, question: str, about: Mapping[str, Any]) -> int:
        """A question that this process is going to answer: it is on disk when this returns."""
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
        """The answer so far: what is killed after this leaves that much."""
        with transaction(self._db, self._path):
            self._db.execute("UPDATE turns SET answer = ? WHERE id = ? AND state = 'running'", (storable(answer), turn_id))

    def end_turn(self, turn_id: int, state: Ending, answer: str, about: Mapping[str, Any]) -> None:
        """The answer is as it will be. A turn that has ended stays as it ended."""
        text = storable(answer)
        with transaction(self._db, self._path):
            statement = "UPDATE turns SET state = ?, answer = ?, about = ? WHERE id = ? AND state = 'running'"
            if self._db.execute(statement, (state, text, json_of(about), turn_id)).rowcount:
                self._db.execute("UPDATE turns_fts SET answer = ? WHERE rowid = ?", (text, turn_id))

    def undo(self, turn_ids: Iterable[int]) -> None:
        """Take turns back: they stay in the file, and are not part of the conversation any more."""
        with transaction(self._db, self._path):
            self._db.executemany("UPDATE turns SET is_undone = 1 WHERE id = ?", [(each,) for each in turn_ids])

    def pin(self, turn_id: int, *, is_pinned: bool) -> None:
        with transaction(self._db, self._path):
            self._db.execute("UPDATE turns SET is_pinned = ? WHERE id = ?", (int(is_pinned), turn_id))

    # --- search ---

    def search(self, text: str, limit: int = MAX_FOUND) -> list[Found]:
        """Turns in which all these words stand, the best first; a word may be the beginning of one. Nothing in `text` is syntax."""
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
                Found(conversation=str(name), question=str(question), snippet=str(snippet), number=int(number))
                for name, question, snippet, number in rows
            ]

    # --- inside ---

    def _rows(self, chosen: str, values: tuple[object, ...]) -> list[ConversationRow]:
        turns = "FROM turns AS t WHERE t.conversation_id = conversations.id AND NOT t.is_undone"
        statement = (
            f"SELECT id, name, about, created_at, updated_at, (SELECT count(*) {turns}), "  # noqa: S608  # our own words
            f"(SELECT t.question {turns} ORDER BY t.id LIMIT 1) FROM conversations {chosen}"
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
            raise UsageError(f"There is a conversation {name!r} already.", hint="Choose another name, or delete that one.")


def checked_name(name: str) -> str:
    """A name without white space around it. UsageError for one that is empty, too long, or not fit for a line."""
    name = name.strip()
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise UsageError(f"The name of a conversation is a line of 1 to {MAX_NAME_CHARS} characters.", hint="Choose another name.")
    return storable(name)


def _turn(row: tuple[Any, ...]) -> StoredTurn:
    """TypeError for what a damaged file put there."""
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
