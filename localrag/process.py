"""This process: how old it is, and the limits that a child process sets to itself before it touches what is not trusted.

The limits hold even when the parent is gone. On Windows there are none: there the parent's clock is the only limit.
"""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import resource

_STATM, _STAT = Path("/proc/self/statm"), Path("/proc/self/stat")
_STARTED_AT = 19
"""Index of a process's start, in clock ticks since the machine booted, among the fields of its stat file after the name."""


def confine(more_bytes: int) -> None:
    """Lets this process grow by `more_bytes`, write into no file and start no process: for what only computes an answer."""
    limit_memory(more_bytes)
    limit_files(0)
    forbid_processes()


def limit_memory(more_bytes: int) -> None:
    """Lets this process grow by `more_bytes`, where its size is to be had cheaply, and leave no core file."""
    if sys.platform == "win32":
        return
    _set(resource.RLIMIT_CORE, 0)
    if size := size_bytes():
        _set(resource.RLIMIT_AS, size + more_bytes)


def limit_files(most_bytes: int) -> None:
    """Lets this process write files of `most_bytes`. Python ignores the signal of one that is too large: the write fails."""
    if sys.platform != "win32":
        _set(resource.RLIMIT_FSIZE, most_bytes)


def forbid_processes() -> None:
    """Lets this process start no other, and no thread; nobody keeps the superuser from it."""
    if sys.platform != "win32":
        _set(resource.RLIMIT_NPROC, 0)


def limit_computing(more_s: float) -> None:
    """Ends this process by SIGXCPU after `more_s` seconds of computing from now on. It can be set anew, also to more."""
    if sys.platform == "win32":
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    seconds = math.ceil(usage.ru_utime + usage.ru_stime + more_s)
    with suppress(ValueError, OSError):  # the hard limit stays, for it could not be raised for the next
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else min(seconds, hard), hard))


def age_s() -> float:
    """Seconds since this process was started, to one clock tick (10 ms) on Linux.

    psutil alone would not do there: it adds the start to a boot time in whole seconds, and so makes a process up to 1 s older.
    """
    if sys.platform == "linux":
        with suppress(OSError, ValueError, IndexError):
            started_at = int(_STAT.read_bytes().rpartition(b")")[2].split()[_STARTED_AT]) / os.sysconf("SC_CLK_TCK")
            return time.clock_gettime(time.CLOCK_BOOTTIME) - started_at
    import psutil  # noqa: PLC0415  # weight

    return time.time() - float(psutil.Process().create_time())


def size_bytes() -> int:
    """The address space of this process; 0 where that is not to be had cheaply."""
    try:
        return int(_STATM.read_bytes().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _set(name: int, limit: int) -> None:
    with suppress(ValueError, OSError):  # a lower limit is in force already
        resource.setrlimit(name, (limit, limit))
