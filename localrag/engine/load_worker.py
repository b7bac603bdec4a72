"""The program of the child process that loads an unknown model file; sandbox.py starts it.

The job has the "path" of the file, "vocab_only", "embeds" (whether it is an embedder), "spare_bytes" and "cpu_s". Its limits hold even if
the parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localrag.engine.llama import LlamaModel, LlamaTokenizer
from localrag.errors import ModelFileError
from localrag.process import Parent, limit_self

TEXT = "The trial's 1st text: naïve  words, 漢字, 🙂,\n\tcode() and </s>."
NUM_CELLS = 256  # llama.cpp rounds its cells up to this
BATCH_TOKENS = 32
STACK_BYTES = 512 << 10


def work(job: dict[str, Any], _parent: Parent) -> None:
    """Try the file of the job, within limits."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would count against the limit
    shrink_stacks()
    limit_self(spare_bytes=job["spare_bytes"], cpu_s=job["cpu_s"])
    if job.get("embeds"):
        try_embedder(Path(job["path"]))
    else:
        try_file(Path(job["path"]), vocab_only=job["vocab_only"])


def try_embedder(path: Path) -> None:
    """Embed two texts in one batch."""
    from localrag.engine.embed import LlamaEmbedder  # noqa: PLC0415  # numpy, which the trial of a model does without

    embedder = LlamaEmbedder(path, is_trusted=True)
    try:
        longer = TEXT if embedder.count(TEXT) <= embedder.max_tokens else "a"
        embedder.embed(["a", longer])
    finally:
        embedder.close()


def try_file(path: Path, *, vocab_only: bool) -> None:
    """Loads the file, tokenises a text both ways and, unless `vocab_only`, evaluates a prompt of a few tokens and one more.

    Raises a LocalragError for what llama.cpp refuses; what it does not survive ends the process. The header was checked before.
    """
    model = LlamaModel(path, vocab_only=vocab_only)
    try:
        tokenizer = LlamaTokenizer(model)
        ids = tokenizer.encode(TEXT)
        for token in (*ids, 0, tokenizer.num_tokens - 1):
            tokenizer.piece(token)
        _ = tokenizer.bos_text, tokenizer.eos_text
        if not vocab_only:
            tokenizer.piece(_generate(model, (ids or [0])[:4]))
    finally:
        model.close()


def _generate(model: LlamaModel, ids: Sequence[int]) -> int:
    """The likeliest token after `ids`, itself evaluated too: a batch and a single token take different ways through llama.cpp."""
    lib = model.lib
    # not every model has what flash attention needs
    context = _context(model, lib.LLAMA_FLASH_ATTN_TYPE_ENABLED) or _context(model, lib.LLAMA_FLASH_ATTN_TYPE_DISABLED)
    if not context:
        raise ModelFileError("llama.cpp makes no context for it")
    batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
    try:
        if not lib.llama_get_memory(context):
            raise ModelFileError("it keeps nothing of what it has read, so it is no model that writes")
        logits = _evaluate(model, context, batch, ids, 0)
        token = logits.index(max(logits))
        _evaluate(model, context, batch, [token], len(ids))
        return token
    finally:
        lib.llama_batch_free(batch)
        lib.llama_free(context)


def _context(model: LlamaModel, flash_attention: int) -> object:
    params = model.lib.llama_context_default_params()
    params.n_ctx = NUM_CELLS
    params.n_batch = params.n_ubatch = BATCH_TOKENS
    params.n_seq_max = params.n_outputs_max = 1
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = flash_attention
    return model.lib.llama_init_from_model(model.handle, params)


def _evaluate(model: LlamaModel, context: object, batch: Any, ids: Sequence[int], start: int) -> list[float]:  # noqa: ANN401  # a C structure
    """The logits after `ids`, which stand from position `start` on."""
    last = len(ids) - 1
    for index, token in enumerate(ids):
        batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, start + index, 1
        batch.seq_id[index][0], batch.logits[index] = 0, index == last
    batch.n_tokens = len(ids)
    code = model.lib.llama_decode(context, batch)
    logits = model.lib.llama_get_logits_ith(context, last) if code == 0 else None
    if not logits:
        raise ModelFileError(f"llama.cpp cannot evaluate a text with it (code {code})")
    numbers: list[float] = logits[: model.num_vocab_tokens]
    if any(map(math.isnan, numbers)):
        raise ModelFileError("its answers are not numbers: its weights, or the numbers that scale them, are damaged")
    return numbers


def shrink_stacks() -> None:
    """llama.cpp checks each tensor in a thread of its own: with stacks of the usual 8 MB they alone would pass the limit."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # glibc alone can do this
        libc = ctypes.CDLL(None)
        attributes = ctypes.create_string_buffer(128)  # pthread_attr_t has 56 bytes where that is most
        if libc.pthread_attr_init(attributes) == 0 and libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK_BYTES)) == 0:
            libc.pthread_setattr_default_np(attributes)
