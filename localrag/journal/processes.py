"""Which process is at work on something that the journal keeps, so that what one left unfinished when it was killed is known as such."""

from __future__ import annotations

_SAME_START_S = 10.0
"""The clock by which a process began can be set meanwhile."""


def began(pid: int) -> float:
    """When a process began, in seconds since the epoch; 0 where that is not to be known."""
    import psutil  # noqa: PLC0415  # weight

    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, OSError, ValueError, OverflowError):
        return 0.0


def runs(pid: int, since: float) -> bool:
    """Whether that process still runs, and is not another one that has its number now."""
    return bool(now := began(pid)) and abs(now - since) <= _SAME_START_S
