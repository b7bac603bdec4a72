"""How the work of a function grows with its input. It is counted in processor time, so that what else the machine does hardly matters."""

import math
import time
from collections.abc import Callable


def cpu_s(work: Callable[[], object]) -> float:
    """Seconds of processor time that this thread spends in it."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def check_linear(work: Callable[[int], object], size: int) -> None:
    """Fails if `work` takes far more than ten times as long for `size` as for a tenth of it; with the square it would take 100 times."""
    small = min(cpu_s(lambda: work(size // 10)) for _ in range(3))
    large = math.inf
    for _ in range(3):  # once is enough if nothing disturbs it
        large = min(large, cpu_s(lambda: work(size)))
        if large < 40 * small + 0.1:
            return
    raise AssertionError(f"{small:.4f} s for {size // 10}, {large:.4f} s for {size}")
