"""The door to llama.cpp for a model that turns texts into vectors: a context that pools. Every number is checked before it goes into C."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.engine import gguf, sandbox, threads
from localrag.engine.llama import MAX_SEQUENCES, Abort, LlamaModel
from localrag.engine.llama_lib import begin_log, complaint
from localrag.errors import EngineError, ModelFileError, UsageError
from localrag.settings import MAX_TEXT_BYTES
from localrag.text.tokens import check_length

if TYPE_CHECKING:
    import numpy as np


POOLINGS = {1: "mean", 2: "cls", 3: "last"}
"""How the vectors of a text's tokens become one, by llama.cpp's numbers. 4 ranks texts, which makes no vector."""


class EmbeddingContext:
    """Evaluates whole texts, up to `num_sequences` of them and `batch_tokens` tokens in one call, and keeps nothing of them.

    ModelFileError for a file that does not say how its vectors are pooled; EngineError where the memory does not suffice.
    """

    def __init__(self, model: LlamaModel, *, batch_tokens: int, num_sequences: int, num_threads: int) -> None:
        # llama.cpp asserts that its plan of a whole batch divides evenly among the texts
        divides = 1 <= num_sequences <= MAX_SEQUENCES and batch_tokens % num_sequences == 0
        if not (divides and 1 <= batch_tokens <= 65_536 and num_threads >= 1):
            raise EngineError(f"A batch of {batch_tokens} tokens of {num_sequences} texts is out of bounds.")
        self.lib = lib = model.lib
        self.model = model
        self.batch_tokens = batch_tokens
        self.num_sequences = num_sequences
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = batch_tokens  # a text is pooled where it is evaluated as a whole
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = num_threads
        params.embeddings = True
        params.kv_unified = True  # else each text gets its even share of the cells
        params.no_perf = True
        begin_log()
        for flash_attention in (lib.LLAMA_FLASH_ATTN_TYPE_ENABLED, lib.LLAMA_FLASH_ATTN_TYPE_DISABLED):  # twice as fast, where it can
            params.flash_attn_type = flash_attention
            self.handle = lib.llama_init_from_model(model.handle, params)
            if self.handle:
                break
        else:
            raise EngineError(
                f"llama.cpp cannot embed texts of {batch_tokens} tokens: {complaint() or 'no reason given'}",
                hint="Free some memory, or use a smaller embedder.",
                batch_tokens=batch_tokens,
            )
        if lib.llama_pooling_type(self.handle) not in POOLINGS:
            lib.llama_free(self.handle)
            self.handle = None
            raise ModelFileError(
                f"{model.path.name} is no embedder: it does not say how the vectors of its tokens become one.",
                hint="Use the GGUF file of an embedding model.",
            )
        self.memory = lib.llama_get_memory(self.handle)  # an encoder has none
        self.dim = int(lib.llama_model_n_embd_out(model.handle))
        self._batch = lib.llama_batch_init(batch_tokens, 0, 1)
        self._abort = Abort(lib, self.handle)

    def set_threads(self, num_threads: int) -> None:
        self.lib.llama_set_n_threads(self.handle, max(1, num_threads), max(1, num_threads))

    def embed(self, texts: Sequence[Sequence[int]], out: np.ndarray) -> None:
        """Writes the pooled vector of each text, given as token ids, into the rows of `out`: float32, len(texts) x dim, not normalised."""
        import numpy as np  # noqa: PLC0415  # heavy

        self._fill(texts)
        if self.memory:
            self.lib.llama_memory_clear(self.memory, True)
        begin_log()
        evaluate = self.lib.llama_decode if self.memory else self.lib.llama_encode
        code = evaluate(self.handle, self._batch)
        self._abort.happened(code)
        if code != 0:
            raise EngineError(f"llama.cpp could not embed {len(texts)} texts: {complaint() or f'code {code}'}.", code=code)
        for seq_id in range(len(texts)):
            vector = self.lib.llama_get_embeddings_seq(self.handle, seq_id)
            if not vector:
                raise EngineError("llama.cpp gave no vector for a text.")
            out[seq_id] = np.ctypeslib.as_array(vector, (self.dim,))

    def _fill(self, texts: Sequence[Sequence[int]]) -> None:
        num_tokens = sum(map(len, texts))
        if not (0 < len(texts) <= self.num_sequences and all(texts) and num_tokens <= self.batch_tokens):
            raise EngineError(f"A batch of {num_tokens} tokens of {len(texts)} texts is out of bounds.")
        batch, index = self._batch, 0
        for seq_id, ids in enumerate(texts):
            for position, token in enumerate(ids):
                if not 0 <= token < self.model.num_vocab_tokens:
                    raise EngineError(f"Token id {token} is not in the vocabulary of {self.model.num_vocab_tokens}.")
                batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
                batch.seq_id[index][0], batch.logits[index] = seq_id, True
                index += 1
        batch.n_tokens = index

    def close(self) -> None:
        if self.handle:
            self.lib.llama_batch_free(self._batch)
            self.lib.llama_free(self.handle)
            self.handle = None


MAX_TEXT_TOKENS = 8192
"""A text is evaluated in one piece, and what that takes grows with the square of its length."""
BATCH_TOKENS = 512
"""Texts are put together up to this: an encoder computes every token with every other of a batch, also those of other texts."""
BATCH_TEXTS = 32


class _Memory:
    """A model and its context, apart from the embedder that uses them, so that they can be freed after it."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model
        self.context: EmbeddingContext | None = None

    def free_context(self) -> None:
        if self.context is not None:
            self.context.close()
            self.context = None

    def free(self) -> None:
        self.free_context()
        self.model.close()


class LlamaEmbedder:
    """Implements `localrag.text.tokens.Embedder` with the GGUF file at `path`. One thread at a time evaluates; others wait.

    `close` gives the memory back, and so does dropping the last reference. `home` remembers that the file was tried in a child process, as
    all are that are not `is_trusted`. Where the file is a copy of another embedder, `fingerprint`, `max_tokens` and `input_ids` (a text's
    ids with the special ones, before which nothing is cut) are the original's, so that vectors, limits and counts are the same.
    `fingerprint` is else the file's sha256, and `sha256` spares reading it. ModelFileError for a file that is damaged, foreign or no
    embedder.
    """

    def __init__(
        self,
        path: Path,
        *,
        home: Path | None = None,
        is_trusted: bool = False,
        sha256: str | None = None,
        fingerprint: str | None = None,
        max_tokens: int | None = None,
        input_ids: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.path = path
        self._fingerprint = fingerprint or sha256
        info = gguf.read_header(path)
        if info.is_vocab_only:
            raise ModelFileError(f"{path.name} holds a vocabulary and no weights.", hint="Use the GGUF file of an embedding model.")
        if not is_trusted:
            sandbox.ensure_safe(path, home=home, sha256=sha256, embeds=True)
        self._lock = threading.Lock()
        self._governor = threads.ThreadGovernor()
        self._model = LlamaModel(path)
        self._memory = _Memory(self._model)
        weakref.finalize(self, self._memory.free).atexit = False  # a session or council that ends leaves its embedder to this
        self._given_input_ids = input_ids
        self._num_special = len(self._input_ids(""))
        longest = min(info.n_ctx_train, MAX_TEXT_TOKENS) - self._num_special
        self.max_tokens = longest if max_tokens is None else max_tokens
        if not 0 < self.max_tokens <= longest:
            self.close()
            raise ModelFileError(f"{path.name} takes texts of {longest} tokens, not of {self.max_tokens}.", hint="Use another embedder.")
        self.dim = int(self._model.lib.llama_model_n_embd_out(self._model.handle))

    @cached_property
    def fingerprint(self) -> str:
        """That of the original where this is a copy, else the sha256 of the file."""
        if self._fingerprint is not None:
            return self._fingerprint
        with self.path.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()

    def input_ids(self, text: str) -> list[int]:
        """The ids that are evaluated for a text, special ones among them."""
        with self._lock:
            return self._checked_ids(text)

    def count(self, text: str) -> int:
        return len(self.input_ids(text)) - self._num_special

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 array of shape (len(texts), dim), each row of length 1.

        KnowledgeBaseError for a text over `max_tokens`; UsageError for one that has no tokens at all, not even special ones.
        """
        import numpy as np  # noqa: PLC0415  # heavy

        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        with self._lock:
            ids = [self._checked_ids(text) for text in texts]
            check_length(max(map(len, ids), default=0) - self._num_special, self.max_tokens)
            if not all(ids):  # llama.cpp writes before its buffer for it, and aborts later
                raise UsageError("An empty text has no vector.", hint="Leave empty texts out.")
            # texts of like lengths together: the last, shortest ones fill up batches
            for batch in _batches(sorted(range(len(ids)), key=lambda row: -len(ids[row])), [len(row) for row in ids]):
                found = np.empty((len(batch), self.dim), dtype=np.float32)
                self._ready(sum(len(ids[row]) for row in batch)).embed([ids[row] for row in batch], found)
                vectors[batch] = found
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not (np.isfinite(lengths).all() and (lengths > 0).all()):
            raise EngineError(f"{self.path.name} gives vectors that are none.", hint="The file is damaged: compare its sha256.")
        vectors /= lengths
        return vectors

    def _ready(self, num_tokens: int) -> EmbeddingContext:
        """A context that takes so many tokens. One for short texts is made first, and one for the longest when they come."""
        context = self._memory.context
        if context is not None and num_tokens <= context.batch_tokens:
            context.set_threads(self._governor.measure())
            return context
        self._memory.free_context()  # where no larger one can be made, the next text has another one
        size = BATCH_TOKENS
        while size < num_tokens:
            size *= 2
        num_threads = self._governor.measure()
        context = EmbeddingContext(self._model, batch_tokens=size, num_sequences=BATCH_TEXTS, num_threads=num_threads)
        self._memory.context = context
        return context

    def _checked_ids(self, text: str) -> list[int]:
        if not self._model.handle:
            raise EngineError("The embedder is closed.")
        return self._input_ids(text)

    def _input_ids(self, text: str) -> list[int]:
        return self._own_input_ids(text) if self._given_input_ids is None else self._given_input_ids(text)

    def _own_input_ids(self, text: str) -> list[int]:
        """By the file's own tokenizer; special strings in the text are text."""
        raw = text.encode("utf-8", "replace")  # lone surrogates, as in file names, have no UTF-8
        if len(raw) > MAX_TEXT_BYTES:
            raise UsageError(f"A text of {len(raw)} bytes is too long to tokenise; the limit is {MAX_TEXT_BYTES}.")
        tokenize, vocab = self._model.lib.llama_tokenize, self._model.vocab
        room = abs(int(tokenize(vocab, raw, len(raw), None, 0, True, False)))
        buffer = (self._model.lib.llama_token * room)()
        count = int(tokenize(vocab, raw, len(raw), buffer, room, True, False))
        return buffer[:count]  # type: ignore[no-any-return]  # a slice of a ctypes array is a list of int

    def close(self) -> None:
        """Gives the memory back. What is called afterwards raises EngineError."""
        with self._lock:
            self._memory.free()


def _batches(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """The rows in `order`, put together while they are few and their tokens fit into a batch; a longer text is alone."""
    batches: list[list[int]] = []
    used = 0
    for row in order:
        if batches and used + lengths[row] <= BATCH_TOKENS and len(batches[-1]) < BATCH_TEXTS:
            batches[-1].append(row)
            used += lengths[row]
        else:
            batches.append([row])
            used = lengths[row]
    return batches
