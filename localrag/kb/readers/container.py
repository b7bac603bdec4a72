"""The ZIP container of a document: its members, unpacked within bounds. Only `zipfile` of the standard library."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator

from localrag.kb.readers.base import UnreadableError

MAX_MEMBERS = 10_000
MAX_UNPACKED_BYTES = 256 * 1024 * 1024  # of all members that are read
MAX_MEMBER_BYTES = 20 * 1024 * 1024  # of one that is read whole
MAX_RATIO = 500  # deflate reaches 1,032; a sheet of like rows stays below 200
BLOCK_BYTES = 64 * 1024

_RATIO_FROM_BYTES = 8 * 1024 * 1024
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BOMB = "it unpacks to far more than its size (a zip bomb)"

# What zipfile was seen to raise for damaged containers; for methods it does not know it is a kind of RuntimeError.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError, IndexError, OverflowError, RuntimeError)


class Container:
    """The members of a document of `kind`, such as "DOCX", by their names. All that is unpacked counts towards `max_unpacked_bytes`."""

    def __init__(self, data: bytes, kind: str, *, max_unpacked_bytes: int = MAX_UNPACKED_BYTES) -> None:
        self.kind = kind
        self._max_unpacked_bytes = max_unpacked_bytes
        self._num_bytes = 0
        if not data.startswith(b"PK"):
            raise UnreadableError(f"it is not a {kind} file" if data else "it is empty")
        if data.count(b"PK\x01\x02") > MAX_MEMBERS:  # counted before zipfile builds an object for each
            raise UnreadableError(f"it holds more than {MAX_MEMBERS:,} files")
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except _ZIP_ERRORS:
            raise UnreadableError(f"it is damaged or cut off: no {kind} file can be opened") from None
        self._members = {_plain(info.filename): info for info in self._zip.infolist()}

    def __contains__(self, name: str) -> bool:
        return _plain(name) in self._members

    def blocks(self, name: str) -> Iterator[bytes]:
        """A member's bytes in pieces. UnreadableError if it is missing, encrypted, damaged or a bomb."""
        info = self._members.get(_plain(name))
        if info is None:
            raise UnreadableError(f"it is not a whole {self.kind} file: {shown(name)} is missing")
        if info.flag_bits & 1:
            raise UnreadableError("it is protected by a password")
        if info.compress_type not in _METHODS:
            raise UnreadableError(f"{shown(name)} in it is packed in a way that is not read")
        num_bytes = 0
        try:
            with self._zip.open(info) as member:
                while block := member.read(BLOCK_BYTES):
                    num_bytes += len(block)
                    self._num_bytes += len(block)
                    too_dense = num_bytes > _RATIO_FROM_BYTES and num_bytes > MAX_RATIO * info.compress_size
                    if too_dense or self._num_bytes > self._max_unpacked_bytes:
                        raise UnreadableError(_BOMB if too_dense else _unpacked(self._max_unpacked_bytes))
                    yield block
        except _ZIP_ERRORS:
            raise UnreadableError(f"it is damaged: {shown(name)} in it cannot be unpacked") from None

    def read(self, name: str, max_bytes: int = MAX_MEMBER_BYTES) -> bytes:
        """A whole member of at most `max_bytes`."""
        pieces, num_bytes = [], 0
        for block in self.blocks(name):
            num_bytes += len(block)
            if num_bytes > max_bytes:
                raise UnreadableError(f"{shown(name)} in it is larger than {max_bytes // 1024 // 1024} MB")
            pieces.append(block)
        return b"".join(pieces)


def _plain(name: str) -> str:
    """Member names are compared without regard to case; some programs write backslashes."""
    return name.replace("\\", "/").lstrip("/").lower()


def shown(name: str) -> str:
    """The name of a member, fit to stand in an error."""
    return name[:80].encode("ascii", "backslashreplace").decode()


def _unpacked(max_bytes: int) -> str:
    return f"it unpacks to more than {max_bytes // 1024 // 1024} MB"
