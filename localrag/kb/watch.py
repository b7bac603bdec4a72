"""Waiting for files to change. The only file that imports watchfiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

QUIET_MS = 600
"""Changes that follow each other within this time are one."""


def changes(paths: Sequence[Path], *, but: Path) -> Iterator[int]:
    """The number of changed files below `paths`, whenever some changed; what lies below `but` does not count. KeyboardInterrupt ends it."""
    from watchfiles import watch  # noqa: PLC0415  # an extension module, wanted only here

    own = but.resolve()
    for found in watch(*paths, watch_filter=lambda _, path: not Path(path).is_relative_to(own), step=QUIET_MS, debounce=10 * QUIET_MS):
        yield len(found)
