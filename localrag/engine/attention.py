"""Measure this processor with generated models: which attention kernel is faster, and how fast it evaluates weights.

Neither flash attention nor plain attention wins everywhere. On one x86 machine flash attention speeds up prefill by a factor of 1.4. On
another, whose compiler turned table look-ups into slow gathers, it halves the decoding speed. A context cannot switch kernels, so the
choice is measured once, with a single thin layer, where attention takes nearly all of the time. The measurement takes about a second. The
result is saved in the home for this processor and this build of llama.cpp. So is the speed of the machine (`machine_speed`), from which the
time of models that are not here yet is predicted.
"""

from __future__ import annotations

import json
import math
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.engine.llama import LlamaContext, LlamaModel
from localrag.engine.llama_lib import library
from localrag.engine.speed import MAX_KEPT, MachineSpeed
from localrag.engine.threads import ThreadGovernor
from localrag.files import JsonCache, replace_text
from localrag.types import SamplingParams

if TYPE_CHECKING:
    from gguf import GGUFWriter

PROMPT_TOKENS, ANSWER_TOKENS = 1024, 128
"""The timed workload, in tokens: a typical prompt with sources, and a typical answer."""

_FILE = "attention.json"
_BATCH, _WIDTH, _VOCAB = 512, 64, 32
_HEADS, _KV_HEADS, _HEAD_SIZE = 16, 4, 64


def flash_attention(home: Path, governor: ThreadGovernor) -> bool:
    """Return whether flash attention is the better kernel here: the saved choice, or else a new measurement.

    Measure with the thread count that `governor` recommends: with one thread per core on a busy machine, the measurement can take over a
    minute. An unwritable home is ignored.
    """
    choice = kept_choice(home, governor)
    if choice is not None:
        return choice
    seconds = measure(governor.measure)
    use_flash = seconds[True] <= seconds[False] * 1.05  # prefer it on a tie: it needs less memory
    record = {"for": _key(governor), "flash_attention": use_flash, "flash_s": round(seconds[True], 4), "plain_s": round(seconds[False], 4)}
    with suppress(OSError):
        replace_text(home / _FILE, json.dumps(record))
    return use_flash


def kept_choice(home: Path, governor: ThreadGovernor) -> bool | None:
    """Return the saved choice for this machine and build of llama.cpp; None if there is none or the file is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads((home / _FILE).read_text(encoding="utf-8"))
        if isinstance(record, dict) and record.get("for") == _key(governor) and isinstance(record.get("flash_attention"), bool):
            return bool(record["flash_attention"])
    return None


def _key(governor: ThreadGovernor) -> str:
    return f"{platform.node()} {_processor()} {library().llama_print_system_info().decode()} {governor.num_cores}"


def measure(num_threads: int | Callable[[], int]) -> dict[bool, float]:
    """Return the seconds for PROMPT_TOKENS and ANSWER_TOKENS with (True) and without (False) flash attention: the better of two runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attention.gguf"
        _write_thin_model(path)
        model = LlamaModel(path)
        try:
            runs = [(flash, _timed(model, flash=flash, num_threads=num_threads)) for flash in (True, False) * 2]
        finally:
            model.close()
    return {flash: min(seconds for which, seconds in runs if which is flash) for flash in (True, False)}


def _timed(model: LlamaModel, *, flash: bool, num_threads: int | Callable[[], int]) -> float:
    num_cells = PROMPT_TOKENS + ANSWER_TOKENS
    context = LlamaContext(model, num_cells=num_cells, batch_tokens=_BATCH, num_threads=num_threads, flash_attention=flash)
    try:
        context.begin(0, [], SamplingParams())
        started = time.perf_counter()
        for start in range(0, PROMPT_TOKENS, _BATCH):
            context.decode([(position % _VOCAB, position, 0, False) for position in range(start, start + _BATCH)])
        for position in range(PROMPT_TOKENS, num_cells):
            context.decode([(1, position, 0, True)])
            context.sample(0, 0)  # waits for the result
        return time.perf_counter() - started
    finally:
        context.close()


def _processor() -> str:
    """Return the processor's name. It is part of the key because a home can move to another machine."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _write_thin_model(path: Path) -> None:
    """Write a one-layer Llama model without a vocabulary. Its weights are random, since gathers of equal values would be too fast."""
    import numpy as np  # noqa: PLC0415  # heavy import

    writer = _writer(path, n_ctx=PROMPT_TOKENS + ANSWER_TOKENS, width=_WIDTH, feed_forward=_WIDTH, layers=1, head_size=_HEAD_SIZE)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (_VOCAB, _WIDTH), "output_norm": (_WIDTH,)}
    shapes |= {f"blk.0.{name}_norm": (_WIDTH,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}": (_KV_HEADS * _HEAD_SIZE, _WIDTH) for name in ("k", "v")}
    shapes |= {f"blk.0.ffn_{name}": (_WIDTH, _WIDTH) for name in ("gate", "up", "down")}
    shapes |= {"blk.0.attn_q": (_HEADS * _HEAD_SIZE, _WIDTH), "blk.0.attn_output": (_WIDTH, _HEADS * _HEAD_SIZE)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.uniform(-0.2, 0.2, shape).astype(np.float32))
    _finish(writer)


def _writer(path: Path, *, n_ctx: int, width: int, feed_forward: int, layers: int, head_size: int) -> GGUFWriter:
    """Begin a Llama model without a tokenizer."""
    from gguf import GGUFWriter  # noqa: PLC0415  # heavy import

    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(_VOCAB)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(feed_forward)
    writer.add_block_count(layers)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_MACHINE_FILE = "machine.json"
_WIDE, _FEED_FORWARD, _LAYERS = 2048, 8192, 4
_PROMPT, _PIECE, _STEPS = 768, 256, 8
_MAX_PREFILL_SLOPE = 2e-3
_Q4_K_WEIGHTS, _Q4_K_BYTES = 256, 144
BUSY_CORES = 0.5
"""From this load of other programs on, a measurement says more of them than of the machine, and is not saved."""


def machine_speed(
    home: Path, governor: ThreadGovernor, on_measure: Callable[[], None] = lambda: None, *, again: bool = False
) -> MachineSpeed:
    """Return the saved speed of this machine and build of llama.cpp, or measure it (`again`) in two to five seconds.

    `on_measure` is called before a measurement. It is not saved if other programs keep the machine busy. An unwritable home is ignored.
    EngineError if llama.cpp is not installed or out of memory.
    """
    key = machine_key(governor.num_cores)
    cache = JsonCache(home / _MACHINE_FILE, most=MAX_KEPT)
    match None if again else cache.read().get(key):
        case [float(prefill), float(slope), float(decode)] if 0 < prefill < math.inf and 0 < decode < math.inf:
            if 0 <= slope <= _MAX_PREFILL_SLOPE:
                return MachineSpeed(prefill, slope, decode)
    on_measure()
    speed = _measure_machine(governor.measure, flash=flash_attention(home, governor))
    if governor.busy_cores < BUSY_CORES:
        cache.put(key, list(astuple(speed)))
    return speed


def machine_key(num_cores: int) -> str:
    """A key of this machine and build of llama.cpp, under which `machine.json` has its speed."""
    return f"{platform.node()} {platform.machine()} {library().llama_print_system_info().decode()} {num_cores}"


def _measure_machine(num_threads: Callable[[], int], *, flash: bool) -> MachineSpeed:
    """Time a prompt and some steps of a generated model, larger than the processor's caches. The fastest step counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.gguf"
        num_weights, num_bytes = _write_wide_model(path)
        model = LlamaModel(path)
        try:
            context = LlamaContext(model, num_cells=1024, batch_tokens=_PIECE, num_threads=num_threads, flash_attention=flash)
            try:

                def decode(num_tokens: int, position: int) -> float:
                    """Evaluate some tokens from a position on. Returns the seconds that it took."""
                    started, last = time.perf_counter(), num_tokens - 1
                    context.decode([(token % _VOCAB, position + token, 0, token == last) for token in range(num_tokens)])
                    context.sample(0, last)  # waits for the result
                    return time.perf_counter() - started

                context.begin(0, [], SamplingParams())
                decode(1, 0)  # pages the weights in
                first_s, *_, last_s = (decode(_PIECE, 1 + start) / _PIECE for start in range(0, _PROMPT, _PIECE))
                step_s = min(decode(1, 1 + _PROMPT + step) for step in range(_STEPS))
            finally:
                context.close()
        finally:
            model.close()
    kv_bytes = _PROMPT * _LAYERS * _KV_HEADS * (_WIDE // _HEADS) * 2 * 2
    # The cost of a token is a straight line over its depth; the two pieces are measured at the middle of each.
    first, last = _PIECE / 2, _PROMPT - _PIECE / 2
    rise = (last_s - first_s) / (last - first)
    slope = min(max(0.0, rise / max(first_s - rise * first, 1e-9)), _MAX_PREFILL_SLOPE)
    return MachineSpeed(num_weights * (1.0 + slope * first) / first_s, slope, (num_bytes + kv_bytes) / step_s)


def _write_wide_model(path: Path) -> tuple[int, int]:
    """Write a Llama model of four layers with random weights in Q4_K. Returns the number of its weights and their bytes."""
    import numpy as np  # noqa: PLC0415  # heavy import
    from gguf import GGMLQuantizationType  # noqa: PLC0415  # heavy import

    head_size = _WIDE // _HEADS
    writer = _writer(path, n_ctx=1024, width=_WIDE, feed_forward=_FEED_FORWARD, layers=_LAYERS, head_size=head_size)
    shapes = {"attn_q": (_WIDE, _WIDE), "attn_k": (_KV_HEADS * head_size, _WIDE), "attn_v": (_KV_HEADS * head_size, _WIDE)}
    shapes |= {"attn_output": (_WIDE, _WIDE), "ffn_gate": (_FEED_FORWARD, _WIDE), "ffn_up": (_FEED_FORWARD, _WIDE)}
    shapes |= {"ffn_down": (_WIDE, _FEED_FORWARD)}
    rng = np.random.default_rng(0)
    scales = np.array([1e-4, 1e-4], np.float16).view(np.uint8)  # of each block: small, so that no activation overflows
    writer.add_tensor("token_embd.weight", rng.uniform(-1, 1, (_VOCAB, _WIDE)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(_WIDE, np.float32))
    for name, (rows, columns) in shapes.items():
        blocks = rng.integers(0, 256, (rows, columns // _Q4_K_WEIGHTS, _Q4_K_BYTES), np.uint8)
        blocks[:, :, :4] = scales
        for layer in range(_LAYERS):
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks.reshape(rows, -1), raw_dtype=GGMLQuantizationType.Q4_K)
    for layer in range(_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(_WIDE, np.float32))
    _finish(writer)
    num_weights = _LAYERS * sum(rows * columns for rows, columns in shapes.values())
    return num_weights, num_weights // _Q4_K_WEIGHTS * _Q4_K_BYTES
