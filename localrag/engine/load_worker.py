"""Child process that tries to load an unknown model file. sandbox.py starts it.

The job has the keys "path", "vocab_only", "use" ("generate", "embed" or "rank"), "spare_bytes" and "cpu_s". The limits hold even if the
parent has died.
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
NUM_CELLS = 256  # llama.cpp rounds up to a multiple of 256
BATCH_TOKENS = 32
STACK_BYTES = 512 << 10


def work(job: dict[str, Any], _parent: Parent) -> None:
    """Try the job's file within its limits."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # stacks of numpy's threads would count against the memory limit
    shrink_stacks()
    limit_self(spare_bytes=job["spare_bytes"], cpu_s=job["cpu_s"])
    use = job.get("use")
    if use == "embed":
        try_embedder(Path(job["path"]))
    elif use == "rank":
        try_reranker(Path(job["path"]))
    else:
        try_file(Path(job["path"]), vocab_only=job["vocab_only"])


def try_embedder(path: Path) -> None:
    """Embed two texts in one batch."""
    from localrag.engine.embed import LlamaEmbedder  # noqa: PLC0415  # imports numpy, which try_file does not need

    embedder = LlamaEmbedder(path, is_trusted=True)
    try:
        longer = TEXT if embedder.count(TEXT) <= embedder.max_tokens else "a"
        embedder.embed(["a", longer])
    finally:
        embedder.close()


def try_reranker(path: Path) -> None:
    """Score two pairs in one batch. What the scores are worth is tested later."""
    from localrag.engine.rerank import LlamaReranker  # noqa: PLC0415  # imports numpy, which try_file does not need

    reranker = LlamaReranker(path, is_trusted=True, is_tested=True)
    try:
        reranker.scores("a", ["b", TEXT])
    finally:
        reranker.close()


def try_file(path: Path, *, vocab_only: bool) -> None:
    """Load a file, encode and decode a text and, unless `vocab_only`, evaluate a prompt of a few tokens and then one more token.

    Raises a LocalragError if llama.cpp refuses the file. A crash ends the process. Check the header first.
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
    """Return the most likely token after `ids`. Evaluate it too, since llama.cpp handles batches and single tokens differently."""
    lib = model.lib
    # flash attention does not support every model
    context = _context(model, lib.LLAMA_FLASH_ATTN_TYPE_ENABLED) or _context(model, lib.LLAMA_FLASH_ATTN_TYPE_DISABLED)
    if not context:
        raise ModelFileError("llama.cpp cannot create a context for it")
    batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
    try:
        if not lib.llama_get_memory(context):
            raise ModelFileError("it has no KV cache, so it cannot generate text")
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
    """Evaluate `ids` from position `start` on, and return the logits after the last one."""
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
        raise ModelFileError("its logits are NaN: its weights or their scales are damaged")
    return numbers


def shrink_stacks() -> None:
    """Give threads small stacks. llama.cpp starts one thread per tensor, whose default 8 MB stacks would exceed the memory limit."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # only glibc supports this
        libc = ctypes.CDLL(None)
        attributes = ctypes.create_string_buffer(128)  # sizeof(pthread_attr_t) is at most 64
        if libc.pthread_attr_init(attributes) == 0 and libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK_BYTES)) == 0:
            libc.pthread_setattr_default_np(attributes)
