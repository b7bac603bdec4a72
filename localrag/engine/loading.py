"""From a GGUF file to an Engine."""

from __future__ import annotations

import functools
import platform
import time
from pathlib import Path

from localrag.engine import attention, gguf, memory
from localrag.engine.engine import BATCH_TOKENS, Engine
from localrag.engine.llama import LlamaContext, LlamaModel, library
from localrag.engine.speed import Speed, SpeedFile
from localrag.engine.template import JinjaChatTemplate
from localrag.engine.vocab import LlamaTokenizer
from localrag.model import ModelInfo


def open_model(
    path: Path,
    *,
    name: str,
    n_ctx: int | None = None,
    vocab_only: bool = False,
    chat_template: str | None = None,
    home: Path | None = None,
) -> Engine:
    """Load a GGUF file: header first, checked in Python, then the vocabulary, and the weights unless `vocab_only`.

    `n_ctx` is the window to ask for where a caller asks for none; `chat_template` is the source of a template that replaces
    the file's own; `home` keeps which attention kernel is the faster one here (without one, it is flash attention) and how fast
    the model is.
    ModelFileError for a file that is damaged or foreign.
    """
    started = time.perf_counter()
    info = gguf.read_header(path)
    source = chat_template or info.chat_template
    template = None if source is None else JinjaChatTemplate(source, origin="the file given" if chat_template else path.name)
    try:
        if template is not None:
            template.start()  # its process starts while the model loads
        model = LlamaModel(path, vocab_only=vocab_only or info.is_vocab_only)
    except BaseException:
        if template is not None:
            template.close()
        raise
    tokenizer = LlamaTokenizer(model)
    if template is not None:
        template.bos_text, template.eos_text = tokenizer.bos_text, tokenizer.eos_text

    def make_runner(num_cells: int, num_sequences: int) -> LlamaContext:
        num_threads = memory.num_threads()
        flash_attention = home is None or attention.flash_attention(home, num_threads=num_threads)
        started = time.perf_counter()
        context = LlamaContext(
            model,
            num_cells=-(-num_cells // 256) * 256,  # as llama.cpp rounds its cells; its largest batch, though, is what was asked for
            num_sequences=num_sequences,
            batch_tokens=BATCH_TOKENS,
            num_threads=num_threads,
            flash_attention=flash_attention,
        )
        make_speed().observe_context(context.num_cells, time.perf_counter() - started)
        return context

    speeds = SpeedFile(home, _speed_key(info))

    @functools.cache
    def make_speed() -> Speed:
        speed = _expected_speed(info, model)
        speeds.load_into(speed)
        return speed

    def close() -> None:
        if template is not None:
            template.close()
        model.close()

    return Engine(
        name=name,
        info=info,
        tokenizer=tokenizer,
        template=template,
        make_slot=lambda requested: memory.make_slot(info, n_ctx if requested is None else requested),
        make_runner=None if model.vocab_only else make_runner,
        make_speed=make_speed,
        keep_speed=speeds.save,
        close=close,
        load_s=time.perf_counter() - started,
    )


def _speed_key(info: ModelInfo) -> str:
    """File, machine and build. The file's place does not matter."""
    file = f"{info.path.name} {info.file_size} {info.architecture} {info.quantization}"
    return f"{file}; {platform.node()} {platform.machine()} {library().llama_print_system_info().decode()} {memory.num_threads()}"


def _expected_speed(info: ModelInfo, model: LlamaModel) -> Speed:
    """A speed of nothing observed, whose slopes follow from the model's shape.

    For each token before it, a prompt token costs a multiplication and an addition with every key and value, beside those with
    every weight; a decoded one reads a token's share of the KV cache, beside the file. Attention is the less efficient part:
    half as much again fits what was measured.
    """
    num_weights = int(model.lib.llama_model_n_params(model.handle)) - info.vocab_size * info.embedding_length
    if num_weights <= 0:  # a vocabulary
        return Speed()
    num_products = info.num_layers * info.num_heads * (info.head_size_k + info.head_size_v)
    return Speed(prefill_slope=1.5 * num_products / num_weights, decode_slope=1.5 * info.kv_bytes_per_token / info.file_size)
