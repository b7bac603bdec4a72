"""The terminal during generation: an area that is redrawn, and Ctrl-C, which stops an answer and keeps its text."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from localrag.engine.engine import Engine


REFRESHES_PER_S = 8


def silence_keys() -> Callable[[], None]:
    """Turn off the terminal's echo and return a function that restores it.

    A terminal echoes keys, and ^C, at the cursor. In a live area that would start a line which the area does not know about, so a stale
    line would remain above it.
    """
    try:
        import termios  # noqa: PLC0415
    except ImportError:  # on Windows
        return lambda: None
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, AttributeError, termios.error):  # no terminal
        return lambda: None
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(number, termios.TCSANOW, silent)

    def restore() -> None:
        with suppress(termios.error, OSError):
            termios.tcsetattr(number, termios.TCSANOW, before)

    return restore


class Area:
    """A live area that redraws the result of `draw` from `open` until `close`, which erases it."""

    def __init__(self, out: Console, draw: Callable[[], RenderableType]) -> None:
        self._out = out
        self._draw = draw
        self._live: Live | None = None
        self._restore: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Start drawing. Does nothing if the area is already open."""
        from rich.live import Live  # noqa: PLC0415  # weight

        if self._live is None:
            self._live = Live(
                console=self._out,
                get_renderable=self._draw,
                refresh_per_second=REFRESHES_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._restore = silence_keys()
            self._live.start()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            self._restore()


def end_answer(engine: Engine) -> None:
    """Cancel an engine's generation. KeyboardInterrupt if the engine is idle, to end a search, for example."""
    if engine.is_idle:
        raise KeyboardInterrupt
    engine.cancel_all()


@contextmanager
def first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C, to keep the text so far. The second Ctrl-C raises KeyboardInterrupt.

    If Ctrl-C is ignored, as in a shell's background jobs, it remains ignored.
    """

    def handle(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
