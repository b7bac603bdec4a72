"""Read a GGUF header into ModelInfo, before any weight is read and before llama.cpp sees the file.

Limits keep a hostile file from exhausting time and memory, and validate the numbers from which memory and window are predicted. The checks
also cover what a trial load cannot find: a token that crashes llama.cpp only when a text needs it. Every other assertion of llama.cpp is
found by that trial, in a child process (sandbox.py). Weights are not read; only a checksum detects damage in them.

Source: src/llama-model.cpp (load_hparams) and src/llama-vocab.cpp of llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from localrag.engine.gguf_layout import (
    FILE_TYPES,
    GET_IT_AGAIN,
    MAX_HEADER_BYTES,
    STRING,
    TAKE_A_LANGUAGE_MODEL,
    TOKENS_KEY,
    UINT16,
    Header,
    clip,
    file_error,
    parse,
)
from localrag.types import ModelInfo

MAX_CONTEXT_TOKENS = 1 << 27
MAX_LAYERS = 512
MAX_HEADS = 1024
MAX_HEAD_SIZE = 4096
MAX_EMBEDDING_LENGTH = 1 << 20
MAX_TEMPLATE_BYTES = 128 << 10
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

CHECK_THE_PATH = "Check the path; `localrag models list` shows the known models."

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_header(path: Path) -> ModelInfo:
    """Read the header of the GGUF file at `path`, in time that grows with the vocabulary.

    A file without weights may omit its shape: ModelInfo then has zeros and an empty `num_kv_heads`.
    Raises ModelFileError for anything but a complete GGUF file of a language model.
    """
    buffer, file_bytes = _map(path)
    with buffer:
        return _model_info(parse(path, buffer, file_bytes))


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
    )


def _check_language_model(header: Header) -> str:
    """Return the type of the tokenizer. ModelFileError unless the file holds a whole language model or its vocabulary."""
    kind = header.text("general.type")
    if kind in ("adapter", "mmproj", "imatrix"):
        raise header.error(f"holds a part of a model ({kind}), not a language model.", hint=TAKE_A_LANGUAGE_MODEL)
    num_parts = header.integer("split.count", 0, 0xFFFF, type_=UINT16) or 1
    if num_parts > 1:
        hint = "Join the parts first: `llama-gguf-split --merge FIRST-PART OUTPUT`, a program of llama.cpp."
        raise header.error(f"is one of {num_parts} parts of a model.", hint=hint, num_parts=num_parts)
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
    """Sizes of a model. `num_heads` and `num_kv_heads` have one entry per layer; head sizes are the largest of all layers."""

    num_layers: int
    embedding_length: int
    num_heads: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    head_size_k: int
    head_size_v: int


def _shape(header: Header, arch: str) -> _Shape:
    num_layers = _needed(header, f"{arch}.block_count", MAX_LAYERS)
    embedding_length = _needed(header, f"{arch}.embedding_length", MAX_EMBEDDING_LENGTH)
    num_heads = header.integers(f"{arch}.attention.head_count", num_layers, 0, MAX_HEADS) or ()
    num_kv_heads = header.integers(f"{arch}.attention.head_count_kv", num_layers, 0, MAX_HEADS)
    if num_kv_heads is None:
        num_kv_heads = num_heads
    if header.num_tensors and not any(num_heads):
        raise header.error(f"has no attention heads ({arch}.attention.head_count); localrag needs a model with attention.")
    for heads, kv_heads in zip(num_heads, num_kv_heads, strict=False):
        if kv_heads and heads % kv_heads:
            raise header.error(f"has a layer of {heads} attention heads, which is not a multiple of its {kv_heads} KV heads.")
    usual = embedding_length // next(filter(None, num_heads), MAX_EMBEDDING_LENGTH)
    return _Shape(
        num_layers=num_layers,
        embedding_length=embedding_length,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size_k=_head_size(header, f"{arch}.attention.key_length", usual),
        head_size_v=_head_size(header, f"{arch}.attention.value_length", usual),
    )


def _head_size(header: Header, key: str, usual: int) -> int:
    size = header.integer(key, 1, MAX_HEAD_SIZE) or usual
    if header.num_tensors and not 1 <= size <= MAX_HEAD_SIZE:
        raise header.error(f"implies heads of {size} elements; 1 to {MAX_HEAD_SIZE} are allowed.", value=size)
    return max(size, header.integer(f"{key}_swa", 1, MAX_HEAD_SIZE) or 0)
