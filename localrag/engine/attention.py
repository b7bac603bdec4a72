"""Choose the faster attention kernel for this processor: llama.cpp's flash attention or plain attention.

Neither wins everywhere. On one x86 machine flash attention speeds up prefill by a factor of 1.4. On another, whose compiler turned table
look-ups into slow gathers, it halves the decoding speed. A context cannot switch kernels, so the choice is measured once, on a generated
model with a single thin layer, where attention takes nearly all of the time. The measurement takes about a second. The result is saved in
the home for this processor and this build of llama.cpp.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from localrag.engine.llama import LlamaContext, LlamaModel
from localrag.engine.llama_lib import library
from localrag.engine.threads import ThreadGovernor
from localrag.files import replace_text
from localrag.types import SamplingParams

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
    from gguf import GGUFWriter  # noqa: PLC0415  # heavy import

    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(_VOCAB)
    writer.add_context_length(PROMPT_TOKENS + ANSWER_TOKENS)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD_SIZE)
    writer.add_value_length(_HEAD_SIZE)
    writer.add_rope_dimension_count(_HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (_VOCAB, _WIDTH), "output_norm": (_WIDTH,)}
    shapes |= {f"blk.0.{name}_norm": (_WIDTH,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}": (_KV_HEADS * _HEAD_SIZE, _WIDTH) for name in ("k", "v")}
    shapes |= {f"blk.0.ffn_{name}": (_WIDTH, _WIDTH) for name in ("gate", "up", "down")}
    shapes |= {"blk.0.attn_q": (_HEADS * _HEAD_SIZE, _WIDTH), "blk.0.attn_output": (_WIDTH, _HEADS * _HEAD_SIZE)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.uniform(-0.2, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
