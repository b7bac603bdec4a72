"""A lock that lets one process at a time index into a knowledge base, so that no work is done twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from localrag.errors import KnowledgeBaseBusyError
from localrag.files import locked
from localrag.kb.sqlite_file import make_folder, unwritable

INDEX_WAIT_S = 30.0
"""Seconds that an indexer waits for another one to finish."""

_FILE = "index.lock"


@contextmanager
def taken(folder: Path, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the turn to write to the knowledge base in `folder`, which is created if it is missing; a killed holder gives it back.

    `on_wait` is called if another process has it. KnowledgeBaseBusyError if it still has it after `wait_s` seconds.
    """
    end = time.monotonic() + wait_s
    with ExitStack() as stack:
        while not _enter(stack, folder, max(0.0, end - time.monotonic()), on_wait):
            stack.close()
        yield


def _enter(stack: ExitStack, folder: Path, wait_s: float, on_wait: Callable[[], None] | None) -> bool:
    """Take the lock; False if it is of a folder that was removed meanwhile."""
    make_folder(folder)
    path = folder / _FILE
    with suppress(FileNotFoundError):
        try:
            descriptor = stack.enter_context(locked(path, wait_s=wait_s, on_wait=on_wait))
            return os.path.samestat(os.fstat(descriptor), path.stat())
        except TimeoutError:
            raise KnowledgeBaseBusyError(
                f"Another localrag is indexing into knowledge base {folder.name!r}.",
                hint="Wait for that one to end, then run the same command again.",
                kb=folder.name,
            ) from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unwritable(f"Cannot write to the folder {folder}", error, path) from error
    return False
