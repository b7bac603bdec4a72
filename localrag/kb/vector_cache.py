"""The file `vec-<generation>` beside a knowledge base: its vectors, memory-mapped, and never trusted.

A process that asks one question must not read and check all of it, so the vectors are checked where they are used: each row has a
checksum, and what leads to the rows (ids, places, checksums) is covered by one crc32 that is looked at when the file is opened. The rows
stand in groups. In a flat file these are rows in order of their ids; in a clustered one, the rows that are nearest to one centroid.

    header                what `_HEADER` says
    vectors               num x dim float32, group after group
    directory             where each group begins, checksum and id of each row, centroids, order of the ids

All numbers are little-endian. A file is written under another name, brought to the disk, and renamed.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from localrag.locking import try_lock

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]
Places = NDArray[np.int64]

GROUP_ROWS = 512
"""Rows in a group of a flat file, and of one product with a query. OpenBLAS hands larger products of this kind to all cores, whose waiting
for each other took 190 ms of CPU time for what 20 ms do in pieces, on a busy machine with 2 cores."""

_MAGIC = b"LRVECS02"
# magic, crc32 of all the rest of the header and of the directory, dimensions, then what `_FIELDS` names
_CRC = struct.Struct("<8sI")
_FIELDS = struct.Struct("<IQQ32sQIIIf40x")  # dim, generation, stamp, embedder, num, groups, centroids, num_probes, recall
HEADER_BYTES = _CRC.size + _FIELDS.size
assert HEADER_BYTES == 128
_GATHERED_ROWS = 512  # copied at a time
_GATHER_COST = 8  # reading one row here and there costs as much as so many in order, measured at 100,000 x 384


class DamagedCacheError(Exception):
    """A cache is not what was written. Never leaves localrag.kb: the vectors are read from the store instead."""


@dataclass(frozen=True, slots=True)
class Version:
    """What a file of vectors was made from: the store's generation, that generation's stamp, and the embedder."""

    generation: int
    stamp: int
    embedder: str
    dim: int

    @property
    def embedder_bytes(self) -> bytes:
        """The first 32 bytes of the fingerprint, which are half of a sha256 in hexadecimal: what a file keeps of it."""
        return self.embedder.encode()[:32].ljust(32, b"\0")

    def same_as(self, other: Version) -> bool:
        own = (self.generation, self.stamp, self.embedder_bytes, self.dim)
        return own == (other.generation, other.stamp, other.embedder_bytes, other.dim)


class VectorFile:
    """The vectors of one version, in groups, mapped from a file or held in memory."""

    def __init__(
        self,
        version: Version,
        vectors: Vectors,
        ids: Ids,
        *,
        starts: Places | None = None,
        sums: NDArray[np.uint32] | None = None,
        centroids: Vectors | None = None,
        order: NDArray[np.uint32] | None = None,
        num_probes: int = 0,
        recall: float = 1.0,
        identity: tuple[int, ...] = (),
    ) -> None:
        """`vectors` of shape (num, dim); `ids` of shape (num,), those of the rows; group i is the rows starts[i] to starts[i + 1].

        Rows are checked against `sums` before they are used; without it they count as checked. With `centroids` of shape (groups, dim),
        a search follows the `num_probes` nearest of them, which found the share `recall` of the 10 nearest when that was measured.
        `order` sorts the ids; without it they ascend. `identity` tells two files of one name apart.
        """
        self.version = version
        self.vectors = vectors
        self.ids = ids
        self.starts = np.array([0, len(ids)], dtype=np.int64) if starts is None else starts
        self.centroids = centroids
        self.num_probes = num_probes
        self.recall = recall
        self.identity = identity
        self._order = order
        self._sums = sums
        self._checked = np.full(len(self.starts) - 1, sums is None)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def last_id(self) -> int:
        """The greatest chunk id in it; 0 if it is empty."""
        if not len(self.ids):
            return 0
        return int(self.ids[-1] if self._order is None else self.ids[self._order[-1]])

    def places(self, ids: Ids) -> Places:
        """The rows of those of these chunk ids that are here."""
        if not len(self.ids):
            return np.zeros(0, dtype=np.int64)
        at = np.searchsorted(self.ids, ids, sorter=self._order)
        inside = at < len(self.ids)
        rows: Places = at[inside] if self._order is None else self._order[at[inside]].astype(np.int64)
        same: NDArray[np.bool_] = self.ids[rows] == ids[inside]
        return rows[same]

    def rows(self, places: Places) -> Vectors:
        """A copy of some rows, checked."""
        found = self.vectors[places]
        if self._sums is not None and not np.array_equal(_row_sums(found), self._sums[places]):
            raise DamagedCacheError
        return found

    def group(self, number: int) -> Vectors:
        """The rows of one group, checked when they are first asked for."""
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        rows = self.vectors[start:end]
        if not self._checked[number]:
            assert self._sums is not None
            if not np.array_equal(_row_sums(rows), self._sums[start:end]):
                raise DamagedCacheError
            self._checked[number] = True
        return rows

    def dot(self, query: Vectors, places: Places | None = None) -> Vectors:
        """The inner product of every row, or of these, with a vector of shape (dim,), at the speed of the memory."""
        if places is not None and len(places) * _GATHER_COST < len(self):
            blocks = [self.rows(places[at : at + _GATHERED_ROWS]) @ query for at in range(0, len(places), _GATHERED_ROWS)]
            return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)
        products = self._dot_all(query)
        return products if places is None else products[places]

    def _dot_all(self, query: Vectors) -> Vectors:
        if self._checked.all():
            return self.vectors @ query
        return np.concatenate([self.dot_group(number, query) for number in range(len(self._checked))])

    def dot_group(self, number: int, query: Vectors) -> Vectors:
        """The inner product of every row of a group with a vector of shape (dim,)."""
        rows = self.group(number)
        pieces = [rows[at : at + GROUP_ROWS] @ query for at in range(0, len(rows), GROUP_ROWS)]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)


def file_of(folder: Path, generation: int) -> Path:
    return folder / f"vec-{generation}"


def cached_generations(folder: Path) -> list[int]:
    """The generations of which there is a file, newest first."""
    numbers = (entry.name.removeprefix("vec-") for entry in folder.glob("vec-*"))
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def open_file(file: Path) -> VectorFile:
    """Maps a file and checks all of it but the vectors. DamagedCacheError for what is not a whole file; OSError as it comes."""
    with file.open("rb") as source:
        status = os.fstat(source.fileno())
        head = source.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES:
            raise DamagedCacheError
        magic, crc = _CRC.unpack_from(head)
        dim, generation, stamp, embedder, num, num_groups, num_centroids, num_probes, recall = _FIELDS.unpack_from(head, _CRC.size)
        sizes = _directory_sizes(num, dim, num_groups, num_centroids)
        vectors_bytes = 4 * num * dim
        if magic != _MAGIC or status.st_size != HEADER_BYTES + vectors_bytes + sum(sizes) or num_centroids not in {0, num_groups}:
            raise DamagedCacheError
        source.seek(HEADER_BYTES + vectors_bytes)
        directory = source.read(sum(sizes))
        if zlib.crc32(directory, zlib.crc32(head[_CRC.size :])) != crc:
            raise DamagedCacheError
        if num:
            vectors: Vectors = np.memmap(source, dtype="<f4", mode="r", offset=HEADER_BYTES, shape=(num, dim)).view(np.ndarray)
        else:
            vectors = np.zeros((0, dim), dtype=np.float32)
    ends = np.cumsum([0, *sizes])
    starts, ids, sums, centroids, order = (
        np.frombuffer(directory[at:end], dtype=kind)
        for at, end, kind in zip(ends, ends[1:], ("<i8", "<i8", "<u4", "<f4", "<u4"), strict=False)
    )
    return VectorFile(
        Version(generation, stamp, embedder.rstrip(b"\0").decode("ascii", "replace"), dim),
        vectors,
        ids,
        starts=starts,
        sums=sums,
        centroids=centroids.reshape(num_centroids, dim) if num_centroids else None,
        order=order if num_centroids else None,
        num_probes=num_probes,
        recall=recall,
        identity=(status.st_dev, status.st_ino, status.st_mtime_ns),
    )


@dataclass(slots=True)
class Clusters:
    """What makes a clustered file of a flat one: the groups' sizes, their centroids, and how many are followed for which recall."""

    num_rows: NDArray[np.int64]
    centroids: Vectors
    num_probes: int
    recall: float


def write_file(folder: Path, version: Version, rows: Iterable[tuple[Ids, Vectors]], clusters: Clusters | None = None) -> Path:
    """Writes `vec-<generation>` and removes older ones; the caller holds the `publishing` lock. OSError as it comes.

    `rows` come in order of the file; in a flat one, by ascending ids. Under its name there is a whole file or none, at every instant.
    """
    file = file_of(folder, version.generation)
    with scratch_file(folder, version, rows, clusters) as temporary:
        temporary.replace(file)
    _sync_folder(folder)
    for other in folder.glob("vec-*"):
        if other != file and _is_older(other, version.generation):
            with suppress(OSError):  # still mapped, on a system that minds
                other.unlink(missing_ok=True)
    return file


@contextmanager
def scratch_file(folder: Path, version: Version, rows: Iterable[tuple[Ids, Vectors]], clusters: Clusters | None = None) -> Iterator[Path]:
    """The same under a name that nobody else reads; it is removed if it still has that name afterwards."""
    for leftover in folder.glob("vec-*.tmp"):  # of a process that was killed: who writes holds the lock
        if not leftover.name.endswith(f".{os.getpid()}.tmp"):
            leftover.unlink(missing_ok=True)
    temporary = folder / f"vec-{version.generation}{'' if clusters is None else '-clustered'}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as out:
            _write(out, version, rows, clusters)
            out.flush()
            os.fsync(out.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def publishing(folder: Path) -> Iterator[bool]:
    """Whether this process may write vector files now: one at a time does, and the lock of one that died is free."""
    try:
        lock = (folder / "vec.lock").open("ab")
    except OSError:
        yield False
        return
    with lock:
        yield try_lock(lock.fileno())


def _write(out: IO[bytes], version: Version, rows: Iterable[tuple[Ids, Vectors]], clusters: Clusters | None) -> None:
    out.write(b"\0" * HEADER_BYTES)
    ids, sums = [np.zeros(0, dtype="<i8")], [np.zeros(0, dtype="<u4")]
    for some_ids, vectors in rows:
        block = np.ascontiguousarray(vectors, dtype="<f4")
        out.write(block.data)
        ids.append(some_ids)
        sums.append(_row_sums(block))
    all_ids = np.concatenate(ids).astype("<i8")
    num = len(all_ids)
    num_rows = np.diff(np.append(np.arange(0, num, GROUP_ROWS), num)) if clusters is None else clusters.num_rows
    starts = np.append(0, np.cumsum(num_rows)).astype("<i8")
    centroids = np.zeros((0, version.dim), dtype="<f4") if clusters is None else clusters.centroids.astype("<f4")
    order = np.zeros(0, dtype="<u4") if clusters is None else np.argsort(all_ids).astype("<u4")
    num_probes, recall = (0, 1.0) if clusters is None else (clusters.num_probes, clusters.recall)
    parts = (starts, all_ids, np.concatenate(sums).astype("<u4"), centroids, order)
    directory = b"".join(part.tobytes() for part in parts)
    fields = _FIELDS.pack(
        version.dim,
        version.generation,
        version.stamp,
        version.embedder_bytes,
        num,
        len(starts) - 1,
        len(centroids),
        num_probes,
        recall,
    )
    out.write(directory)
    out.seek(0)
    out.write(_CRC.pack(_MAGIC, zlib.crc32(directory, zlib.crc32(fields))) + fields)


def _directory_sizes(num: int, dim: int, num_groups: int, num_centroids: int) -> tuple[int, int, int, int, int]:
    """Bytes of each part of the directory. Python's integers do not wrap, so that damaged counts cannot pass for small ones."""
    return 8 * (num_groups + 1), 8 * num, 4 * num, 4 * num_centroids * dim, 4 * num if num_centroids else 0


def _row_sums(rows: Vectors) -> NDArray[np.uint32]:
    """The sum of each row's 32-bit words, modulo 2**32: at the speed of the memory, and changed by every single flipped bit."""
    if not len(rows):
        return np.zeros(0, dtype=np.uint32)
    sums: NDArray[np.uint32] = np.add.reduce(rows.view(np.uint32), axis=1, dtype=np.uint32)
    return sums


def _is_older(file: Path, generation: int) -> bool:
    number = file.name.removeprefix("vec-")
    return number.isdecimal() and int(number) < generation


def _sync_folder(folder: Path) -> None:
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
