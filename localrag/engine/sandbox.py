"""Run llama.cpp in a child process that may abort, hang or exhaust its memory. Unknown model files are loaded there first."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localrag.engine.gguf import clip, file_error
from localrag.engine.llama_lib import begin_log, first_error, library, package_folder
from localrag.errors import EngineError, LocalragError, ModelFileError
from localrag.files import JsonCache, split_parts
from localrag.process import KEPT_VARIABLES, Child, ChildStartError, Parent, signal_name
from localrag.text.sanitize import one_line

LIBRARY_VARIABLES = (*KEPT_VARIABLES, "PATH", "CUDA_PATH", "HIP_PATH")  # to load llama.cpp
# No debugger on abort, one heap for all threads, and no GPU, whose address space would exceed any memory limit.
VARIABLES = {"GGML_NO_BACKTRACE": "1", "MALLOC_ARENA_MAX": "1", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
MAX_LINE_BYTES = 64 << 10
_PREFIX = re.compile(r"llama_model_(load: error loading model|quantize: failed to quantize): ")


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a child: its merged replies, its last line of other output, its exit code, and whether its time ran out."""

    replies: Mapping[str, object]
    words: str
    code: int
    expired: bool

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and self.replies.get("error", "none yet") is None

    @property
    def problem(self) -> str:
        """The error that the child reported, without line breaks or a full stop; empty if it reported none."""
        return _line(str(self.replies.get("error") or ""))

    @property
    def killed_by(self) -> str:
        """The name of the signal that killed the child; empty if none did."""
        return signal_name(self.code)


def run(worker: str, job: Mapping[str, object], limit_s: float, on_reply: Callable[[dict[str, object]], None] | None = None) -> Ended:
    """Run `localrag.engine.WORKER.work(job)` in a child, for up to `limit_s` seconds. Call `on_reply` with each reply.

    Ctrl-C ends the child. EngineError if llama.cpp does not start there.
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
    """Do the job, in the child. If `work` raises a LocalragError, report the first error that llama.cpp logged."""
    work = importlib.import_module(f"localrag.engine.{arguments['worker']}").work
    library()
    begin_log()
    parent.send({"ready": True})
    problem = None
    try:
        work(arguments["job"], parent)
    except LocalragError as error:
        problem = _PREFIX.sub("", first_error(), count=1) or error.message
    except Exception as error:  # noqa: BLE001  # report any error that a file causes
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
    """Shorten `text` to 200 characters of one line, without control characters or a full stop."""
    return one_line(text, 200).rstrip(".")


SPARE_BYTES = 900 << 20  # for the vocabulary, a KV cache of 256 cells, and the compute buffers of a batch of 32
FILE_COPIES = 3  # the file is mapped, its weights may be repacked
CPU_LIMIT_S, CPU_BYTES_PER_S = 4.0, 50e6
WALL_LIMIT_S, WALL_BYTES_PER_S = 20.0, 25e6  # a file may come from a slow disk, and the machine may be busy
MAX_KEPT = 256
TAKE_ANOTHER = "Compare the file's sha256 with the publisher's and download it again, or use another model or a newer llama-cpp-python."


def ensure_safe(
    path: Path,
    *,
    home: Path | None,
    sha256: str | None = None,
    vocab_only: bool = False,
    use: Literal["generate", "embed", "rank"] = "generate",
) -> None:
    """Try a model file in a child process, unless it passed before. Call `gguf.read_header` first.

    `vocab_only` tries only the tokenizer, for files without weights. `use` says what the trial does: generate a token, embed texts or score
    pairs. Pass the file's current `sha256` if it is known. Files that passed are recorded in `home`; if that is None or cannot be written,
    the file is tried again next time. ModelFileError if llama.cpp refuses the file, crashes or exceeds its time limit; EngineError if
    llama.cpp does not start.
    """
    passed = Passed(home)
    key, file_bytes = identity(path, sha256)
    entry = key if use == "generate" else f"{use}s-{key}"
    if passed.holds(entry, vocab_only=vocab_only):
        return
    _try(path, file_bytes, vocab_only=vocab_only, use=use)
    if identity(path, sha256) == (key, file_bytes):  # otherwise it changed during the trial
        passed.add(entry, vocab_only=vocab_only)


class Passed:
    """`trials.json` in the home: the files that passed a trial, oldest first, each with "whole" or "vocabulary".

    A damaged record counts as empty. If two processes write at the same time, one entry can be lost.
    """

    def __init__(self, home: Path | None) -> None:
        self._kept = JsonCache(None if home is None else home / "trials.json", most=MAX_KEPT)

    def holds(self, key: str, *, vocab_only: bool) -> bool:
        return self._kept.read().get(key) in (("whole", "vocabulary") if vocab_only else ("whole",))

    def add(self, key: str, *, vocab_only: bool) -> None:
        self._kept.put(key, "vocabulary" if vocab_only else "whole")


def identity(path: Path, sha256: str | None) -> tuple[str, int]:
    """Return a key of the file (all parts of a split one) and this build of llama.cpp, and the file's size.

    Without `sha256`, and for the parts after the first, hash the status and the first MiB.
    """
    digest = hashlib.blake2b(digest_size=20)
    file_bytes = 0
    try:
        for number, name in enumerate(split_parts(path.name)):
            with path.with_name(name).open("rb") as file:
                status = os.fstat(file.fileno())
                file_bytes += status.st_size
                if sha256 is None or number:
                    digest.update(f"{status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode())
                    digest.update(file.read(1 << 20))
                else:
                    digest.update(sha256.encode())
    except OSError as error:
        raise file_error(path, f"cannot be read: {error.strerror or error}.", hint="Check the path and its permissions.") from error
    digest.update(_build().encode())
    return digest.hexdigest(), file_bytes


def _build() -> str:
    """Identify the build of llama.cpp by the sizes and times of its libraries, since loading them would take 40 ms."""
    libraries = sorted((package_folder() / "lib").glob("*"))
    return " ".join(f"{library.name} {status.st_size} {status.st_mtime_ns}" for library in libraries if (status := library.stat()))


def _try(path: Path, file_bytes: int, *, vocab_only: bool, use: str) -> None:
    job = {
        "use": use,
        "path": str(path.absolute()),
        "vocab_only": vocab_only,
        "spare_bytes": SPARE_BYTES + FILE_COPIES * file_bytes,
        "cpu_s": CPU_LIMIT_S + file_bytes / CPU_BYTES_PER_S,
    }
    limit_s = WALL_LIMIT_S + file_bytes / WALL_BYTES_PER_S
    ended = run("load_worker", job, limit_s)
    if not ended.succeeded:
        raise refused(path, ended, limit_s)


def refused(path: Path, ended: Ended, limit_s: float) -> ModelFileError:
    """Return the error for a file that failed its trial."""
    if ended.expired:
        problem = f"took too long to load: llama.cpp did not finish within {limit_s:.0f} s."
    elif ended.killed_by == "SIGXCPU":
        problem = "took too long to load: llama.cpp exceeded its limit of CPU time."
    elif ended.problem:
        problem = f"is refused by llama.cpp: {ended.problem}."
    else:
        died = f"crashes on it ({ended.killed_by})" if ended.killed_by else f"exits with code {ended.code}"
        problem = f"is not safe to load: llama.cpp {died}{': ' + ended.words if ended.words else ''}."
    return file_error(path, problem, hint=TAKE_ANOTHER, signal=ended.killed_by or None, exit_code=ended.code)
