"""A terminal while a model works: an area that is redrawn, and Ctrl-C, which ends an answer and keeps what was written."""

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
    """Have the terminal no longer show what is typed; what this returns undoes it.

    A terminal writes ^C, and every other key, where its cursor stands. In an area that is drawn anew, that begins a line of which the
    area does not know, and a line of the area stays behind above it.
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
    """Shows what `draw` gives, again and again, from `open` to `close`. It leaves nothing behind."""

    def __init__(self, out: Console, draw: Callable[[], RenderableType]) -> None:
        self._out = out
        self._draw = draw
        self._live: Live | None = None
        self._restore: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Nothing changes where it is open already."""
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
    """Ends what an engine writes. KeyboardInterrupt while it writes nothing, for nothing else would end a search."""
    if engine.is_idle:
        raise KeyboardInterrupt
    engine.cancel_all()


@contextmanager
def first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`, which keeps what was written; the second is a KeyboardInterrupt, wherever the program is.

    Where Ctrl-C is ignored, as in a shell's background jobs, it stays so.
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
