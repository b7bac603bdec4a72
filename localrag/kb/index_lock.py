"""One indexer at a time for each knowledge base, so that none does the work of another again."""

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
"""How long an indexer waits for another one to end."""

_FILE = "index.lock"
_LOOK_AGAIN_S = 0.05


@contextmanager
def taken(folder: Path, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """The turn to write to the knowledge base in `folder`, which is made if need be; a killed holder gives it back.

    `on_wait` is called once if another process has it. KnowledgeBaseBusyError if it still has it after `wait_s` seconds.
    """
    handle = waited(lambda: _try(folder), wait_s=wait_s, on_wait=on_wait)
    if handle is None:
        raise KnowledgeBaseBusyError(
            f"Another localrag is indexing into knowledge base {folder.name!r}.",
            hint="Wait for that one to end, then run the same command again.",
            kb=folder.name,
        )
    try:
        yield
    finally:
        os.close(handle)


def waited(look: Callable[[], T | None], *, wait_s: float, on_wait: Callable[[], None] | None = None) -> T | None:
    """What `look` gives as soon as it gives something; None if it gave nothing for `wait_s` seconds. `on_wait` is called once."""
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
        if try_lock(handle) and os.path.samestat(os.fstat(handle), path.stat()):  # not of a folder that was removed meanwhile
            return handle
    except FileNotFoundError:
        pass
    os.close(handle)
    return None
