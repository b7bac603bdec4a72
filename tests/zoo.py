"""A zoo of tiny random models, one of each architecture that people run. Each takes milliseconds to make and up to a few megabytes.

llama.cpp itself says which tensors an architecture has, and of which shapes: `llama_model_init_from_user` gets the metadata alone and asks
for the data of each. So a kind is described here by its metadata only. All have the same small byte-level vocabulary and template.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localrag.engine.llama_lib import library
from tests.gguf_files import CONTROL_TOKENS, bpe_keys, write_gguf

N_CTX, WIDTH, HEADS, KV_HEADS, HEAD, FEED_FORWARD, WINDOW = 2048, 64, 4, 2, 16, 96, 32
_VOCABULARY = {key: value for key, value in bpe_keys().items() if key.startswith("tokenizer.")}
_SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 2 * WIDTH, "ssm.state_size": 16, "ssm.time_step_rank": 8, "ssm.group_count": 1}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_HEADS = {"attention.key_length": HEAD, "attention.value_length": HEAD}
_SLIDING = {**_HEADS, "attention.sliding_window": WINDOW}

KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3": _HEADS,
    "qwen3moe": {**_HEADS, **_EXPERTS},
    "qwen35": {
        **_HEADS,
        "block_count": 4,
        "full_attention_interval": 4,
        "rope.dimension_sections": [4, 2, 2, 0],
        **_SSM,
        "ssm.state_size": 32,
        "ssm.time_step_rank": 4,
        "ssm.group_count": 2,
    },
    "gemma3": {**_SLIDING, "block_count": 6},
    "gemma4": {
        **_SLIDING,
        "block_count": 6,
        "attention.key_length": 2 * HEAD,
        "attention.value_length": 2 * HEAD,
        "attention.key_length_swa": HEAD,
        "attention.value_length_swa": HEAD,
        "attention.sliding_window_pattern": [True, True, True, False, True, False],
        "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 16,
        "rope.dimension_count": 2 * HEAD,
        "rope.dimension_count_swa": HEAD,
        "rope.freq_base_swa": 10_000.0,
        "final_logit_softcapping": 30.0,
    },
    "gpt-oss": {**_SLIDING, **_EXPERTS, "block_count": 4},
    "lfm2": {"block_count": 4, "attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3},
    "mamba2": {**_SSM, "attention.head_count": None, "attention.head_count_kv": None, "rope.freq_base": None},
    "granitehybrid": {
        **_SSM,
        "block_count": 4,
        "attention.head_count_kv": [0, 0, 2, 0],
        "attention.scale": 0.25,
        "embedding_scale": 2.0,
        "residual_scale": 0.5,
        "logit_scale": 0.25,
    },
    "phi3": {"rope.scaling.original_context_length": N_CTX},
    "mistral3": _HEADS,
    "deepseek2": {
        **_EXPERTS,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 24,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 48,
        "attention.value_length": 32,
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 16,
        "rope.dimension_count": 16,
    },
}
"""Architecture -> the metadata in which it differs from the common ones, without its prefix."""
_UNUSED = re.compile(r"[._](input_)?scale$|^cls\.|^dense_2\.")
"""Optional tensors that files of these architectures mostly lack."""


def write_kind(folder: Path, arch: str, *, seed: int = 0, changes: Mapping[str, object] | None = None, tensors_follow: bool = True) -> Path:
    """Write a random model of one of the KINDS. `changes` replaces metadata, named without the prefix of the architecture.

    Unless `tensors_follow`, the tensors are those of the kind without the changes. Otherwise llama.cpp may abort on absurd ones.
    """
    keys = _keys(arch, changes or {})
    path = folder / f"{arch}.gguf"
    shapes = _shapes(write_gguf(path, keys if tensors_follow else _keys(arch, {})))
    return write_gguf(path, keys, {name: _values(name, shape, seed) for name, shape in shapes.items() if not _UNUSED.search(name)})


def _keys(arch: str, changes: Mapping[str, object]) -> dict[str, object]:
    common = {
        "context_length": N_CTX,
        "block_count": 3,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10_000.0,
    }
    own = {f"{arch}.{key}": value for key, value in (common | KINDS[arch] | dict(changes)).items()}
    return {"general.architecture": arch, "general.name": "Tiny", "general.file_type": 0, **_VOCABULARY, **own}


class _GgufInit(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


class _TensorHead(ctypes.Structure):
    """The first fields of ggml's struct ggml_tensor."""

    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4)]


def _shapes(metadata: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of the architecture in a file of metadata, each with its dimensions, outermost first."""
    lib = library()
    ggml: Any = lib._lib
    ggml.gguf_init_from_file.restype, ggml.gguf_init_from_file.argtypes = ctypes.c_void_p, [ctypes.c_char_p, _GgufInit]
    ggml.gguf_free.argtypes, ggml.ggml_n_dims.argtypes = [ctypes.c_void_p], [ctypes.c_void_p]
    ggml.ggml_get_name.restype, ggml.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    shapes: dict[str, tuple[int, ...]] = {}

    @lib.llama_model_set_tensor_data_t
    def note(tensor: int, _user_data: object) -> None:
        sizes = _TensorHead.from_address(tensor).ne[: ggml.ggml_n_dims(tensor)]
        shapes[ggml.ggml_get_name(tensor).decode()] = tuple(reversed(sizes))

    context = ggml.gguf_init_from_file(str(metadata).encode(), _GgufInit(True, None))
    assert context, metadata
    try:
        model = lib.llama_model_init_from_user(context, note, None, lib.llama_model_default_params())
        assert model, metadata
        lib.llama_model_free(model)
    finally:
        ggml.gguf_free(context)
    return shapes


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random values under which answers vary, nothing overflows, and the best token is well ahead of the next."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    normal = rng.standard_normal(shape, dtype=np.float32)
    if name.startswith("rope_"):  # factors of frequencies
        values = np.ones(shape)
    elif name.endswith(("norm.weight", "layer_output_scale.weight", "ssm_d")):
        values = 1 + 0.1 * normal
    elif name.endswith("ssm_a"):  # a decay
        values = -np.exp(0.5 * normal)
    elif name.endswith(".bias") or len(shape) == 1:
        values = 0.1 * normal
    elif name.endswith("ffn_gate_inp.weight"):  # one expert decides, so that rounding does not choose between two
        values = 10 * normal
    elif name == "output.weight":
        values = 0.25 * normal
        values[: len(CONTROL_TOKENS)] = 0  # an answer goes on to its limit
    else:
        values = normal / np.sqrt(shape[-1])
    return values.astype(np.float32)
