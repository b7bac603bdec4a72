"""Read and write the file of a cached prefix: its identity, token ids, breakpoints, and llama.cpp's opaque state.

    magic 8 | version 4 | header length 4 | header, ASCII JSON | token ids, 4 each | breakpoints, 4 each | payload | sha256 of the above, 32

Numbers are sizes in bytes. Integers are little-endian and unsigned. llama.cpp silently accepts the state of other weights, and a truncated
state can crash the process, since its reader asserts. Therefore the whole file is verified before any byte of the payload is returned.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

from localrag.errors import ModelFileError
from localrag.files import atomic_write

VERSION = 1
MAX_FILE_BYTES = 2 << 30
MAX_TOKENS = 1 << 24
MAX_HEADER_BYTES = 16 << 10
PART_SUFFIX = ".part"

_MAGIC = b"LRPREFIX"
_FIXED = struct.Struct("<8sII")
_SHA256_BYTES = 32
_MAX_IDENTITY_BYTES = MAX_HEADER_BYTES - 1024
_FINGERPRINT_BYTES = 1 << 20

Fault = Literal["missing", "unreadable", "foreign", "newer", "damaged"]


class PrefixFileError(Exception):
    """The reason why a file cannot be used. The cache turns it into a warning.

    `fault` is "missing" (another process evicted the file), "unreadable" (it may still be good), "foreign" (it belongs to another model or
    size limit), "newer" (a newer localrag wrote it) or "damaged". Only a damaged file is safe to delete.
    """

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The model, build and settings for which a state is valid. A state with any other value is invalid.

    `model` is the sha256 of the model file, or its `model_fingerprint`. `llama_build` is the package version with llama.cpp's system info,
    or a hash of both. `n_swa` is 0 without a sliding window. ValueError if the canonical form is longer than 15 KiB.
    """

    model: str
    llama_build: str
    architecture: str
    type_k: str
    type_v: str
    flash_attention: bool
    n_ctx_train: int
    n_swa: int = 0
    rope_scaling: str | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None

    def __post_init__(self) -> None:
        if len(self.canonical) > _MAX_IDENTITY_BYTES:
            raise ValueError(f"an identity of {len(self.canonical)} bytes is longer than {_MAX_IDENTITY_BYTES}")

    @property
    def canonical(self) -> str:
        """The identity as JSON; equal identities have equal text."""
        return _canonical(self)

    @property
    def digest(self) -> str:
        """The sha256 of the canonical form, in lower-case hexadecimal."""
        return hashlib.sha256(self.canonical.encode("ascii")).hexdigest()


@lru_cache(maxsize=16)  # needed for each file of a folder
def _canonical(identity: Identity) -> str:
    return _json(asdict(identity))


def model_fingerprint(path: Path) -> str:
    """Identify a model file without hashing gigabytes: by name, size, modification time, and the blake2b hash of its first MiB.

    Raises ModelFileError if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            start = hashlib.blake2b(file.read(_FINGERPRINT_BYTES), digest_size=16).hexdigest()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}.", path=str(path)) from None
    return f"{path.name}:{status.st_size}:{status.st_mtime_ns}:{start}"


@dataclass(frozen=True, slots=True)
class Head:
    """The part of a file before its payload. Its sizes agree with the file's size; only `read` verifies the checksum."""

    raw: bytes
    token_bytes: bytes
    border_bytes: bytes
    payload_bytes: int


def pack(numbers: Sequence[int]) -> bytes:
    """Encode token ids or breakpoints, 4 bytes each. ValueError for a number outside 0..2**32-1."""
    try:
        return struct.pack(f"<{len(numbers)}I", *numbers)
    except struct.error as error:
        raise ValueError(f"not a list of token ids or breakpoints: {error}") from None


def unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def write(
    path: Path, identity: Identity, token_ids: Sequence[int], breakpoints: Sequence[int], payload: bytes | bytearray | memoryview
) -> None:
    """Write a file atomically. Only its owner can read it, since a state contains the user's text.

    A killed process leaves a hidden file that ends in `.part`. Raises OSError after removing that file, and ValueError for an empty list or
    payload, or for invalid ids.
    """
    tokens, ends, body = pack(token_ids), pack(breakpoints), memoryview(payload).cast("B")
    if not 0 < len(token_ids) <= MAX_TOKENS or not len(body):
        raise ValueError(f"a prefix has 1 to {MAX_TOKENS} tokens and a state, not {len(token_ids)} tokens and {len(body)} bytes")
    if len(breakpoints) > MAX_TOKENS:
        raise ValueError(f"a prefix has at most {MAX_TOKENS} breakpoints, not {len(breakpoints)}")
    about = {"created": int(time.time()), "num_tokens": len(token_ids), "num_borders": len(breakpoints), "payload_bytes": len(body)}
    header = _json({"identity": asdict(identity)} | about).encode("ascii")
    digest = hashlib.sha256()
    with atomic_write(path, suffix=PART_SUFFIX) as out:  # the folder is not flushed: at worst a power cut loses the new name
        for part in (_FIXED.pack(_MAGIC, VERSION, len(header)), header, tokens, ends, body):
            digest.update(part)
            out.write(part)
        out.write(digest.digest())


def read(path: Path, identity: Identity, *, max_bytes: int = MAX_FILE_BYTES) -> tuple[tuple[int, ...], tuple[int, ...], bytearray]:
    """Verify a file and return its token ids, breakpoints and payload. It must have this identity and at most `max_bytes`.

    Needs no more memory than the size of the file. Raises PrefixFileError.
    """
    try:
        with _open(path) as file:
            head = _read_head(file, identity, max_bytes)
            payload = bytearray(head.payload_bytes)
            num_read = file.readinto(payload)  # type: ignore[attr-defined]  # a buffered file's, which BinaryIO does not name
            stored = file.read(_SHA256_BYTES)
    except OSError as error:
        raise _unreadable(error) from None
    except MemoryError:
        raise PrefixFileError("unreadable", "there is not enough memory to read it") from None
    if num_read != head.payload_bytes:
        raise PrefixFileError("damaged", "it became shorter while it was read")
    digest = hashlib.sha256(head.raw)
    digest.update(payload)
    if digest.digest() != stored:
        raise PrefixFileError("damaged", "its checksum is wrong")
    return unpack(head.token_bytes), unpack(head.border_bytes), payload


def read_head(path: Path, identity: Identity, *, max_bytes: int = MAX_FILE_BYTES) -> Head:
    """Read the part before the payload. Raises PrefixFileError."""
    try:
        with _open(path) as file:
            return _read_head(file, identity, max_bytes)
    except OSError as error:
        raise _unreadable(error) from None


def file_bytes(identity: Identity, num_tokens: int, num_borders: int, payload_bytes: int) -> int:
    """Return an upper bound of a file's size in bytes."""
    return _FIXED.size + len(identity.canonical) + 128 + 4 * (num_tokens + num_borders) + payload_bytes + _SHA256_BYTES


def _open(path: Path) -> BinaryIO:
    """Open a regular file, without following a link or blocking on a pipe."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PrefixFileError("damaged", "it is not a regular file")
    return os.fdopen(handle, "rb")


def _read_head(file: BinaryIO, identity: Identity, max_bytes: int) -> Head:
    """Read the part before the payload. Check each size against the file's before reading that many bytes."""
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise PrefixFileError("foreign", f"its {size} bytes are more than {max_bytes}")
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size:
        raise PrefixFileError("damaged", f"it ends after {len(fixed)} bytes")
    magic, version, header_bytes = _FIXED.unpack(fixed)
    if magic != _MAGIC:
        raise PrefixFileError("damaged", "it is not a prefix file")
    if version > VERSION:
        raise PrefixFileError("newer", f"its format has version {version}, but this localrag supports only {VERSION}")
    if version < VERSION or not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise PrefixFileError("damaged", f"it claims version {version} and a header of {header_bytes} bytes")
    header = file.read(header_bytes)
    num_tokens, num_borders, payload_bytes = _parse(header, identity)
    claimed = _FIXED.size + header_bytes + 4 * (num_tokens + num_borders) + payload_bytes + _SHA256_BYTES
    if claimed != size:
        raise PrefixFileError("damaged", f"it has {size} bytes and claims {claimed}")
    token_bytes, border_bytes = file.read(4 * num_tokens), file.read(4 * num_borders)
    if len(token_bytes) + len(border_bytes) != 4 * (num_tokens + num_borders):
        raise PrefixFileError("damaged", "it became shorter while it was read")
    return Head(fixed + header + token_bytes + border_bytes, token_bytes, border_bytes, payload_bytes)


def _parse(header: bytes, identity: Identity) -> tuple[int, int, int]:
    """Return the number of tokens, the number of breakpoints and the size of the payload that a header claims."""
    try:
        fields = json.loads(str(header, "ascii"))
        owner = _json(fields["identity"])
        numbers = fields["num_tokens"], fields["num_borders"], fields["payload_bytes"]
    except (ValueError, TypeError, LookupError, RecursionError):
        raise PrefixFileError("damaged", "its header is invalid") from None
    if any(type(number) is not int for number in numbers):
        raise PrefixFileError("damaged", "its header claims impossible numbers")
    num_tokens, num_borders, payload_bytes = numbers
    if not (0 < num_tokens <= MAX_TOKENS and 0 <= num_borders <= MAX_TOKENS and 0 < payload_bytes < 1 << 63):
        raise PrefixFileError("damaged", "its header claims impossible numbers")
    if owner != identity.canonical:
        raise PrefixFileError("foreign", "it belongs to another model, build or setting")
    return num_tokens, num_borders, payload_bytes


def _unreadable(error: OSError) -> PrefixFileError:
    if isinstance(error, FileNotFoundError):
        return PrefixFileError("missing", "it is not there")
    if error.errno == errno.ELOOP:
        return PrefixFileError("damaged", "it is a link")
    return PrefixFileError("unreadable", f"it cannot be read ({error.strerror or error})")


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))  # ASCII, since a file name may not be valid UTF-8
