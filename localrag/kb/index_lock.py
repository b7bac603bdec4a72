"""A lock that lets one process at a time index into a knowledge base, so that no work is done twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from localrag.errors import KnowledgeBaseBusyError
from localrag.files import try_lock
from localrag.kb.sqlite_file import make_folder, unwritable

T = TypeVar("T")

INDEX_WAIT_S = 30.0
"""Seconds that an indexer waits for another one to finish."""

_FILE = "index.lock"
_LOOK_AGAIN_S = 0.05


@contextmanager
def taken(folder: Path, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the index lock of the knowledge base in `folder`, which is created if necessary. The lock is released if the process dies.

    `on_wait` is called once if another process holds the lock. Raises KnowledgeBaseBusyError if that process still holds it after
    `wait_s` seconds.
    """
    handle = waited(lambda: _try(folder), wait_s=wait_s, on_wait=on_wait)
    if handle is None:
        raise KnowledgeBaseBusyError(
            f"Another localrag is indexing into knowledge base {folder.name!r}.",
            hint="Wait until it has finished, then run the same command again.",
            kb=folder.name,
        )
    try:
        yield
    finally:
        os.close(handle)


def waited(look: Callable[[], T | None], *, wait_s: float, on_wait: Callable[[], None] | None = None) -> T | None:
    """Poll `look` until it returns something other than None, and return that; None after `wait_s` seconds.

    `on_wait` is called once, before the first pause.
    """
    end = time.monotonic() + wait_s
    while (found := look()) is None and time.monotonic() < end:
        if on_wait is not None:
            on_wait()
            on_wait = None
        time.sleep(_LOOK_AGAIN_S)
    return found


def _try(folder: Path) -> int | None:
    make_folder(folder)
    path = folder / _FILE
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    except FileNotFoundError:  # the folder was removed just now
        return None
    except OSError as error:
        raise unwritable(f"Cannot write to the folder {folder}", error, path) from error
    try:
        if try_lock(handle) and os.path.samestat(os.fstat(handle), path.stat()):  # the folder may have been removed meanwhile
            return handle
    except FileNotFoundError:
        pass
    os.close(handle)
    return None
