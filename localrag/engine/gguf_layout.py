"""The walk over a GGUF header: every length against the bytes left, every tensor against the end of the file.

Nothing is believed before it is checked. Arrays are walked, not built; only the vocabulary's tokens are copied, because they
must be compared with one another. The walk over long arrays of strings is nearly all of the time.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from struct import Struct
from struct import error as struct_error

from localrag.engine.gguf_types import (
    ARRAY,
    CONVERT_IT,
    GET_IT_AGAIN,
    MAX_ARRAY_ELEMENTS,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_STRING_BYTES,
    MAX_TENSOR_NAME_BYTES,
    MAX_TENSORS,
    STRING,
    TENSOR_TYPES,
    TOKENS_KEY,
    VALUE_TYPES,
    Header,
    Value,
    clip,
)
from localrag.errors import counted

MAGIC = b"GGUF"

_U32, _U64, _U64_PAIR = Struct("<I"), Struct("<Q"), Struct("<QQ")
_ARRAY_HEAD = Struct("<IQ")  # type of an element, number of elements
_TENSOR_TAILS = {num_dims: Struct(f"<{num_dims}QIQ") for num_dims in range(1, 5)}  # sizes, type, offset
_DEFAULT_ALIGNMENT = 32


def parse(path: Path, buffer: mmap.mmap, file_bytes: int) -> Header:
    """The header of the file at `path`; `buffer` maps its start, MAX_HEADER_BYTES at most.

    Raises ModelFileError for a file that is not GGUF, is truncated or contradicts itself.
    """
    header = Header(path, buffer, file_bytes)
    cursor = _Cursor(header)
    _read_version(header, cursor)
    header.num_tensors, num_keys = cursor.unpack(_U64_PAIR, "the head of the file")
    if header.num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        problem = f"is damaged: it promises {header.num_tensors} tensors and {num_keys} keys; the limits are {MAX_TENSORS} and {MAX_KEYS}."
        raise header.error(problem, num_tensors=header.num_tensors, num_keys=num_keys)
    for index in range(num_keys):
        key = cursor.name(f"key {index + 1} of {num_keys}", MAX_KEY_BYTES)
        if key in header.values:
            raise header.error(f"is damaged: it has the key {clip(key)} twice.", key=clip(key))
        header.values[key] = _read_value(header, cursor, key)
    _check_tensors(header, cursor)
    return header


class _Cursor:
    """A position in the header; each step is checked before it is made."""

    __slots__ = ("buffer", "header", "pos")

    def __init__(self, header: Header) -> None:
        self.header = header
        self.buffer = header.buffer
        self.pos = 0

    def skip(self, num_bytes: int, what: str) -> int:
        """Moves past the next `num_bytes`, which must be there; says where they began."""
        start, end, file_end = self.pos, self.pos + num_bytes, self.header.file_bytes
        if end > file_end:
            problem = f"is truncated or damaged: {clip(what)} ends at byte {end}, the file at byte {file_end}."
            raise self.header.error(problem, hint=GET_IT_AGAIN, needed_bytes=end, missing_bytes=end - file_end)
        if end > len(self.buffer):
            raise self.header.error(f"has a header of more than {MAX_HEADER_BYTES} bytes.", limit_bytes=MAX_HEADER_BYTES)
        self.pos = end
        return start

    def unpack(self, layout: Struct, what: str) -> tuple[int, ...]:
        return layout.unpack_from(self.buffer, self.skip(layout.size, what))

    def skip_string(self, what: str, max_bytes: int = MAX_STRING_BYTES) -> int:
        """Moves past a length and as many bytes; says where the bytes began."""
        (length,) = self.unpack(_U64, what)
        if length > max_bytes:
            raise self.header.error(f"is damaged: {clip(what)} has {length} bytes; the limit is {max_bytes}.", limit_bytes=max_bytes)
        return self.skip(length, what)

    def name(self, what: str, max_bytes: int) -> str:
        """The name that comes next: one line of UTF-8, not empty."""
        raw = self.buffer[self.skip_string(what, max_bytes) : self.pos]
        name = raw.decode(errors="replace")
        if not name or "\ufffd" in name or not name.isprintable():
            raise self.header.error(f"is damaged: the name of {what} is {clip(ascii(raw))}.")
        return name

    def strings(self, count: int, what: str, *, keep: bool) -> list[bytes]:
        """Moves past `count` strings; gives their bytes if they are to be kept. A call of skip_string for each would be too slow."""
        buffer, pos, unpack = self.buffer, self.pos, _U64.unpack_from
        kept: list[bytes] = []
        keep_one = kept.append
        try:
            for _ in range(count):
                (length,) = unpack(buffer, pos)
                if length > MAX_STRING_BYTES:
                    self.pos = pos
                    self.skip_string(what)  # raises
                start = pos + 8
                pos = start + length
                if keep:
                    keep_one(buffer[start:pos])
        except struct_error:  # a length lies past the end
            self.pos = pos
            self.skip(8, what)  # raises
        self.skip(pos - self.pos, what)
        return kept


def _read_version(header: Header, cursor: _Cursor) -> None:
    first = header.buffer[:24]
    if not first.startswith(MAGIC):
        raise header.error(f"is not a GGUF file: it starts with {first!r}.", hint=CONVERT_IT)
    cursor.skip(len(MAGIC), "the magic")
    (header.version,) = cursor.unpack(_U32, "the version")
    if header.version and not header.version & 0xFFFF:
        raise header.error("is a big-endian GGUF file; only little-endian ones can be read here.", hint=CONVERT_IT)
    if header.version not in (2, 3):
        raise header.error(f"is GGUF of version {header.version}; versions 2 and 3 can be read.", hint=CONVERT_IT, version=header.version)


def _read_value(header: Header, cursor: _Cursor, key: str) -> Value:
    (type_,) = cursor.unpack(_U32, key)
    count = None
    if type_ == ARRAY:
        type_, count = cursor.unpack(_ARRAY_HEAD, key)
        if count > MAX_ARRAY_ELEMENTS:
            problem = f"is damaged: {clip(key)} promises {count} elements; the limit is {MAX_ARRAY_ELEMENTS}."
            raise header.error(problem, key=clip(key), count=count)
    if type_ not in VALUE_TYPES:
        raise header.error(f"is damaged: {clip(key)} has a value of the unknown type {type_}.", key=clip(key), type_number=type_)
    value = Value(type_, cursor.pos, count)
    if type_ != STRING:
        cursor.skip(VALUE_TYPES[type_][1].size * (1 if count is None else count), key)
    elif count is None:
        cursor.skip_string(key)
    elif key == TOKENS_KEY:
        header.tokens = cursor.strings(count, key, keep=True)
    else:
        cursor.strings(count, key, keep=False)
    return value


def _check_tensors(header: Header, cursor: _Cursor) -> None:
    """The tensors must lie one behind the other, in the order in which they are named, and end within the file."""
    alignment = header.integer("general.alignment", 32, 65_536) or _DEFAULT_ALIGNMENT
    if alignment & (alignment - 1):
        raise header.error(f"has {alignment} under general.alignment, where a power of two belongs.", alignment=alignment)
    end = next_offset = 0
    for index in range(header.num_tensors):
        name = cursor.name(f"tensor {index + 1} of {header.num_tensors}", MAX_TENSOR_NAME_BYTES)
        if name in header.tensors:
            raise header.error(f"is damaged: it has the tensor {name} twice.", tensor=name)
        num_bytes, offset = _read_tensor(header, cursor, name)
        if offset != next_offset:
            problem = f"is damaged: the tensor {name} is said to be at offset {offset}, but the one before it leads to {next_offset}."
            raise header.error(problem, tensor=name, offset=offset, expected=next_offset)
        end = offset + num_bytes
        next_offset = _pad(end, alignment)
    needed = _pad(cursor.pos, alignment) + end if header.num_tensors else 0
    if needed > header.file_bytes:
        missing = needed - header.file_bytes
        problem = f"is truncated: the header promises {needed} bytes, the file has {header.file_bytes}; {counted(missing, 'byte')} missing."
        raise header.error(problem, hint=GET_IT_AGAIN, needed_bytes=needed, missing_bytes=missing)


def _read_tensor(header: Header, cursor: _Cursor, name: str) -> tuple[int, int]:
    """How many bytes the tensor takes, and at which offset it is said to be."""
    (num_dims,) = cursor.unpack(_U32, name)
    if num_dims not in _TENSOR_TAILS:
        raise header.error(f"is damaged: the tensor {name} has {num_dims} dimensions; 1 to 4 are possible.", tensor=name)
    *sizes, type_, offset = cursor.unpack(_TENSOR_TAILS[num_dims], name)
    if type_ not in TENSOR_TYPES:
        raise header.error(f"stores the tensor {name} as type {type_}, which is not known here.", tensor=name, type_number=type_)
    block_elements, block_bytes = TENSOR_TYPES[type_]
    num_elements = math.prod(sizes)
    if not 0 < num_elements < 1 << 63 or sizes[0] % block_elements:
        problem = f"is damaged: the tensor {name} has the impossible shape {' x '.join(map(str, sizes))}."
        raise header.error(problem, tensor=name)
    header.tensors[name] = tuple(sizes), type_
    return num_elements // block_elements * block_bytes, offset


def _pad(num_bytes: int, alignment: int) -> int:
    """`num_bytes`, rounded up to the alignment, which is a power of two."""
    return (num_bytes + alignment - 1) & -alignment
