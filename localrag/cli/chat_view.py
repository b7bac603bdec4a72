"""An answer as it comes: as Markdown on a terminal, where what is complete is drawn once and only its end anew; elsewhere as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from localrag.cli import display
from localrag.cli.live import Area
from localrag.cli.text import console, dim, safe

if TYPE_CHECKING:
    from rich.console import Console

_MARGIN_LINES = 2


class View(Protocol):
    """Is told what is waited for, remarked and thought, called with each piece of an answer, and closed in the end."""

    def wait(self, text: str, /) -> None: ...
    def remark(self, text: str, /) -> None: ...
    def think(self, piece: str, /) -> None: ...
    def __call__(self, piece: str, /) -> None: ...
    def close(self) -> None: ...


def make_view(*, draws: bool) -> View:
    """For a terminal that can move its cursor (`draws`), or for any other output."""
    return MarkdownView(console()) if draws else _PlainView()


class _PlainView(display.AnswerStream):
    """Text as it comes, and nothing before it."""

    def wait(self, text: str) -> None:
        """A pipe is not told what is waited for."""

    def remark(self, text: str) -> None:
        """It goes where talk goes."""
        dim(text)

    def think(self, piece: str) -> None:
        """Nor what is thought."""


class MarkdownView:
    """Blocks of Markdown (paragraphs, lists, code) are printed for good once the next one has begun; the last is drawn anew until then."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._text = ""
        self._waiting = ""
        self._has_thought = False
        self._area = Area(out, self._tail)

    def wait(self, text: str) -> None:
        """Say what is being done until the first piece comes."""
        self._waiting = text
        self._area.open()

    def remark(self, text: str) -> None:
        """A line that stays, above the answer."""
        self._area.close()
        dim(text)

    def think(self, piece: str) -> None:
        """Thoughts are printed as they come, dimmed, above the answer."""
        self._area.close()
        self._has_thought = True
        self._out.print(safe(piece), style="dim", end="", markup=False, highlight=False, soft_wrap=True)

    def _begin(self) -> None:
        """The answer stands apart from the thoughts."""
        if self._has_thought:
            self._has_thought = False
            self._out.print("\n")

    def __call__(self, piece: str) -> None:
        self._begin()
        self._text = (self._text + safe(piece)).lstrip("\n") if not self._text else self._text + safe(piece)
        done = _complete(self._text)
        if done:
            finished, self._text = self._text[:done], self._text[done:].lstrip("\n")
            self._area.close()
            self._print(finished)
        if self._text.strip():
            self._area.open()

    def close(self) -> None:
        self._area.close()
        self._begin()
        if self._text.strip():
            self._print(self._text)
        self._text = ""

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
