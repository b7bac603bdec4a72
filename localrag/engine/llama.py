"""The only door to llama.cpp: a model, a context of several sequences, samplers. Every number is checked before it goes into C.

A wrong number there does not raise, it aborts the process (a batch over its size, a sampler on an index without logits, a
sequence id over the limit), so the classes here refuse it first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrag.decoding import SamplingParams
from localrag.engine.grammar import grammar_of
from localrag.errors import EngineError, ModelFileError

if TYPE_CHECKING:
    from localrag.engine.constrained import ConstrainedSampler

MAX_SEQUENCES = 256
"""llama.cpp aborts on a sequence id beyond this."""

_log: deque[str] = deque(maxlen=20)
_kept_alive: list[object] = []  # what C holds a pointer to for as long as the process lives


@functools.cache
def library() -> Any:  # noqa: ANN401  # a module, whose types mypy does not see through importlib
    """llama-cpp-python's module of C functions, with the backend initialised and its log kept off the terminal.

    The package's own __init__ imports numpy and the high-level class, which takes 100 ms and is not used: the module is
    imported without running it. A script that imports llama_cpp itself gets the whole package as ever.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion would otherwise fork a debugger
    if "llama_cpp" in sys.modules:
        lib: Any = importlib.import_module("llama_cpp.llama_cpp")
    else:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None:
            raise EngineError("llama-cpp-python is not installed.", hint="Install it with: pip install llama-cpp-python")
        sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
        try:
            lib = importlib.import_module("llama_cpp.llama_cpp")
        finally:
            del sys.modules["llama_cpp"]
    callback = lib.llama_log_callback(_keep_log)
    lib.llama_log_set(callback, None)
    _kept_alive.append(callback)
    lib.llama_backend_init()
    return lib


def _keep_log(level: int, text: bytes, _user_data: object) -> None:
    if level >= 3:  # warnings and errors; 5 continues the line before
        _log.append(text.decode("utf-8", "replace").strip())


def last_log_line() -> str:
    """What llama.cpp last complained about; empty if it did not."""
    return next((line for line in reversed(_log) if line), "")


class LlamaModel:
    """A GGUF file loaded by llama.cpp, or only its vocabulary. The header was checked before (engine/gguf.py)."""

    def __init__(self, path: Path, *, vocab_only: bool = False) -> None:
        self.lib = library()
        self.path = path
        self.vocab_only = vocab_only
        params = self.lib.llama_model_default_params()
        params.vocab_only = vocab_only
        params.check_tensors = not vocab_only  # damaged weights would load, and answer with garbage
        if b"AMX_INT8 = 1" in self.lib.llama_print_system_info():
            # compilers that drop the tile configuration as a dead store make llama.cpp die there of an illegal instruction (its
            # pull request 26954); without extra buffer types it takes the AVX-512 kernels. scripts/setup builds without AMX.
            params.use_extra_bufts = False
        _log.clear()
        self.handle = self.lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise ModelFileError(
                f"llama.cpp cannot load {path.name}: {last_log_line() or 'no reason given'}",
                hint="Fetch the file again, or use one that this build of llama.cpp knows.",
            )
        self.vocab = self.lib.llama_model_get_vocab(self.handle)
        self.num_vocab_tokens = int(self.lib.llama_vocab_n_tokens(self.vocab))

    def close(self) -> None:
        if self.handle:
            self.lib.llama_model_free(self.handle)
            self.handle = None


class LlamaSampler:
    """A chain of llama.cpp's samplers for one sequence. Temperature 0 takes the likeliest token."""

    def __init__(self, params: SamplingParams, model: LlamaModel) -> None:
        grammar = None if params.json_schema is None else grammar_of(params.json_schema)
        self.lib = lib = library()
        self.handle = self._chain()
        self._penalties: Any = None
        self._constrained: ConstrainedSampler | None = None
        if params.repeat_penalty != 1.0 and params.repeat_last_n > 0:
            self._penalties = self.handle if grammar is None else self._chain()  # under a grammar it comes before, on all tokens
            self._add(
                self._penalties,
                lib.llama_sampler_init_penalties(model.num_vocab_tokens, params.repeat_last_n, params.repeat_penalty, 0.0, 0.0),
            )
        if params.temperature == 0.0:
            self._add(self.handle, lib.llama_sampler_init_greedy())
        else:
            # top-k comes first: the others are 2 to 40 times slower on a whole vocabulary
            if params.top_k > 0:
                self._add(self.handle, lib.llama_sampler_init_top_k(params.top_k))
            self._add(self.handle, lib.llama_sampler_init_top_p(params.top_p, 1))
            self._add(self.handle, lib.llama_sampler_init_min_p(params.min_p, 1))
            self._add(self.handle, lib.llama_sampler_init_temp(params.temperature))
            self._add(self.handle, lib.llama_sampler_init_dist(params.seed))
        if grammar is not None:
            from localrag.engine.constrained import ConstrainedSampler  # noqa: PLC0415  # weight: numpy

            self._constrained = ConstrainedSampler(
                lib,
                model.vocab,
                num_vocab_tokens=model.num_vocab_tokens,
                grammar=grammar,
                choose=None if params.temperature == 0.0 else self.handle,
                penalties=self._penalties,
            )

    def _chain(self) -> Any:  # noqa: ANN401  # a C pointer
        params = self.lib.llama_sampler_chain_default_params()
        params.no_perf = True
        return self.lib.llama_sampler_chain_init(params)

    def _add(self, chain: Any, link: Any) -> None:  # noqa: ANN401  # C pointers
        if not link:
            raise EngineError("llama.cpp refused a sampler.")
        self.lib.llama_sampler_chain_add(chain, link)

    def sample(self, context: Any, index: int) -> int:  # noqa: ANN401  # a C pointer
        """The next token from entry `index` of the last batch, whose logits must be there (LlamaContext sees to it)."""
        if self._constrained is not None:
            return self._constrained.sample(self.lib.llama_get_logits_ith(context, index))
        return int(self.lib.llama_sampler_sample(self.handle, context, index))

    def close(self) -> None:
        if self.handle:
            if self._constrained is not None:
                self._constrained.close()
                if self._penalties:
                    self.lib.llama_sampler_free(self._penalties)
            self.lib.llama_sampler_free(self.handle)
            self.handle = None


class LlamaContext:
    """A KV cache of `num_cells` tokens that up to `num_sequences` sequences share, and the batch that is decoded into it.

    A Runner (engine.py). Sequence ids count from 0.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        num_cells: int,
        num_sequences: int = 1,
        batch_tokens: int = 512,
        num_threads: int,
        flash_attention: bool = True,
    ) -> None:
        if model.vocab_only:
            raise EngineError(f"{model.path.name} holds a vocabulary and no weights; it cannot generate.")
        if not (1 <= num_sequences <= MAX_SEQUENCES and 1 <= batch_tokens <= 65_536 and 1 <= num_cells < 2**31 and num_threads >= 1):
            raise EngineError(f"A context of {num_cells} cells for {num_sequences} sequences is out of bounds.")
        self.lib = lib = model.lib
        self.model = model
        self.batch_tokens = batch_tokens
        self.num_sequences = num_sequences
        params = lib.llama_context_default_params()
        params.n_ctx = num_cells
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_seq_max = params.n_outputs_max = num_sequences
        params.n_threads = params.n_threads_batch = num_threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = True  # sequences share cells, and a copied prefix costs nothing
        params.no_perf = True
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise EngineError(
                f"llama.cpp cannot make a context of {num_cells} tokens: {last_log_line() or 'no reason given'}",
                hint="Ask for a smaller window with --ctx.",
                num_cells=num_cells,
            )
        self.num_cells = int(lib.llama_n_ctx(self.handle))
        self._samplers: dict[int, LlamaSampler] = {}
        self.memory = lib.llama_get_memory(self.handle)
        self._batch = lib.llama_batch_init(batch_tokens, 0, 1)
        self._cancelled = False
        self._interrupted = False
        self._outputs: set[int] = set()
        self._abort = lib.ggml_abort_callback(self._should_abort)
        lib.llama_set_abort_callback(self.handle, self._abort, None)

    def begin(self, seq_id: int, _prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """A sampler of its own for a sequence. What the sequence holds stays."""
        self._samplers[self._checked(seq_id)] = LlamaSampler(sampling, self.model)

    def end(self, seq_id: int) -> None:
        """Free the sampler of a sequence. What the sequence holds stays."""
        self._samplers.pop(self._checked(seq_id)).close()

    def cancel(self) -> None:
        """Stop the decode that is running, or else the next one, within milliseconds; from any thread."""
        self._cancelled = True

    def _should_abort(self, _user_data: object) -> bool:
        try:
            return self._cancelled
        except KeyboardInterrupt:  # a signal is delivered here, between two nodes of the graph; it is raised after C returned
            self._interrupted = True
            return True

    def decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> bool:
        """Evaluate (token id, position, sequence id, logits wanted) tuples in one batch; False if it was cancelled."""
        wanted = {i for i, entry in enumerate(entries) if entry[3]}
        if not 0 < len(entries) <= self.batch_tokens or len(wanted) > self.num_sequences:
            raise EngineError(f"A batch of {len(entries)} tokens and {len(wanted)} outputs is out of bounds.")
        batch = self._batch
        for i, (token, position, seq_id, logits) in enumerate(entries):
            if not 0 <= seq_id < self.num_sequences:
                raise EngineError(f"Sequence id {seq_id} is out of bounds.")
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq_id
            batch.logits[i] = logits
        batch.n_tokens = len(entries)
        self._outputs = set()
        code = self.lib.llama_decode(self.handle, batch)
        interrupted = self._interrupted
        self._cancelled = self._interrupted = False
        if interrupted:
            raise KeyboardInterrupt
        if code == 2:
            return False
        if code != 0:
            reason = "the KV cache is full" if code == 1 else last_log_line() or f"code {code}"
            raise EngineError(f"llama.cpp could not evaluate a batch of {len(entries)} tokens: {reason}.", code=code)
        self._outputs = wanted
        return True

    def sample(self, seq_id: int, index: int) -> int:
        """The next token of a sequence, from the `index`-th entry of the last batch, which must have asked for logits."""
        if index not in self._outputs:
            raise EngineError(f"Entry {index} of the last batch has no logits.")
        return self._samplers[seq_id].sample(self.handle, index)

    def num_tokens(self, seq_id: int) -> int:
        """How many positions of a sequence are in the cache, by the cache's own word."""
        return int(self.lib.llama_memory_seq_pos_max(self.memory, self._checked(seq_id))) + 1

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Drop what a sequence holds from position `num_tokens` on."""
        if num_tokens < 0 or not self.lib.llama_memory_seq_rm(self.memory, self._checked(seq_id), num_tokens, -1):
            raise EngineError(f"Sequence {seq_id} cannot be cut to {num_tokens} tokens.")

    def copy(self, source: int, seq_id: int, num_tokens: int) -> bool:
        """Have `seq_id` hold the first tokens of `source`, in the same cells; False, and it holds nothing, where the memory cannot."""
        if source == seq_id or not 0 < num_tokens <= self.num_tokens(source):
            raise EngineError(f"Sequence {source} cannot be copied to {seq_id} up to {num_tokens} tokens.")
        self.lib.llama_memory_seq_rm(self.memory, self._checked(seq_id), -1, -1)
        self.lib.llama_memory_seq_cp(self.memory, source, seq_id, 0, num_tokens)
        return self._holds(seq_id, num_tokens)

    def cut(self, seq_id: int, num_tokens: int) -> bool:
        """Drop what a sequence holds from position `num_tokens` on; False, and it holds nothing, where the memory cannot."""
        if num_tokens < 0:
            raise EngineError(f"Sequence {seq_id} cannot be cut to {num_tokens} tokens.")
        self.lib.llama_memory_seq_rm(self.memory, self._checked(seq_id), num_tokens or -1, -1)
        return num_tokens == 0 or self._holds(seq_id, num_tokens)

    def _holds(self, seq_id: int, num_tokens: int) -> bool:
        """Whether a sequence can go on behind so many tokens. It is told by positions: return values say yes also where it cannot.

        A sliding window must still hold the last tokens before that position; a recurrent state stands at one position alone.
        """
        first = int(self.lib.llama_memory_seq_pos_min(self.memory, seq_id))
        last = int(self.lib.llama_memory_seq_pos_max(self.memory, seq_id))
        window = int(self.lib.llama_model_n_swa(self.model.handle))
        if last == num_tokens - 1 and (first == 0 or (window > 0 and 0 <= first <= max(0, num_tokens - window))):
            return True
        self.lib.llama_memory_seq_rm(self.memory, seq_id, -1, -1)
        return False

    def _checked(self, seq_id: int) -> int:
        if not 0 <= seq_id < self.num_sequences:
            raise EngineError(f"Sequence id {seq_id} is out of bounds.")
        return seq_id

    def close(self) -> None:
        if self.handle:
            for sampler in self._samplers.values():
                sampler.close()
            self._samplers.clear()
            self.lib.llama_batch_free(self._batch)
            self.lib.llama_free(self.handle)
            self.handle = None
