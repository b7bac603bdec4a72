"""Child process that quantizes a model file with llama.cpp. sandbox.py starts it for optimize.py.

The job has the keys "source", "target", "file_type" (llama.cpp's number), "num_threads", "buffer_bytes", "spare_bytes", "most_bytes" (limit
of the target) and "cpu_s". The child sends `{"done": 3, "of": 272}` as it writes tensors, and exits when its parent does.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

from localrag.engine.llama_lib import keep_log, library
from localrag.errors import EngineError
from localrag.process import Parent, limit_self

_STEP = re.compile(r"\[ *(\d{1,6})/ *(\d{1,6})\]")  # "[  12/ 272] blk.1.attn_q.weight - ..."


def work(job: dict[str, Any], parent: Parent) -> None:
    """Write the job's target within its limits. EngineError if llama.cpp fails."""
    limit_self(spare_bytes=job["spare_bytes"], cpu_s=job["cpu_s"], max_file_bytes=job["most_bytes"])
    os.umask(0o077)  # llama.cpp creates the target, which must be private
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    lib = library()
    callback = lib.llama_log_callback(partial(hear, parent))  # C holds a pointer to it
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
    with Path(job["target"]).open("rb+") as file:  # on disk before it is renamed
        os.fsync(file.fileno())


def hear(parent: Parent, level: int, text: bytes, user_data: object) -> None:
    """Log callback: keep errors and send progress to the parent."""
    keep_log(level, text, user_data)
    if step := _STEP.match(text.decode("utf-8", "replace").strip()):
        parent.send({"done": int(step[1]), "of": int(step[2])})


def end_with_parent(parent: Parent) -> None:
    """Exit when the parent does. `receive` blocks until then, since the parent sends nothing."""
    parent.receive()
    os._exit(1)
