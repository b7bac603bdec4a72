"""Small GGUF files, written with the gguf package: a tiny llama that llama.cpp loads and runs, and its vocabulary alone.

`changes` set keys, a None takes one away: `write_model(path, changes={"llama.context_length": 64, "general.name": None})`.
An int is written as uint32, a float as float32, a list of them as an array of int32 or float32.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from localrag.engine.gguf import read_header
from localrag.errors import ModelFileError

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, EMBEDDING_LENGTH, FEED_FORWARD_LENGTH, N_CTX_TRAIN = 2, 4, 2, 32, 64, 512
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # token types
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED_TOKENS = ["<think>", "</think>"]
MERGES = ["t h", "th e", "i n", "Ġ th", "Ġ the"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(path: Path, *, changes: Mapping[str, object] | None = None, seed: int = 0) -> Path:
    """A whole model of about 110 kB: two layers of random weights, a byte-level BPE vocabulary of 266 tokens, a ChatML template."""
    keys = bpe_keys() | dict(changes or {})
    tokens = keys["tokenizer.ggml.tokens"]
    return write_gguf(path, keys, tiny_tensors(len(tokens) if isinstance(tokens, list) else 0, seed=seed))


def write_vocab(path: Path, *, changes: Mapping[str, object] | None = None) -> Path:
    """The same without weights."""
    return write_gguf(path, bpe_keys() | dict(changes or {}))


def write_gguf(path: Path, keys: Mapping[str, object], tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """A GGUF file of version 3 with these keys, `general.architecture` among them, and these tensors."""
    writer = GGUFWriter(path, str(keys["general.architecture"]))
    for key, value in keys.items():
        if key == "general.architecture" or value is None:
            continue
        if isinstance(value, list):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=_value_type(value[0], integer=GGUFValueType.INT32))
        else:
            writer.add_key_value(key, value, _value_type(value, integer=GGUFValueType.UINT32))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shape_keys() -> dict[str, object]:
    """The keys of a tiny llama, without its tokenizer."""
    return {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "general.file_type": 0,
        "llama.context_length": N_CTX_TRAIN,
        "llama.block_count": NUM_LAYERS,
        "llama.embedding_length": EMBEDDING_LENGTH,
        "llama.feed_forward_length": FEED_FORWARD_LENGTH,
        "llama.attention.head_count": NUM_HEADS,
        "llama.attention.head_count_kv": NUM_KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
    }


def bpe_keys() -> dict[str, object]:
    """A tiny llama with a byte-level BPE tokenizer."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = CONTROL_TOKENS + byte_level_alphabet() + merged + USER_DEFINED_TOKENS
    types = [CONTROL] * len(CONTROL_TOKENS) + [NORMAL] * (256 + len(merged)) + [USER_DEFINED] * len(USER_DEFINED_TOKENS)
    return shape_keys() | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


def spm_keys() -> dict[str, object]:
    """A tiny llama with a SentencePiece tokenizer: 256 bytes, and a few pieces."""
    pieces = ["▁", "t", "h", "e", "▁t", "he", "▁the"]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    return shape_keys() | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def byte_level_alphabet() -> list[str]:
    """The 256 characters by which GPT-2's tokenizers write bytes, in the order of the bytes."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def tiny_tensors(num_tokens: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights for `shape_keys`, the same for the same seed."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.2)

    width, wide = EMBEDDING_LENGTH, FEED_FORWARD_LENGTH
    kv_width = width // NUM_HEADS * NUM_KV_HEADS
    tensors = {"token_embd.weight": matrix(num_tokens, width), "output_norm.weight": np.ones(width, np.float32)}
    for layer in range(NUM_LAYERS):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": np.ones(width, np.float32),
            f"blk.{layer}.attn_q.weight": matrix(width, width),
            f"blk.{layer}.attn_k.weight": matrix(kv_width, width),
            f"blk.{layer}.attn_v.weight": matrix(kv_width, width),
            f"blk.{layer}.attn_output.weight": matrix(width, width),
            f"blk.{layer}.ffn_norm.weight": np.ones(width, np.float32),
            f"blk.{layer}.ffn_gate.weight": matrix(wide, width),
            f"blk.{layer}.ffn_up.weight": matrix(wide, width),
            f"blk.{layer}.ffn_down.weight": matrix(width, wide),
        }
    return tensors


def _value_type(value: object, *, integer: GGUFValueType) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return integer
    return GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.STRING


# Raw pieces, for what the gguf package refuses to write.

UINT32, INT32, STRING, ARRAY, UINT64 = 4, 5, 8, 9, 10


def text(content: str | bytes) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, value_type: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + payload


def array(element_type: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", element_type, count) + payload


def tensor(name: str | bytes, sizes: Sequence[int], tensor_type: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor_type, offset)


def raw_file(*pairs: bytes, tensors: Sequence[bytes] = (), version: int = 3, num_bytes: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + bytes((num_bytes or len(head)) - len(head))


def raw_pairs(**changes: bytes) -> list[bytes]:
    """The keys of a tiny llama, encoded; `changes` replaces the pair of a key, whose dots are written as __."""
    tokens = ["a", "b", "c"]
    pairs = {
        "general__architecture": pair("general.architecture", STRING, text("llama")),
        "llama__context_length": pair("llama.context_length", UINT32, struct.pack("<I", 512)),
        "llama__block_count": pair("llama.block_count", UINT32, struct.pack("<I", 2)),
        "llama__embedding_length": pair("llama.embedding_length", UINT32, struct.pack("<I", 32)),
        "llama__attention__head_count": pair("llama.attention.head_count", UINT32, struct.pack("<I", 4)),
        "tokenizer__ggml__model": pair("tokenizer.ggml.model", STRING, text("gpt2")),
        "tokenizer__ggml__tokens": pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, b"".join(map(text, tokens)))),
    }
    return list((pairs | changes).values())


def refusal(path: Path) -> ModelFileError:
    """The error with which the file is refused."""
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert_well_said(caught.value, path)
    return caught.value


def assert_well_said(error: ModelFileError, path: Path) -> None:
    """One line, a way out, and numbers that are fit for JSON."""
    assert error.message.isprintable()
    assert len(error.message) < len(str(path)) + 300
    assert error.hint
    assert error.numbers["path"] == str(path)
    json.dumps(error.to_dict())
