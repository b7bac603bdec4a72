"""Read a GGUF header into ModelInfo, before any weight is read and before llama.cpp sees the file.

Limits keep a hostile file from exhausting time and memory, and validate the numbers from which memory and window are predicted. The checks
also cover what a trial load cannot find: a token that crashes llama.cpp only when a text needs it. Every other assertion of llama.cpp is
found by that trial, in a child process (sandbox.py). Weights are not read; only a checksum detects damage in them.

Source: the GGUF specification (ggml/docs/gguf.md), ggml/src/gguf.cpp, src/llama-model.cpp (load_hparams) and src/llama-vocab.cpp of
llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from struct import error as struct_error
from typing import NamedTuple

from localrag.errors import ModelFileError, counted
from localrag.files import split_parts
from localrag.types import ModelInfo

MAX_KEYS = 4096
MAX_TENSORS = 16_384
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 1 << 20
MAX_TENSOR_NAME_BYTES = 63
MAX_ARRAY_ELEMENTS = 2 << 20
MAX_HEADER_BYTES = 256 << 20

GET_IT_AGAIN = "Download it again, and compare its sha256 with the publisher's."
TAKE_ANOTHER = "The file is damaged or meant for another program: download it again, or use another conversion of the model."
TAKE_A_LANGUAGE_MODEL = "Use the GGUF file of a language model that includes its tokenizer."
CONVERT_IT = "Give the path of a little-endian GGUF file of version 2 or 3; llama.cpp has scripts that convert other files."

TOKENS_KEY = "tokenizer.ggml.tokens"

UINT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 2, 4, 5, 6, 7, 8, 9
# GGUF value type -> its name and layout (for a string, the layout of the length before the text)
VALUE_TYPES = {
    0: ("uint8", Struct("<B")),
    1: ("int8", Struct("<b")),
    UINT16: ("uint16", Struct("<H")),
    3: ("int16", Struct("<h")),
    UINT32: ("uint32", Struct("<I")),
    INT32: ("int32", Struct("<i")),
    FLOAT32: ("float32", Struct("<f")),
    BOOL: ("bool", Struct("<?")),
    STRING: ("string", Struct("<Q")),
    10: ("uint64", Struct("<Q")),
    11: ("int64", Struct("<q")),
    12: ("float64", Struct("<d")),
}
# ggml tensor type -> (elements per block, bytes per block)
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
# general.file_type -> the quantization of most weights
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

MAX_CONTEXT_TOKENS = 1 << 27
MAX_LAYERS = 512
MAX_HEADS = 1024
MAX_HEAD_SIZE = 4096
MAX_EMBEDDING_LENGTH = 1 << 20
MAX_TEMPLATE_BYTES = 128 << 10
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

CHECK_THE_PATH = "Check the path; `localrag models list` shows the known models."

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Tensor(NamedTuple):
    """The place of a tensor in its file: its dimensions, innermost first, its type number (see TENSOR_TYPES) and its first byte."""

    sizes: tuple[int, ...]
    type: int
    start: int


def read_header(path: Path) -> ModelInfo:
    """Read the header of the GGUF file at `path`, in time that grows with the vocabulary.

    A file without weights may omit its shape: ModelInfo then has zeros and an empty `num_kv_heads`.
    Raises ModelFileError for anything but a complete GGUF file of a language model.
    """
    return read_header_and_tensors(path)[0]


def read_header_and_tensors(path: Path) -> tuple[ModelInfo, dict[str, Tensor]]:
    """Like `read_header`, with the place of each tensor by name; for a split file, of the tensors in its first part."""
    buffer, file_bytes = _map(path)
    with buffer:
        header = parse(path, buffer, file_bytes)
        _add_parts(header)
        return _model_info(header), header.tensors


def _add_parts(header: Header) -> None:
    """Check the other parts of a split file, which are beside its first part, and count their tensors and bytes in `header`.

    llama.cpp opens all parts by the name of the first one. ModelFileError if a part is missing, damaged or not of this file.
    """
    count = header.integer("split.count", 0, 0xFFFF, type_=UINT16) or 1
    if count == 1:
        return
    names = split_parts(header.path.name)
    if header.integer("split.no", 0, 0xFFFF, type_=UINT16) or len(names) != count or names[0] != header.path.name:
        first = names[0] if len(names) == count else f"NAME-00001-of-{count:05}.gguf"
        raise header.error(
            f"is one of {count} parts of a model.", hint=f"Name the first part, {first}, with the others beside it.", num_parts=count
        )
    expected, tensor_names = header.integer("split.tensors.count", 0, MAX_TENSORS, type_=INT32), set(header.tensors)
    for number, name in enumerate(names[1:], start=1):
        buffer, file_bytes = _map(header.path.with_name(name))
        with buffer:
            part = parse(header.path.with_name(name), buffer, file_bytes)
            stands = [part.integer(key, 0, 0xFFFF, type_=UINT16) for key in ("split.no", "split.count")]
        if stands != [number, count]:
            raise part.error(f"is not part {number + 1} of {count} of {header.path.name}.", hint=GET_IT_AGAIN)
        if not tensor_names.isdisjoint(part.tensors):
            raise part.error(f"repeats tensors of another part of {header.path.name}.", hint=GET_IT_AGAIN)
        tensor_names.update(part.tensors)
        header.file_bytes += file_bytes
    if expected is not None and expected != len(tensor_names):
        raise header.error(f"claims {expected} tensors, but its {count} parts hold {len(tensor_names)}.", hint=GET_IT_AGAIN)
    header.num_tensors = len(tensor_names)


def _map(path: Path) -> tuple[mmap.mmap, int]:
    """Map the first MAX_HEADER_BYTES of a file. Return the map and the size of the whole file in bytes."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a FIFO would block until a writer comes
            raise file_error(path, f"is a {'folder' if stat.S_ISDIR(mode) else 'special file'}, not a GGUF file.", hint=CHECK_THE_PATH)
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if not file_bytes:
                raise file_error(path, "is empty.", hint=GET_IT_AGAIN, file_bytes=0)
            return mmap.mmap(file.fileno(), min(file_bytes, MAX_HEADER_BYTES), access=mmap.ACCESS_READ), file_bytes
    except FileNotFoundError:
        raise file_error(path, "does not exist.", hint=CHECK_THE_PATH) from None
    except OSError as error:
        raise file_error(path, f"cannot be read: {error.strerror or error}.", hint=CHECK_THE_PATH) from error
    except ValueError as error:  # a NUL in the path, or a file that was truncated meanwhile
        raise file_error(path, f"cannot be read: {error}.", hint=CHECK_THE_PATH) from error


def _model_info(header: Header) -> ModelInfo:
    tokenizer_model = _check_language_model(header)
    arch = _identifier(header, "general.architecture")
    if arch is None:
        raise header.error("lacks general.architecture.")
    n_ctx_train = _needed(header, f"{arch}.context_length", MAX_CONTEXT_TOKENS)
    shape = _shape(header, arch)
    rope_scaling = header.text(f"{arch}.rope.scaling.type")
    if rope_scaling is not None and rope_scaling not in ROPE_SCALINGS:
        raise header.error(f"has the unknown rope scaling {clip(ascii(rope_scaling))}.")
    _check_vocabulary(header, tokenizer_model)
    name = header.text("general.name") or ""
    file_type = header.integer("general.file_type", 0, 0xFFFF_FFFF)
    return ModelInfo(
        path=header.path,
        file_size=header.file_bytes,
        gguf_version=header.version,
        architecture=arch,
        name="".join(filter(str.isprintable, name)) or None,  # it is printed on terminals
        n_ctx_train=n_ctx_train,
        num_layers=shape.num_layers,
        num_heads=max(shape.num_heads, default=0),
        num_kv_heads=shape.num_kv_heads,
        embedding_length=shape.embedding_length,
        head_size_k=shape.head_size_k,
        head_size_v=shape.head_size_v,
        rope_scaling=rope_scaling,
        rope_freq_base=header.number(f"{arch}.rope.freq_base"),
        sliding_window=header.integer(f"{arch}.attention.sliding_window", 0, 0x7FFF_FFFF) or None,
        vocab_size=len(header.tokens),
        tokenizer_model=tokenizer_model,
        tokenizer_pre=_identifier(header, "tokenizer.ggml.pre"),
        chat_template=header.text("tokenizer.chat_template", MAX_TEMPLATE_BYTES) or None,
        num_tensors=header.num_tensors,
        quantization=FILE_TYPES.get(file_type) if header.num_tensors and file_type is not None else None,
        layer_kv=shape.layer_kv,
        state_bytes=shape.state_bytes,
    )


def _check_language_model(header: Header) -> str:
    """Return the type of the tokenizer. ModelFileError unless the file holds a whole language model or its vocabulary."""
    kind = header.text("general.type")
    if kind in ("adapter", "mmproj", "imatrix"):
        raise header.error(f"holds a part of a model ({kind}), not a language model.", hint=TAKE_A_LANGUAGE_MODEL)
    tokenizer_model = _identifier(header, "tokenizer.ggml.model")
    if tokenizer_model in (None, "none", "no_vocab"):
        raise header.error("holds no tokenizer (tokenizer.ggml.model), so it is not a language model.", hint=TAKE_A_LANGUAGE_MODEL)
    return tokenizer_model


def _check_vocabulary(header: Header, tokenizer_model: str) -> None:
    """Refuse vocabularies that crash llama.cpp only on certain texts, which a trial load does not find."""
    vocabulary = header.values.get(TOKENS_KEY)
    if vocabulary is None or vocabulary.type != STRING or not vocabulary.count:
        raise header.error(f"holds no vocabulary ({TOKENS_KEY}).", hint=TAKE_A_LANGUAGE_MODEL)
    try:
        b"\n".join(header.tokens).decode()
    except UnicodeDecodeError:
        raise header.error("has a token in its vocabulary that is not UTF-8.") from None
    # A SentencePiece tokenizer falls back to byte tokens, and throws through the C interface if one is missing.
    if tokenizer_model == "llama":
        tokens = set(header.tokens)
        missing = sum(b"<0x%02X>" % byte not in tokens and bytes([byte]) not in tokens for byte in range(256))
        if missing:
            raise header.error(f"lacks {missing} of the 256 byte tokens that its tokenizer needs.", num_missing=missing)


def _identifier(header: Header, key: str) -> str | None:
    text = header.text(key) or None
    if text is not None and not _IDENTIFIER.fullmatch(text):
        raise header.error(f"has {clip(ascii(text))} under {key}, which is not a name.", key=key)
    return text


def _needed(header: Header, key: str, high: int) -> int:
    """Return the integer under `key`, from 1 to `high`; 0 if a file without weights lacks it."""
    number = header.integer(key, 1, high)
    if number is None and header.num_tensors:
        raise header.error(f"lacks {key}.", key=key)
    return number or 0


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a model. `num_heads` and `num_kv_heads` have one entry per layer; head sizes are the largest of all layers.

    For `layer_kv` and `state_bytes`, see ModelInfo.
    """

    num_layers: int
    embedding_length: int
    num_heads: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    head_size_k: int
    head_size_v: int
    layer_kv: tuple[tuple[int, int], ...]
    state_bytes: int


def _shape(header: Header, arch: str) -> _Shape:
    num_layers = _needed(header, f"{arch}.block_count", MAX_LAYERS)
    embedding_length = _needed(header, f"{arch}.embedding_length", MAX_EMBEDDING_LENGTH)
    num_heads = header.integers(f"{arch}.attention.head_count", num_layers, 0, MAX_HEADS) or ()
    num_kv_heads = header.integers(f"{arch}.attention.head_count_kv", num_layers, 0, MAX_HEADS)
    if num_kv_heads is None:
        num_kv_heads = num_heads
    state_elements = _state_elements(header, arch, embedding_length, max(num_heads, default=0))
    if header.num_tensors and not any(num_heads) and not state_elements:
        raise header.error(f"has no attention heads ({arch}.attention.head_count) and no recurrent layers.")
    for heads, kv_heads in zip(num_heads, num_kv_heads, strict=False):
        if kv_heads and heads % kv_heads:
            raise header.error(f"has a layer of {heads} attention heads, which is not a multiple of its {kv_heads} KV heads.")
    usual = embedding_length // next(filter(None, num_heads), MAX_EMBEDDING_LENGTH)
    size_k, size_v = (_head_sizes(header, f"{arch}.attention.{each}_length", usual, has_heads=any(num_heads)) for each in ("key", "value"))
    recurrent = _recurrent_layers(header, arch, num_kv_heads) if state_elements else frozenset()
    return _Shape(
        num_layers=num_layers,
        embedding_length=embedding_length,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size_k=max(size_k),
        head_size_v=max(size_v),
        layer_kv=_layer_kv(header, arch, num_kv_heads, size_k, size_v, frozenset() if arch in _BESIDE_ATTENTION else recurrent),
        state_bytes=_STATE_ELEMENT_BYTES * state_elements * (len(recurrent) if num_kv_heads else num_layers),
    )


def _head_sizes(header: Header, key: str, usual: int, *, has_heads: bool) -> tuple[int, int]:
    """Return the size of a head in a layer that attends to all tokens, and in one with a sliding window."""
    size = header.integer(key, 1, MAX_HEAD_SIZE) or usual
    if header.num_tensors and has_heads and not 1 <= size <= MAX_HEAD_SIZE:
        raise header.error(f"implies heads of {size} elements; 1 to {MAX_HEAD_SIZE} are allowed.", value=size)
    return size, header.integer(f"{key}_swa", 1, MAX_HEAD_SIZE) or size


_STATE_ELEMENT_BYTES = 4
_BESIDE_ATTENTION = ("falcon-h1",)
"""Architectures whose layers have attention and a recurrent state side by side."""
_EVERY_NTH_ATTENDS = ("qwen3next", "qwen35", "qwen35moe")
"""Architectures that say at which interval a layer with attention follows recurrent ones."""


def _state_elements(header: Header, arch: str, embedding_length: int, num_heads: int) -> int:
    """Return the number of elements of a sequence's state in each recurrent layer; 0 if the model has none.

    It is a short convolution (LFM2), a linear attention (RWKV, Kimi), or a convolution and a state space (Mamba, gated delta nets).
    """
    conv, wkv, kernel, kda, inner, state, groups, shifts = (
        header.integer(f"{arch}.{key}", 0, MAX_EMBEDDING_LENGTH) or 0
        for key in (
            "shortconv.l_cache",
            "wkv.head_size",
            "ssm.conv_kernel",
            "kda.head_dim",
            "ssm.inner_size",
            "ssm.state_size",
            "ssm.group_count",
            "token_shift_count",
        )
    )
    if conv:
        return embedding_length * (conv - 1)
    if wkv:
        return embedding_length * (wkv + (shifts or 2))
    if kda:
        return num_heads * kda * (3 * max(0, kernel - 1) + kda)
    return max(0, kernel - 1) * (inner + 2 * groups * state) + state * inner


def _recurrent_layers(header: Header, arch: str, num_kv_heads: tuple[int, ...]) -> frozenset[int]:
    """Return the layers that keep a recurrent state, where `num_kv_heads` has an entry for each."""
    count = len(num_kv_heads)
    if arch in _BESIDE_ATTENTION:
        return frozenset(range(count))
    if arch in _EVERY_NTH_ATTENDS:
        flags = header.flags(f"{arch}.attention.recurrent_layers", count)
        interval = header.integer(f"{arch}.full_attention_interval", 1, MAX_LAYERS) or 4
        stack = range(count - (header.integer(f"{arch}.nextn_predict_layers", 0, MAX_LAYERS) or 0))
        return frozenset(layer for layer in stack if (flags[layer] if flags else (layer + 1) % interval))
    widths = header.integers(f"{arch}.feed_forward_length", count, 0, MAX_EMBEDDING_LENGTH) if arch.startswith("nemotron_h") else None
    return frozenset(layer for layer, heads in enumerate(num_kv_heads) if not heads and not (widths and widths[layer]))


def _layer_kv(
    header: Header,
    arch: str,
    num_kv_heads: tuple[int, ...],
    size_k: tuple[int, int],
    size_v: tuple[int, int],
    recurrent: frozenset[int],
) -> tuple[tuple[int, int], ...]:
    """Return the numbers of elements of a token's keys and of its values, in each layer that stores any.

    An embedder whose tokens attend to later ones stores none. The last layers can share the keys and values of earlier ones, or predict
    further tokens, which localrag does not use. In multi-head latent attention, values are computed from the stored keys.
    """
    if header.flag(f"{arch}.attention.causal") is False:
        return ()
    unused = sum(header.integer(f"{arch}.{key}", 0, MAX_LAYERS) or 0 for key in ("attention.shared_kv_layers", "nextn_predict_layers"))
    is_latent = all(header.integer(f"{arch}.attention.{each}_length_mla", 0, MAX_HEAD_SIZE) for each in ("key", "value"))
    slides = header.flags(f"{arch}.attention.sliding_window_pattern", len(num_kv_heads))
    layers = []
    for layer, heads in enumerate(num_kv_heads[: max(0, len(num_kv_heads) - unused)]):
        if heads and layer not in recurrent:
            keys, values = (max(sizes) if slides is None else sizes[slides[layer]] for sizes in (size_k, size_v))
            layers.append((heads * keys, 0 if is_latent else heads * values))
    return tuple(layers)


def file_error(path: Path, problem: str, *, hint: str, **numbers: object) -> ModelFileError:
    """Return the error for a file. `problem` follows the path in its message."""
    name = str(path)
    return ModelFileError(f"{name if name.isprintable() else ascii(name)} {problem}", hint=hint, path=name, **numbers)


def clip(text: str) -> str:
    """Shorten `text` to 80 characters, for an error message."""
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class Value:
    """The position of a key's value: `count` elements of `type` from byte `start`, or one element if `count` is None."""

    type: int
    start: int
    count: int | None


@dataclass(slots=True)
class Header:
    """The keys of a GGUF file and the positions of their values in `buffer`, which maps the start of the file.

    Look-ups return None for a missing key. They raise ModelFileError for a value of another type or out of range.
    """

    path: Path
    buffer: mmap.mmap
    file_bytes: int
    version: int = 0
    num_tensors: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    tokens: list[bytes] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def error(self, problem: str, *, hint: str = TAKE_ANOTHER, **numbers: object) -> ModelFileError:
        """Return the error for `problem`, which follows the path of the file in the message."""
        return file_error(self.path, problem, hint=hint, file_bytes=self.file_bytes, **numbers)

    def integer(self, key: str, low: int, high: int, *, type_: int = UINT32) -> int | None:
        """Return the integer under `key`, from `low` to `high`."""
        value = self._single(key, type_)
        return None if value is None else self._integer_at(key, value, 0, low, high)

    def integers(self, key: str, count: int, low: int, high: int) -> tuple[int, ...] | None:
        """Return the `count` integers under `key`: an array of that length, or a single integer repeated."""
        value = self.values.get(key)
        if value is None or value.count is None:
            single = self.integer(key, low, high)
            return None if single is None else (single,) * count
        if value.type not in (UINT32, INT32) or value.count != count:
            actual = f"{value.count} values of type {VALUE_TYPES[value.type][0]}"
            raise self.error(f"has {actual} under {clip(key)}, where one or {count} of type uint32 belong.", key=key, expected=count)
        return tuple(self._integer_at(key, value, index, low, high) for index in range(count))

    def flag(self, key: str) -> bool | None:
        """Return the boolean under `key`."""
        value = self._single(key, BOOL)
        return None if value is None else bool(self.buffer[value.start])

    def flags(self, key: str, count: int) -> tuple[bool, ...] | None:
        """Return the `count` booleans under `key`; None for a single value."""
        value = self.values.get(key)
        if value is None or value.count is None:
            return None
        if value.type not in (BOOL, UINT32, INT32) or value.count != count:
            actual = f"{value.count} values of type {VALUE_TYPES[value.type][0]}"
            raise self.error(f"has {actual} under {clip(key)}, where {count} of type bool belong.", key=key, expected=count)
        layout = VALUE_TYPES[value.type][1]
        return tuple(bool(layout.unpack_from(self.buffer, value.start + index * layout.size)[0]) for index in range(count))

    def number(self, key: str) -> float | None:
        """Return the float under `key`: finite, 0 or more."""
        value = self._single(key, FLOAT32)
        if value is None:
            return None
        number: float = VALUE_TYPES[FLOAT32][1].unpack_from(self.buffer, value.start)[0]
        if not (math.isfinite(number) and number >= 0):
            raise self.error(f"has {number} under {clip(key)}, where a finite number of 0 or more belongs.", key=key)
        return number

    def text(self, key: str, max_bytes: int = MAX_STRING_BYTES) -> str | None:
        """Return the text under `key`."""
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
            actual = VALUE_TYPES[value.type][0] + ("" if value.count is None else " array")
            raise self.error(f"has a {actual} under {clip(key)}, where a {VALUE_TYPES[type_][0]} belongs.", key=key)
        return value

    def _integer_at(self, key: str, value: Value, index: int, low: int, high: int) -> int:
        layout = VALUE_TYPES[value.type][1]
        integer: int = layout.unpack_from(self.buffer, value.start + index * layout.size)[0]
        if not low <= integer <= high:
            raise self.error(f"has {integer} under {clip(key)}, where {low} to {high} belongs.", key=key, value=integer, low=low, high=high)
        return integer


MAGIC = b"GGUF"

_U32, _U64, _U64_PAIR = Struct("<I"), Struct("<Q"), Struct("<QQ")
_ARRAY_HEAD = Struct("<IQ")  # element type, number of elements
_TENSOR_TAILS = {num_dims: Struct(f"<{num_dims}QIQ") for num_dims in range(1, 5)}  # sizes, type, offset
_DEFAULT_ALIGNMENT = 32


def parse(path: Path, buffer: mmap.mmap, file_bytes: int) -> Header:
    """Parse the header of the file at `path`, whose first MAX_HEADER_BYTES are mapped by `buffer`.

    Raises ModelFileError if the file is not GGUF, is truncated or contradicts itself.
    """
    header = Header(path, buffer, file_bytes)
    cursor = _Cursor(header)
    _read_version(header, cursor)
    header.num_tensors, num_keys = cursor.unpack(_U64_PAIR, "the head of the file")
    if header.num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        problem = f"is damaged: it claims {header.num_tensors} tensors and {num_keys} keys; the limits are {MAX_TENSORS} and {MAX_KEYS}."
        raise header.error(problem, num_tensors=header.num_tensors, num_keys=num_keys)
    for index in range(num_keys):
        key = cursor.name(f"key {index + 1} of {num_keys}", MAX_KEY_BYTES)
        if key in header.values:
            raise header.error(f"is damaged: it has the key {clip(key)} twice.", key=clip(key))
        header.values[key] = _read_value(header, cursor, key)
    _check_tensors(header, cursor)
    return header


class _Cursor:
    """A position in the header. Each step is checked against the file's size first."""

    __slots__ = ("buffer", "header", "pos")

    def __init__(self, header: Header) -> None:
        self.header = header
        self.buffer = header.buffer
        self.pos = 0

    def skip(self, num_bytes: int, what: str) -> int:
        """Move past `num_bytes` and return the position of the first one. ModelFileError if the file ends before that."""
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
        """Move past a length-prefixed string and return the position of its first byte."""
        (length,) = self.unpack(_U64, what)
        if length > max_bytes:
            raise self.header.error(f"is damaged: {clip(what)} has {length} bytes; the limit is {max_bytes}.", limit_bytes=max_bytes)
        return self.skip(length, what)

    def name(self, what: str, max_bytes: int) -> str:
        """Read a name: one line of UTF-8, not empty."""
        raw = self.buffer[self.skip_string(what, max_bytes) : self.pos]
        name = raw.decode(errors="replace")
        if not name or "\ufffd" in name or not name.isprintable():
            raise self.header.error(f"is damaged: the name of {what} is {clip(ascii(raw))}.")
        return name

    def strings(self, count: int, what: str, *, keep: bool) -> list[bytes]:
        """Move past `count` strings and return their bytes if `keep`. Calling skip_string for each would be too slow."""
        buffer, pos, unpack = self.buffer, self.pos, _U64.unpack_from
        strings: list[bytes] = []
        keep_one = strings.append
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
        except struct_error:  # a length is past the end
            self.pos = pos
            self.skip(8, what)  # raises
        self.skip(pos - self.pos, what)
        return strings


def _read_version(header: Header, cursor: _Cursor) -> None:
    first = header.buffer[:24]
    if not first.startswith(MAGIC):
        raise header.error(f"is not a GGUF file: it starts with {first!r}.", hint=CONVERT_IT)
    cursor.skip(len(MAGIC), "the magic")
    (header.version,) = cursor.unpack(_U32, "the version")
    if header.version and not header.version & 0xFFFF:
        raise header.error("is a big-endian GGUF file; only little-endian files are supported.", hint=CONVERT_IT)
    if header.version not in (2, 3):
        raise header.error(f"has GGUF version {header.version}; versions 2 and 3 are supported.", hint=CONVERT_IT, version=header.version)


def _read_value(header: Header, cursor: _Cursor, key: str) -> Value:
    (type_,) = cursor.unpack(_U32, key)
    count = None
    if type_ == ARRAY:
        type_, count = cursor.unpack(_ARRAY_HEAD, key)
        if count > MAX_ARRAY_ELEMENTS:
            problem = f"is damaged: {clip(key)} claims {count} elements; the limit is {MAX_ARRAY_ELEMENTS}."
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
    """Check that the tensors follow one another in the order of their names and end within the file."""
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
            problem = f"is damaged: the tensor {name} claims offset {offset}; expected {next_offset}."
            raise header.error(problem, tensor=name, offset=offset, expected=next_offset)
        end = offset + num_bytes
        next_offset = _pad(end, alignment)
    first = _pad(cursor.pos, alignment)
    header.tensors = {name: tensor._replace(start=first + tensor.start) for name, tensor in header.tensors.items()}
    needed = first + end if header.num_tensors else 0
    if needed > header.file_bytes:
        missing = needed - header.file_bytes
        problem = f"is truncated: the header claims {needed} bytes, the file has {header.file_bytes}; {counted(missing, 'byte')} missing."
        raise header.error(problem, hint=GET_IT_AGAIN, needed_bytes=needed, missing_bytes=missing)


def _read_tensor(header: Header, cursor: _Cursor, name: str) -> tuple[int, int]:
    """Return the size of a tensor in bytes and the offset that the header claims for it."""
    (num_dims,) = cursor.unpack(_U32, name)
    if num_dims not in _TENSOR_TAILS:
        raise header.error(f"is damaged: the tensor {name} has {num_dims} dimensions; 1 to 4 are allowed.", tensor=name)
    *sizes, type_, offset = cursor.unpack(_TENSOR_TAILS[num_dims], name)
    if type_ not in TENSOR_TYPES:
        raise header.error(f"stores the tensor {name} as the unknown type {type_}.", tensor=name, type_number=type_)
    block_elements, block_bytes = TENSOR_TYPES[type_]
    num_elements = math.prod(sizes)
    if not 0 < num_elements < 1 << 63 or sizes[0] % block_elements:
        problem = f"is damaged: the tensor {name} has the impossible shape {' x '.join(map(str, sizes))}."
        raise header.error(problem, tensor=name)
    header.tensors[name] = Tensor(tuple(sizes), type_, offset)  # of the first tensor, until all are read
    return num_elements // block_elements * block_bytes, offset


def _pad(num_bytes: int, alignment: int) -> int:
    """Round `num_bytes` up to a multiple of `alignment`, a power of two."""
    return (num_bytes + alignment - 1) & -alignment
