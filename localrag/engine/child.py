"""llama.cpp at work in a child process that may abort, hang or grow: here it is started, heard and ended. Its side is worker.py.

It is started as `python -I -S -c START WORKER JOB PATH...`, where WORKER is a module of this package with a function `work`, JOB is
JSON, and the PATHs are where Python looks for modules. It replies in lines of JSON: `{"ready": true}` once llama.cpp stands, what the
worker sends, and at the end `{"error": null}`, or in its place what was wrong. On the same pipe come llama.cpp's last words.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localrag.engine.gguf_layout import clip
from localrag.engine.llama_lib import package_folder
from localrag.errors import EngineError
from localrag.text.sanitize import one_line

START = "import sys; sys.path += sys.argv[3:]; from localrag.engine.worker import main; main()"
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "PATH", "CUDA_PATH", "HIP_PATH")  # to load llama.cpp
# No debugger when it aborts, one heap for all threads, and no GPU: its address space would pass any limit of memory.
VARIABLES = {"GGML_NO_BACKTRACE": "1", "MALLOC_ARENA_MAX": "1", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
MAX_LINE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its replies in one, its last line that was none, its exit code, and whether its time had run out."""

    replies: Mapping[str, object]
    words: str
    code: int
    expired: bool

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and self.replies.get("error", "none yet") is None

    @property
    def problem(self) -> str:
        """What it said was wrong, as a part of one line; empty if it did not come to say it."""
        return _line(str(self.replies.get("error") or ""))

    @property
    def killed_by(self) -> str:
        """The name of the signal that ended it; empty if none did."""
        if self.code >= 0:
            return ""
        return signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"


def run(worker: str, job: Mapping[str, object], limit_s: float, on_reply: Callable[[dict[str, object]], None] | None = None) -> Ended:
    """Have a child do the job, for `limit_s` at most; `on_reply` hears each reply as it comes. Ctrl-C ends the child.

    EngineError if llama.cpp does not start there.
    """
    replies: dict[str, object] = {}
    words = ""
    expired = threading.Event()
    with _start(worker, job) as process:
        timer = threading.Timer(limit_s, _give_up, (process, expired))
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout
            while line := process.stdout.readline(MAX_LINE_BYTES):
                reply = _reply(line)
                if reply is None:
                    words = _line(line.decode("utf-8", "replace")) or words
                    continue
                replies |= reply
                if on_reply is not None:
                    on_reply(reply)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()  # where the reading was interrupted
            process.wait()
    if "ready" not in replies and not expired.is_set():
        raise _start_error(clip(words) or f"it ended with {code}", hint="Install localrag and llama-cpp-python again.")
    return Ended(replies, words, code, expired.is_set())


def _start(worker: str, job: Mapping[str, object]) -> subprocess.Popen[bytes]:
    folders = [str(Path(__file__).parents[2]), str(package_folder().parent), *filter(os.path.isabs, sys.path)]
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    try:
        # Without the site module it starts faster and runs no .pth file; its own session keeps Ctrl-C from it.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, worker, json.dumps(job), *dict.fromkeys(folders)],
            stdin=subprocess.PIPE,  # nothing is written: it closes when this process is gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=kept | VARIABLES,
            start_new_session=True,
        )
    except OSError as error:
        raise _start_error(str(error), hint="Check the machine's limits.") from error


def _start_error(reason: str, *, hint: str) -> EngineError:
    return EngineError(f"The process that llama.cpp was to work in did not start: {reason}.", hint=hint)


def _give_up(process: subprocess.Popen[bytes], expired: threading.Event) -> None:
    expired.set()
    process.kill()


def _reply(line: bytes) -> dict[str, object] | None:
    with suppress(ValueError, RecursionError):
        reply = json.loads(line)
        if isinstance(reply, dict):
            return reply
    return None


def _line(text: str) -> str:
    """`text` as a part of one line: no control characters, not long, no full stop."""
    return one_line(text, 200).rstrip(".")
