"""Which attention kernel is the faster one on this processor: llama.cpp's flash attention, or the plain one.

Neither is so everywhere. On one x86 machine flash attention evaluates prompts 1.4 times faster; on another, whose compiler turns its
table look-ups into slow gathers, it halves the speed of decoding. It cannot be changed within a context, so it is measured once, on a
model of one thin layer that is written for the purpose: there, next to nothing but attention takes time. About a second, kept in the
home for this build of llama.cpp on this processor.
"""

from __future__ import annotations

import json
import platform
import random
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from localrag.engine.json_cache import replace_text
from localrag.engine.llama import LlamaContext, LlamaModel
from localrag.engine.llama_lib import library
from localrag.engine.threads import ThreadGovernor
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
        path.write_bytes(_thin_model())
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


def _thin_model() -> bytes:
    """A GGUF file (version 3) of a llama without a vocabulary. The weights are random: look-ups of equal values would be too fast."""
    keys = [
        _field("general.architecture", 8, _string("llama")),
        _field("tokenizer.ggml.model", 8, _string("no_vocab")),
        *(
            _field(f"llama.{name}", 4, struct.pack("<I", value))
            for name, value in {
                "vocab_size": _VOCAB,
                "context_length": PROMPT_TOKENS + ANSWER_TOKENS,
                "embedding_length": _WIDTH,
                "feed_forward_length": _WIDTH,
                "block_count": 1,
                "attention.head_count": _HEADS,
                "attention.head_count_kv": _KV_HEADS,
                "attention.key_length": _HEAD_SIZE,
                "attention.value_length": _HEAD_SIZE,
                "rope.dimension_count": _HEAD_SIZE,
            }.items()
        ),
        _field("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
    ]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (_WIDTH, _VOCAB), "output_norm.weight": (_WIDTH,)}
    shapes |= {f"blk.0.{name}_norm.weight": (_WIDTH,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}.weight": (_WIDTH, _KV_HEADS * _HEAD_SIZE) for name in ("k", "v")}
    shapes |= {f"blk.0.ffn_{name}.weight": (_WIDTH, _WIDTH) for name in ("gate", "up", "down")}
    shapes |= {"blk.0.attn_q.weight": (_WIDTH, _HEADS * _HEAD_SIZE), "blk.0.attn_output.weight": (_HEADS * _HEAD_SIZE, _WIDTH)}
    infos, num_floats = [], 0
    for name, shape in shapes.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos.append(_string(name) + dims + struct.pack("<IQ", 0, 4 * num_floats))
        num_floats += shape[0] * (shape[1] if len(shape) > 1 else 1)
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    draw = random.Random(0)  # noqa: S311  # weights of no meaning, and the same each time
    pattern = struct.pack("<4093f", *(draw.uniform(-0.2, 0.2) for _ in range(4093)))  # a prime: no two rows are alike
    return header + bytes(-len(header) % 32) + (pattern * (num_floats // 4093 + 1))[: 4 * num_floats]


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _field(name: str, value_type: int, value: bytes) -> bytes:
    return _string(name) + struct.pack("<I", value_type) + value
