"""llama.cpp's objects in Python: a model, its tokenizer, a context with a KV cache, and a sampler chain."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrag.engine.backend import MAX_SEQUENCES, Logprobs, PartOf
from localrag.engine.grammar import Vocabulary, grammar_of
from localrag.engine.llama_lib import begin_log, complaint, give_back, library
from localrag.errors import EngineError, ModelFileError, UsageError
from localrag.types import SamplingParams

if TYPE_CHECKING:
    from localrag.engine.constrained import ConstrainedSampler
    from localrag.engine.grammar import Matcher


_MAX_TEXT_BYTES = 256 * 1024 * 1024  # llama.cpp takes a 32-bit length
_TAG = re.compile(r"</?[^\s<>]{1,60}>|\[/?[A-Z][A-Z_ ]{0,60}\]|<[|｜][^<>]{1,60}[|｜]>")


class LlamaTokenizer:
    """Implements `localrag.text.tokens.Tokenizer` with a model's vocabulary. Ids are those of `llama_tokenize`."""

    def __init__(self, model: LlamaModel) -> None:
        self.lib = model.lib
        self.vocab = model.vocab
        self._model = model  # keeps the vocabulary alive
        self._buffer = (model.lib.llama_token * 4096)()
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.num_tokens = model.num_vocab_tokens

    @functools.cached_property
    def name(self) -> str:
        """A fingerprint of the vocabulary: its size, four sample tokens and its special tokens."""
        sample = (0, self.num_tokens // 3, self.num_tokens // 2, self.num_tokens - 1)
        digest = hashlib.sha256(repr((self.num_tokens, [self.text(i) for i in sample], self.special_texts)).encode())
        return f"llama-{digest.hexdigest()[:16]}"

    def text(self, token_id: int) -> str:
        """Return the text of a token as the vocabulary stores it."""
        raw = self.lib.llama_vocab_get_text(self.vocab, self._checked(token_id))
        return raw.decode("utf-8", "replace") if raw else ""

    @property
    def bos_id(self) -> int | None:
        token = int(self.lib.llama_vocab_bos(self.vocab))
        return token if token >= 0 else None

    @property
    def eos_id(self) -> int | None:
        token = int(self.lib.llama_vocab_eos(self.vocab))
        return token if token >= 0 else None

    @property
    def bos_text(self) -> str:
        return "" if self.bos_id is None else self.text(self.bos_id)

    @property
    def eos_text(self) -> str:
        return "" if self.eos_id is None else self.text(self.eos_id)

    @property
    def adds_bos(self) -> bool:
        return bool(self.lib.llama_vocab_get_add_bos(self.vocab)) and self.bos_id is not None

    @functools.cached_property
    def _attributes(self) -> dict[int, int]:
        """Attributes of control, unknown and user-defined tokens. They come from llama.cpp, which corrects those in the file."""
        get, vocab, lib = self.lib.llama_vocab_get_attr, self.vocab, self.lib
        special = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        pairs = enumerate(map(get, repeat(vocab), range(self.num_tokens)))  # a tight loop: a vocabulary can have 262,144 tokens
        return {i: attributes for i, attributes in pairs if attributes & special}

    @functools.cached_property
    def special_texts(self) -> tuple[tuple[str, int], ...]:
        mask = self.lib.LLAMA_TOKEN_ATTR_CONTROL | self.lib.LLAMA_TOKEN_ATTR_UNKNOWN
        pairs = ((self.text(i), i) for i, attributes in self._attributes.items() if attributes & mask)
        return tuple((text, i) for text, i in pairs if text)

    @functools.cached_property
    def tag_texts(self) -> tuple[tuple[str, int], ...]:
        mask = self.lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        pairs = ((self.text(i), i) for i, attributes in self._attributes.items() if attributes & mask)
        return tuple((text, i) for text, i in pairs if _TAG.fullmatch(text))

    def strips(self, token_id: int) -> tuple[bool, bool]:
        attributes = self._attributes.get(token_id, 0)
        return bool(attributes & self.lib.LLAMA_TOKEN_ATTR_LSTRIP), bool(attributes & self.lib.LLAMA_TOKEN_ATTR_RSTRIP)

    def encode(self, text: str) -> list[int]:
        raw = _utf8(text)
        count = self._tokenize(raw, len(self._buffer))
        if count < 0:
            self._buffer = (self.lib.llama_token * -count)()
            count = self._tokenize(raw, -count)
        return self._buffer[:count]  # type: ignore[no-any-return]  # a slice of a ctypes array is a list of int

    def count(self, text: str) -> int:
        return abs(self._tokenize(_utf8(text), 0))

    def _tokenize(self, raw: bytes, room: int) -> int:
        count = int(self.lib.llama_tokenize(self.vocab, raw, len(raw), self._buffer, room, False, False))
        if count == -(2**31):
            raise EngineError("The text has more tokens than llama.cpp can count.")
        return count

    def piece(self, token_id: int, *, special: bool = True) -> bytes:
        piece = self._pieces.get((token_id, special))
        if piece is None:
            piece = self._pieces[token_id, special] = self._piece(self._checked(token_id), special=special)
        return piece

    def _piece(self, token_id: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(128)
        length = int(self.lib.llama_token_to_piece(self.vocab, token_id, buffer, len(buffer), 0, special))
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = int(self.lib.llama_token_to_piece(self.vocab, token_id, buffer, len(buffer), 0, special))
        return buffer.raw[:length]

    def is_end(self, token_id: int) -> bool:
        return bool(self.lib.llama_vocab_is_eog(self.vocab, self._checked(token_id)))

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.num_tokens:
            raise EngineError(f"Token id {token_id} is not in the vocabulary of {self.num_tokens}.")
        return token_id


def _utf8(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")  # lone surrogates, as in file names, have no UTF-8
    if len(raw) > _MAX_TEXT_BYTES:
        raise UsageError(f"A text of {len(raw)} bytes is too long to tokenize; the limit is {_MAX_TEXT_BYTES}.")
    return raw


_ABORTED = 2
"""The code that llama_decode returns when its abort callback stopped it."""


class LlamaModel:
    """A GGUF file loaded by llama.cpp, or only its vocabulary. Check the header first with engine/gguf.py."""

    def __init__(self, path: Path, *, vocab_only: bool = False) -> None:
        self.lib = library()
        self.path = path
        self.vocab_only = vocab_only
        params = self.lib.llama_model_default_params()
        params.vocab_only = vocab_only
        params.check_tensors = not vocab_only  # otherwise damaged weights load and produce garbage
        if b"AMX_INT8 = 1" in self.lib.llama_print_system_info():
            # Compilers that drop the tile configuration as a dead store make llama.cpp crash with an illegal instruction (its pull
            # request 26954). Without extra buffer types it uses the AVX-512 kernels. scripts/setup builds without AMX.
            params.use_extra_bufts = False
        begin_log()
        self.handle = self.lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise ModelFileError(
                f"llama.cpp cannot load {path.name}: {complaint() or 'no reason given'}",
                hint="Fetch the file again, or use one that this build of llama.cpp knows.",
            )
        self.vocab = self.lib.llama_model_get_vocab(self.handle)
        self.num_vocab_tokens = int(self.lib.llama_vocab_n_tokens(self.vocab))

    @functools.cached_property
    def grammar_vocabulary(self) -> Vocabulary:
        """The tokens for constrained decoding, each with the bytes that it adds to an answer."""
        buffer = ctypes.create_string_buffer(4096)
        write, vocab, ids = self.lib.llama_token_to_piece, self.vocab, range(self.num_vocab_tokens)
        lengths = (int(write(vocab, token, buffer, len(buffer), 0, False)) for token in ids)
        pieces = [ctypes.string_at(buffer, max(0, length)) for length in lengths]  # a token longer than the buffer is never sampled
        return Vocabulary(
            pieces, [token for token in ids if self.lib.llama_vocab_is_eog(vocab, token)], functools.partial(_encode, self.lib, vocab)
        )

    def close(self) -> None:
        if self.handle:
            self.lib.llama_model_free(self.handle)
            self.handle = None
            give_back()


def _encode(lib: Any, vocab: object, text: str) -> list[int]:  # noqa: ANN401  # a module, loaded from a path
    """Tokenize a text. Takes no model: llguidance holds this function where Python's garbage collector cannot see the cycle."""
    raw = text.encode()
    buffer = (lib.llama_token * (len(raw) + 1))()
    count = int(lib.llama_tokenize(vocab, raw, len(raw), buffer, len(buffer), False, False))
    return list(buffer[: max(0, count)])


class Abort:
    """The abort callback of a context. llama.cpp calls it between the nodes of a graph and stops if it returns true."""

    def __init__(self, lib: Any, context: object) -> None:  # noqa: ANN401  # a module, loaded from a path
        self.is_wanted = False
        self._interrupted = False
        self._callback = lib.ggml_abort_callback(self._ask)  # C holds a pointer to it
        lib.llama_set_abort_callback(context, self._callback, None)

    def _ask(self, _user_data: object) -> bool:
        try:
            return self.is_wanted
        except KeyboardInterrupt:  # a signal delivered here is raised again after C returns
            self._interrupted = True
            return True

    def happened(self, code: int) -> bool:
        """Whether the evaluation that returned `code` was cancelled. Resets the request. Raises KeyboardInterrupt after Ctrl-C."""
        is_wanted, interrupted = self.is_wanted, self._interrupted
        self.is_wanted = self._interrupted = False
        if interrupted or (code == _ABORTED and not is_wanted):  # a signal can also be delivered on the way into the callback
            raise KeyboardInterrupt
        return code == _ABORTED


class LlamaSampler:
    """A sampler chain for one sequence. Temperature 0 selects the most likely token."""

    def __init__(self, params: SamplingParams, model: LlamaModel) -> None:
        matcher = self._matcher(params, model)
        self.lib = lib = library()
        self.handle = self._chain()
        self._penalties: Any = None
        self._constrained: ConstrainedSampler | None = None
        penalties = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        if penalties != (1.0, 0.0, 0.0) and params.repeat_last_n > 0:
            self._penalties = self.handle if matcher is None else self._chain()  # under a grammar it runs first, on all tokens
            self._add(
                self._penalties,
                lib.llama_sampler_init_penalties(model.num_vocab_tokens, params.repeat_last_n, *penalties),
            )
        if params.temperature == 0.0:
            self._add(self.handle, lib.llama_sampler_init_greedy())
        else:
            # top-k first: the others are 2 to 40 times slower on a whole vocabulary
            if params.top_k > 0:
                self._add(self.handle, lib.llama_sampler_init_top_k(params.top_k))
            self._add(self.handle, lib.llama_sampler_init_top_p(params.top_p, 1))
            self._add(self.handle, lib.llama_sampler_init_min_p(params.min_p, 1))
            self._add(self.handle, lib.llama_sampler_init_temp(params.temperature))
            # with LLAMA_DEFAULT_SEED, the largest 32-bit number, llama.cpp would draw a random seed
            self._add(self.handle, lib.llama_sampler_init_dist(params.seed % lib.LLAMA_DEFAULT_SEED))
        if matcher is not None:
            from localrag.engine.constrained import ConstrainedSampler  # noqa: PLC0415  # heavy: numpy

            self._constrained = ConstrainedSampler(
                lib,
                matcher,
                num_vocab_tokens=model.num_vocab_tokens,
                choose=None if params.temperature == 0.0 else self.handle,
                penalties=self._penalties,
            )

    @staticmethod
    def _matcher(params: SamplingParams, model: LlamaModel) -> Matcher | None:
        if params.call_rules is not None and params.citations:
            return model.grammar_vocabulary.calling_matcher(
                params.call_rules, params.citations, params.num_answer_tokens, is_first=params.cites_first
            )
        if params.call_rules is not None:
            return model.grammar_vocabulary.matcher(params.call_rules.grammar)
        if params.json_schema is not None:
            return model.grammar_vocabulary.matcher(grammar_of(params.json_schema, or_text=params.or_text))
        if params.citations:
            return model.grammar_vocabulary.citing_matcher(
                params.citations, params.num_answer_tokens, params.quotes, is_first=params.cites_first
            )
        return None

    def _chain(self) -> Any:  # noqa: ANN401  # a C pointer
        params = self.lib.llama_sampler_chain_default_params()
        params.no_perf = True
        return self.lib.llama_sampler_chain_init(params)

    def _add(self, chain: Any, link: Any) -> None:  # noqa: ANN401  # C pointers
        if not link:
            raise EngineError("llama.cpp refused a sampler.")
        self.lib.llama_sampler_chain_add(chain, link)

    def sample(self, context: Any, index: int, part_of: PartOf | None = None) -> int:  # noqa: ANN401  # a C pointer
        """Sample the next token from the logits of entry `index` of the last batch. LlamaContext checks that they exist."""
        if self._constrained is not None:
            return self._constrained.sample(self.lib.llama_get_logits_ith(context, index), part_of)
        return int(self.lib.llama_sampler_sample(self.handle, context, index))

    def take_copied(self) -> tuple[int, ...]:
        """Return the tokens to append after the last sampled one, once."""
        return () if self._constrained is None else self._constrained.take_copied()

    def close(self) -> None:
        if self.handle:
            if self._constrained is not None and self._penalties:
                self.lib.llama_sampler_free(self._penalties)
            self.lib.llama_sampler_free(self.handle)
            self.handle = None


class LlamaContext:
    """A llama.cpp context: a KV cache of `num_cells` tokens, shared by up to `num_sequences` sequences, and a batch buffer.

    Implements `localrag.engine.backend.Runner`. Sequence ids count from 0. A batch yields the logits of up to `num_outputs` tokens, by
    default one per sequence.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        num_cells: int,
        num_sequences: int = 1,
        num_outputs: int | None = None,
        batch_tokens: int = 512,
        num_threads: int | Callable[[], int],
        flash_attention: bool = True,
    ) -> None:
        if model.vocab_only:
            raise EngineError(f"{model.path.name} holds a vocabulary and no weights; it cannot generate.")
        self._num_threads: Callable[[], int] = functools.partial(int, num_threads) if isinstance(num_threads, int) else num_threads
        threads = self._num_threads()
        outputs = num_sequences if num_outputs is None else num_outputs
        sizes = 1 <= num_sequences <= MAX_SEQUENCES and 1 <= batch_tokens <= 65_536 and 1 <= outputs <= 65_536
        if not (sizes and 1 <= num_cells < 2**31 and threads >= 1):
            raise EngineError(f"A context of {num_cells} cells for {num_sequences} sequences is out of bounds.")
        self.lib = lib = model.lib
        self.model = model
        self.batch_tokens = batch_tokens
        self.num_sequences = num_sequences
        self.num_outputs = outputs
        params = lib.llama_context_default_params()
        params.n_ctx = num_cells
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_seq_max = num_sequences
        params.n_outputs_max = outputs
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = True  # sequences share cells, so copying a prefix is free
        params.no_perf = True
        begin_log()
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise EngineError(
                f"llama.cpp cannot make a context of {num_cells} tokens: {complaint() or 'no reason given'}",
                hint="Ask for a smaller window with --ctx.",
                num_cells=num_cells,
            )
        self.num_cells = int(lib.llama_n_ctx(self.handle))
        self.moves_cells = bool(lib.llama_model_n_swa(model.handle))
        self.is_recurrent = bool(lib.llama_model_is_recurrent(model.handle) or lib.llama_model_is_hybrid(model.handle))
        self._samplers: dict[int, LlamaSampler] = {}
        self.memory = lib.llama_get_memory(self.handle)
        self._batch = lib.llama_batch_init(batch_tokens, 0, 1)
        self._outputs: set[int] = set()
        self._abort = Abort(lib, self.handle)

    def prepare(self) -> None:
        """Update the number of threads. Call it before an answer, while no other one is running."""
        threads = self._num_threads()
        self.lib.llama_set_n_threads(self.handle, threads, threads)

    def check(self, sampling: SamplingParams) -> None:
        """Raise UsageError for an unsupported JSON schema."""
        if sampling.json_schema is not None:
            grammar_of(sampling.json_schema)

    def begin(self, seq_id: int, _prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Create the sampler of a sequence. Its cached tokens are kept."""
        self._samplers[self._checked(seq_id)] = LlamaSampler(sampling, self.model)

    def end(self, seq_id: int) -> None:
        """Free the sampler of a sequence. Its cached tokens are kept."""
        self._samplers.pop(self._checked(seq_id)).close()

    def cancel(self) -> None:
        """Stop the running decode, or else the next one, within milliseconds. Can be called from any thread."""
        self._abort.is_wanted = True

    def resume(self) -> None:
        """Withdraw a `cancel`, so that the next decode runs."""
        self._abort.is_wanted = False

    def decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> bool:
        """Evaluate (token id, position, sequence id, wants logits) tuples in one batch. Return False if it was cancelled."""
        outputs = {i for i, entry in enumerate(entries) if entry[3]}
        if not 0 < len(entries) <= self.batch_tokens or len(outputs) > self.num_outputs:
            raise EngineError(f"A batch of {len(entries)} tokens and {len(outputs)} outputs is out of bounds.")
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
        begin_log()
        code = self.lib.llama_decode(self.handle, batch)
        if self._abort.happened(code):
            return False
        if code != 0:
            reason = "the KV cache is full" if code == 1 else complaint() or f"code {code}"
            raise EngineError(f"llama.cpp could not evaluate a batch of {len(entries)} tokens: {reason}.", code=code)
        self._outputs = outputs
        return True

    def sample(self, seq_id: int, index: int, part_of: PartOf | None = None) -> int:
        """Sample the next token of a sequence from entry `index` of the last batch, which must have requested logits.

        `part_of` is as in `localrag.engine.backend.Runner`.
        """
        if index not in self._outputs:
            raise EngineError(f"Entry {index} of the last batch has no logits.")
        return self._samplers[seq_id].sample(self.handle, index, part_of)

    def take_copied(self, seq_id: int) -> tuple[int, ...]:
        """Return the tokens to append after the last sampled one; see `localrag.engine.backend.Runner`."""
        return self._samplers[seq_id].take_copied()

    def logits(self, index: int, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return the logits of some tokens at entry `index` of the last batch, which must have requested logits."""
        if index not in self._outputs or not all(0 <= token < self.model.num_vocab_tokens for token in token_ids):
            raise EngineError(f"Entry {index} of the last batch has no logits for these tokens.")
        row = self.lib.llama_get_logits_ith(self.handle, index)
        return tuple(row[token] for token in token_ids)

    def logprobs(self, index: int, num_top: int) -> Logprobs:
        """Return the logprobs of the whole vocabulary at entry `index` of the last batch; see `localrag.engine.backend.Runner`."""
        if index not in self._outputs:
            raise EngineError(f"Entry {index} of the last batch has no logits.")
        from localrag.engine.constrained import logprobs_of  # noqa: PLC0415  # heavy: numpy

        return logprobs_of(self.lib.llama_get_logits_ith(self.handle, index), self.model.num_vocab_tokens, num_top)

    def all_logits(self) -> Any:  # noqa: ANN401  # a pointer of C
        """Wait for the last batch and return a pointer to its requested logits, row by row. It is valid until the next batch."""
        rows = self.lib.llama_get_logits(self.handle)
        if not self._outputs or not rows:
            raise EngineError("The last batch has no logits.")
        return rows

    def num_tokens(self, seq_id: int) -> int:
        """Return the number of positions of a sequence in the KV cache, as llama.cpp reports it."""
        return int(self.lib.llama_memory_seq_pos_max(self.memory, self._checked(seq_id))) + 1

    def copy(self, source: int, seq_id: int, num_tokens: int, checkpoint: bytes | None = None) -> bool:
        """Make `seq_id` share the cells of the first `num_tokens` of `source`. If the memory cannot, empty `seq_id` and return False."""
        if source == seq_id or not 0 < num_tokens <= self.num_tokens(source):
            raise EngineError(f"Sequence {source} cannot be copied to {seq_id} up to {num_tokens} tokens.")
        self.lib.llama_memory_seq_rm(self.memory, self._checked(seq_id), -1, -1)
        self.lib.llama_memory_seq_cp(self.memory, source, seq_id, 0, num_tokens)
        return self.cut(seq_id, num_tokens, checkpoint)

    def cut(self, seq_id: int, num_tokens: int, checkpoint: bytes | None = None) -> bool:
        """Truncate a sequence to `num_tokens`. If the memory cannot, empty the sequence and return False."""
        if num_tokens < 0:
            raise EngineError(f"Sequence {seq_id} cannot be cut to {num_tokens} tokens.")
        if checkpoint is not None:  # first restore the layers that cannot be truncated
            self._write(self._checked(seq_id), checkpoint, self.lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        self.lib.llama_memory_seq_rm(self.memory, self._checked(seq_id), num_tokens or -1, -1)
        return num_tokens == 0 or self._holds(seq_id, num_tokens)

    def checkpoint(self, seq_id: int) -> bytes:
        """Return the state of the recurrent layers of a sequence, or the window of sliding ones, for `cut` and `copy`."""
        return self._read(self._checked(seq_id), self.lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def save(self, seq_id: int) -> bytes:
        """Return the state of a sequence, for `restore` in a context of the same model and settings."""
        return self._read(self._checked(seq_id), self.lib.LLAMA_STATE_SEQ_FLAGS_NONE)

    def restore(self, seq_id: int, state: bytes | bytearray, num_tokens: int) -> bool:
        """Load a state from `save` into a sequence. If llama.cpp refuses it, empty the sequence and return False.

        Verify the state's checksum first: llama.cpp can crash on a damaged one.
        """
        self.lib.llama_memory_seq_rm(self.memory, self._checked(seq_id), -1, -1)
        if self._write(seq_id, state, self.lib.LLAMA_STATE_SEQ_FLAGS_NONE) and self.num_tokens(seq_id) == num_tokens:
            return True
        self.lib.llama_memory_seq_rm(self.memory, seq_id, -1, -1)
        return False

    def _read(self, seq_id: int, flags: int) -> bytes:
        size = int(self.lib.llama_state_seq_get_size_ext(self.handle, seq_id, flags))
        buffer = (ctypes.c_uint8 * size)()
        num_written = int(self.lib.llama_state_seq_get_data_ext(self.handle, buffer, size, seq_id, flags))
        if not 0 < num_written <= size:
            raise EngineError(f"The state of sequence {seq_id} cannot be saved.")
        return bytes(memoryview(buffer)[:num_written])

    def _write(self, seq_id: int, state: bytes | bytearray, flags: int) -> bool:
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        return int(self.lib.llama_state_seq_set_data_ext(self.handle, buffer, len(state), seq_id, flags)) == len(state)

    def _holds(self, seq_id: int, num_tokens: int) -> bool:
        """Return whether a sequence can continue after `num_tokens` tokens. Empty it if it cannot.

        Judge by positions, since llama.cpp's return values report success even where it cannot. A sliding window must still hold the last
        tokens before that position. A recurrent state exists at a single position, which is then the first and the last one.
        """
        first = int(self.lib.llama_memory_seq_pos_min(self.memory, seq_id))
        last = int(self.lib.llama_memory_seq_pos_max(self.memory, seq_id))
        window = int(self.lib.llama_model_n_swa(self.model.handle))
        is_whole = first == last if self.is_recurrent else first == 0 or (window > 0 and 0 <= first <= max(0, num_tokens - window))
        if last == num_tokens - 1 and is_whole:
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
            give_back()
