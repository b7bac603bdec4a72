"""The child process of child.py: llama.cpp is loaded, the job is done by a module's `work`, and what came of it is replied."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from localrag.engine.library import begin_log, first_error, library
from localrag.errors import LocalragError

_PREFIX = re.compile(r"llama_model_(load: error loading model|quantize: failed to quantize): ")


def main() -> None:
    """Do the job of the command line. `work` raises a LocalragError for what llama.cpp refuses; what it logged says why."""
    work = importlib.import_module(f"localrag.engine.{sys.argv[1]}").work
    library()
    begin_log()
    send({"ready": True})
    problem = None
    try:
        work(json.loads(sys.argv[2]))
    except LocalragError as error:
        problem = _PREFIX.sub("", first_error(), count=1) or error.message
    except Exception as error:  # noqa: BLE001  # whatever a file leads to is an answer, not an end
        problem = f"{type(error).__name__}: {error}"
    send({"error": problem})


def send(reply: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def limit_self(*, spare_bytes: int, cpu_s: float, max_file_bytes: int = 0) -> None:
    """Lets this process grow by `spare_bytes`, compute for `cpu_s` seconds since it began, and write files of `max_file_bytes`."""
    if sys.platform == "win32":  # there the parent's clock is the only limit
        return
    import resource  # noqa: PLC0415  # not on Windows

    # The first limit of computing sends SIGXCPU, which says what happened. Python ignores the signal of a file that is too large: the
    # write fails, which llama.cpp reports.
    seconds = math.ceil(cpu_s)
    limits = [
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_FSIZE, max_file_bytes, max_file_bytes),
        (resource.RLIMIT_CPU, seconds, seconds + 1),
    ]
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere the size of a process is not to be had cheaply
        most = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + spare_bytes
        limits.append((resource.RLIMIT_AS, most, most))
    for name, soft, hard in limits:
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already
            resource.setrlimit(name, (soft, hard))
