"""Load a GGUF file into an engine that runs it with llama.cpp."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from localrag.engine import attention, gguf, memory, sandbox, threads
from localrag.engine.context import BATCH_TOKENS, num_sequence_ids
from localrag.engine.engine import Engine
from localrag.engine.jobs import CHAT
from localrag.engine.llama import LlamaContext, LlamaModel, LlamaTokenizer
from localrag.engine.speed import Speed, SpeedFile
from localrag.engine.template import JinjaChatTemplate
from localrag.types import ModelInfo, Slot


def open_model(
    path: Path,
    *,
    name: str,
    n_ctx: int | None = None,
    vocab_only: bool = False,
    chat_template: str | None = None,
    home: Path | None = None,
    is_trusted: bool = False,
    sha256: str | None = None,
    prefix_bytes: int = 0,
) -> Engine:
    """Load a GGUF file: first the header, checked in Python, then the vocabulary and, unless `vocab_only`, the weights.

    `n_ctx` is the default window in tokens. `chat_template` is the source of a template that replaces the file's own. `home` stores
    measurements: the model's speed, and which attention kernel is faster on this machine (without a home, flash attention is used). Unless
    `is_trusted`, the file is first loaded in a child process. Up to `prefix_bytes` of evaluated prefixes are stored on disk in `home`.

    Raises ModelFileError for a damaged or unsupported file. Raises EngineError, before loading the weights, if the model does not fit in
    the free memory even with the smallest window.
    """
    started = time.perf_counter()
    info = gguf.read_header(path)
    vocab_only = vocab_only or info.is_vocab_only
    if home is not None and not is_trusted:
        sandbox.ensure_safe(path, home=home, vocab_only=vocab_only)
    governor = threads.ThreadGovernor()  # measures the load of other processes while the model loads
    gpu_layers = 0 if vocab_only else _fitting_gpu_layers(info)
    source = chat_template or info.chat_template
    template = None if source is None else JinjaChatTemplate(source, origin="the file given" if chat_template else path.name)
    model = _load(path, template, vocab_only=vocab_only)
    tokenizer = LlamaTokenizer(model)
    if template is not None:
        template.bos_text, template.eos_text = tokenizer.bos_text, tokenizer.eos_text
    backend = LlamaBackend(
        name=name,
        info=info,
        sha256=sha256,
        load_s=time.perf_counter() - started,
        tokenizer=tokenizer,
        model=model,
        template=template,
        home=home,
        n_ctx=n_ctx,
        governor=governor,
        gpu_layers=gpu_layers,
    )
    prefix_cache = None
    if prefix_bytes and home is not None and backend.can_generate:
        from localrag.engine.prefix_disk_cache import make_prefix_cache  # noqa: PLC0415  # weight

        prefix_cache = make_prefix_cache(home, info, sha256=sha256, max_bytes=prefix_bytes)
    return Engine(backend, prefix_cache=prefix_cache)


@dataclass(kw_only=True)
class LlamaBackend:
    """A model in llama.cpp. Derived values are computed on first use."""

    name: str
    info: ModelInfo
    sha256: str | None
    load_s: float
    tokenizer: LlamaTokenizer
    model: LlamaModel
    template: JinjaChatTemplate | None
    home: Path | None
    n_ctx: int | None
    governor: threads.ThreadGovernor
    gpu_layers: int
    plans: dict[bool, memory.MemoryPlan] = field(default_factory=dict)
    """Memory plans of the latest contexts, weights included: False for the common context, True for the repeatable one."""

    counts_are_exact = True

    @property
    def memory_plan(self) -> memory.MemoryPlan | None:
        """The plan of the common context if there is one, else of the repeatable one."""
        return self.plans.get(False) or self.plans.get(True)

    @property
    def can_generate(self) -> bool:
        return not self.model.vocab_only

    @cached_property
    def speed_file(self) -> SpeedFile:
        return SpeedFile(self.home, speed_key(self.info))

    @cached_property
    def speed(self) -> Speed:
        speed = _expected_speed(self.info, self.model)
        self.speed_file.load_into(speed)
        return speed

    def save_speed(self) -> None:
        self.speed_file.save(self.speed)

    def make_slot(self, n_ctx: int | None, /) -> Slot:
        """Choose the window. The existing context's cells need no further memory, so its size is always available."""
        flash_attention = self.home is None or attention_kept(self.home)
        situation = memory.Situation(is_loaded=True)
        num_sequences = num_sequence_ids(CHAT.num_sequences, self.info.state_bytes) if self.info.state_bytes else 1
        fitting = memory.nearest(self.info, num_sequences, flash_attention=flash_attention, gpu_layers=self.gpu_layers, situation=situation)
        num_cells = 0 if self.memory_plan is None else self.memory_plan.n_ctx
        return memory.make_slot(self.info, self.n_ctx if n_ctx is None else n_ctx, fitting=max(fitting, num_cells))

    def make_runner(self, num_cells: int, num_sequences: int, /, *, repeatable: bool = False) -> LlamaContext:
        """Create a context. A `repeatable` one uses plain attention: on a CPU, flash attention splits each token's sum among threads."""
        self.plans.pop(repeatable, None)  # the previous context is closed
        flash_attention = not repeatable and (self.home is None or attention.flash_attention(self.home, self.governor))
        situation = memory.Situation(is_loaded=True)
        plan = memory.plan(
            self.info, num_cells, num_sequences, flash_attention=flash_attention, gpu_layers=self.gpu_layers, situation=situation
        )
        memory.require(plan, self.info, situation=situation)
        started = time.perf_counter()
        context = LlamaContext(
            self.model,
            num_cells=plan.n_ctx,  # llama.cpp rounds up the number of cells, but not the batch size
            num_sequences=num_sequences,
            num_outputs=num_sequences if repeatable else memory.num_outputs(num_sequences),
            batch_tokens=BATCH_TOKENS,
            num_threads=self.governor.measure,
            flash_attention=flash_attention,
        )
        self.speed.observe_context(context.num_cells, time.perf_counter() - started)
        self.plans[repeatable] = memory.as_if_unloaded(plan, self.info)
        return context

    def close(self) -> None:
        if self.template is not None:
            self.template.close()
        self.model.close()


def _load(path: Path, template: JinjaChatTemplate | None, *, vocab_only: bool) -> LlamaModel:
    """Load the model while its template's process starts."""
    if template is None:
        return LlamaModel(path, vocab_only=vocab_only)
    try:
        template.start()
        return LlamaModel(path, vocab_only=vocab_only)
    except BaseException:
        template.close()
        raise


def speed_key(info: ModelInfo) -> str:
    """A key of file, machine and build. The file's folder does not matter."""
    file = f"{info.path.name} {info.file_size} {info.architecture} {info.quantization}"
    return f"{file}; {attention.machine_key(threads.num_cores())}"


def attention_kept(home: Path) -> bool:
    """Whether flash attention was measured to be faster here. False if that is unknown: plans then assume the larger memory."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads((home / "attention.json").read_text(encoding="utf-8")).get("flash_attention") is True
    return False


def _fitting_gpu_layers(info: ModelInfo) -> int:
    """Number of layers that llama.cpp puts on a GPU by default: all if there is one. Raises EngineError if they do not fit."""
    gpu_layers = info.num_layers + 1 if memory.gpu_devices() else 0
    memory.require(memory.plan(info, 1, flash_attention=True, gpu_layers=gpu_layers), info)
    return gpu_layers


def _expected_speed(info: ModelInfo, model: LlamaModel) -> Speed:
    """A speed without observations, with slopes derived from the model's shape.

    For each token before it, a prompt token costs one multiply-add with every key and value, in addition to those with every weight. A
    decoded token reads one token's share of the KV cache, in addition to the weights. Attention is less efficient: a factor of 1.5 fits the
    measurements.
    """
    num_weights = int(model.lib.llama_model_n_params(model.handle)) - info.vocab_size * info.embedding_length
    if num_weights <= 0:  # a vocabulary without weights
        return Speed()
    num_products = info.num_layers * info.num_heads * (info.head_size_k + info.head_size_v)
    return Speed(prefill_slope=1.5 * num_products / num_weights, decode_slope=1.5 * info.kv_bytes_per_token / info.file_size)
