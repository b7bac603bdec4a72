"""How long a window fits this machine, and the slot that follows from it."""

from __future__ import annotations

import os

import psutil

from localrag.errors import EngineError, UsageError
from localrag.model import Bound, ModelInfo, Slot

RESERVE_BYTES = 512 * 1024 * 1024
"""Left for compute buffers, Python and everything else on the machine."""


def num_threads() -> int:
    """Physical cores that this process may use: llama.cpp's threads spin, and two on one core slow each other."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def fitting_tokens(info: ModelInfo, available_bytes: int | None = None) -> int:
    """Tokens of KV cache that fit beside the weights in the memory that is free now (0 if not even the weights do)."""
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    room = available - info.file_size - RESERVE_BYTES
    return max(0, room // max(1, info.kv_bytes_per_token))


def make_slot(info: ModelInfo, requested: int | None, *, fitting: int | None = None) -> Slot:
    """The window: what was requested, capped by the training context and by memory, and which of them bound it.

    Never llama.cpp's default of 512 and never more than the model was trained for. EngineError if memory holds nothing.
    """
    if requested is not None and requested < 1:
        raise UsageError(f"A window of {requested} tokens is not possible.", hint="Give --ctx 1 or more, or leave it out.")
    fitting = fitting_tokens(info) if fitting is None else fitting
    if fitting < 1:
        raise EngineError(
            f"{info.path.name} does not fit into the free memory.",
            hint="Close other programs, or use a smaller model.",
            file_size=info.file_size,
        )
    limits: list[tuple[int, Bound]] = [(info.n_ctx_train, "training"), (fitting, "memory")]
    if requested is not None:
        limits.insert(0, (requested, "requested"))
    n_ctx, bound = min(limits, key=lambda limit: limit[0])  # the first of equals
    return Slot(id=0, n_ctx=n_ctx, n_ctx_train=info.n_ctx_train, requested=requested, bound=bound)
