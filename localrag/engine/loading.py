"""From a GGUF file to an Engine."""

from __future__ import annotations

import time
from pathlib import Path

from localrag.engine import attention, gguf, memory
from localrag.engine.engine import BATCH_TOKENS, Engine
from localrag.engine.llama import LlamaContext, LlamaModel
from localrag.engine.template import JinjaChatTemplate
from localrag.engine.vocab import LlamaTokenizer


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
    the file's own; `home` keeps which attention kernel is the faster one here (without one, it is flash attention).
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
        return LlamaContext(
            model,
            num_cells=num_cells,
            num_sequences=num_sequences,
            batch_tokens=BATCH_TOKENS,
            num_threads=num_threads,
            flash_attention=home is None or attention.flash_attention(home, num_threads=num_threads),
        )

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
        close=close,
        load_s=time.perf_counter() - started,
    )
