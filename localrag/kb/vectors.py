"""The vector index: derived from the store, held by FAISS, kept on disk as a cache that is never trusted.

This is the only file that imports faiss. FAISS's own index files are not used: a damaged one can corrupt memory. The cache is
`vec-<generation>` beside the database, and whatever does not match it byte for byte, generation for generation, is built again.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from localrag.kb.store import Store

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]

_MAGIC = b"LRVECS01"
_HEADER = struct.Struct("<8sQQII")  # magic, generation, number of vectors, dimensions, crc32 of all that follows
# Then the ids as int64 and the vectors as float32, both little-endian.


class VectorIndex:
    """Cosine similarity over the chunks of one generation of a store, exact (flat inner product of unit vectors)."""

    def __init__(self, generation: int, ids: Ids, vectors: Vectors) -> None:
        """`ids` of shape (n,), ascending; `vectors` of shape (n, dim), each row of length 1."""
        self.generation = generation
        self._ids = ids
        self._index: Any = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(np.ascontiguousarray(vectors, dtype=np.float32))

    def __len__(self) -> int:
        return len(self._ids)

    def search(self, query: Vectors, k: int) -> list[tuple[int, float]]:
        """The `k` nearest chunks to a vector of shape (dim,), as (chunk id, cosine similarity), best first, ties by id."""
        if not len(self._ids) or k < 1:
            return []
        scores, places = self._index.search(query.reshape(1, -1), min(k, len(self._ids)))
        found = [(int(self._ids[place]), float(score)) for place, score in zip(places[0], scores[0], strict=True) if place >= 0]
        return sorted(found, key=lambda hit: (-hit[1], hit[0]))

    def similarities(self, query: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """The cosine similarity of each of these chunks with a vector of shape (dim,); ids that are not here are left out."""
        places = np.searchsorted(self._ids, ids)
        known = [(one, int(place)) for one, place in zip(ids, places, strict=True) if place < len(self._ids) and self._ids[place] == one]
        return {one: float(self._index.reconstruct(place) @ query) for one, place in known}


def load_index(store: Store) -> VectorIndex | None:
    """The index of the store's present generation, from the cache if it fits, else built and cached; None if nothing is stored.

    Call it inside `store.reading()`. A cache that cannot be written is no error.
    """
    embedder = store.embedder
    if embedder is None:
        return None
    generation, dim = store.generation, embedder[1]
    file = store.path.parent / f"vec-{generation}"
    cached = _read_cache(file, generation, dim)
    if cached is not None:
        return VectorIndex(generation, *cached)
    known, data = [], bytearray()
    for chunk_id, vector in store.vectors():
        known.append(chunk_id)
        data += vector
    ids, vectors = np.array(known, dtype="<i8"), np.frombuffer(data, dtype="<f4").reshape(len(known), dim)
    with suppress(OSError):
        _write_cache(file, generation, ids, vectors)
    return VectorIndex(generation, ids, vectors)


def _read_cache(file: Path, generation: int, dim: int) -> tuple[Ids, Vectors] | None:
    try:
        data = file.read_bytes()
    except OSError:
        return None
    if len(data) < _HEADER.size:
        return None
    magic, its_generation, num, its_dim, crc = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    if (magic, its_generation, its_dim, len(body)) != (_MAGIC, generation, dim, num * (8 + 4 * dim)) or zlib.crc32(body) != crc:
        return None
    return np.frombuffer(body[: 8 * num], dtype="<i8"), np.frombuffer(body[8 * num :], dtype="<f4").reshape(num, dim)


def _write_cache(file: Path, generation: int, ids: Ids, vectors: Vectors) -> None:
    """Published by rename, after its bytes are on the disk: under its name there is a whole file or none. Older ones are removed."""
    parts = ids.astype("<i8").tobytes(), vectors.astype("<f4").tobytes()
    header = _HEADER.pack(_MAGIC, generation, len(ids), vectors.shape[1], zlib.crc32(parts[1], zlib.crc32(parts[0])))
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            out.writelines((header, *parts))
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(file.parent)
    for other in file.parent.glob("vec-*"):
        if other != file and _is_older(other, generation):
            other.unlink(missing_ok=True)


def _is_older(file: Path, generation: int) -> bool:
    number = file.name.removeprefix("vec-").partition(".")[0]  # also a .tmp that a killed process left behind
    return number.isdecimal() and int(number) < generation


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
