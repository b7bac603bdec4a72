"""The memory-mapped file of vectors `vec-<generation>` in the folder of a knowledge base. Its content is never trusted unchecked.

A process that answers one question must not read the whole file. Each row therefore has a checksum that is verified on first use, and
one crc32, verified on opening, covers everything else: ids, group starts, checksums. A row belongs to a group: in a flat file, rows in id
order; in a clustered file, the rows nearest to one centroid. A file is written under a temporary name, synced and renamed. Layout:

    header                the fields of `Header`, and a crc32
    vectors               num x dim float32, group after group
    directory             start of each group, ids and checksums of the rows, centroids, order of the ids

All numbers are little-endian. The crc32 covers the header and the directory; the directory holds a checksum for each row.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrag.files import locked, open_private, sync_folder

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]
Places = NDArray[np.int64]

GROUP_ROWS = 512
"""Rows in a group of a flat file, and in one product with a query. OpenBLAS spreads larger products over all cores, which then wait for
each other: on a busy machine with 2 cores, 190 ms of CPU time instead of 20 ms in pieces."""

_GATHERED_ROWS = 512  # rows to copy at a time
_GATHER_COST = 8  # reading one row at random costs as much as this many rows in order, measured at 100,000 x 384

_MAGIC = b"LRVECS02"
_CRC = struct.Struct("<8sI")  # magic, crc32 over the rest of the header and the directory
_FIELDS = struct.Struct("<IQQ32sQIIIf40x")
_KINDS = ("<i8", "<i8", "<u4", "<f4", "<u4")  # dtypes of the parts of the directory
HEADER_BYTES = _CRC.size + _FIELDS.size
assert HEADER_BYTES == 128


class DamagedCacheError(Exception):
    """Raised for a file that differs from what was written. Never leaves localrag.kb: the vectors are read from the store instead."""


@dataclass(frozen=True, slots=True)
class Version:
    """What a file of vectors was derived from: a generation of the store, the stamp of that generation, and the embedder."""

    generation: int
    stamp: int
    embedder: str
    dim: int

    @property
    def embedder_bytes(self) -> bytes:
        """The first 32 bytes of the fingerprint (half of a sha256 in hexadecimal), as stored in a file."""
        return self.embedder.encode()[:32].ljust(32, b"\0")

    def same_as(self, other: Version) -> bool:
        own = (self.generation, self.stamp, self.embedder_bytes, self.dim)
        return own == (other.generation, other.stamp, other.embedder_bytes, other.dim)


class Header(NamedTuple):
    """The header of a file: its dimensions, origin and contents."""

    dim: int
    generation: int
    stamp: int
    embedder: bytes  # `Version.embedder_bytes`
    num: int
    num_groups: int
    num_centroids: int
    num_probes: int
    recall: float

    @property
    def version(self) -> Version:
        return Version(self.generation, self.stamp, self.embedder.rstrip(b"\0").decode("ascii", "replace"), self.dim)

    @property
    def vectors_bytes(self) -> int:
        return 4 * self.num * self.dim

    @property
    def directory_sizes(self) -> tuple[int, int, int, int, int]:
        """The size in bytes of each part of the directory. Python's integers do not overflow, so a damaged count cannot look small."""
        order_bytes = 4 * self.num if self.num_centroids else 0
        return 8 * (self.num_groups + 1), 8 * self.num, 4 * self.num, 4 * self.num_centroids * self.dim, order_bytes

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.vectors_bytes + sum(self.directory_sizes)

    def packed(self, directory: bytes) -> bytes:
        """Serialise the header of a file with this directory."""
        fields = _FIELDS.pack(*self)
        return _CRC.pack(_MAGIC, _crc(fields, directory)) + fields


class Directory(NamedTuple):
    """The start of each group, the ids and checksums of the rows, the centroids of the groups, and the order that sorts the ids."""

    starts: Places
    ids: Ids
    sums: NDArray[np.uint32]
    centroids: Vectors
    order: NDArray[np.uint32]

    def packed(self) -> bytes:
        parts: tuple[NDArray[np.generic], ...] = tuple(self)
        return b"".join(part.astype(kind, copy=False).tobytes() for part, kind in zip(parts, _KINDS, strict=True))


class VectorFile:
    """The vectors of one version, in groups, memory-mapped from a file or held in memory."""

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
        """`vectors` has shape (num, dim), `ids` shape (num,); group i is the rows starts[i] to starts[i + 1].

        Rows are checked against `sums` before use; without `sums` they count as checked. With `centroids` of shape (groups, dim), a search
        probes the `num_probes` nearest clusters, which gave the measured recall@10 `recall`. `order` sorts the ids; without it they ascend.
        `identity` distinguishes two files of the same name.
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
        """Return the row numbers of those of the chunk ids that are in the file."""
        if not len(self.ids):
            return np.zeros(0, dtype=np.int64)
        at = np.searchsorted(self.ids, ids, sorter=self._order)
        inside = at < len(self.ids)
        rows: Places = at[inside] if self._order is None else self._order[at[inside]].astype(np.int64)
        same: NDArray[np.bool_] = self.ids[rows] == ids[inside]
        return rows[same]

    def rows(self, places: Places) -> Vectors:
        """Return a checked copy of some rows. Raises DamagedCacheError."""
        vectors = self.vectors[places]
        if self._sums is not None and not np.array_equal(_row_sums(vectors), self._sums[places]):
            raise DamagedCacheError
        return vectors

    def group(self, number: int) -> Vectors:
        """Return the rows of one group, checked on first use. Raises DamagedCacheError."""
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        rows = self.vectors[start:end]
        if not self._checked[number]:
            assert self._sums is not None
            if not np.array_equal(_row_sums(rows), self._sums[start:end]):
                raise DamagedCacheError
            self._checked[number] = True
        return rows

    def dot(self, query: Vectors, places: Places | None = None) -> Vectors:
        """Return the inner products of all rows, or of those at `places`, with a vector of shape (dim,)."""
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
        """Return the inner products of the rows of a group with a vector of shape (dim,)."""
        rows = self.group(number)
        pieces = [rows[at : at + GROUP_ROWS] @ query for at in range(0, len(rows), GROUP_ROWS)]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)


def file_of(folder: Path, generation: int) -> Path:
    return folder / f"vec-{generation}"


def cached_generations(folder: Path) -> list[int]:
    """Return the generations that have a file, newest first."""
    numbers = (entry.name.removeprefix("vec-") for entry in folder.glob("vec-*"))
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def open_file(file: Path) -> VectorFile:
    """Map a file and check everything but the vectors. Raises DamagedCacheError for a damaged file; OSError propagates."""
    with file.open("rb") as source:
        status = os.fstat(source.fileno())
        head = source.read(HEADER_BYTES)
        header = _unpack_header(head, status.st_size)
        source.seek(HEADER_BYTES + header.vectors_bytes)
        directory = _unpack_directory(head, header, source.read())
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
    """The clusters of a file: their sizes and centroids, and the number to probe with the recall that this gives."""

    num_rows: NDArray[np.int64]
    centroids: Vectors
    num_probes: int
    recall: float


def write_file(folder: Path, version: Version, rows: Iterable[tuple[Ids, Vectors]], clusters: Clusters | None = None) -> Path:
    """Write `vec-<generation>` atomically and remove older files. The caller holds the `publishing` lock. OSError propagates.

    `rows` are in file order: in a flat file, by ascending id.
    """
    file = file_of(folder, version.generation)
    with scratch_file(folder, version, rows, clusters) as temporary:
        temporary.replace(file)
    sync_folder(folder)
    for other in folder.glob("vec-*"):
        if other != file and _is_older(other, version.generation):
            with suppress(OSError):  # Windows does not delete mapped files
                other.unlink(missing_ok=True)
    return file


@contextmanager
def scratch_file(folder: Path, version: Version, rows: Iterable[tuple[Ids, Vectors]], clusters: Clusters | None = None) -> Iterator[Path]:
    """Write a file under a temporary name. It is removed on exit unless it was renamed."""
    for leftover in folder.glob("vec-*.tmp"):  # from a killed process, since only the holder of the lock writes
        if not leftover.name.endswith(f".{os.getpid()}.tmp"):
            leftover.unlink(missing_ok=True)
    temporary = folder / f"vec-{version.generation}{'' if clusters is None else '-clustered'}.{os.getpid()}.tmp"
    try:
        with open_private(temporary, "wb") as out:
            _write(out, version, rows, clusters)
            out.flush()
            os.fsync(out.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def publishing(folder: Path) -> Iterator[bool]:
    """Try to take the lock for writing vector files; yield whether that succeeded. The lock is released if the process dies."""
    with ExitStack() as stack:
        allowed = False
        with suppress(OSError):
            stack.enter_context(locked(folder / "vec.lock"))
            allowed = True
        yield allowed


def _write(out: IO[bytes], version: Version, rows: Iterable[tuple[Ids, Vectors]], clusters: Clusters | None) -> None:
    out.write(b"\0" * HEADER_BYTES)
    ids, sums = [np.zeros(0, dtype="<i8")], [np.zeros(0, dtype="<u4")]
    for some_ids, vectors in rows:
        block = np.ascontiguousarray(vectors, dtype="<f4")
        out.write(block.data)
        ids.append(some_ids)
        sums.append(_row_sums(block))
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


def _unpack_header(head: bytes, file_bytes: int) -> Header:
    """Read the header of a file of this size. Raises DamagedCacheError if it is invalid or does not match the size."""
    if len(head) < HEADER_BYTES:
        raise DamagedCacheError
    header = Header(*_FIELDS.unpack_from(head, _CRC.size))
    if not head.startswith(_MAGIC) or file_bytes != header.file_bytes or header.num_centroids not in {0, header.num_groups}:
        raise DamagedCacheError
    return header


def _unpack_directory(head: bytes, header: Header, directory: bytes) -> Directory:
    """Read the directory of a file whose header has the bytes `head`. Raises DamagedCacheError unless both are intact."""
    if _crc(head[_CRC.size :], directory) != _CRC.unpack_from(head)[1]:
        raise DamagedCacheError
    ends = np.cumsum([0, *header.directory_sizes])
    starts, ids, sums, centroids, order = (
        np.frombuffer(directory[at:end], dtype=kind) for at, end, kind in zip(ends, ends[1:], _KINDS, strict=False)
    )
    return Directory(starts, ids, sums, centroids.reshape(header.num_centroids, header.dim), order)


def _row_sums(rows: Vectors) -> NDArray[np.uint32]:
    """Return the sum of each row's 32-bit words, modulo 2**32. It is as fast as memory and detects any single flipped bit."""
    if not len(rows):
        return np.zeros(0, dtype=np.uint32)
    sums: NDArray[np.uint32] = np.add.reduce(rows.view(np.uint32), axis=1, dtype=np.uint32)
    return sums


def _crc(fields: bytes, directory: bytes) -> int:
    return zlib.crc32(directory, zlib.crc32(fields))
