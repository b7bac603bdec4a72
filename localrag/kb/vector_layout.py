"""The file `vec-<generation>`, byte by byte. localrag/kb/vector_cache.py says what it is for.

    header                what `Header` says, and a crc32
    vectors               num x dim float32, group after group
    directory             where each group begins, ids and checksums of the rows, centroids, order of the ids

All numbers are little-endian. The crc32 covers the header and the directory; each row of the vectors has a checksum in the directory.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]
Places = NDArray[np.int64]

_MAGIC = b"LRVECS02"
_CRC = struct.Struct("<8sI")  # magic, crc32 of all the rest of the header and of the directory
_FIELDS = struct.Struct("<IQQ32sQIIIf40x")
HEADER_BYTES = _CRC.size + _FIELDS.size
assert HEADER_BYTES == 128


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


class Header(NamedTuple):
    """What a file says of itself: its dimensions, what it was made from, and what stands in it."""

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
        """Bytes of each part of the directory. Python's integers do not wrap, so that damaged counts cannot pass for small ones."""
        order_bytes = 4 * self.num if self.num_centroids else 0
        return 8 * (self.num_groups + 1), 8 * self.num, 4 * self.num, 4 * self.num_centroids * self.dim, order_bytes

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.vectors_bytes + sum(self.directory_sizes)

    def packed(self, directory: bytes) -> bytes:
        """The header of a file with this directory."""
        fields = _FIELDS.pack(*self)
        return _CRC.pack(_MAGIC, _crc(fields, directory)) + fields


class Directory(NamedTuple):
    """Where each group begins, the ids of the rows, their checksums, the centroids of the groups, and the order that sorts the ids."""

    starts: Places
    ids: Ids
    sums: NDArray[np.uint32]
    centroids: Vectors
    order: NDArray[np.uint32]

    def packed(self) -> bytes:
        parts: tuple[NDArray[np.generic], ...] = tuple(self)
        return b"".join(part.astype(kind, copy=False).tobytes() for part, kind in zip(parts, _KINDS, strict=True))


_KINDS = ("<i8", "<i8", "<u4", "<f4", "<u4")


def unpack_header(head: bytes, file_bytes: int) -> Header:
    """The header at the begin of a file of this size. DamagedCacheError if there is none, or it is of another file."""
    if len(head) < HEADER_BYTES:
        raise DamagedCacheError
    header = Header(*_FIELDS.unpack_from(head, _CRC.size))
    if not head.startswith(_MAGIC) or file_bytes != header.file_bytes or header.num_centroids not in {0, header.num_groups}:
        raise DamagedCacheError
    return header


def unpack_directory(head: bytes, header: Header, directory: bytes) -> Directory:
    """The directory that belongs to a header, of which `head` are the bytes. DamagedCacheError if one of them is not what was written."""
    if _crc(head[_CRC.size :], directory) != _CRC.unpack_from(head)[1]:
        raise DamagedCacheError
    ends = np.cumsum([0, *header.directory_sizes])
    starts, ids, sums, centroids, order = (
        np.frombuffer(directory[at:end], dtype=kind) for at, end, kind in zip(ends, ends[1:], _KINDS, strict=False)
    )
    return Directory(starts, ids, sums, centroids.reshape(header.num_centroids, header.dim), order)


def row_sums(rows: Vectors) -> NDArray[np.uint32]:
    """The sum of each row's 32-bit words, modulo 2**32: at the speed of the memory, and changed by every single flipped bit."""
    if not len(rows):
        return np.zeros(0, dtype=np.uint32)
    sums: NDArray[np.uint32] = np.add.reduce(rows.view(np.uint32), axis=1, dtype=np.uint32)
    return sums


def _crc(fields: bytes, directory: bytes) -> int:
    return zlib.crc32(directory, zlib.crc32(fields))
