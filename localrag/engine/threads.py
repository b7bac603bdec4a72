"""Choose the number of decoding threads: one per core, except cores that other processes keep busy.

llama.cpp's threads spin while they wait for each other. On 2 cores with two other busy processes, two threads decoded 300 times slower than
on an idle machine, while one thread was almost as fast (August 2026).
"""

from __future__ import annotations

import functools
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

MIN_WINDOW_S = 0.25
"""Shortest measurement. CPU times are counted in 10 ms ticks per processor and use; over a shorter time, rounding looks like load."""


def choose(num_cores: int, busy_cores: float) -> int:
    """Return the number of threads, at least 1: `num_cores` minus `busy_cores`, the load of other processes, rounded to a whole core."""
    return max(1, num_cores - int(max(0.0, busy_cores) + 0.5))


def num_cores() -> int:
    """Return the number of physical cores that this process may use, within its CPU affinity and its container's CPU quota."""
    allowed = len(allowed_cpus())
    return max(1, min(allowed, _physical_cores() or allowed, _quota_cores(Path("/sys/fs/cgroup/cpu.max")) or allowed))


@functools.cache  # takes milliseconds: reads the system's description of every processor
def _physical_cores() -> int | None:
    return psutil.cpu_count(logical=False)


def allowed_cpus() -> frozenset[int]:
    """Return the numbers of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _quota_cores(file: Path) -> int | None:
    """Return the whole cores of a container's CPU quota (cgroup v2's cpu.max, in microseconds per period); None for no limit."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds up to the time `at_s`: of all processes on the allowed processors, and of this process with its children."""

    at_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> Reading:
        """Read the CPU times, in well under a millisecond. Time stolen by a virtual machine's host counts as other processes' time."""
        allowed = allowed_cpus()
        all_s = 0.0
        try:
            for cpu, times in enumerate(psutil.cpu_times(percpu=True)):
                if cpu in allowed:
                    shares = times._asdict()
                    excluded = ("idle", "iowait", "guest", "guest_nice")  # idle time, and guest time, which is part of user time
                    all_s += sum(seconds for name, seconds in shares.items() if name not in excluded)
        except (OSError, RuntimeError, ValueError, psutil.Error):  # unavailable: assume that nothing is busy
            all_s = 0.0
        own = os.times()
        return cls(time.perf_counter(), all_s, own.user + own.system + own.children_user + own.children_system + _running_children_s())

    def busy_cores_until(self, later: Reading) -> float | None:
        """Return the cores that other processes kept busy until a later reading; None if less than MIN_WINDOW_S passed."""
        window_s = later.at_s - self.at_s
        if window_s < MIN_WINDOW_S:
            return None
        return max(0.0, (later.all_s - self.all_s) - (later.own_s - self.own_s)) / window_s


def _running_children_s() -> float:
    """Return the CPU seconds of this process's running children (Linux; 0 elsewhere)."""
    total_s = 0.0
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_text(encoding="ascii").split():
                with suppress(psutil.Error, OSError):
                    times = psutil.Process(int(pid)).cpu_times()
                    total_s += times.user + times.system
    return total_s


class ThreadGovernor:
    """Adapts `num_threads` to the load of other processes.

    `measure` covers the time since the last call or the creation of the object, and never waits. Create the object before loading a model,
    and call `measure` when its context is created and between answers. After a long pause, call it again during the answer.
    """

    def __init__(self, cores: int | None = None) -> None:
        self.num_cores = num_cores() if cores is None else cores
        self.busy_cores: float = 0.0
        """Cores that other processes kept busy in the last measurement."""
        self._before = Reading.now()

    @property
    def num_threads(self) -> int:
        return choose(self.num_cores, self.busy_cores)

    def measure(self, now: Reading | None = None) -> int:
        """Update and return `num_threads`. A call within MIN_WINDOW_S of the last measurement changes nothing."""
        now = Reading.now() if now is None else now
        busy = self._before.busy_cores_until(now)
        if busy is not None:
            self.busy_cores = busy
            self._before = now
        return self.num_threads
