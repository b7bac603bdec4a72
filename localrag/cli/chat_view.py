"""An answer as it comes: as Markdown on a terminal, where what is complete is drawn once and only its end anew; elsewhere as it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from localrag.cli import display
from localrag.cli.text import console, safe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

REFRESHES_PER_S = 8
_MARGIN_LINES = 2


class View(Protocol):
    """Is told what is waited for, called with each piece of an answer, and closed in the end."""

    def wait(self, text: str, /) -> None: ...
    def __call__(self, piece: str, /) -> None: ...
    def close(self) -> None: ...


def make_view(*, draws: bool) -> View:
    """For a terminal that can move its cursor (`draws`), or for any other output."""
    return MarkdownView(console()) if draws else _PlainView()


class _PlainView(display.AnswerStream):
    """Text as it comes, and nothing before it."""

    def wait(self, text: str) -> None:
        """A pipe is not told what is waited for."""


class MarkdownView:
    """Blocks of Markdown (paragraphs, lists, code) are printed for good once the next one has begun; the last is drawn anew until then."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._text = ""
        self._waiting = ""
        self._live: Live | None = None

    def wait(self, text: str) -> None:
        """Say what is being done until the first piece comes."""
        self._waiting = text
        self._draw()

    def __call__(self, piece: str) -> None:
        self._text = (self._text + safe(piece)).lstrip("\n") if not self._text else self._text + safe(piece)
        done = _complete(self._text)
        if done:
            finished, self._text = self._text[:done], self._text[done:].lstrip("\n")
            self._stop()
            self._print(finished)
        if self._text.strip():
            self._draw()

    def close(self) -> None:
        self._stop()
        if self._text.strip():
            self._print(self._text)
        self._text = ""

    def _draw(self) -> None:
        from rich.live import Live  # noqa: PLC0415  # weight

        if self._live is None:
            self._live = Live(
                console=self._out,
                get_renderable=self._tail,
                refresh_per_second=REFRESHES_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def _tail(self) -> Any:  # noqa: ANN401  # rich's
        """The last block, or as many of its last lines as the terminal shows: what scrolled away cannot be drawn anew."""
        if not self._text.strip():
            return f"{self._waiting} …" if self._waiting else ""
        lines = self._text.split("\n")
        room = max(1, self._out.height - _MARGIN_LINES)
        fits: list[str] = []
        for line in reversed(lines):
            room -= 1 + len(line) // max(1, self._out.width)
            if room < 0:
                break
            fits.insert(0, line)
        return _markdown(self._text) if len(fits) == len(lines) else "\n".join(fits)

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _print(self, text: str) -> None:
        self._out.print(_markdown(text.strip("\n")))
        self._out.print()


def _markdown(text: str) -> Any:  # noqa: ANN401  # rich's Markdown, imported late
    from rich.markdown import Markdown  # noqa: PLC0415  # weight

    return Markdown(text, hyperlinks=False)


def _complete(text: str) -> int:
    """How many characters of a Markdown text stand in blocks behind which another one has begun."""
    if "\n" not in text:
        return 0
    from markdown_it import MarkdownIt  # noqa: PLC0415  # weight

    starts = [token.map[0] for token in MarkdownIt().parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    if len(starts) < 2:
        return 0
    return sum(len(line) + 1 for line in text.split("\n")[: starts[-1]])


def draws() -> bool:
    """Whether stdout is a terminal that can move its cursor."""
    import os  # noqa: PLC0415

    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
