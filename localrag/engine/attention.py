"""Which attention kernel is the faster one on this processor: llama.cpp's flash attention, or the plain one.

Neither is so everywhere. On one x86 machine flash attention evaluates prompts 1.4 times faster; on another, whose compiler turns its
table look-ups into slow gathers, it halves the speed of decoding. It cannot be changed within a context, so it is measured once, on a
model of one thin layer that is written for the purpose: there, next to nothing but attention takes time. About a second, kept in the
home for this build of llama.cpp on this processor.
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
"""A question with its sources, and an answer: the mixture that is timed."""

_FILE = "attention.json"
_BATCH, _WIDTH, _VOCAB = 512, 64, 32
_HEADS, _KV_HEADS, _HEAD_SIZE = 16, 4, 64


def flash_attention(home: Path, governor: ThreadGovernor) -> bool:
    """Whether to use flash attention here: what was measured before, or is measured now. A home that cannot be written is no error.

    It is measured with the threads that are good now: with one for each core, beside busy processes, it takes a minute and more.
    """
    kept = kept_choice(home, governor)
    if kept is not None:
        return kept
    seconds = measure(governor.measure)
    chosen = seconds[True] <= seconds[False] * 1.05  # about as fast: it takes less memory
    record = {"for": _key(governor), "flash_attention": chosen, "flash_s": round(seconds[True], 4), "plain_s": round(seconds[False], 4)}
    with suppress(OSError):
        replace_text(home / _FILE, json.dumps(record))
    return chosen


def kept_choice(home: Path, governor: ThreadGovernor) -> bool | None:
    """What was chosen for this machine and this build; None if nothing was, or what is kept is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads((home / _FILE).read_text(encoding="utf-8"))
        if isinstance(record, dict) and record.get("for") == _key(governor) and isinstance(record.get("flash_attention"), bool):
            return bool(record["flash_attention"])
    return None


def _key(governor: ThreadGovernor) -> str:
    return f"{platform.node()} {_processor()} {library().llama_print_system_info().decode()} {governor.num_cores}"


def measure(num_threads: int | Callable[[], int]) -> dict[bool, float]:
    """Seconds for PROMPT_TOKENS and ANSWER_TOKENS with (True) and without (False) flash attention: the best of two runs each."""
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
    """The processor's name: a home can move to another machine."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _write_thin_model(path: Path) -> None:
    """Write a GGUF file of a llama without a vocabulary. The weights are random: look-ups of equal values would be too fast."""
    import numpy as np  # noqa: PLC0415  # weight, like the next
    from gguf import GGUFWriter  # noqa: PLC0415

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
