"""The child process in which llama.cpp writes a model file anew, started by quantize.py as

    python -I -S quantize_worker.py JOB PATH...      (PATH: where Python looks for modules)

JOB is a JSON object: "source", "target", "file_type" (llama.cpp's number), "num_threads", "buffer_bytes", "spare_bytes", "most_bytes" of
the target and "cpu_s". On standard output it says `{"ready": true}`, `{"done": 3, "of": 272}` as tensors are written, and at the end
`{"error": null}`, or in its place one line that says why not. It ends with the process that started it: standard input is then closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

ERROR_LEVEL, MAX_ERRORS = 4, 20
_STEP = re.compile(r"\[ *(\d{1,6})/ *(\d{1,6})\]")  # "[  12/ 272] blk.1.attn_q.weight - ..."


def quantize(lib: Any, job: dict[str, Any], said: list[str]) -> str | None:  # noqa: ANN401  # a module, loaded from a path
    """None, or why there is no whole file."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = job["file_type"]
    params.nthread = job["num_threads"]
    params.allow_requantize = True
    params.max_buf_size = job["buffer_bytes"]
    code = lib.llama_model_quantize(os.fsencode(job["source"]), os.fsencode(job["target"]), ctypes.byref(params))
    if code != 0:
        return said[0] if said else f"llama.cpp ended with code {code}"
    with Path(job["target"]).open("rb+") as file:  # on the disk before it is put in place
        os.fsync(file.fileno())
    return None


def limit_self(*, spare_bytes: int, most_bytes: int, cpu_s: float) -> None:
    """Lets this process grow by `spare_bytes`, write files of `most_bytes` and compute for `cpu_s` seconds."""
    if sys.platform == "win32":  # there the parent's clock is the only limit
        return
    import resource  # noqa: PLC0415  # not on Windows

    seconds = math.ceil(cpu_s)
    # Python ignores the signal of a file that is too large: the write fails, which llama.cpp reports.
    limits = [(resource.RLIMIT_CORE, 0, 0), (resource.RLIMIT_FSIZE, most_bytes, most_bytes), (resource.RLIMIT_CPU, seconds, seconds + 1)]
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere the size of a process is not to be had cheaply
        most = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + spare_bytes
        limits.append((resource.RLIMIT_AS, most, most))
    for name, soft, hard in limits:
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already
            resource.setrlimit(name, (soft, hard))


def end_with_parent() -> None:
    """The parent holds the other end of standard input and writes nothing: it closes when the parent is gone."""
    os.read(0, 1)
    os._exit(1)


def send(reply: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def listen(lib: Any) -> tuple[list[str], object]:  # noqa: ANN401  # a module, loaded from a path
    """The errors that llama.cpp logs from now on, while steps are passed on; and what must live for as long."""
    said: list[str] = []

    def hear(level: int, text: bytes, _user_data: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == ERROR_LEVEL and len(said) < MAX_ERRORS:
            said.append(line.removeprefix("llama_model_quantize: failed to quantize: "))
        elif step := _STEP.match(line):
            send({"done": int(step[1]), "of": int(step[2])})

    callback = lib.llama_log_callback(hear)
    lib.llama_log_set(callback, None)
    return said, callback


def main() -> None:
    job = json.loads(sys.argv[1])
    sys.path.extend(sys.argv[2:])

    from localrag.engine.library import library  # noqa: PLC0415  # the path to it is set above

    lib = library()
    said, _callback = listen(lib)
    send({"ready": True})
    limit_self(spare_bytes=job["spare_bytes"], most_bytes=job["most_bytes"], cpu_s=job["cpu_s"])
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        problem = quantize(lib, job, said)
    except Exception as error:  # noqa: BLE001  # whatever a file leads to is an answer, not an end
        problem = f"{type(error).__name__}: {error}"
    send({"error": problem})


if __name__ == "__main__":
    main()
