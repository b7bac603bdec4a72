"""Commands of a chat about its turns, and about conversations."""

from __future__ import annotations

from pathlib import Path

from localrag.cli import chat_text
from localrag.cli.chat_desk import Command, Desk, whole
from localrag.cli.text import note, safe
from localrag.errors import UsageError
from localrag.settings import expanded

_MAX_FOUND = 20


def _retry(desk: Desk, _rest: str) -> None:
    turn = desk.room.retried()
    note(f"Seed {desk.room.sampling.seed}, temperature {desk.room.sampling.temperature:g}.")
    desk.ask(turn.question)


def _undo(desk: Desk, rest: str) -> None:
    taken = desk.room.chat.undo(whole(rest, "/undo", least=1) if rest else 1)
    note(f"Taken back: {', '.join(chat_text.short(turn.question) for turn in taken)}")


def _edit(desk: Desk, rest: str) -> None:
    """`/edit [N] [TEXT]`: turns from N on are taken back, and N is asked anew, with another text."""
    first, _, text = rest.partition(" ")
    turns = desk.room.chat.turns
    number = whole(first, "/edit", least=1) if first.isdecimal() else len(turns)
    text = text.strip() if first.isdecimal() else rest
    old = desk.room.chat.turn(number)
    desk.room.chat.undo(len(turns) - number + 1)
    if text:
        desk.ask(text)
    else:
        desk.prefilled = old.question


def _pin(desk: Desk, rest: str) -> None:
    _set_pin(desk, rest, is_pinned=True)


def _unpin(desk: Desk, rest: str) -> None:
    _set_pin(desk, rest, is_pinned=False)


def _set_pin(desk: Desk, rest: str, *, is_pinned: bool) -> None:
    turn = desk.room.chat.pin(whole(rest, "/pin", least=1) if rest else -1, is_pinned=is_pinned)
    note(f"{'Is kept whole whatever comes' if is_pinned else 'Is no longer pinned'}: {chat_text.short(turn.question)}")


def _history(desk: Desk, _rest: str) -> None:
    for number, turn in enumerate(desk.room.chat.turns, 1):
        note(f"  {number}{' pinned' if turn.is_pinned else ''}  {chat_text.short(turn.question)}{chat_text.state_of(turn)}")


# --- conversations ---


def _fork(desk: Desk, rest: str) -> None:
    first, _, name = rest.partition(" ")
    room = desk.room
    number = whole(first, "/fork", least=1) if first.isdecimal() else len(room.chat.turns)
    name = (name if first.isdecimal() else rest).strip() or f"{room.status.name} from {number}"
    made = room.chat.fork(number, name)
    room.enter(name, made)
    note(f"This is {name!r} now, which begins with {number} turns of the other one.")


def _new(desk: Desk, rest: str) -> None:
    desk.room.begin(rest or None)
    note(f"A new conversation: {desk.room.status.name!r}.")


def _resume(desk: Desk, rest: str) -> None:
    if not rest:
        raise UsageError("/resume NAME goes on with that conversation.", hint="To see them: /list")
    desk.room.resume(rest)
    chat_text.transcript(desk.room.chat.turns, last=3)


def _rename(desk: Desk, rest: str) -> None:
    room = desk.room
    room.journal.conversations.rename(room.chat.id, rest)
    room.status.name = room.session.name = rest.strip()
    note(f"This conversation is {room.status.name!r} now.")


def _list(desk: Desk, _rest: str) -> None:
    for row in desk.room.journal.conversations.all()[-_MAX_FOUND:]:
        note(f"  {row.name}  {row.num_turns} turns  {chat_text.short(row.first_question)}")


def _search(desk: Desk, rest: str) -> None:
    found = desk.room.journal.conversations.search(rest, _MAX_FOUND)
    for each in found:
        note(f"  {each.conversation}, turn {each.number}: {chat_text.short(each.snippet)}")
    if not found:
        note("Nothing was found.")


def _save(desk: Desk, rest: str) -> None:
    if not rest:
        raise UsageError("/save FILE writes the conversation: as Markdown, or as JSON into a .json file.")
    path = expanded(Path(rest))
    chat_text.save(path, desk.room.status.name, desk.room.chat.turns)
    note(f"Written to {safe(str(path))}.")


COMMANDS = (
    Command(_history, "/history", "the turns, with their numbers"),
    Command(_pin, "/pin [N]", "never summarise nor leave out a turn"),
    Command(_unpin, "/unpin [N]", "let it be summarised again"),
    Command(_retry, "/retry", "answer the last question anew, with another seed"),
    Command(_edit, "/edit [N] [TEXT]", "take back turn N and all behind it, and ask it otherwise"),
    Command(_undo, "/undo [N]", "take back the last turn, or the last N"),
    Command(_fork, "/fork [N] [NAME]", "go on from turn N in a conversation of its own"),
    Command(_new, "/new [NAME]", "begin another conversation"),
    Command(_resume, "/resume NAME", "go on with another conversation"),
    Command(_rename, "/rename NAME", "give this conversation a name"),
    Command(_list, "/list", "the last conversations"),
    Command(_search, "/search WORDS", "find turns of all conversations"),
    Command(_save, "/save FILE", "write this conversation as Markdown, or as JSON into a .json file"),
)
