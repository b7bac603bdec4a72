"""What a GGUF header is made of: value types, tensor types, caps, and the typed look-up of a key.

Source: the GGUF specification (ggml/docs/gguf.md) and ggml/src/gguf.cpp of llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

from localrag.errors import ModelFileError

MAX_KEYS = 4096
MAX_TENSORS = 16_384
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 1 << 20
MAX_TENSOR_NAME_BYTES = 63
MAX_ARRAY_ELEMENTS = 2 << 20
MAX_HEADER_BYTES = 256 << 20

GET_IT_AGAIN = "Download it again, and compare its sha256 with the publisher's."
TAKE_ANOTHER = "The file is damaged or meant for another program: download it again, or use another conversion of the model."
TAKE_A_LANGUAGE_MODEL = "Use the GGUF file of a language model, which holds its tokenizer too."
CONVERT_IT = "Give the path of a GGUF file of version 2 or 3, little-endian; llama.cpp has scripts that convert other files."

TOKENS_KEY = "tokenizer.ggml.tokens"

UINT16, UINT32, INT32, FLOAT32, STRING, ARRAY = 2, 4, 5, 6, 8, 9
# GGUF value type -> its name, and how one is unpacked (of a string: its length, which comes before the text)
VALUE_TYPES = {
    0: ("uint8", Struct("<B")),
    1: ("int8", Struct("<b")),
    UINT16: ("uint16", Struct("<H")),
    3: ("int16", Struct("<h")),
    UINT32: ("uint32", Struct("<I")),
    INT32: ("int32", Struct("<i")),
    FLOAT32: ("float32", Struct("<f")),
    7: ("bool", Struct("<?")),
    STRING: ("string", Struct("<Q")),
    10: ("uint64", Struct("<Q")),
    11: ("int64", Struct("<q")),
    12: ("float64", Struct("<d")),
}
# ggml tensor type -> elements in a block, bytes of a block
TENSOR_TYPES = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 36),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
    42: (64, 18),  # Q2_0
}
# general.file_type -> what most of the weights are stored as
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}


def file_error(path: Path, problem: str, *, hint: str, **numbers: object) -> ModelFileError:
    """The error whose line is the path and what is wrong with the file there."""
    name = str(path)
    return ModelFileError(f"{name if name.isprintable() else ascii(name)} {problem}", hint=hint, path=name, **numbers)


def clip(text: str) -> str:
    """`text`, short enough for an error's one line."""
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class Value:
    """Where a key's value lies: `count` elements of `type` from byte `start`, or a single one where `count` is None."""

    type: int
    start: int
    count: int | None


@dataclass(slots=True)
class Header:
    """The keys of a GGUF file and where their values lie in `buffer`, which maps the start of the file.

    `tensors` has each tensor's sizes, the innermost first, and the number of its type.

    A look-up gives None for a key that is not there, and raises a ModelFileError for a value of another type or out of range.
    """

    path: Path
    buffer: mmap.mmap
    file_bytes: int
    version: int = 0
    num_tensors: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    tokens: list[bytes] = field(default_factory=list)
    tensors: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    def error(self, problem: str, *, hint: str = TAKE_ANOTHER, **numbers: object) -> ModelFileError:
        """The error for `problem`, a sentence whose subject is the file."""
        return file_error(self.path, problem, hint=hint, file_bytes=self.file_bytes, **numbers)

    def integer(self, key: str, low: int, high: int, *, type_: int = UINT32) -> int | None:
        """The integer under `key`, from `low` to `high`."""
        value = self._single(key, type_)
        return None if value is None else self._integer_at(key, value, 0, low, high)

    def integers(self, key: str, count: int, low: int, high: int) -> tuple[int, ...] | None:
        """The `count` integers under `key`: an array of as many, or a single one that stands for all."""
        value = self.values.get(key)
        if value is None or value.count is None:
            single = self.integer(key, low, high)
            return None if single is None else (single,) * count
        if value.type not in (UINT32, INT32) or value.count != count:
            found = f"{value.count} of type {VALUE_TYPES[value.type][0]}"
            raise self.error(f"has {found} under {clip(key)}, where one or {count} of type uint32 belong.", key=key, expected=count)
        return tuple(self._integer_at(key, value, index, low, high) for index in range(count))

    def number(self, key: str) -> float | None:
        """The float under `key`: finite, 0 or more."""
        value = self._single(key, FLOAT32)
        if value is None:
            return None
        number: float = VALUE_TYPES[FLOAT32][1].unpack_from(self.buffer, value.start)[0]
        if not (math.isfinite(number) and number >= 0):
            raise self.error(f"has {number} under {clip(key)}, where a finite number of 0 or more belongs.", key=key)
        return number

    def text(self, key: str, max_bytes: int = MAX_STRING_BYTES) -> str | None:
        """The text under `key`."""
        value = self._single(key, STRING)
        if value is None:
            return None
        length_layout = VALUE_TYPES[STRING][1]
        (length,) = length_layout.unpack_from(self.buffer, value.start)
        if length > max_bytes:
            raise self.error(f"has {length} bytes of text under {clip(key)}; the limit is {max_bytes}.", key=key, limit_bytes=max_bytes)
        start = value.start + length_layout.size
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.error(f"has text under {clip(key)} that is not UTF-8.", key=key) from None

    def _single(self, key: str, type_: int) -> Value | None:
        value = self.values.get(key)
        if value is not None and (value.type != type_ or value.count is not None):
            found = VALUE_TYPES[value.type][0] + ("" if value.count is None else " array")
            raise self.error(f"has a {found} under {clip(key)}, where a {VALUE_TYPES[type_][0]} belongs.", key=key)
        return value

    def _integer_at(self, key: str, value: Value, index: int, low: int, high: int) -> int:
        layout = VALUE_TYPES[value.type][1]
        integer: int = layout.unpack_from(self.buffer, value.start + index * layout.size)[0]
        if not low <= integer <= high:
            raise self.error(f"has {integer} under {clip(key)}, where {low} to {high} belongs.", key=key, value=integer, low=low, high=high)
        return integer
