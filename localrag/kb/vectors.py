"""The vector index: derived from the store, kept beside it as a file, and never older or other than the truth.

An index is a file of vectors of some earlier generation (localrag/kb/vector_cache.py) and, in memory, the vectors that came since. Both
are searched, and what was found is looked up in the store, where what was removed is missing. This rests on two promises of the store:
an id is never used twice and grows with time, and the vector of an id never changes. The stamp of a generation tells a file of this
store's own past from one of a store that was put back from a backup and went another way.

Searching is exact (every vector is compared) until localrag/kb/ann.py has made a clustered file, in the background. A query imports
neither faiss nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from localrag.kb.vector_cache import GROUP_ROWS, VectorFile, cached_generations, file_of, open_file, publishing, write_file
from localrag.kb.vector_layout import DamagedCacheError, Ids, Places, Vectors, Version

__all__ = ["APPROXIMATE_FROM", "VectorIndex", "Vectors", "load_index"]

APPROXIMATE_FROM = 100_000
"""Chunks from which a clustered file is worth its making: exact search of 100,000 x 384 takes 8 to 20 ms on 2 cores, with their load."""

NUM_CHANGED = 2048
"""A file is made anew when so many chunks, and a sixteenth of it, came or went since: 2,048 are read from the store in 10 ms."""

_ROUNDING = 1e-5  # more than two ways of adding up one inner product of unit vectors differ
_CANDIDATES = 4  # vectors that are compared at least, for each that is wanted


class Truth(Protocol):
    """What is needed of a store; localrag/kb/store.py says what each is."""

    path: Path

    @property
    def generation(self) -> int: ...
    @property
    def embedder(self) -> tuple[str, int] | None: ...
    @property
    def num_chunks(self) -> int: ...
    def stamp(self, generation: int) -> int | None: ...
    def vectors(self, after: int = 0) -> Iterator[tuple[int, bytes]]: ...
    def existing(self, ids: Sequence[int]) -> list[int]: ...


class VectorIndex:
    """Cosine similarity over the chunks of one generation of a store. Use it inside `store.reading()`, at that generation."""

    def __init__(self, truth: Truth, version: Version, base: VectorFile, added: VectorFile) -> None:
        """`base` is of this version or of an earlier one of this store; `added` holds what came since, by id."""
        self.version = version
        self.base = base
        self.added = added
        self._truth = truth
        self._moved_on = base.version.generation != version.generation
        self._num_chunks = truth.num_chunks if self._moved_on else len(base)

    @property
    def generation(self) -> int:
        return self.version.generation

    def __len__(self) -> int:
        return self._num_chunks

    @property
    def num_changed(self) -> int:
        """How many chunks came or went since the file was made."""
        return len(self.added) + max(0, len(self.base) + len(self.added) - self._num_chunks)

    @property
    def is_outdated(self) -> bool:
        return self.num_changed > NUM_CHANGED + len(self.base) // 16

    @property
    def wants_clusters(self) -> bool:
        """Whether localrag/kb/ann.py should be started: searching would be faster with a new clustered file."""
        return self._num_chunks >= APPROXIMATE_FROM and (self.base.centroids is None or self.is_outdated)

    def search(self, query: Vectors, k: int, among: Sequence[int] | Ids | None = None) -> list[tuple[int, float]]:
        """The `k` nearest chunks to a vector of shape (dim,), as (chunk id, cosine similarity), best first, ties by id.

        With `among`, only of these chunks; that is exact always, in time proportional to their number, or that of all if they are many.
        Without, it is exact unless the index is clustered: then `base.recall` of the 10 nearest were found when that was measured.
        """
        if k < 1:
            return []
        wanted = None if among is None else np.unique(np.asarray(among, dtype=np.int64))
        query = np.ascontiguousarray(query, dtype=np.float32)
        try:
            return self._search(query, k, wanted)
        except DamagedCacheError:
            self._do_without_file()
            return self._search(query, k, wanted)

    def similarities(self, query: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """The cosine similarity of each of these chunks with a vector of shape (dim,); ids that are not here are left out."""
        exact = query.astype(np.float64)
        return {one: _product(vector, exact) for one, vector in self.vectors_of(ids).items()}

    def vectors_of(self, ids: Sequence[int]) -> dict[int, Vectors]:
        """The vector, of shape (dim,), of each of these chunks; ids that are not here are left out."""
        wanted = np.unique(np.asarray(self._present(ids), dtype=np.int64))
        try:
            return self._vectors_of(wanted)
        except DamagedCacheError:
            self._do_without_file()
            return self._vectors_of(wanted)

    def _vectors_of(self, wanted: Ids) -> dict[int, Vectors]:
        found: dict[int, Vectors] = {}
        for part in (self.base, self.added):
            places = part.places(wanted)
            found.update(zip(part.ids[places].tolist(), part.rows(places), strict=True))
        return found

    def _search(self, query: Vectors, k: int, wanted: Ids | None, *, exact: bool = False) -> list[tuple[int, float]]:
        clustered = self.base.centroids is not None and wanted is None and not exact
        parts = (self.base, self.added)
        compared = [_probe(self.base, query, k) if part is self.base and clustered else _compare(part, query, wanted) for part in parts]
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
            depth *= 4  # so many of the best were removed since
        if len(best) < k and clustered and len(scores) < len(self.base):
            return self._search(query, k, wanted, exact=True)
        # The scores that are given out are computed alike wherever a vector stands, so that equal vectors tie.
        precise = query.astype(np.float64)
        hits = []
        for part, here in ((self.base, best[in_base[best]]), (self.added, best[~in_base[best]])):
            vectors = part.rows(places[here])
            hits += [(one, _product(vector, precise)) for one, vector in zip(ids[here].tolist(), vectors, strict=True)]
        return sorted(hits, key=lambda hit: (-hit[1], hit[0]))[:k]

    def _present(self, ids: Sequence[int]) -> Sequence[int]:
        """Those of these chunks that this generation of the store has."""
        return self._truth.existing(ids) if self._moved_on else ids

    def _do_without_file(self) -> None:
        """The file is not what was written: read the store instead, and let the next process make a new file."""
        with suppress(OSError):
            file_of(self._truth.path.parent, self.base.version.generation).unlink(missing_ok=True)
        self.base = _in_memory(self._truth, self.version)
        self.added = _empty(self.version)
        self._moved_on, self._num_chunks = False, len(self.base)


def load_index(store: Truth, previous: VectorIndex | None = None) -> VectorIndex | None:
    """The index of the store's present generation; None if nothing was ever stored. `previous`, of the same store, spares reading.

    Call it inside `store.reading()`. A file is made where there is none that serves; one that cannot be written is no error.
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
    if index.is_outdated and len(index) < APPROXIMATE_FROM:  # larger ones are made anew in the background
        return VectorIndex(store, version, make_flat(store, version), _empty(version))
    return index


def make_flat(store: Truth, version: Version) -> VectorFile:
    """All vectors of this version, the store's present one, by id: from a new file if it can be written, else in memory."""
    folder = store.path.parent
    with publishing(folder) as allowed, suppress(OSError, DamagedCacheError):
        if allowed:
            return open_file(write_file(folder, version, rows_of(store, version.dim)))
    return _in_memory(store, version)


def rows_of(store: Truth, dim: int, after: int = 0) -> Iterator[tuple[Ids, Vectors]]:
    """Ids and vectors of the store's chunks beyond an id, some hundreds at a time, by id."""
    rows = store.vectors(after)
    while batch := list(islice(rows, GROUP_ROWS)):
        ids = np.fromiter((one for one, _ in batch), dtype=np.int64, count=len(batch))
        yield ids, np.frombuffer(b"".join(vector for _, vector in batch), dtype="<f4").reshape(len(batch), dim)


def newest_file(store: Truth, version: Version, previous: VectorIndex | None = None) -> VectorFile | None:
    """The newest file of vectors that this version grew from, or is."""
    folder = store.path.parent
    for generation in cached_generations(folder):
        stamp = store.stamp(generation) if generation <= version.generation else None
        if stamp is None:
            continue
        file = file_of(folder, generation)
        with suppress(OSError, DamagedCacheError):
            status = file.stat()
            if previous is not None and previous.base.identity == (status.st_dev, status.st_ino, status.st_mtime_ns):
                found = previous.base
            else:
                found = open_file(file)
            mine = Version(generation, stamp, version.embedder, version.dim)
            if found.version.same_as(mine):
                return found
    return None


def _added_since(store: Truth, version: Version, base: VectorFile, previous: VectorIndex | None) -> VectorFile:
    if base.version.generation == version.generation:
        return _empty(version)
    known = None
    if previous is not None and previous.base is base and store.stamp(previous.generation) == previous.version.stamp:
        known = previous.added
    last_id = max(base.last_id, known.last_id if known else 0)
    new = _in_memory(store, version, after=last_id)
    if known is None or not len(known):
        return new
    return VectorFile(version, np.concatenate((known.vectors, new.vectors)), np.concatenate((known.ids, new.ids))) if len(new) else known


def _in_memory(store: Truth, version: Version, *, after: int = 0) -> VectorFile:
    data, ids = bytearray(), [np.zeros(0, dtype=np.int64)]
    for some, vectors in rows_of(store, version.dim, after):
        ids.append(some)
        data += vectors.data
    return VectorFile(version, np.frombuffer(data, dtype="<f4").reshape(-1, version.dim), np.concatenate(ids))


def _empty(version: Version) -> VectorFile:
    return VectorFile(version, np.zeros((0, version.dim), dtype=np.float32), np.zeros(0, dtype=np.int64))


def _compare(part: VectorFile, query: Vectors, wanted: Ids | None) -> tuple[Places, Vectors]:
    """Rows and their inner products with the query: all rows, or those of the chunks that are wanted."""
    places = None if wanted is None else part.places(wanted)
    return np.arange(len(part)) if places is None else places, part.dot(query, places)


def _probe(part: VectorFile, query: Vectors, k: int) -> tuple[Places, Vectors]:
    """The same for the rows of the nearest clusters."""
    assert part.centroids is not None
    nearest = np.argsort(-(part.centroids @ query))
    num_rows = np.cumsum(np.diff(part.starts)[nearest])
    chosen = nearest[: max(part.num_probes, int(np.searchsorted(num_rows, _CANDIDATES * k)) + 1)]
    places = [np.arange(part.starts[number], part.starts[number + 1]) for number in chosen]
    return np.concatenate(places), np.concatenate([part.dot_group(number, query) for number in chosen])


def _best(scores: Vectors, num: int) -> Places:
    """Where the `num` best scores stand, and those that rounding may have put behind them; in no order."""
    if num >= len(scores):
        return np.arange(len(scores))
    least = np.partition(scores, len(scores) - num)[len(scores) - num]
    return np.flatnonzero(scores >= least - _ROUNDING)


def _product(vector: Vectors, query: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.float32(vector.astype(np.float64) @ query))
