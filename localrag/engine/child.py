"""Run llama.cpp in a child process, where it may abort, hang or grow: both sides of it.

A worker is a module of this package with a function `work(job, parent)`. What it replies are messages: `{"ready": true}` once llama.cpp is
loaded, what `work` sends, and at the end `{"error": null}` or what went wrong. llama.cpp's last words come between them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from localrag.engine.gguf_layout import clip
from localrag.engine.llama_lib import begin_log, first_error, library, package_folder
from localrag.errors import EngineError, LocalragError
from localrag.process import KEPT_VARIABLES, Child, ChildStartError, Parent, signal_name
from localrag.text.sanitize import one_line

LIBRARY_VARIABLES = (*KEPT_VARIABLES, "PATH", "CUDA_PATH", "HIP_PATH")  # to load llama.cpp
# No debugger when it aborts, one heap for all threads, and no GPU: its address space would pass any limit of memory.
VARIABLES = {"GGML_NO_BACKTRACE": "1", "MALLOC_ARENA_MAX": "1", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
MAX_LINE_BYTES = 64 << 10
_PREFIX = re.compile(r"llama_model_(load: error loading model|quantize: failed to quantize): ")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its replies merged, its last line that was none, its exit code, and whether its time had run out."""

    replies: Mapping[str, object]
    words: str
    code: int
    expired: bool

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and self.replies.get("error", "none yet") is None

    @property
    def problem(self) -> str:
        """What it said went wrong, as a part of one line; empty if it did not get to say it."""
        return _line(str(self.replies.get("error") or ""))

    @property
    def killed_by(self) -> str:
        """The name of the signal that ended it; empty if none did."""
        return signal_name(self.code)


def run(worker: str, job: Mapping[str, object], limit_s: float, on_reply: Callable[[dict[str, object]], None] | None = None) -> Ended:
    """Have a child do the job within `limit_s`; `on_reply` gets each reply as it comes. Ctrl-C ends the child.

    EngineError if llama.cpp does not start there.
    """
    replies: dict[str, object] = {}
    words = ""
    try:
        child = Child(
            __name__,
            {"worker": worker, "job": job},
            folders=[package_folder().parent],
            kept=LIBRARY_VARIABLES,
            variables=VARIABLES,
            with_output=True,
        )
    except ChildStartError as error:
        raise _start_error(error.reason, hint=error.hint) from error
    try:
        with child.within(limit_s):
            for line in child.lines(MAX_LINE_BYTES):
                reply = _reply(line)
                if reply is None:
                    words = _line(line.decode("utf-8", "replace")) or words
                    continue
                replies |= reply
                if on_reply is not None:
                    on_reply(reply)
            code = child.exit_code()
    finally:
        child.stop()
    ended = Ended(replies, words, code, child.expired)
    if "ready" not in replies and not ended.expired:
        raise _start_error(clip(ended.problem or words) or f"it ended with {code}", hint="Install localrag and llama-cpp-python again.")
    return ended


def main(arguments: Mapping[str, object], parent: Parent) -> None:
    """Do the job, in the child. `work` raises a LocalragError for what llama.cpp refuses; what it logged says why."""
    work = importlib.import_module(f"localrag.engine.{arguments['worker']}").work
    library()
    begin_log()
    parent.send({"ready": True})
    problem = None
    try:
        work(arguments["job"], parent)
    except LocalragError as error:
        problem = _PREFIX.sub("", first_error(), count=1) or error.message
    except Exception as error:  # noqa: BLE001  # whatever a file leads to is an answer, not an end
        problem = f"{type(error).__name__}: {error}"
    parent.send({"error": problem})


def _start_error(reason: str, *, hint: str) -> EngineError:
    return EngineError(f"The child process for llama.cpp did not start: {reason}.", hint=hint)


def _reply(line: bytes) -> dict[str, object] | None:
    with suppress(ValueError, RecursionError):
        reply = json.loads(line)
        if isinstance(reply, dict):
            return reply
    return None


def _line(text: str) -> str:
    """`text` as a part of one line: no control characters, not long, no full stop."""
    return one_line(text, 200).rstrip(".")
