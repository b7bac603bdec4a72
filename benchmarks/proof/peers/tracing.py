"""Every token that llama.cpp is given to evaluate in this process: ids and positions, recorded where `llama_decode` is called.

It is the one door through which create_chat_completion, the programs built on it and localrag's own engine go, so all of them are traced
in the same way and none is asked. Models that embed go through it too; each context tells the architecture of its model.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

_calls: list[dict[str, Any]] = []
_traced: list[Any] = []
"""The function that is traced, once it is."""


def begin() -> None:
    """Forgets what was recorded, and records from now on."""
    _calls.clear()
    if _traced:
        return
    lib: Any = importlib.import_module("llama_cpp.llama_cpp")
    decode = lib.llama_decode
    _traced.append(decode)

    def traced_decode(context: Any, batch: Any) -> Any:
        tokens = [batch.token[i] for i in range(batch.n_tokens)] if batch.token else []
        positions = [batch.pos[i] for i in range(batch.n_tokens)] if batch.pos else []
        num_batch = lib.llama_n_batch(context)
        _calls.append({"model": _architecture(lib, context), "tokens": tokens, "positions": positions, "n_batch": num_batch})
        return decode(context, batch)

    lib.llama_decode = traced_decode


def calls() -> list[dict[str, Any]]:
    """Each call so far: the model's architecture, the tokens with their positions, and the most that a call may hold."""
    return list(_calls)


def _architecture(lib: Any, context: Any) -> str:
    buffer = ctypes.create_string_buffer(64)
    lib.llama_model_meta_val_str(lib.llama_get_model(context), b"general.architecture", buffer, len(buffer))
    return buffer.value.decode()
