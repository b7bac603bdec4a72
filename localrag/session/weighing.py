"""Hits weighed by the relevance of the files that they are from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.relevance import File, Weights, score, weigh
from localrag.relevance.profile import normalised
from localrag.types import Hit

if TYPE_CHECKING:
    from localrag.kb import KnowledgeBase

MAX_FILE_BYTES = 2 * 1024 * 1024


def weighed(hits: Sequence[Hit], task: str, knowledge_bases: Sequence[KnowledgeBase], weights: Mapping[str, object]) -> list[Hit]:
    """The hits, best first again. A file that is no longer there, or is no text, is scored by the chunks that were found in it.

    Files are aligned with the task by words: how near they are in meaning is what the hits were ranked by. Documents of one path (to a
    program, https://x.org/a and https://x.org/a/ are one) have the score of one of them.
    """
    paths: dict[str, Path] = {}
    for kb in knowledge_bases:
        paths |= kb.paths()
    by_path = {hit.chunk.source: normalised(hit.chunk.source) for hit in hits}
    files = {path: _file(source, hits, paths.get(source)) for source, path in by_path.items()}
    chosen = Weights(**{**weights, "method": "keyword"})  # type: ignore[arg-type]  # checked by the catalogue
    scores = {normalised(each.path): each.score for each in score(list(files.values()), task, weights=chosen, now=time.time())}
    return weigh(hits, {source: scores[path] for source, path in by_path.items()})


def _file(source: str, hits: Sequence[Hit], path: Path | None) -> File:
    from localrag.kb.readers import UnreadableError  # noqa: PLC0415  # weight
    from localrag.kb.walk import read_file  # noqa: PLC0415

    try:
        if path is not None and path.stat().st_size <= MAX_FILE_BYTES:
            return File(source, read_file(str(path)).data.decode("utf-8"), path.stat().st_mtime)
    except (OSError, UnreadableError, UnicodeDecodeError):
        pass
    return File(source, "\n".join(hit.chunk.text for hit in hits if hit.chunk.source == source), None)
