"""The first time that a model file is seen, llama.cpp loads it in a child process: a file that aborts or hangs it there costs an error.

The header was checked before (gguf.py), for sizes and for tokens. What llama.cpp asserts of the rest, and what the code of an
architecture or the weights decide, is found by trying: load, tokenise, evaluate. A file that passed is remembered, by its identity and
the build of llama.cpp, and not tried again. Damage within the weights can pass: only a checksum finds it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from localrag.engine import child
from localrag.engine.gguf_layout import file_error
from localrag.engine.llama_lib import package_folder
from localrag.errors import ModelFileError
from localrag.files import JsonCache

SPARE_BYTES = 900 << 20  # for what is not the file: vocabulary, a cache of 256 cells, compute buffers of a batch of 32
FILE_COPIES = 3  # the file is mapped, its weights may be repacked
CPU_LIMIT_S, CPU_BYTES_PER_S = 4.0, 50e6
WALL_LIMIT_S, WALL_BYTES_PER_S = 20.0, 25e6  # a file may come from a slow disk, and the machine may be busy
MAX_KEPT = 256
TAKE_ANOTHER = "Compare the file's sha256 with the publisher's and download it again, or use another model or a newer llama-cpp-python."


def ensure_safe(path: Path, *, home: Path | None, sha256: str | None = None, vocab_only: bool = False, embeds: bool = False) -> None:
    """Have the file tried in a child process, unless it passed before.

    Call it after `gguf.read_header`. `vocab_only` tries the tokenizer alone, as a file without weights needs; a file that `embeds`
    embeds texts instead of writing a token. `sha256` is of the whole file as it is now, where that is known. What passed is kept
    in `home`; where that is None or cannot be written, the file is tried again next time.
    ModelFileError if llama.cpp refuses the file, dies of it or does not come to an end; EngineError if llama.cpp does not start.
    """
    passed = Passed(home)
    key, file_bytes = identity(path, sha256)
    entry = f"embeds-{key}" if embeds else key
    if passed.holds(entry, vocab_only=vocab_only):
        return
    _try(path, file_bytes, "embed_worker" if embeds else "load_worker", vocab_only=vocab_only)
    if identity(path, sha256) == (key, file_bytes):  # else it was changed meanwhile, and what was tried is no more
        passed.add(entry, vocab_only=vocab_only)


class Passed:
    """`trials.json` in the home: the files that llama.cpp has survived, the last one last, whole or their vocabulary alone.

    A record that is damaged is empty. It is replaced as a whole; of two processes that write at once one can lose its entry.
    """

    def __init__(self, home: Path | None) -> None:
        self._kept = JsonCache(None if home is None else home / "trials.json", most=MAX_KEPT)

    def holds(self, key: str, *, vocab_only: bool) -> bool:
        return self._kept.read().get(key) in (("whole", "vocabulary") if vocab_only else ("whole",))

    def add(self, key: str, *, vocab_only: bool) -> None:
        self._kept.put(key, "vocabulary" if vocab_only else "whole")


def identity(path: Path, sha256: str | None) -> tuple[str, int]:
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
    libraries = sorted((package_folder() / "lib").glob("*"))
    return " ".join(f"{library.name} {status.st_size} {status.st_mtime_ns}" for library in libraries if (status := library.stat()))


def _try(path: Path, file_bytes: int, worker: str, *, vocab_only: bool) -> None:
    job = {
        "path": str(path.absolute()),
        "vocab_only": vocab_only,
        "spare_bytes": SPARE_BYTES + FILE_COPIES * file_bytes,
        "cpu_s": CPU_LIMIT_S + file_bytes / CPU_BYTES_PER_S,
    }
    limit_s = WALL_LIMIT_S + file_bytes / WALL_BYTES_PER_S
    ended = child.run(worker, job, limit_s)
    if not ended.succeeded:
        raise refused(path, ended, limit_s)


def refused(path: Path, ended: child.Ended, limit_s: float) -> ModelFileError:
    """The error for a file that failed."""
    if ended.expired:
        problem = f"was given up: llama.cpp did not come to an end with it within {limit_s:.0f} s."
    elif ended.killed_by == "SIGXCPU":
        problem = "was given up: llama.cpp computed without coming to an end."
    elif ended.problem:
        problem = f"is refused by llama.cpp: {ended.problem}."
    else:
        died = f"is killed by it ({ended.killed_by})" if ended.killed_by else f"ends with code {ended.code}"
        problem = f"is not safe to load: llama.cpp {died}{': ' + ended.words if ended.words else ''}."
    return file_error(path, problem, hint=TAKE_ANOTHER, signal=ended.killed_by or None, exit_code=ended.code)
