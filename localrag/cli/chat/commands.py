"""The table of chat commands, and the commands about turns and conversations."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from localrag.cli.chat import settings
from localrag.cli.chat.render import save, short, state_of, transcript
from localrag.cli.chat.state import Command, Desk, Room, whole
from localrag.cli.terminal import copy_text, note
from localrag.errors import UsageError, counted
from localrag.settings import expanded
from localrag.text.sanitize import safe

_MAX_FOUND = 20


def _retry(desk: Desk, rest: str) -> None:
    """`/retry [MODEL]`: answer the last question again, with another seed or with another model, which then stays."""
    room = desk.room
    if rest:
        room.chat.turn(-1)  # UsageError without a turn, before a model is loaded
        settings.switch_model(room, rest)
        turn = room.chat.undo()[0]
    else:
        turn = room.retried()
        note(f"Seed {room.sampling.seed}, temperature {room.sampling.temperature:g}.")
    desk.ask(turn.question)


def _copy(desk: Desk, rest: str) -> None:
    """`/copy [N]`: put the answer of turn N, or the last one, on the clipboard."""
    answer = desk.room.chat.turn(whole(rest, "/copy", least=1) if rest else -1).answer.strip()
    if not answer:
        raise UsageError("This turn has no answer to copy.", hint="/history lists the turns; /copy N copies the answer of turn N.")
    way = copy_text(answer)
    if way == "OSC 52":
        note("Asked the terminal to copy the answer (OSC 52). Not every terminal does: if pasting shows another text, use /save FILE.")
    else:
        note(f"Copied the answer with {way}.")


def _undo(desk: Desk, rest: str) -> None:
    turns = desk.room.chat.undo(whole(rest, "/undo", least=1) if rest else 1)
    note(f"Removed: {', '.join(short(turn.question) for turn in turns)}")


def _edit(desk: Desk, rest: str) -> None:
    """`/edit [N] [TEXT]`: remove turn N and all later turns, then ask TEXT, or edit the old question."""
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
    note(f"{'Pinned' if is_pinned else 'Unpinned'}: {short(turn.question)}")


def _history(desk: Desk, _rest: str) -> None:
    for number, turn in enumerate(desk.room.chat.turns, 1):
        note(f"  {number}{' pinned' if turn.is_pinned else ''}  {short(turn.question)}{state_of(turn)}")


# --- conversations ---


def _fork(desk: Desk, rest: str) -> None:
    first, _, name = rest.partition(" ")
    room = desk.room
    number = whole(first, "/fork", least=1) if first.isdecimal() else len(room.chat.turns)
    name = (name if first.isdecimal() else rest).strip() or f"{room.status.name} from {number}"
    chat_id = room.chat.fork(number, name)
    room.enter(name, chat_id)
    note(f"Switched to {name!r}, a copy up to turn {number}.")


def _new(desk: Desk, rest: str) -> None:
    desk.room.begin(rest or None)
    note(f"Started a new conversation: {desk.room.status.name!r}.")


def _resume(desk: Desk, rest: str) -> None:
    if not rest:
        raise UsageError("/resume needs the NAME of a conversation.", hint="To list conversations: /list")
    desk.room.resume(rest)
    transcript(desk.room.chat.turns, last=3)


def _rename(desk: Desk, rest: str) -> None:
    room = desk.room
    room.journal.conversations.rename(room.chat.id, rest)
    room.status.name = room.session.name = rest.strip()
    note(f"Renamed to {room.status.name!r}.")


def _list(desk: Desk, _rest: str) -> None:
    for row in desk.room.journal.conversations.all()[-_MAX_FOUND:]:
        note(f"  {row.name}  {counted(row.num_turns, 'turn')}  {short(row.first_question)}")


def _search(desk: Desk, rest: str) -> None:
    matches = desk.room.journal.conversations.search(rest, _MAX_FOUND)
    for each in matches:
        note(f"  {each.conversation}, turn {each.number}: {short(each.snippet)}")
    if not matches:
        note("No matches.")


def _save(desk: Desk, rest: str) -> None:
    if not rest:
        raise UsageError("/save needs a FILE.", hint="/save FILE writes Markdown, or JSON if FILE ends in .json.")
    path = expanded(Path(rest))
    save(path, desk.room.status.name, desk.room.chat.turns)
    note(f"Wrote {safe(str(path))}.")


TURN_COMMANDS = (
    Command(_retry, "/retry [MODEL]", "ask the last question again, for another answer or of another model"),
    Command(_copy, "/copy [N]", "copy the last answer, or that of turn N, to the clipboard"),
    Command(_history, "/history", "list the turns (questions with their answers) by number"),
    Command(_pin, "/pin [N]", "keep this turn in full, however long the conversation gets"),
    Command(_unpin, "/unpin [N]", "undo /pin"),
    Command(_edit, "/edit [N] [TEXT]", "ask turn N differently; it and all later turns are removed"),
    Command(_undo, "/undo [N]", "remove the last turn, or the last N"),
    Command(_fork, "/fork [N] [NAME]", "go on from turn N in a new conversation; this one stays as it is"),
    Command(_new, "/new [NAME]", "start a new conversation"),
    Command(_resume, "/resume NAME", "continue another conversation"),
    Command(_rename, "/rename NAME", "rename this conversation"),
    Command(_list, "/list", "list the latest conversations"),
    Command(_search, "/search WORDS", "search all conversations"),
    Command(_save, "/save FILE", "write this conversation as Markdown, or as JSON if FILE ends in .json"),
)


def words(room: Room, line: str) -> Iterable[tuple[str, str]]:
    """Yield completions of a command line, each with a description."""
    name, separator, rest = line.partition(" ")
    if not separator:
        yield from (("/" + each, command.help) for each, command in COMMANDS.items())
        return
    if name == "/kb":
        from localrag.kb import list_kbs  # noqa: PLC0415  # weight

        if " " not in rest:
            yield from (("add", "start using a knowledge base"), ("drop", "stop using a knowledge base"))
        yield from ((each, "knowledge base") for each in list_kbs(room.settings.kb_dir))
    elif name in ("/model", "/retry"):
        from localrag.catalog import Catalog  # noqa: PLC0415  # weight

        yield from ((each, "model") for each in (*Catalog.load(room.settings).models, "echo"))


def _help(desk: Desk, _rest: str) -> None:
    width = max(len(command.usage) for command in desk.commands.values())
    is_wide = shutil.get_terminal_size().columns >= 2 * width
    for command in desk.commands.values():
        if is_wide:
            note(f"  {command.usage:{width}}  {command.help}", hang=width + 2)
        else:
            note(f"  {command.usage}", hang=4)
            note(f"      {command.help}")
    note("Enter sends. Alt-Enter starts a new line. ``` starts a block of lines. Ctrl-C stops an answer and keeps its text. Ctrl-D leaves.")


def _exit(desk: Desk, _rest: str) -> None:
    desk.is_open = False


_ALL = (
    Command(_help, "/help", "list the commands"),
    *settings.COMMANDS,
    *TURN_COMMANDS,
    Command(_exit, "/exit", "leave the chat, as do exit, quit and Ctrl-D"),
)
COMMANDS = {command.name: command for command in _ALL}
