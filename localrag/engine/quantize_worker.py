"""The child process in which llama.cpp writes a model file anew, for quantize.py; child.py says how it is started.

The job is "source", "target", "file_type" (llama.cpp's number), "num_threads", "buffer_bytes", "spare_bytes", "most_bytes" of the
target and "cpu_s". It replies `{"done": 3, "of": 272}` as tensors are written, and ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from pathlib import Path
from typing import Any

from localrag.engine.llama_lib import keep_log, library
from localrag.engine.worker import limit_self, send
from localrag.errors import EngineError

_STEP = re.compile(r"\[ *(\d{1,6})/ *(\d{1,6})\]")  # "[  12/ 272] blk.1.attn_q.weight - ..."


def work(job: dict[str, Any]) -> None:
    """Write the target of the job, within limits. EngineError if llama.cpp does not."""
    limit_self(spare_bytes=job["spare_bytes"], cpu_s=job["cpu_s"], max_file_bytes=job["most_bytes"])
    os.umask(0o077)  # llama.cpp makes the file; this process makes no other
    threading.Thread(target=end_with_parent, daemon=True).start()
    lib = library()
    callback = lib.llama_log_callback(hear)  # C holds a pointer to it
    lib.llama_log_set(callback, None)
    quantize(lib, job)


def quantize(lib: Any, job: dict[str, Any]) -> None:  # noqa: ANN401  # a module, loaded from a path
    params = lib.llama_model_quantize_default_params()
    params.ftype = job["file_type"]
    params.nthread = job["num_threads"]
    params.allow_requantize = True
    params.max_buf_size = job["buffer_bytes"]
    code = lib.llama_model_quantize(os.fsencode(job["source"]), os.fsencode(job["target"]), ctypes.byref(params))
    if code != 0:
        raise EngineError(f"llama.cpp ended with code {code}")
    with Path(job["target"]).open("rb+") as file:  # on the disk before it is put in place
        os.fsync(file.fileno())


def hear(level: int, text: bytes, user_data: object) -> None:
    """Errors are kept, steps are passed on."""
    keep_log(level, text, user_data)
    if step := _STEP.match(text.decode("utf-8", "replace").strip()):
        send({"done": int(step[1]), "of": int(step[2])})


def end_with_parent() -> None:
    """The parent holds the other end of standard input and writes nothing: it closes when the parent is gone."""
    os.read(0, 1)
    os._exit(1)
