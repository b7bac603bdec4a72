"""The first time that a model file is seen, llama.cpp loads it in a child process: what aborts or hangs there costs an error, not this one.

The header was checked before (gguf.py), which stops nearly all that llama.cpp asserts. What only the code of an architecture or
the weights decide is found by trying: load, tokenise, evaluate. A file that passed is remembered, by what it is and by the build of
llama.cpp, and not tried again. Damage within the weights can pass: only a checksum finds it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from localrag.engine.gguf_types import clip, file_error
from localrag.engine.kept import KeptValues
from localrag.errors import EngineError, ModelFileError

SPARE_BYTES = 900 << 20  # for what is not the file: vocabulary, a cache of 256 cells, compute buffers of a batch of 32
FILE_COPIES = 3  # the file is mapped, its weights may be repacked
CPU_LIMIT_S, CPU_BYTES_PER_S = 4.0, 50e6
WALL_LIMIT_S, WALL_BYTES_PER_S = 20.0, 25e6  # a file may come from a slow disk, and the machine may be busy
MAX_OUTPUT_BYTES = 64 << 10
MAX_KEPT = 256
WORKER = Path(__file__).with_name("trial_worker.py")
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "PATH", "CUDA_PATH", "HIP_PATH")  # to load llama.cpp
# No debugger when it aborts, one heap for all threads, and no GPU: its address space would pass any limit of memory.
VARIABLES = {"GGML_NO_BACKTRACE": "1", "MALLOC_ARENA_MAX": "1", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}

TAKE_ANOTHER = "Compare the file's sha256 with the publisher's and download it again, or use another model or a newer llama-cpp-python."


def ensure_safe(
    path: Path,
    *,
    home: Path | None,
    sha256: str | None = None,
    vocab_only: bool = False,
    trusted: Collection[str] = (),
) -> None:
    """Have the file tried in a child process, unless it passed before or its `sha256` is one of the `trusted`.

    Call it after `gguf.read_header`. `vocab_only` tries the tokenizer alone, as a file without weights needs. `sha256` is of the
    whole file as it is now, where that is known. What passed is kept in `home`; where that is None or cannot be written, the
    file is tried again next time.
    ModelFileError if llama.cpp refuses the file, dies of it or does not come to an end; EngineError if llama.cpp does not start.
    """
    if sha256 is not None and sha256 in trusted:
        return
    passed = Passed(home)
    key, file_bytes = _identity(path, sha256)
    if passed.holds(key, vocab_only=vocab_only):
        return
    _try(path, file_bytes, vocab_only=vocab_only)
    if _identity(path, sha256) == (key, file_bytes):  # else it was changed meanwhile, and what was tried is no more
        passed.add(key, vocab_only=vocab_only)


class Passed:
    """`trials.json` in the home: the files that llama.cpp has survived, the last one last, whole or their vocabulary alone.

    A record that is damaged is empty. It is replaced as a whole; of two processes that write at once one can lose its entry.
    """

    def __init__(self, home: Path | None) -> None:
        self._kept = KeptValues(None if home is None else home / "trials.json", most=MAX_KEPT)

    def holds(self, key: str, *, vocab_only: bool) -> bool:
        return self._kept.read().get(key) in (("whole", "vocabulary") if vocab_only else ("whole",))

    def add(self, key: str, *, vocab_only: bool) -> None:
        self._kept.put(key, "vocabulary" if vocab_only else "whole")


def _identity(path: Path, sha256: str | None) -> tuple[str, int]:
    """What the file is, and for which build of llama.cpp; and its size. Without a sha256 its status and first MiB tell it apart."""
    digest = hashlib.blake2b(digest_size=20)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if sha256 is None:
                digest.update(f"{status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode())
                digest.update(file.read(1 << 20))
            else:
                digest.update(sha256.encode())
    except OSError as error:
        raise file_error(path, f"cannot be read: {error.strerror or error}.", hint="Check the path and its permissions.") from error
    digest.update(_build().encode())
    return digest.hexdigest(), status.st_size


def _build() -> str:
    """Tells builds of llama.cpp apart by their libraries' sizes and times; to load them would take 40 ms."""
    libraries = sorted((_package("llama_cpp") / "llama_cpp" / "lib").glob("*"))
    return " ".join(f"{library.name} {status.st_size} {status.st_mtime_ns}" for library in libraries if (status := library.stat()))


def _package(name: str) -> Path:
    """The folder that a package is imported from."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise EngineError("llama-cpp-python is not installed.", hint="Install it with: pip install llama-cpp-python")
    return Path(spec.origin).parents[1]


def _try(path: Path, file_bytes: int, *, vocab_only: bool) -> None:
    job = {
        "path": str(path.absolute()),
        "vocab_only": vocab_only,
        "spare_bytes": SPARE_BYTES + FILE_COPIES * file_bytes,
        "cpu_s": CPU_LIMIT_S + file_bytes / CPU_BYTES_PER_S,
    }
    limit_s = WALL_LIMIT_S + file_bytes / WALL_BYTES_PER_S
    output, code, expired = _run(json.dumps(job), limit_s)
    replies, words = _understand(output)
    if {"error": None} in replies:
        if code == 0 and not expired:
            return
    elif {"ready": True} not in replies and not expired:
        said = clip(words) or f"it ended with {code}"
        raise EngineError(f"The process that tries model files did not start: {said}.", hint="Install localrag and llama-cpp-python again.")
    refusal = next((str(reply["error"]) for reply in replies if reply.get("error")), None)
    raise _refused(path, refusal, words, code, limit_s if expired else None)


def _refused(path: Path, refusal: str | None, words: str, code: int, limit_s: float | None) -> ModelFileError:
    """The error for a file that failed: `refusal` is what the child said of it, `words` what llama.cpp printed before it died."""
    name = "" if code >= 0 else signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if limit_s is not None:
        problem = f"was given up: llama.cpp did not come to an end with it within {limit_s:.0f} s."
    elif name == "SIGXCPU":
        problem = "was given up: llama.cpp computed without coming to an end."
    elif refusal is not None:
        problem = f"is refused by llama.cpp: {_line(refusal)}."
    else:
        died = f"is killed by it ({name})" if name else f"ends with code {code}"
        problem = f"is not safe to load: llama.cpp {died}{': ' + _line(words) if words else ''}."
    return file_error(path, problem, hint=TAKE_ANOTHER, signal=name or None, exit_code=code)


def _line(text: str) -> str:
    """`text` as a part of one line: no control characters, not long, no full stop."""
    printable = "".join(char if char.isprintable() else " " for char in text).strip().rstrip(".")
    return printable if len(printable) <= 200 else printable[:197] + "..."


def _understand(output: bytes) -> tuple[list[dict[str, object]], str]:
    """The child's replies, and the last line that was not one: the assertion that failed, if llama.cpp aborted."""
    replies: list[dict[str, object]] = []
    words = ""
    for line in output.decode("utf-8", "replace").splitlines():
        with suppress(ValueError, RecursionError):
            reply = json.loads(line)
            if isinstance(reply, dict):
                replies.append(reply)
                continue
        words = line.strip() or words
    return replies, words


def _run(job: str, limit_s: float) -> tuple[bytes, int, bool]:
    """What the child printed, how it ended, and whether it had to be ended."""
    folders = [str(Path(__file__).parents[2]), str(_package("llama_cpp")), *filter(os.path.isabs, sys.path)]
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    try:
        # Without the site module it starts faster and runs no .pth file; its own session keeps Ctrl-C from it.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WORKER), job, *dict.fromkeys(folders)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=kept | VARIABLES,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineError(f"The process that tries model files did not start: {error}.", hint="Check the machine's limits.") from error
    assert process.stdout
    expired = threading.Event()
    timer = threading.Timer(limit_s, _give_up, (process, expired))
    timer.daemon = True
    timer.start()
    output = b""
    try:
        with process.stdout as pipe:
            while piece := os.read(pipe.fileno(), MAX_OUTPUT_BYTES):
                output = (output + piece)[-MAX_OUTPUT_BYTES:]
        return output, process.wait(), expired.is_set()
    finally:
        timer.cancel()
        process.kill()  # where the reading was interrupted
        process.wait()


def _give_up(process: subprocess.Popen[bytes], expired: threading.Event) -> None:
    expired.set()
    process.kill()
