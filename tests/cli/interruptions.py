"""Runs that write their results to OUT, a line each, and are stopped while they do."""

import random
import signal
import subprocess
import time


def kill_again_and_again(command, out, *, num_kills, done_with, num_tries):
    """Runs `command` until it ends with exit code `done_with`, `num_tries` times at most; kills it at random moments, so many times.

    Returns how many runs died of it, and what the last one wrote to stdout.
    """
    rng, num_killed, said = random.Random(11), 0, b""
    for _ in range(num_tries):
        size = out.stat().st_size if out.exists() else 0
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            if num_killed < num_kills:
                until = time.monotonic() + 120
                while process.poll() is None and time.monotonic() < until and (not out.exists() or out.stat().st_size in {0, size}):
                    time.sleep(0.001)  # until it has written something
                time.sleep(rng.random() * 0.05)
                process.kill()
                num_killed += process.wait() == -signal.SIGKILL
            said, _ = process.communicate(timeout=100)
        if process.returncode == done_with:
            break
    return num_killed, said


def press_ctrl_c(command, out):
    """Runs `command` and interrupts it once a line is in OUT; returns (exit code, stdout, stderr)."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until and not (out.exists() and b"\n" in out.read_bytes()):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, err = process.communicate(timeout=120)
    return process.returncode, stdout, err
