"""Whether the files of vectors say what the store says."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from localrag.kb.vector_cache import cached_generations, file_of, open_file
from localrag.kb.vector_layout import DamagedCacheError
from localrag.kb.vectors import Truth, rows_of


def verify_index(store: Truth) -> list[str]:
    """What is wrong with the files of vectors, row by row against the store; each wrong one is removed. Inside `store.reading()`."""
    folder, problems = store.path.parent, []
    for generation in cached_generations(folder):
        problem = _problem(store, generation)
        if problem:
            problems.append(f"vec-{generation}: {problem}")
            with suppress(OSError):
                file_of(folder, generation).unlink(missing_ok=True)
    return problems


def _problem(store: Truth, generation: int) -> str:
    try:
        file = open_file(file_of(store.path.parent, generation))
        if (file.version.generation, file.version.stamp) != (generation, store.stamp(generation)):
            return "it is not of this knowledge base"
        for ids, vectors in rows_of(store, file.version.dim):
            shared = ids[ids <= file.last_id]
            places = file.places(shared)
            if len(places) != len(shared) or not np.array_equal(file.rows(places), vectors[: len(shared)]):
                return "it differs from the stored vectors"
    except (OSError, DamagedCacheError):
        return "it is damaged"
    return ""
