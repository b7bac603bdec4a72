"""What begins with / in a chat."""

from __future__ import annotations

from collections.abc import Iterable

from localrag.cli import chat_means, chat_turns
from localrag.cli.chat_desk import Command, Desk
from localrag.cli.chat_room import Room
from localrag.cli.text import note


def words(room: Room, line: str) -> Iterable[tuple[str, str]]:
    """Completions of a line that begins with a command, each with what it is."""
    name, found, rest = line.partition(" ")
    if not found:
        yield from (("/" + each, command.help) for each, command in COMMANDS.items())
        return
    if name == "/kb":
        yield from (("add", "use one more"), ("drop", "use one less"))
        if rest:
            from localrag.kb import list_kbs  # noqa: PLC0415  # weight

            yield from ((each, "knowledge base") for each in list_kbs(room.settings.kb_dir))
    elif name == "/model":
        from localrag.catalog import Catalog  # noqa: PLC0415  # weight

        yield from ((each, "model") for each in (*Catalog.load(room.settings).models, "echo"))


def _help(desk: Desk, _rest: str) -> None:
    width = max(len(command.usage) for command in desk.commands.values())
    for command in desk.commands.values():
        note(f"  {command.usage:{width}}  {command.help}")
    note("Enter sends, Alt-Enter begins a new line, ``` opens a block of lines. Ctrl-C ends an answer and keeps it, Ctrl-D leaves.")


def _exit(desk: Desk, _rest: str) -> None:
    desk.is_open = False


_ALL = (
    Command(_help, "/help", "what there is"),
    *chat_means.COMMANDS,
    *chat_turns.COMMANDS,
    Command(_exit, "/exit", "leave; so does Ctrl-D"),
)
COMMANDS = {command.name: command for command in _ALL}
