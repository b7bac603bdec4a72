"""The vector index of a knowledge base: a file derived from the store and always consistent with it.

An index combines a file of vectors of an earlier generation (localrag/kb/vector_cache.py) with the vectors added since, in memory. Both
are searched, and results that the store no longer has are dropped. This relies on two guarantees of the store: ids increase over time and
are never reused, and the vector of an id never changes. The stamp of a generation distinguishes a file of this store's own past from one
of a store that was restored from a backup and then diverged.

Search is exact (every vector is compared) until localrag/kb/ann.py has built a clustered file in the background. A query imports neither
faiss nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from localrag.kb.store import Store
from localrag.kb.vector_cache import (
    GROUP_ROWS,
    DamagedCacheError,
    Ids,
    Places,
    VectorFile,
    Vectors,
    Version,
    cached_generations,
    file_of,
    open_file,
    publishing,
    write_file,
)

APPROXIMATE_FROM = 100_000
"""Number of chunks from which a clustered file pays off. Exact search of 100,000 x 384 takes 8 to 20 ms on 2 busy cores."""

NUM_CHANGED = 2048
"""A file is rewritten after this many changes plus a sixteenth of its rows. Reading 2,048 vectors from the store takes 10 ms."""

_ROUNDING = 1e-5  # more than the rounding error of an inner product of unit vectors
_CANDIDATES = 4  # least number of vectors to compare for each requested result


class VectorIndex:
    """Cosine similarity over the chunks of one generation of a store. Use it inside `store.reading()`, at that generation."""

    def __init__(self, store: Store, version: Version, base: VectorFile, added: VectorFile) -> None:
        """`base` has this version or an earlier one of this store; `added` holds the vectors added since, in id order."""
        self.version = version
        self.base = base
        self.added = added
        self._store = store
        self._moved_on = base.version.generation != version.generation
        self._num_chunks = store.num_chunks if self._moved_on else len(base)

    @property
    def generation(self) -> int:
        return self.version.generation

    def __len__(self) -> int:
        return self._num_chunks

    @property
    def num_changed(self) -> int:
        """The number of chunks added or removed since the file was written."""
        return len(self.added) + max(0, len(self.base) + len(self.added) - self._num_chunks)

    @property
    def is_outdated(self) -> bool:
        return self.num_changed > NUM_CHANGED + len(self.base) // 16

    @property
    def wants_clusters(self) -> bool:
        """Whether search would be faster with a new clustered file, so that localrag/kb/ann.py should be started."""
        return self._num_chunks >= APPROXIMATE_FROM and (self.base.centroids is None or self.is_outdated)

    def search(self, query: Vectors, k: int, among: Sequence[int] | Ids | None = None) -> list[tuple[int, float]]:
        """Return the `k` chunks nearest to a vector of shape (dim,), as (chunk id, cosine similarity), best first, ties by id.

        With `among`, only these chunks are searched, exactly, in time proportional to their number, or to the number of all chunks if they
        are many. Without `among`, search is exact unless the index is clustered; then its measured recall@10 is `base.recall`.
        """
        if k < 1:
            return []
        candidates = None if among is None else np.unique(np.asarray(among, dtype=np.int64))
        query = np.ascontiguousarray(query, dtype=np.float32)
        try:
            return self._search(query, k, candidates)
        except DamagedCacheError:
            self._do_without_file()
            return self._search(query, k, candidates)

    def similarities(self, query: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """Return the cosine similarity of each of these chunks with a vector of shape (dim,). Unknown ids are left out."""
        exact = query.astype(np.float64)
        return {one: _product(vector, exact) for one, vector in self.vectors_of(ids).items()}

    def vectors_of(self, ids: Sequence[int]) -> dict[int, Vectors]:
        """Return the vector, of shape (dim,), of each of these chunks. Unknown ids are left out."""
        present = np.unique(np.asarray(self._present(ids), dtype=np.int64))
        try:
            return self._vectors_of(present)
        except DamagedCacheError:
            self._do_without_file()
            return self._vectors_of(present)

    def _vectors_of(self, ids: Ids) -> dict[int, Vectors]:
        vectors: dict[int, Vectors] = {}
        for part in (self.base, self.added):
            places = part.places(ids)
            vectors.update(zip(part.ids[places].tolist(), part.rows(places), strict=True))
        return vectors

    def _search(self, query: Vectors, k: int, candidates: Ids | None, *, exact: bool = False) -> list[tuple[int, float]]:
        clustered = self.base.centroids is not None and candidates is None and not exact
        parts = (self.base, self.added)
        compared = [_probe(self.base, query, k) if part is self.base and clustered else _compare(part, query, candidates) for part in parts]
        places = np.concatenate([some for some, _ in compared])
        scores = np.concatenate([some for _, some in compared])
        in_base = np.arange(len(places)) < len(compared[0][0])
        ids = np.concatenate([part.ids[some] for part, (some, _) in zip(parts, compared, strict=True)])
        depth = k
        while True:
            best = _best(scores, depth)
            best = best[np.isin(ids[best], self._present(ids[best].tolist()))]
            if len(best) >= k or depth >= len(scores):
                break
            depth *= 4  # many of the best have been removed since
        if len(best) < k and clustered and len(scores) < len(self.base):
            return self._search(query, k, candidates, exact=True)
        # Recompute the returned scores in the same way for all vectors, so that equal vectors tie.
        precise = query.astype(np.float64)
        hits = []
        for part, here in ((self.base, best[in_base[best]]), (self.added, best[~in_base[best]])):
            vectors = part.rows(places[here])
            hits += [(one, _product(vector, precise)) for one, vector in zip(ids[here].tolist(), vectors, strict=True)]
        return sorted(hits, key=lambda hit: (-hit[1], hit[0]))[:k]

    def _present(self, ids: Sequence[int]) -> Sequence[int]:
        """Return those of the chunk ids that this generation of the store has."""
        return self._store.existing(ids) if self._moved_on else ids

    def _do_without_file(self) -> None:
        """Remove a damaged file and read the vectors from the store instead. The next process writes a new file."""
        with suppress(OSError):
            file_of(self._store.path.parent, self.base.version.generation).unlink(missing_ok=True)
        self.base = _in_memory(self._store, self.version)
        self.added = _empty(self.version)
        self._moved_on, self._num_chunks = False, len(self.base)


def load_index(store: Store, previous: VectorIndex | None = None) -> VectorIndex | None:
    """Load the index of the store's current generation; None if nothing was ever stored. Call it inside `store.reading()`.

    `previous`, an index of the same store, saves reading vectors again. If no file fits, one is written; failing to write is not an error.
    """
    embedder = store.embedder
    if embedder is None:
        return None
    generation = store.generation
    version = Version(generation, store.stamp(generation) or 0, *embedder)
    base = newest_file(store, version, previous)
    if base is None:
        return VectorIndex(store, version, make_flat(store, version), _empty(version))
    index = VectorIndex(store, version, base, _added_since(store, version, base, previous))
    if index.is_outdated and len(index) < APPROXIMATE_FROM:  # larger indexes are rebuilt in the background
        return VectorIndex(store, version, make_flat(store, version), _empty(version))
    return index


def verify_index(store: Store) -> list[str]:
    """Compare the files of vectors with the store, row by row. Remove wrong files and return their problems. For `store.reading()`."""
    folder, problems = store.path.parent, []
    for generation in cached_generations(folder):
        problem = _problem(store, generation)
        if problem:
            problems.append(f"vec-{generation}: {problem}")
            with suppress(OSError):
                file_of(folder, generation).unlink(missing_ok=True)
    return problems


def make_flat(store: Store, version: Version) -> VectorFile:
    """Load all vectors of the current version in id order: from a new file if it can be written, or else in memory."""
    folder = store.path.parent
    with publishing(folder) as allowed, suppress(OSError, DamagedCacheError):
        if allowed:
            return open_file(write_file(folder, version, rows_of(store, version.dim)))
    return _in_memory(store, version)


def rows_of(store: Store, dim: int, after: int = 0) -> Iterator[tuple[Ids, Vectors]]:
    """Yield (ids, vectors) of the chunks after an id, a few hundred at a time, ordered by id."""
    rows = store.vectors(after)
    while batch := list(islice(rows, GROUP_ROWS)):
        ids = np.fromiter((one for one, _ in batch), dtype=np.int64, count=len(batch))
        yield ids, np.frombuffer(b"".join(vector for _, vector in batch), dtype="<f4").reshape(len(batch), dim)


def newest_file(store: Store, version: Version, previous: VectorIndex | None = None) -> VectorFile | None:
    """Open the newest file of this version or of an earlier version in its history; None if there is none."""
    folder = store.path.parent
    for generation in cached_generations(folder):
        stamp = store.stamp(generation) if generation <= version.generation else None
        if stamp is None:
            continue
        file = file_of(folder, generation)
        with suppress(OSError, DamagedCacheError):
            status = file.stat()
            if previous is not None and previous.base.identity == (status.st_dev, status.st_ino, status.st_mtime_ns):
                candidate = previous.base
            else:
                candidate = open_file(file)
            expected = Version(generation, stamp, version.embedder, version.dim)
            if candidate.version.same_as(expected):
                return candidate
    return None


def _added_since(store: Store, version: Version, base: VectorFile, previous: VectorIndex | None) -> VectorFile:
    if base.version.generation == version.generation:
        return _empty(version)
    delta = None
    if previous is not None and previous.base is base and store.stamp(previous.generation) == previous.version.stamp:
        delta = previous.added
    last_id = max(base.last_id, delta.last_id if delta else 0)
    new = _in_memory(store, version, after=last_id)
    if delta is None or not len(delta):
        return new
    return VectorFile(version, np.concatenate((delta.vectors, new.vectors)), np.concatenate((delta.ids, new.ids))) if len(new) else delta


def _in_memory(store: Store, version: Version, *, after: int = 0) -> VectorFile:
    data, ids = bytearray(), [np.zeros(0, dtype=np.int64)]
    for some, vectors in rows_of(store, version.dim, after):
        ids.append(some)
        data += vectors.data
    return VectorFile(version, np.frombuffer(data, dtype="<f4").reshape(-1, version.dim), np.concatenate(ids))


def _empty(version: Version) -> VectorFile:
    return VectorFile(version, np.zeros((0, version.dim), dtype=np.float32), np.zeros(0, dtype=np.int64))


def _compare(part: VectorFile, query: Vectors, candidates: Ids | None) -> tuple[Places, Vectors]:
    """Return row numbers and inner products with the query: of all rows, or of the candidate chunks."""
    places = None if candidates is None else part.places(candidates)
    return np.arange(len(part)) if places is None else places, part.dot(query, places)


def _probe(part: VectorFile, query: Vectors, k: int) -> tuple[Places, Vectors]:
    """Like `_compare`, for the rows of the nearest clusters."""
    assert part.centroids is not None
    nearest = np.argsort(-(part.centroids @ query))
    num_rows = np.cumsum(np.diff(part.starts)[nearest])
    clusters = nearest[: max(part.num_probes, int(np.searchsorted(num_rows, _CANDIDATES * k)) + 1)]
    places = [np.arange(part.starts[number], part.starts[number + 1]) for number in clusters]
    return np.concatenate(places), np.concatenate([part.dot_group(number, query) for number in clusters])


def _best(scores: Vectors, num: int) -> Places:
    """Return the indices of the `num` best scores and of any scores within rounding error of them, in no order."""
    if num >= len(scores):
        return np.arange(len(scores))
    least = np.partition(scores, len(scores) - num)[len(scores) - num]
    return np.flatnonzero(scores >= least - _ROUNDING)


def _product(vector: Vectors, query: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.float32(vector.astype(np.float64) @ query))


def _problem(store: Store, generation: int) -> str:
    try:
        file = open_file(file_of(store.path.parent, generation))
        if (file.version.generation, file.version.stamp) != (generation, store.stamp(generation)):
            return "it belongs to another knowledge base"
        if store.embedder is None or not file.version.same_as(Version(generation, file.version.stamp, *store.embedder)):
            file_of(store.path.parent, generation).unlink(missing_ok=True)  # of the embedder before the last switch: never read again
            return ""
        for ids, vectors in rows_of(store, file.version.dim):
            shared = ids[ids <= file.last_id]
            places = file.places(shared)
            if len(places) != len(shared) or not np.array_equal(file.rows(places), vectors[: len(shared)]):
                return "it differs from the stored vectors"
    except (OSError, DamagedCacheError):
        return "it is damaged"
    return ""
