"""A process from its start to its end: when its first byte came, what it wrote, and the most memory that it and its children held."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_SAMPLE_S = 0.1
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """`first_s` and `total_s` count from the start of the process; `first_s` is 0 where nothing was written to standard output.

    `peak_mib` is the highest sum of resident memory of the process and its children, looked at ten times a second. A file that two of them
    map counts twice.
    """

    returncode: int
    first_s: float
    total_s: float
    out: str
    err: str
    peak_mib: float

    @property
    def complaint(self) -> str:
        """The last line of what it said, for a table."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        return (lines or [f"it ended with exit code {self.returncode} and said nothing"])[-1][:300]


def run(command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None, limit_s: float = 900.0) -> Ran:
    """Runs a command to its end; after `limit_s` it and its children are killed, and its exit code is that of SIGKILL."""
    with tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        child = subprocess.Popen(
            command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, start_new_session=True
        )
        memory = _Memory(child.pid)
        late = threading.Timer(limit_s, _kill, (child.pid,))
        late.start()
        assert child.stdout is not None
        try:
            first = os.read(child.stdout.fileno(), 1 << 16)
            first_s = time.perf_counter() - started if first else 0.0
            out = first + child.stdout.read()
            returncode = child.wait()
            total_s = time.perf_counter() - started
        finally:
            late.cancel()
            peak_mib = memory.stop()
            _kill(child.pid)  # what it left behind
            child.wait()
            child.stdout.close()
        err.seek(0)
        said = err.read()
    return Ran(returncode, first_s, total_s, out.decode(errors="replace"), said.decode(errors="replace"), peak_mib)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class _Memory(threading.Thread):
    """Looks at the resident memory of a process and its children until it is stopped."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._peak, self._ended = pid, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            with suppress(psutil.Error):
                process = psutil.Process(self._pid)
                self._peak = max(self._peak, sum(map(_resident, [process, *process.children(recursive=True)])))

    def stop(self) -> float:
        self._ended.set()
        self.join()
        return self._peak / _MIB


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0
