"""The end of a terminal that is drawn anew while models read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

REFRESHES_PER_S = 8


class Area:
    """Shows what `draw` gives, again and again, from `open` to `close`. It leaves nothing behind."""

    def __init__(self, out: Console, draw: Callable[[], RenderableType]) -> None:
        self._out = out
        self._draw = draw
        self._live: Live | None = None

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
            self._live.start()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
