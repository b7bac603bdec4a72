"""The file format of one evaluated prefix: its identity, its token ids and breakpoints, and the state as opaque bytes.

    magic 8 | version 4 | header length 4 | header, ASCII JSON | token ids, 4 each | breakpoints, 4 each | payload | sha256 of the rest, 32

Integers are little-endian and unsigned. llama.cpp silently accepts states of other weights, and a truncated state can end the process
(its reader asserts). So no byte of a payload is returned before the whole file has been verified.
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
from localrag.files import atomic_write, split_parts

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
    """Why a file is not used. The store turns it into a warning.

    `fault` says what to do: a `missing` file was evicted by another process; an `unreadable` one may be valid; a `foreign` one belongs to
    another model or exceeds the size limit; a `newer` one belongs to a later version of localrag. Only a `damaged` file may be removed.
    """

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything that determines the meaning of a state. If any field differs, the state is not valid.

    `model` is the SHA-256 of the model's file, or its `model_fingerprint`. `llama_build` is the package version with llama.cpp's system
    info, or a hash of both. `n_swa` is 0 without a sliding window. Raises ValueError if the fields take more than 15 KiB.
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
        """The identity as text, the same for equal identities."""
        return _canonical(self)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical text, in lower-case hexadecimal."""
        return hashlib.sha256(self.canonical.encode("ascii")).hexdigest()


@lru_cache(maxsize=16)  # compared with every file of a folder
def _canonical(identity: Identity) -> str:
    return _json(asdict(identity))


def model_fingerprint(path: Path) -> str:
    """Identify a model file without hashing all of it: by name, size, modification time, and blake2b of its first MiB.

    The parts of a split file after the first count by size and modification time.

    Raises ModelFileError if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            start = hashlib.blake2b(file.read(_FINGERPRINT_BYTES), digest_size=16).hexdigest()
        others = [path.with_name(name).stat() for name in split_parts(path.name)[1:]]
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}.", path=str(path)) from None
    return ":".join([path.name, *(f"{each.st_size}:{each.st_mtime_ns}" for each in (status, *others)), start])


@dataclass(frozen=True, slots=True)
class Head:
    """The part of a file before the payload. Its sizes match the file's size, but only `read` verifies the checksum."""

    raw: bytes
    token_bytes: bytes
    breakpoint_bytes: bytes
    payload_bytes: int


def pack(numbers: Sequence[int]) -> bytes:
    """Encode token ids or breakpoints as in a file, 4 bytes each. Raises ValueError for a number outside 0..2**32-1."""
    try:
        return struct.pack(f"<{len(numbers)}I", *numbers)
    except struct.error as error:
        raise ValueError(f"not a list of token ids or breakpoints: {error}") from None


def unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def write(
    path: Path, identity: Identity, token_ids: Sequence[int], breakpoints: Sequence[int], payload: bytes | bytearray | memoryview
) -> None:
    """Write a file atomically: afterwards, `path` is either complete or unchanged.

    Only the owner can read it, since a state contains the user's text. A killed process leaves a hidden file that ends in `.part`. Raises
    OSError after removing partial data, and ValueError for an empty list or payload, or for invalid ids.
    """
    tokens, ends, body = pack(token_ids), pack(breakpoints), memoryview(payload).cast("B")
    if not 0 < len(token_ids) <= MAX_TOKENS or not len(body):
        raise ValueError(f"a prefix has 1 to {MAX_TOKENS} tokens and a state, not {len(token_ids)} tokens and {len(body)} bytes")
    if len(breakpoints) > MAX_TOKENS:
        raise ValueError(f"a prefix has no more than {MAX_TOKENS} breakpoints, not {len(breakpoints)}")
    about = {"created": int(time.time()), "num_tokens": len(token_ids), "num_borders": len(breakpoints), "payload_bytes": len(body)}
    header = _json({"identity": asdict(identity)} | about).encode("ascii")
    digest = hashlib.sha256()
    with atomic_write(path, suffix=PART_SUFFIX) as out:  # not flushed: a power cut loses at most the new name
        for part in (_FIXED.pack(_MAGIC, VERSION, len(header)), header, tokens, ends, body):
            digest.update(part)
            out.write(part)
        out.write(digest.digest())


def read(path: Path, identity: Identity, *, max_bytes: int = MAX_FILE_BYTES) -> tuple[tuple[int, ...], tuple[int, ...], bytearray]:
    """Read and verify a file of this identity. Returns its token ids, breakpoints and payload.

    Uses no more memory than the size of the file, which is at most `max_bytes`. Raises PrefixFileError.
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
        raise PrefixFileError("damaged", "it was truncated while it was read")
    digest = hashlib.sha256(head.raw)
    digest.update(payload)
    if digest.digest() != stored:
        raise PrefixFileError("damaged", "its checksum does not match")
    return unpack(head.token_bytes), unpack(head.breakpoint_bytes), payload


def read_head(path: Path, identity: Identity, *, max_bytes: int = MAX_FILE_BYTES) -> Head:
    """Read the part before the payload. Raises PrefixFileError."""
    try:
        with _open(path) as file:
            return _read_head(file, identity, max_bytes)
    except OSError as error:
        raise _unreadable(error) from None


def file_bytes(identity: Identity, num_tokens: int, num_breakpoints: int, payload_bytes: int) -> int:
    """Maximum size of a file. The actual one is smaller if its numbers have fewer digits."""
    return _FIXED.size + len(identity.canonical) + 128 + 4 * (num_tokens + num_breakpoints) + payload_bytes + _SHA256_BYTES


def _open(path: Path) -> BinaryIO:
    """Open a regular file, without following links or waiting for pipes."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PrefixFileError("damaged", "it is not a plain file")
    return os.fdopen(handle, "rb")


def _read_head(file: BinaryIO, identity: Identity, max_bytes: int) -> Head:
    """Read the head. Every size is checked against the file's size before anything of that size is read."""
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise PrefixFileError("foreign", f"its {size} bytes exceed the limit of {max_bytes}")
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size:
        raise PrefixFileError("damaged", f"it ends after {len(fixed)} bytes")
    magic, version, header_bytes = _FIXED.unpack(fixed)
    if magic != _MAGIC:
        raise PrefixFileError("damaged", "it does not begin like a prefix file")
    if version > VERSION:
        raise PrefixFileError("newer", f"its format version is {version}; this localrag supports up to {VERSION}")
    if version < VERSION or not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise PrefixFileError("damaged", f"it claims version {version} and a header of {header_bytes} bytes")
    header = file.read(header_bytes)
    num_tokens, num_breakpoints, payload_bytes = _parse(header, identity)
    claimed = _FIXED.size + header_bytes + 4 * (num_tokens + num_breakpoints) + payload_bytes + _SHA256_BYTES
    if claimed != size:
        raise PrefixFileError("damaged", f"it has {size} bytes and claims {claimed}")
    token_bytes, breakpoint_bytes = file.read(4 * num_tokens), file.read(4 * num_breakpoints)
    if len(token_bytes) + len(breakpoint_bytes) != 4 * (num_tokens + num_breakpoints):
        raise PrefixFileError("damaged", "it was truncated while it was read")
    return Head(fixed + header + token_bytes + breakpoint_bytes, token_bytes, breakpoint_bytes, payload_bytes)


def _parse(header: bytes, identity: Identity) -> tuple[int, int, int]:
    """Parse the header of this identity. Returns the number of tokens, of breakpoints, and of payload bytes."""
    try:
        fields = json.loads(str(header, "ascii"))
        identity_json = _json(fields["identity"])
        numbers = fields["num_tokens"], fields["num_borders"], fields["payload_bytes"]
    except (ValueError, TypeError, LookupError, RecursionError):
        raise PrefixFileError("damaged", "its header is invalid") from None
    if any(type(number) is not int for number in numbers):
        raise PrefixFileError("damaged", "its header claims impossible numbers")
    num_tokens, num_breakpoints, payload_bytes = numbers
    if not (0 < num_tokens <= MAX_TOKENS and 0 <= num_breakpoints <= MAX_TOKENS and 0 < payload_bytes < 1 << 63):
        raise PrefixFileError("damaged", "its header claims impossible numbers")
    if identity_json != identity.canonical:
        raise PrefixFileError("foreign", "it was made by another model, build or setting")
    return num_tokens, num_breakpoints, payload_bytes


def _unreadable(error: OSError) -> PrefixFileError:
    if isinstance(error, FileNotFoundError):
        return PrefixFileError("missing", "it does not exist")
    if error.errno == errno.ELOOP:
        return PrefixFileError("damaged", "it is a link")
    return PrefixFileError("unreadable", f"it cannot be read ({error.strerror or error})")


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))  # ASCII: a file's name may hold what UTF-8 cannot
