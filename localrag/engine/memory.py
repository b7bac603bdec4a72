"""What llama.cpp can compute on besides the processor: the GPUs that the installed build knows and finds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from localrag.engine.llama_lib import library
from localrag.errors import EngineError, UsageError
from localrag.types import Bound, ModelInfo, Slot

_GPU_TYPES = (1, 2)  # ggml_backend_dev_type: a GPU with memory of its own, and one that shares the machine's


@dataclass(frozen=True, slots=True)
class GpuDevice:
    name: str
    description: str
    free_bytes: int
    total_bytes: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def gpu_devices() -> list[GpuDevice]:
    """The GPUs of this build with their memory now; none where it was built for the processor alone. EngineError without llama.cpp."""
    lib = library()
    if not lib.llama_supports_gpu_offload():
        return []
    try:
        ggml = lib._lib  # noqa: SLF001  # llama-cpp-python binds no device function; the handle finds those of the libraries it needs
        count, get, kind = ggml.ggml_backend_dev_count, ggml.ggml_backend_dev_get, ggml.ggml_backend_dev_type
        name, description, memory = ggml.ggml_backend_dev_name, ggml.ggml_backend_dev_description, ggml.ggml_backend_dev_memory
    except AttributeError:  # another system's loader, or a build of other names
        return []
    count.restype, kind.restype, memory.restype = ctypes.c_size_t, ctypes.c_int, None
    get.restype, name.restype, description.restype = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p
    get.argtypes = [ctypes.c_size_t]
    for function in (kind, name, description):
        function.argtypes = [ctypes.c_void_p]
    memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    found = []
    for index in range(count()):
        device = get(index)
        if kind(device) in _GPU_TYPES:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            memory(device, ctypes.byref(free), ctypes.byref(total))
            found.append(GpuDevice(_text(name(device)), _text(description(device)), free.value, total.value))
    return found


def gpu_bytes_free() -> int:
    """Free memory of all GPUs together, between which llama.cpp splits a model."""
    return sum(device.free_bytes for device in gpu_devices())


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


RESERVE_BYTES = 256 * 1024 * 1024
"""Left to everything else on the machine."""
UBATCH_TOKENS = 512
"""Tokens that are evaluated at once, as the engine asks for them; all activations are of so many."""
CELLS_PAD = 256
MAX_UNSAID_TOKENS = 1 << 20
"""As much as a window can have where a file without weights leaves its training context unsaid."""

KV_TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32}
"""Bytes an element of keys and values."""

_VOCAB_TOKEN_BYTES = {"gpt2": 330}  # text, two maps, merges; without merges:
_VOCAB_TOKEN_BYTES_PLAIN = 200
# The share of a file that llama.cpp copies into another layout for this processor (measured), by quantisation. What it copied stays
# mapped, but is not read again: the kernel may take it back, so it counts for the peak and not for what must fit.
_REPACKED_SHARE = {"Q4_0": 0.93, "IQ4_NL": 0.93, "MXFP4": 0.9, "Q4_K_S": 0.8, "Q4_K_M": 0.65, "Q2_K": 0.5, "Q2_K_S": 0.5}
_K_BLOCK = 256  # rows of K-quants are multiples of it: other widths fall back to types that are not repacked
_FIXED_BYTES = 3 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of a process with this model and a context of `n_ctx` cells, which `num_sequences` share.

    `weights_bytes` is the file as it is mapped, `copied_bytes` weights in another layout and llama.cpp's vocabulary; `python_bytes`
    is what the process held when the plan was made; of the others, `gpu_bytes` lie on the GPU, `gpu_weights_bytes` of weights among
    them. `available` and `gpu_available` are what was free then. A recurrent layer's state is not counted: it does not grow, and is
    small.
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
        """The peak of the process in the machine's memory (VmHWM on Linux)."""
        parts = self.weights_bytes, self.copied_bytes, self.kv_bytes, self.compute_bytes, self.python_bytes, self.embedder_bytes
        return sum(parts) - self.gpu_bytes

    @property
    def needed(self) -> int:
        """What must still be free for it: the peak less what the process holds, and less what is mapped but not read again."""
        return self.total - self.python_bytes - min(self.repacked_bytes, self.total - self.python_bytes)

    @property
    def committed(self) -> int:
        """What of the machine's memory is not free while the model is open; its mapped file counts as free all the same."""
        return self.total - self.python_bytes - self.embedder_bytes - (self.weights_bytes - self.gpu_weights_bytes)

    @property
    def fits(self) -> bool:
        return fit_together([self], available_bytes=self.available, gpu_available_bytes=self.gpu_available)

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "total": self.total, "needed": self.needed, "fits": self.fits}

    def to_summary(self) -> dict[str, object]:
        """The `memory` of an answer object: what the model takes, wherever it lies, without what Python held before."""
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
    """What a plan is made in; None is looked up. Bytes."""

    available_bytes: int | None = None
    gpu_available_bytes: int | None = None
    python_bytes: int | None = None
    embedder_bytes: int = 0
    is_loaded: bool = False
    """The weights are there already: their copies and what lies on the GPU are not free any more, and not needed again."""


def fit_together(plans: Sequence[MemoryPlan], *, available_bytes: int, gpu_available_bytes: int) -> bool:
    """Whether models that share one process fit at once into what is free without them."""
    needed, on_gpu = sum(each.needed for each in plans), sum(each.gpu_bytes for each in plans)
    return needed + RESERVE_BYTES <= available_bytes and on_gpu <= gpu_available_bytes


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that a process can still take: the machine's, or less in a container with a limit (cgroup v2)."""
    free = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return free
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stats = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        cached = int(stats["active_file"]) + int(stats["inactive_file"])  # given back when it is wanted
        return max(0, min(free, int(limit) - used + cached))
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
    """What the model takes with a KV cache of `n_ctx` cells in all. Plain attention takes more than flash attention.

    `gpu_layers` counts as llama.cpp does: more than the model's layers is all of it. EngineError for a KV type that is unknown, or
    that plain attention cannot use.
    """
    known = _look_up(situation or Situation(), gpu_layers)
    if kv_type not in KV_TYPE_BYTES or (KV_TYPE_BYTES[kv_type] < KV_TYPE_BYTES["f16"] and not flash_attention):
        raise EngineError(
            f"A KV cache of {kv_type} is not possible{' without flash attention' if kv_type in KV_TYPE_BYTES else ''}.",
            hint="Use f16.",
            kv_type=kv_type,
        )
    cells = -(-n_ctx // CELLS_PAD) * CELLS_PAD
    kv_bytes = int(cells * info.kv_bytes_per_token * KV_TYPE_BYTES[kv_type] / KV_TYPE_BYTES["f16"])
    compute_bytes = _compute_bytes(info, cells, num_sequences, flash_attention=flash_attention)
    share = min(1.0, gpu_layers / (info.num_layers + 1)) if info.num_layers else 0.0
    on_gpu = int(share * info.file_size)
    repacked = 0 if known.is_loaded else int(_repacked_bytes(info) * (1 - share))
    vocabulary = 0 if known.is_loaded else info.vocab_size * _VOCAB_TOKEN_BYTES.get(info.tokenizer_model, _VOCAB_TOKEN_BYTES_PLAIN)
    return MemoryPlan(
        n_ctx=cells,
        num_sequences=num_sequences,
        kv_type=kv_type,
        flash_attention=flash_attention,
        gpu_layers=gpu_layers,
        weights_bytes=info.file_size - (on_gpu if known.is_loaded else 0),
        copied_bytes=repacked + vocabulary,
        repacked_bytes=repacked,
        kv_bytes=kv_bytes,
        compute_bytes=compute_bytes,
        python_bytes=known.python_bytes or 0,
        embedder_bytes=known.embedder_bytes,
        gpu_bytes=(0 if known.is_loaded else on_gpu) + int(share * kv_bytes) + (compute_bytes if share else 0),
        gpu_weights_bytes=0 if known.is_loaded else on_gpu,
        available=known.available_bytes or 0,
        gpu_available=known.gpu_available_bytes or 0,
    )


def as_if_unloaded(made: MemoryPlan, info: ModelInfo) -> MemoryPlan:
    """The plan of a context for a model that is loaded, with the weights and their copies in it again, and nothing of Python."""
    return plan(
        info,
        made.n_ctx,
        made.num_sequences,
        made.kv_type,
        flash_attention=made.flash_attention,
        gpu_layers=made.gpu_layers,
        situation=Situation(available_bytes=made.available, gpu_available_bytes=made.gpu_available, python_bytes=0),
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
    """The most tokens of KV cache with which the plan fits: the training context, or else whole blocks of 256; 0 if none do."""
    known = _look_up(situation or Situation(), gpu_layers)

    def fits(n_ctx: int) -> bool:
        made = plan(info, n_ctx, num_sequences, kv_type, flash_attention=flash_attention, gpu_layers=gpu_layers, situation=known)
        return made.fits

    most = info.n_ctx_train or MAX_UNSAID_TOKENS
    low, high = 0, -(-most // CELLS_PAD)  # the number of blocks that fits is at least low, at most high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * CELLS_PAD) else (low, middle - 1)
    return min(most, low * CELLS_PAD)


def require(made: MemoryPlan, info: ModelInfo, *, situation: Situation | None = None) -> None:
    """Raise an EngineError with the numbers and the nearest window that fits, unless the plan fits."""
    if made.fits:
        return
    near = nearest(
        info,
        made.num_sequences,
        made.kv_type,
        flash_attention=made.flash_attention,
        gpu_layers=made.gpu_layers,
        situation=situation or Situation(available_bytes=made.available, gpu_available_bytes=made.gpu_available),
    )
    on_gpu = made.gpu_bytes > made.gpu_available
    needed, free = (made.gpu_bytes, made.gpu_available) if on_gpu else (made.needed, made.available - RESERVE_BYTES)
    raise EngineError(
        f"{info.path.name} with a window of {made.n_ctx} tokens does not fit into the free memory{' of the GPU' if on_gpu else ''}: "
        f"it needs {_mib(needed)} MiB, and {_mib(max(0, free))} MiB can be had.",
        hint=f"Use a window of {near} tokens or less (--ctx)." if near else "Close other programs, or use a smaller model.",
        n_ctx=made.n_ctx,
        nearest_n_ctx=near,
        needed_bytes=needed,
        free_bytes=max(0, free),
        weights_bytes=made.weights_bytes,
        kv_bytes=made.kv_bytes,
        compute_bytes=made.compute_bytes,
        available_bytes=made.available,
    )


def make_slot(info: ModelInfo, requested: int | None, *, fitting: int | None = None) -> Slot:
    """The window: what was requested, capped by the training context and by memory, and which of them bound it.

    `fitting` is the most that memory holds, found by `nearest` if it is not given. Never llama.cpp's default of 512 and never more
    than the model was trained for, or MAX_UNSAID_TOKENS where its file does not say. EngineError if memory holds nothing.
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


def _look_up(given: Situation, gpu_layers: int) -> Situation:
    """The situation with every number in it."""
    free, on_gpu, held = given.available_bytes, given.gpu_available_bytes, given.python_bytes
    return replace(
        given,
        available_bytes=available_memory() if free is None else free,
        gpu_available_bytes=(gpu_bytes_free() if gpu_layers else 0) if on_gpu is None else on_gpu,
        python_bytes=psutil.Process().memory_info().rss if held is None else held,
    )


def _compute_bytes(info: ModelInfo, cells: int, num_sequences: int, *, flash_attention: bool) -> int:
    """Activations of one batch and the outputs. What is reserved and never written is not counted: it takes no memory.

    A layer's feed-forward part and its attention take turns in the same buffer. Plain attention holds every head's scores over all
    cells, as 32 bits and converted to 16. The mask is of 32 bits there and of 16 with flash attention; layers that slide have their own.
    """
    mask = cells * (2 if flash_attention else 4) * (2 if info.sliding_window else 1)
    scores = 0 if flash_attention else 6 * cells * info.num_heads
    activations = max(44 * info.embedding_length, 16 * info.embedding_length + scores)
    return _FIXED_BYTES + UBATCH_TOKENS * (mask + activations) + 4 * num_sequences * info.vocab_size


def _repacked_bytes(info: ModelInfo) -> int:
    """What llama.cpp copies of the weights."""
    quantization = info.quantization or ""
    if "_K" in quantization and info.embedding_length % _K_BLOCK:
        return 0
    return int(info.file_size * _REPACKED_SHARE.get(quantization, 0.0))


def _mib(num_bytes: int) -> int:
    return round(num_bytes / 1024 / 1024)
