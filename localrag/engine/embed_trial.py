"""An embedder's file, the first time that it is seen, embeds texts in a child process, as trial.py has a language model write a token."""

from __future__ import annotations

from pathlib import Path

from localrag.engine import child
from localrag.engine.trial import (
    CPU_BYTES_PER_S,
    CPU_LIMIT_S,
    FILE_COPIES,
    SPARE_BYTES,
    WALL_BYTES_PER_S,
    WALL_LIMIT_S,
    Passed,
    identity,
    refused,
)


def ensure_safe(path: Path, *, home: Path | None, sha256: str | None = None) -> None:
    """Have the file tried in a child process, unless it passed before. Call it after `gguf.read_header`.

    What passed is kept in `home`. ModelFileError if llama.cpp refuses the file, dies of it or does not come to an end.
    """
    passed = Passed(home)
    key, file_bytes = identity(path, sha256)
    if passed.holds(f"embeds-{key}", vocab_only=False):
        return
    job = {
        "path": str(path.absolute()),
        "spare_bytes": SPARE_BYTES + FILE_COPIES * file_bytes,
        "cpu_s": CPU_LIMIT_S + file_bytes / CPU_BYTES_PER_S,
    }
    limit_s = WALL_LIMIT_S + file_bytes / WALL_BYTES_PER_S
    ended = child.run("embed_worker", job, limit_s)
    if not ended.succeeded:
        raise refused(path, ended, limit_s)
    if identity(path, sha256) == (key, file_bytes):  # else it was changed meanwhile, and what was tried is no more
        passed.add(f"embeds-{key}", vocab_only=False)
