"""How many threads decode: a core each, and none on a core that another process keeps busy.

llama.cpp's threads wait for each other by spinning: beside two busy processes two threads decoded 300 times slower, and one thread
was almost as fast as on an idle machine (notes of August 2026, 2 cores).
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
"""Processor times are counted in ticks of 10 ms, on each processor and for each use: over a shorter time their rounding looks like work."""


def choose(num_cores: int, busy_cores: float) -> int:
    """Threads for so many cores of which others keep `busy_cores` busy: one less for each that is busy half of the time. 1 or more."""
    return max(1, num_cores - int(max(0.0, busy_cores) + 0.5))


def num_cores() -> int:
    """Physical cores that this process may use: its affinity and its container's share of processor time are kept."""
    allowed = len(allowed_cpus())
    return max(1, min(allowed, _physical_cores() or allowed, _quota_cores(Path("/sys/fs/cgroup/cpu.max")) or allowed))


@functools.cache  # milliseconds: the system's description of every processor is read
def _physical_cores() -> int | None:
    return psutil.cpu_count(logical=False)


def allowed_cpus() -> frozenset[int]:
    """The numbers of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _quota_cores(file: Path) -> int | None:
    """Whole cores of a container's processor time (cgroup v2's cpu.max: microseconds of each period); None without a limit."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True, slots=True)
class Reading:
    """Processor seconds up to the instant `at_s`: of all processes on the allowed processors, and of this one with its children."""

    at_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> Reading:
        """Takes well under a millisecond. Time that the host of a virtual machine took away is other processes' time."""
        allowed = allowed_cpus()
        all_s = 0.0
        try:
            for cpu, times in enumerate(psutil.cpu_times(percpu=True)):
                if cpu in allowed:
                    shares = times._asdict()
                    twice = ("idle", "iowait", "guest", "guest_nice")  # idle, and what is counted under user too
                    all_s += sum(seconds for name, seconds in shares.items() if name not in twice)
        except (OSError, RuntimeError, ValueError, psutil.Error):  # a machine that does not tell: nothing is busy
            all_s = 0.0
        own = os.times()
        return cls(time.perf_counter(), all_s, own.user + own.system + own.children_user + own.children_system + _running_children_s())

    def busy_cores_until(self, later: Reading) -> float | None:
        """Cores that other processes kept busy from this reading to a later one; None if that was too short a time to tell."""
        window_s = later.at_s - self.at_s
        if window_s < MIN_WINDOW_S:
            return None
        return max(0.0, (later.all_s - self.all_s) - (later.own_s - self.own_s)) / window_s


def _running_children_s() -> float:
    """Processor seconds of the processes that this one started and that still run: they end soon, or wait (Linux; 0 elsewhere)."""
    total_s = 0.0
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_text(encoding="ascii").split():
                with suppress(psutil.Error, OSError):
                    times = psutil.Process(int(pid)).cpu_times()
                    total_s += times.user + times.system
    return total_s


class ThreadGovernor:
    """`num_threads` follows what other processes do.

    `measure` looks at the time since it was last called, or since this was made, and never waits: make it before a model is loaded
    and measure when its context is made; measure again between answers, and once an answer runs if nothing was asked for long.
    """

    def __init__(self, cores: int | None = None) -> None:
        self.num_cores = num_cores() if cores is None else cores
        self.busy_cores: float = 0.0
        """What was last measured."""
        self._before = Reading.now()

    @property
    def num_threads(self) -> int:
        return choose(self.num_cores, self.busy_cores)

    def measure(self, now: Reading | None = None) -> int:
        """Refresh and return `num_threads`; what is called within a quarter of a second of the last measurement changes nothing."""
        now = Reading.now() if now is None else now
        busy = self._before.busy_cores_until(now)
        if busy is not None:
            self.busy_cores = busy
            self._before = now
        return self.num_threads
