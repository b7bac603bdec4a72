"""The file `vec-<generation>` beside a knowledge base: its vectors, memory-mapped, and never trusted.

A process that asks one question must not read and check all of it, so the vectors are checked where they are used: each row has a
checksum, and what leads to the rows (ids, places, checksums) is covered by one crc32 that is looked at when the file is opened. The rows
stand in groups. In a flat file these are rows in order of their ids; in a clustered one, the rows that are nearest to one centroid.
A file is written under another name, brought to the disk, and renamed; localrag/kb/vector_layout.py says what stands in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from localrag.kb.vector_layout import (
    HEADER_BYTES,
    DamagedCacheError,
    Directory,
    Header,
    Ids,
    Places,
    Vectors,
    Version,
    row_sums,
    unpack_directory,
    unpack_header,
)
from localrag.locking import try_lock

GROUP_ROWS = 512
"""Rows in a group of a flat file, and of one product with a query. OpenBLAS hands larger products of this kind to all cores, whose waiting
for each other took 190 ms of CPU time for what 20 ms do in pieces, on a busy machine with 2 cores."""

_GATHERED_ROWS = 512  # copied at a time
_GATHER_COST = 8  # reading one row here and there costs as much as so many in order, measured at 100,000 x 384


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
        if self._sums is not None and not np.array_equal(row_sums(found), self._sums[places]):
            raise DamagedCacheError
        return found

    def group(self, number: int) -> Vectors:
        """The rows of one group, checked when they are first asked for."""
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        rows = self.vectors[start:end]
        if not self._checked[number]:
            assert self._sums is not None
            if not np.array_equal(row_sums(rows), self._sums[start:end]):
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
        header = unpack_header(head, status.st_size)
        source.seek(HEADER_BYTES + header.vectors_bytes)
        directory = unpack_directory(head, header, source.read())
        shape = (header.num, header.dim)
        if header.num:
            vectors: Vectors = np.memmap(source, dtype="<f4", mode="r", offset=HEADER_BYTES, shape=shape).view(np.ndarray)
        else:
            vectors = np.zeros(shape, dtype=np.float32)
    return VectorFile(
        header.version,
        vectors,
        directory.ids,
        starts=directory.starts,
        sums=directory.sums,
        centroids=directory.centroids if header.num_centroids else None,
        order=directory.order if header.num_centroids else None,
        num_probes=header.num_probes,
        recall=header.recall,
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
        sums.append(row_sums(block))
    directory = _directory(np.concatenate(ids), np.concatenate(sums), version.dim, clusters)
    header = Header(
        version.dim,
        version.generation,
        version.stamp,
        version.embedder_bytes,
        num=len(directory.ids),
        num_groups=len(directory.starts) - 1,
        num_centroids=len(directory.centroids),
        num_probes=0 if clusters is None else clusters.num_probes,
        recall=1.0 if clusters is None else clusters.recall,
    )
    packed = directory.packed()
    out.write(packed)
    out.seek(0)
    out.write(header.packed(packed))


def _directory(ids: Ids, sums: NDArray[np.uint32], dim: int, clusters: Clusters | None) -> Directory:
    num = len(ids)
    num_rows = np.diff(np.append(np.arange(0, num, GROUP_ROWS), num)) if clusters is None else clusters.num_rows
    starts = np.append(0, np.cumsum(num_rows))
    if clusters is None:
        return Directory(starts, ids, sums, np.zeros((0, dim), dtype=np.float32), np.zeros(0, dtype=np.uint32))
    return Directory(starts, ids, sums, clusters.centroids, np.argsort(ids).astype(np.uint32))


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
