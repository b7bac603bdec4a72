"""A lock on an open file that ends with its holder."""

from __future__ import annotations

import sys


def try_lock(handle: int) -> bool:
    """Take the lock of an open file if it is free. The system gives it back when the file is closed or the process dies."""
    try:
        if sys.platform == "win32":
            import msvcrt  # noqa: PLC0415  # only there

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl  # noqa: PLC0415  # not there

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
