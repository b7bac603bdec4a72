"""Predict the memory of a model and its KV cache, and find the largest window that fits into RAM and GPU memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from localrag.engine.llama_lib import library
from localrag.errors import EngineError, UsageError
from localrag.types import Bound, ModelInfo, Slot

_GPU_TYPES = (1, 2)  # ggml_backend_dev_type: a discrete GPU, and one that shares the machine's memory


@dataclass(frozen=True, slots=True)
class GpuDevice:
    name: str
    description: str
    free_bytes: int
    total_bytes: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def gpu_devices() -> list[GpuDevice]:
    """Return the GPUs that llama.cpp can use, with their current memory; empty for a CPU build. EngineError if it is not installed."""
    lib = library()
    if not lib.llama_supports_gpu_offload():
        return []
    try:
        ggml = lib._lib  # noqa: SLF001  # llama-cpp-python binds no device functions, but its handle finds them
        count, get, kind = ggml.ggml_backend_dev_count, ggml.ggml_backend_dev_get, ggml.ggml_backend_dev_type
        name, description, memory = ggml.ggml_backend_dev_name, ggml.ggml_backend_dev_description, ggml.ggml_backend_dev_memory
    except AttributeError:  # another loader, or a build with other names
        return []
    count.restype, kind.restype, memory.restype = ctypes.c_size_t, ctypes.c_int, None
    get.restype, name.restype, description.restype = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p
    get.argtypes = [ctypes.c_size_t]
    for function in (kind, name, description):
        function.argtypes = [ctypes.c_void_p]
    memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    devices = []
    for index in range(count()):
        device = get(index)
        if kind(device) in _GPU_TYPES:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            memory(device, ctypes.byref(free), ctypes.byref(total))
            devices.append(GpuDevice(_text(name(device)), _text(description(device)), free.value, total.value))
    return devices


def gpu_bytes_free() -> int:
    """Return the free memory of all GPUs together, since llama.cpp splits a model between them."""
    return sum(device.free_bytes for device in gpu_devices())


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


RESERVE_BYTES = 256 * 1024 * 1024
"""Memory left for the rest of the machine."""
UBATCH_TOKENS = 512
"""Tokens that the engine evaluates at a time. The size of all activations is proportional to it."""
CELLS_PAD = 256
MAX_UNSAID_TOKENS = 1 << 20
"""Largest window of a file without weights that does not state its training context."""

KV_TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32}
"""Bytes per element of keys and values."""

_VOCAB_TOKEN_BYTES = {"gpt2": 330}  # text, two maps, and merges
_VOCAB_TOKEN_BYTES_PLAIN = 200  # without merges
# The measured share of a file that llama.cpp repacks for this processor, by quantization. The original stays mapped but is not read again,
# so the kernel can reclaim it: it counts toward the peak, but not toward the memory that must be free.
_REPACKED_SHARE = {"Q4_0": 0.93, "IQ4_NL": 0.93, "MXFP4": 0.9, "Q4_K_S": 0.8, "Q4_K_M": 0.65, "Q2_K": 0.5, "Q2_K_S": 0.5}
_K_BLOCK = 256  # row size of K-quants; other widths fall back to types that are not repacked
_FIXED_BYTES = 3 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Predicted memory, in bytes, of a process with this model and a context of `n_ctx` cells shared by `num_sequences`.

    `weights_bytes` is the mmapped file. `copied_bytes` is repacked weights and llama.cpp's vocabulary. `python_bytes` is the resident size
    of the process when the plan was made. `kv_bytes` includes the states of recurrent layers, one for each sequence. `gpu_bytes` is the
    part of the others on the GPU, `gpu_weights_bytes` its weights. `available` and `gpu_available` were free at that time.
    """

    n_ctx: int
    num_sequences: int
    kv_type: str
    flash_attention: bool
    gpu_layers: int
    weights_bytes: int
    copied_bytes: int
    repacked_bytes: int
    kv_bytes: int
    compute_bytes: int
    python_bytes: int
    embedder_bytes: int
    gpu_bytes: int
    gpu_weights_bytes: int
    available: int
    gpu_available: int

    @property
    def total(self) -> int:
        """Peak of the process in the machine's memory (VmHWM on Linux)."""
        parts = self.weights_bytes, self.copied_bytes, self.kv_bytes, self.compute_bytes, self.python_bytes, self.embedder_bytes
        return sum(parts) - self.gpu_bytes

    @property
    def needed(self) -> int:
        """Memory that must be free: the peak, less the current size of the process and the mapped pages that are not read again."""
        return self.total - self.python_bytes - min(self.repacked_bytes, self.total - self.python_bytes)

    @property
    def committed(self) -> int:
        """Memory that is in use while the model is open. The mmapped file counts as free."""
        return self.total - self.python_bytes - self.embedder_bytes - (self.weights_bytes - self.gpu_weights_bytes)

    @property
    def fits(self) -> bool:
        return fit_together([self], available_bytes=self.available, gpu_available_bytes=self.gpu_available)

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "total": self.total, "needed": self.needed, "fits": self.fits}

    def to_summary(self) -> dict[str, object]:
        """Return the `memory` field of an answer: the model's memory in RAM and on the GPU, without Python's own."""
        return {
            "predicted_bytes": self.total - self.python_bytes + self.gpu_bytes,
            "available_bytes": self.available,
            "weights_bytes": self.weights_bytes,
            "kv_bytes": self.kv_bytes,
            "gpu_bytes": self.gpu_bytes,
            "gpu_layers": self.gpu_layers,
            "kv_type": self.kv_type,
            "flash_attention": self.flash_attention,
            "num_cells": self.n_ctx,
            "num_sequences": self.num_sequences,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The memory, in bytes, against which a plan is made. None means: measure it now."""

    available_bytes: int | None = None
    gpu_available_bytes: int | None = None
    python_bytes: int | None = None
    embedder_bytes: int = 0
    is_loaded: bool = False
    """True if the weights are already loaded, so that their copies and their GPU memory are not needed again."""


def fit_together(plans: Sequence[MemoryPlan], *, available_bytes: int, gpu_available_bytes: int) -> bool:
    """Whether models that share one process fit together into the memory that is free without them."""
    needed, on_gpu = sum(each.needed for each in plans), sum(each.gpu_bytes for each in plans)
    return needed + RESERVE_BYTES <= available_bytes and on_gpu <= gpu_available_bytes


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that a process can still allocate: the machine's free memory, or less under a container's limit (cgroup v2)."""
    free = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return free
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stats = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        cache_bytes = int(stats["active_file"]) + int(stats["inactive_file"])  # the page cache, which the kernel reclaims on demand
        return max(0, min(free, int(limit) - used + cache_bytes))
    except (OSError, ValueError, KeyError):
        return free


def plan(
    info: ModelInfo,
    n_ctx: int,
    num_sequences: int = 1,
    kv_type: str = "f16",
    *,
    flash_attention: bool = False,
    gpu_layers: int = 0,
    situation: Situation | None = None,
) -> MemoryPlan:
    """Predict the memory of a model with a KV cache of `n_ctx` cells in total. Plain attention needs more than flash attention.

    As in llama.cpp, a `gpu_layers` above the model's number of layers offloads everything. EngineError for a KV type that is unknown or
    that plain attention does not support.
    """
    resources = _look_up(situation or Situation(), gpu_layers)
    if kv_type not in KV_TYPE_BYTES or (KV_TYPE_BYTES[kv_type] < KV_TYPE_BYTES["f16"] and not flash_attention):
        raise EngineError(
            f"A KV cache of type {kv_type} is not supported{' without flash attention' if kv_type in KV_TYPE_BYTES else ''}.",
            hint="Use f16.",
            kv_type=kv_type,
        )
    cells = -(-n_ctx // CELLS_PAD) * CELLS_PAD
    bytes_per_token = info.kv_bytes_per_token if flash_attention else info.plain_kv_bytes_per_token
    kv_bytes = int(cells * bytes_per_token * KV_TYPE_BYTES[kv_type] / KV_TYPE_BYTES["f16"]) + num_sequences * info.state_bytes
    compute_bytes = _compute_bytes(info, cells, num_sequences, flash_attention=flash_attention)
    share = min(1.0, gpu_layers / (info.num_layers + 1)) if info.num_layers else 0.0
    on_gpu = int(share * info.file_size)
    repacked = 0 if resources.is_loaded else int(_repacked_bytes(info) * (1 - share))
    vocabulary = 0 if resources.is_loaded else info.vocab_size * _VOCAB_TOKEN_BYTES.get(info.tokenizer_model, _VOCAB_TOKEN_BYTES_PLAIN)
    return MemoryPlan(
        n_ctx=cells,
        num_sequences=num_sequences,
        kv_type=kv_type,
        flash_attention=flash_attention,
        gpu_layers=gpu_layers,
        weights_bytes=info.file_size - (on_gpu if resources.is_loaded else 0),
        copied_bytes=repacked + vocabulary,
        repacked_bytes=repacked,
        kv_bytes=kv_bytes,
        compute_bytes=compute_bytes,
        python_bytes=resources.python_bytes or 0,
        embedder_bytes=resources.embedder_bytes,
        gpu_bytes=(0 if resources.is_loaded else on_gpu) + int(share * kv_bytes) + (compute_bytes if share else 0),
        gpu_weights_bytes=0 if resources.is_loaded else on_gpu,
        available=resources.available_bytes or 0,
        gpu_available=resources.gpu_available_bytes or 0,
    )


def as_if_unloaded(estimate: MemoryPlan, info: ModelInfo) -> MemoryPlan:
    """Return the plan for a loaded model as if it had yet to be loaded: with its weights and their copies, without Python's memory."""
    return plan(
        info,
        estimate.n_ctx,
        estimate.num_sequences,
        estimate.kv_type,
        flash_attention=estimate.flash_attention,
        gpu_layers=estimate.gpu_layers,
        situation=Situation(available_bytes=estimate.available, gpu_available_bytes=estimate.gpu_available, python_bytes=0),
    )


def nearest(
    info: ModelInfo,
    num_sequences: int = 1,
    kv_type: str = "f16",
    *,
    flash_attention: bool = False,
    gpu_layers: int = 0,
    situation: Situation | None = None,
) -> int:
    """Return the largest KV cache, in tokens, that fits: the training context or a smaller multiple of 256; 0 if none fits."""
    resources = _look_up(situation or Situation(), gpu_layers)

    def fits(n_ctx: int) -> bool:
        return plan(info, n_ctx, num_sequences, kv_type, flash_attention=flash_attention, gpu_layers=gpu_layers, situation=resources).fits

    most = info.n_ctx_train or MAX_UNSAID_TOKENS
    low, high = 0, -(-most // CELLS_PAD)  # the number of blocks that fits is at least low, at most high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * CELLS_PAD) else (low, middle - 1)
    return min(most, low * CELLS_PAD)


def require(estimate: MemoryPlan, info: ModelInfo, *, situation: Situation | None = None) -> None:
    """Raise an EngineError that names the largest window that fits, unless the plan fits."""
    if estimate.fits:
        return
    near = nearest(
        info,
        estimate.num_sequences,
        estimate.kv_type,
        flash_attention=estimate.flash_attention,
        gpu_layers=estimate.gpu_layers,
        situation=situation or Situation(available_bytes=estimate.available, gpu_available_bytes=estimate.gpu_available),
    )
    on_gpu = estimate.gpu_bytes > estimate.gpu_available
    needed, free = (estimate.gpu_bytes, estimate.gpu_available) if on_gpu else (estimate.needed, estimate.available - RESERVE_BYTES)
    raise EngineError(
        f"{info.path.name} with a window of {estimate.n_ctx} tokens does not fit into the free memory{' of the GPU' if on_gpu else ''}: "
        f"it needs {_mib(needed)} MiB, and {_mib(max(0, free))} MiB are available.",
        hint=f"Use a window of {near} tokens or less (--ctx)." if near else "Close other programs, or use a smaller model.",
        n_ctx=estimate.n_ctx,
        nearest_n_ctx=near,
        needed_bytes=needed,
        free_bytes=max(0, free),
        weights_bytes=estimate.weights_bytes,
        kv_bytes=estimate.kv_bytes,
        compute_bytes=estimate.compute_bytes,
        available_bytes=estimate.available,
    )


def make_slot(info: ModelInfo, requested: int | None, *, fitting: int | None = None) -> Slot:
    """Choose the window: the requested one, capped by the training context and by memory. The slot names the cap that applied.

    `fitting` is the largest window that fits into memory, by default from `nearest`. If the file does not state a training context, the
    cap is MAX_UNSAID_TOKENS. EngineError if no window fits.
    """
    if requested is not None and requested < 1:
        raise UsageError(f"A window of {requested} tokens is not possible.", hint="Give --ctx 1 or more, or leave it out.")
    fitting = nearest(info) if fitting is None else fitting
    if fitting < 1:
        raise EngineError(
            f"{info.path.name} does not fit into the free memory.",
            hint="Close other programs, or use a smaller model.",
            file_size=info.file_size,
        )
    trained = info.n_ctx_train or MAX_UNSAID_TOKENS
    limits: list[tuple[int, Bound]] = [(trained, "training"), (fitting, "memory")]
    if requested is not None:
        limits.insert(0, (requested, "requested"))
    n_ctx, bound = min(limits, key=lambda limit: limit[0])  # the first of equals
    return Slot(id=0, n_ctx=n_ctx, n_ctx_train=trained, requested=requested, bound=bound)


def _look_up(situation: Situation, gpu_layers: int) -> Situation:
    """Return the situation with every None replaced by a measurement."""
    free, on_gpu, python_bytes = situation.available_bytes, situation.gpu_available_bytes, situation.python_bytes
    return replace(
        situation,
        available_bytes=available_memory() if free is None else free,
        gpu_available_bytes=(gpu_bytes_free() if gpu_layers else 0) if on_gpu is None else on_gpu,
        python_bytes=psutil.Process().memory_info().rss if python_bytes is None else python_bytes,
    )


def _compute_bytes(info: ModelInfo, cells: int, num_sequences: int, *, flash_attention: bool) -> int:
    """Return the bytes of activations for one batch and of the outputs. Reserved pages that are never written do not count.

    Feed-forward and attention take turns in one buffer. Plain attention holds the scores of every head over all cells, in 32 bits and
    again in 16. The mask has 32 bits per entry, or 16 with flash attention; layers with a sliding window have their own mask. A model
    without attention has neither.
    """
    cells = cells if info.layer_kv else 0
    mask = cells * (2 if flash_attention else 4) * (2 if info.sliding_window else 1)
    scores = 0 if flash_attention else 6 * cells * info.num_heads
    activations = max(44 * info.embedding_length, 16 * info.embedding_length + scores)
    return _FIXED_BYTES + UBATCH_TOKENS * (mask + activations) + 4 * num_sequences * info.vocab_size


def _repacked_bytes(info: ModelInfo) -> int:
    """Return the bytes of the weights that llama.cpp repacks."""
    quantization = info.quantization or ""
    if "_K" in quantization and info.embedding_length % _K_BLOCK:
        return 0
    return int(info.file_size * _REPACKED_SHARE.get(quantization, 0.0))


def _mib(num_bytes: int) -> int:
    return round(num_bytes / 1024 / 1024)
