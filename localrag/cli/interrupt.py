"""Ctrl-C that ends an answer and keeps what was written."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localrag.engine.engine import Engine


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
