"""Where what a person types in a chat is done: a question is asked, what begins with / is a command."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from localrag.cli.chat_room import Room
from localrag.errors import UsageError

Ask = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """`run(desk, rest)` does it; `rest` is what stands behind its name."""

    run: Callable[[Desk, str], None]
    usage: str
    help: str

    @property
    def name(self) -> str:
        return self.usage[1:].partition(" ")[0]


class Desk:
    """Does what lines of a chat say. `ask` asks a question; `commands` are known by name; `prefilled` is what the next line begins as."""

    def __init__(self, room: Room, ask: Ask, commands: Mapping[str, Command]) -> None:
        self.room = room
        self.ask = ask
        self.commands = commands
        self.prefilled = ""
        self.is_open = True

    def handle(self, text: str) -> bool:
        """Do a line; False if the chat is to end. A line that begins with // is a question that begins with /."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            self._command(name.strip()).run(self, rest.strip())
        else:
            self.ask(text[1:] if text.startswith("//") else text)
        return self.is_open

    def _command(self, name: str) -> Command:
        command = self.commands.get(name)
        if command is None:
            near = difflib.get_close_matches(name, self.commands, n=2)
            hint = f"Did you mean {' or '.join('/' + each for each in near)}?" if near else "See /help; // begins a question with a slash."
            raise UsageError(f"There is no command /{name[:40]}.", hint=hint)
        return command


def number(text: str, name: str, least: float, most: float) -> float:
    """What is given to the command `name`; UsageError if it is no number from `least` to `most`."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UsageError(f"{name} takes a number from {least:g} to {most:g}, not {text[:40]!r}.")
    return value


def whole(text: str, name: str, *, least: int = 0, most: int = 10**9) -> int:
    """The same for a whole number."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise UsageError(f"{name} takes a whole number from {least} to {most}, not {text[:40]!r}.")
    return int(text)
