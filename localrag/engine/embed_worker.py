"""The child process in which llama.cpp meets an embedder's file for the first time, for sandboxed_load.py; child.py starts it.

The job is the "path" of the file, "spare_bytes" and "cpu_s".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from localrag.engine.embed import LlamaEmbedder
from localrag.engine.load_worker import TEXT, shrink_stacks
from localrag.process import Parent, limit_self


def work(job: dict[str, Any], _parent: Parent) -> None:
    """Embed two texts in one batch with the file of the job, within limits."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would count against the limit
    shrink_stacks()
    limit_self(spare_bytes=job["spare_bytes"], cpu_s=job["cpu_s"])
    embedder = LlamaEmbedder(Path(job["path"]), is_trusted=True)
    try:
        longer = TEXT if embedder.count(TEXT) <= embedder.max_tokens else "a"
        embedder.embed(["a", longer])
    finally:
        embedder.close()
