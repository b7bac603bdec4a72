"""How the work of a function grows with its input. It is counted in processor time, so that what else the machine does hardly matters."""

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
    large = min(cpu_s(lambda: work(size)) for _ in range(3))
    assert large < 40 * small + 0.1, f"{small:.4f} s for {size // 10}, {large:.4f} s for {size}"
