"""A council as it sits: who reads and writes just now, on a terminal side by side, and what each came to."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import click

from localrag.cli import council_text
from localrag.cli.live import Area
from localrag.cli.text import console, note, one_line
from localrag.council.roles import RESERVED_ROLES

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

Event = Mapping[str, Any]

_MIN_COLUMN_CELLS = 28
_MAX_LINES = 8
_BLOCK_CHARS = 1024
"""What is shown of a text begins at a multiple of this, so that its lines break where they did before."""
_BY_ALL = ("proposal", "review")
"""What every member is asked for; all else is asked of one role."""
_TEXT_IN_JSON = re.compile(r'"\w+"\s*:\s*"((?:[^"\\]|\\.)*)')


@dataclass(slots=True)
class _Column:
    """One role at work. `num_pieces` are those of its text so far: a token each, but where it takes several to make a character."""

    role: str
    state: str = "waiting"
    since: float = field(default_factory=time.monotonic)
    text: str = ""
    num_pieces: int = 0

    def read(self) -> None:
        """A prompt is given to it, perhaps not the first one."""
        self.state, self.since, self.text, self.num_pieces = "reading", time.monotonic(), "", 0

    def write(self, text: str) -> None:
        self.state = "writing"
        self.text += text
        self.num_pieces += 1

    @property
    def heading(self) -> str:
        known = {"reading": f"reading, {time.monotonic() - self.since:.0f} s", "writing": f"writing, {self.num_pieces} tokens"}
        return one_line(f"{self.role}: {known.get(self.state, self.state)}")

    @property
    def tail(self) -> str:
        """The end of the text, fit for a terminal; of a form in JSON, the end of the texts in it."""
        text = self.text
        if text.lstrip().startswith("{"):
            found = _TEXT_IN_JSON.findall(text)
            text = "\n".join(each.replace("\\n", "\n").replace('\\"', '"') for each in found)
        shown = text[max(0, len(text) // _BLOCK_CHARS - 1) * _BLOCK_CHARS :]
        return "\n".join(council_text.paragraphs(shown))


class _Board:
    """Who reads and writes just now, each with the end of its text."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._area = Area(out, self._draw)
        self._columns: dict[str, _Column] = {}

    def open(self, roles: Sequence[str]) -> None:
        """Draw these roles, all of them waiting."""
        self.close()
        self._columns = {role: _Column(role) for role in roles}
        self._area.open()

    def column(self, role: str) -> _Column:
        """That of a role; one that is not drawn is drawn nowhere."""
        return self._columns.get(role) or _Column(role)

    def close(self) -> None:
        self._area.close()

    def _draw(self) -> RenderableType:
        """Side by side where the terminal is wide enough for all, else one below the other."""
        from rich.table import Table  # noqa: PLC0415  # weight

        columns = list(self._columns.values())
        width, height = self._out.width, self._out.height - 2
        is_wide = len(columns) * _MIN_COLUMN_CELLS <= width
        grid = Table.grid(padding=(0, 2, 0, 0) if is_wide else 0)
        if is_wide:
            each = max(1, width // max(1, len(columns)) - 2)
            for _ in columns:
                grid.add_column(width=each)
            grid.add_row(*(self._cell(column, each, min(_MAX_LINES, height - 1)) for column in columns))
        else:
            for column in columns:
                grid.add_row(self._cell(column, width, min(2, height // len(columns) - 1)))
        return grid

    def _cell(self, column: _Column, width: int, num_lines: int) -> Text:
        """A role's heading, and the last lines of its text."""
        from rich.text import Text  # noqa: PLC0415  # weight

        cell = Text(column.heading, style="bold", no_wrap=True)
        cell.truncate(width, overflow="ellipsis")
        drawn = Text().append_text(cell)
        if num_lines > 0:
            for line in list(Text(column.tail).wrap(self._out, width))[-num_lines:]:
                line.rstrip()
                drawn.append("\n").append_text(line)
        return drawn


class CouncilView:
    """Shows what happens as it does: talk on stderr, the verdict on stdout. On a terminal whoever is at work is shown at work."""

    def __init__(self, council: str) -> None:
        out = console(err=True)
        self._board = _Board(out) if sys.stderr.isatty() and not out.is_dumb_terminal else None
        self._council = council
        self._members: list[str] = []
        self._kind = ""
        self._budgets: dict[str, Event] = {}
        """Those that are still to be shown, by role: a board that is drawn has no place for them."""
        self._said: dict[str, Event] = {}
        """What was said and not made anything of yet, by role."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()

    def on_text(self, role: str, text: str) -> None:
        if self._board is not None:
            self._board.column(role).write(text)

    def on_event(self, event: Event) -> None:
        name = event["event"]
        if name == "budget":
            self._begin(event)
        elif name == "said":
            self._end_writing(event)
        else:
            if self._board is not None:
                self._board.close()
            self._kind = ""
            self._show(name, event)

    def _begin(self, event: Event) -> None:
        role, kind = event["role"], event["kind"]
        if self._kind != kind:
            self._kind = kind
            self._said.clear()
            if self._board is not None:
                self._board.open(self._members if kind in _BY_ALL else [role])
        if self._board is None:
            _note(council_text.budget_lines(event))
        else:
            self._budgets[role] = event
            self._board.column(role).read()

    def _end_writing(self, event: Event) -> None:
        role = event["role"]
        self._said[role] = event
        if self._board is not None:
            written = event.get("usage", {}).get("completion_tokens", 0)
            self._board.column(role).state = "failed" if "error" in event else f"done, {written} tokens"

    def _show(self, name: str, event: Event) -> None:
        """What is not drawn but stays."""
        if name == "checked":
            self._show_budgets(event["member"])
            _note(council_text.proposal_lines(event, self._said.pop(event["member"], None)))
            return
        self._show_budgets()
        match name:
            case "start":
                self._members = [each["role"] for each in event["roles"] if each["role"] not in RESERVED_ROLES]
                note(f"Council {one_line(self._council)}")
                _note(council_text.start_lines(event))
            case "planned":
                _note(council_text.planned_lines(event))
            case "search":
                _note(council_text.search_lines(event))
            case "ranking":
                _note(council_text.ranking_lines(event))
            case "tool":
                _note(council_text.tool_lines(event))
            case "verdict":
                _verdict(event)
            case "end":
                for each in self._said.values():
                    _note(council_text.said_lines(each))
                _note(council_text.end_lines(event))
        self._said.clear()

    def _show_budgets(self, *roles: str) -> None:
        """Of these roles, or of all."""
        for role in roles or tuple(self._budgets):
            if role in self._budgets:
                _note(council_text.budget_lines(self._budgets.pop(role), console(err=True).width))


def _note(lines: Sequence[str]) -> None:
    for line in lines:
        note(line)


def _verdict(event: Event) -> None:
    """On stdout: drawn on a terminal, as Markdown elsewhere."""
    text = council_text.verdict_markdown(event)
    out = console()
    if not sys.stdout.isatty() or out.is_dumb_terminal:
        click.echo(text, nl=False)
        return
    from rich.markdown import Markdown  # noqa: PLC0415  # weight

    out.print(Markdown(text, hyperlinks=False))
