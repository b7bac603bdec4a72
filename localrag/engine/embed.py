"""Embed texts with llama.cpp. All sizes and token ids are checked before they reach C."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.engine import gguf, sandbox, threads
from localrag.engine.backend import MAX_SEQUENCES
from localrag.engine.llama import Abort, LlamaModel
from localrag.engine.llama_lib import begin_log, complaint
from localrag.errors import EngineError, ModelFileError, UsageError
from localrag.settings import MAX_TEXT_BYTES
from localrag.text.tokens import check_length

if TYPE_CHECKING:
    import numpy as np


POOLINGS = {1: "mean", 2: "cls", 3: "last"}
"""Pooling methods that produce vectors, by llama.cpp's numbers."""
RANK = 4
"""The pooling method that applies a classification head: a text gets scores instead of a vector."""


class EmbeddingContext:
    """A llama.cpp context that embeds up to `num_sequences` texts with `batch_tokens` tokens in total per call.

    With `ranks` it scores them instead, by the classification head; check first that the file has one. With `takes_vectors`, tokens are
    handed over as vectors. Texts do not affect later calls. ModelFileError if the file defines no pooling; EngineError if memory does not
    suffice.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        batch_tokens: int,
        num_sequences: int,
        num_threads: int,
        ranks: bool = False,
        takes_vectors: bool = False,
    ) -> None:
        # llama.cpp asserts that a batch divides evenly among its texts
        divides = 1 <= num_sequences <= MAX_SEQUENCES and batch_tokens % num_sequences == 0
        if not (divides and 1 <= batch_tokens <= 65_536 and num_threads >= 1):
            raise EngineError(f"A batch of {batch_tokens} tokens for {num_sequences} texts is out of bounds.")
        self.lib = lib = model.lib
        self.model = model
        self.batch_tokens = batch_tokens
        self.num_sequences = num_sequences
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = batch_tokens  # pooling needs the whole text in one ubatch
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = num_threads
        params.embeddings = True
        if ranks:
            params.pooling_type = RANK  # few files name it
        params.kv_unified = True  # else each text gets an equal share of the cells
        params.no_perf = True
        begin_log()
        for flash_attention in (lib.LLAMA_FLASH_ATTN_TYPE_ENABLED, lib.LLAMA_FLASH_ATTN_TYPE_DISABLED):  # twice as fast where supported
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
        if not ranks and lib.llama_pooling_type(self.handle) not in POOLINGS:
            lib.llama_free(self.handle)
            self.handle = None
            raise ModelFileError(
                f"{model.path.name} is not an embedder: it defines no pooling.",
                hint="Use the GGUF file of an embedding model.",
            )
        self.memory = lib.llama_get_memory(self.handle)  # NULL for an encoder
        self.dim = int(lib.llama_model_n_cls_out(model.handle) if ranks else lib.llama_model_n_embd_out(model.handle))
        self._input_dim = int(lib.llama_model_n_embd_inp(model.handle)) if takes_vectors else 0
        self._batch = lib.llama_batch_init(batch_tokens, self._input_dim, 1)
        self._abort = Abort(lib, self.handle)

    def set_threads(self, num_threads: int) -> None:
        self.lib.llama_set_n_threads(self.handle, max(1, num_threads), max(1, num_threads))

    def embed(self, texts: Sequence[Sequence[int]], out: np.ndarray, *, vectors: np.ndarray | None = None) -> None:
        """Write the pooled vector or the scores of each text (token ids) to a row of `out`: float32, len(texts) x dim, not normalized.

        If the context takes vectors, `vectors` has those of all tokens in order: float32, tokens x width of the model.
        """
        import numpy as np  # noqa: PLC0415  # heavy

        num_tokens = self._fill(texts)
        if (self._input_dim > 0) != (vectors is not None):
            raise EngineError("A context takes either token ids or vectors.")
        if vectors is not None:
            if vectors.shape != (num_tokens, self._input_dim):
                raise EngineError(f"{num_tokens} tokens need as many vectors of {self._input_dim} numbers.")
            np.ctypeslib.as_array(self._batch.embd, vectors.shape)[:] = vectors
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

    def _fill(self, texts: Sequence[Sequence[int]]) -> int:
        """Check the texts and write them to the batch. Return their number of tokens."""
        num_tokens = sum(map(len, texts))
        if not (0 < len(texts) <= self.num_sequences and all(texts) and num_tokens <= self.batch_tokens):
            raise EngineError(f"A batch of {num_tokens} tokens for {len(texts)} texts is out of bounds.")
        batch, index = self._batch, 0
        for seq_id, ids in enumerate(texts):
            for position, token in enumerate(ids):
                if not 0 <= token < self.model.num_vocab_tokens:
                    raise EngineError(f"Token id {token} is not in the vocabulary of {self.model.num_vocab_tokens}.")
                if not self._input_dim:
                    batch.token[index] = token
                batch.pos[index], batch.n_seq_id[index] = position, 1
                batch.seq_id[index][0], batch.logits[index] = seq_id, True
                index += 1
        batch.n_tokens = index
        return index

    def close(self) -> None:
        if self.handle:
            self.lib.llama_batch_free(self._batch)
            self.lib.llama_free(self.handle)
            self.handle = None


MAX_TEXT_TOKENS = 8192
"""Longest text. A text is evaluated in one piece, at a cost that grows with the square of its length."""
BATCH_TOKENS = 512
"""Tokens per batch. An encoder attends from each token to all tokens of the batch, including those of other texts."""
BATCH_TEXTS = 32


class ModelMemory:
    """A model and its context. Separate from the embedder so that a finalizer can free them."""

    def __init__(self, model: LlamaModel, *, ranks: bool = False, takes_vectors: bool = False) -> None:
        self.model = model
        self.context: EmbeddingContext | None = None
        self._ranks = ranks
        self._takes_vectors = takes_vectors
        self._governor = threads.ThreadGovernor()

    def ready(self, num_tokens: int) -> EmbeddingContext:
        """Return a context for `num_tokens` tokens. It starts at BATCH_TOKENS and is replaced by a larger one for longer texts."""
        if self.context is not None and num_tokens <= self.context.batch_tokens:
            self.context.set_threads(self._governor.measure())
            return self.context
        self.free_context()  # if the larger context fails, the next text creates a new one
        size = BATCH_TOKENS
        while size < num_tokens:
            size *= 2
        self.context = EmbeddingContext(
            self.model,
            batch_tokens=size,
            num_sequences=BATCH_TEXTS,
            num_threads=self._governor.measure(),
            ranks=self._ranks,
            takes_vectors=self._takes_vectors,
        )
        return self.context

    def free_context(self) -> None:
        if self.context is not None:
            self.context.close()
            self.context = None

    def free(self) -> None:
        self.free_context()
        self.model.close()


class LlamaEmbedder:
    """Implements `localrag.text.tokens.Embedder` with the GGUF file at `path`. One thread at a time evaluates; others wait.

    `close` frees the memory, and so does dropping the last reference. Unless `is_trusted`, the file is first tried in a child process;
    `home` stores the files that passed. If the file is a converted copy, pass the original's `fingerprint`, `max_tokens` and `input_ids`
    (which returns all ids of a text, special ones included), so that vectors, limits and counts agree. `fingerprint` defaults to the
    file's sha256; pass `sha256` if it is known, to avoid reading the file. ModelFileError if the file is damaged or not an embedder.
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
            sandbox.ensure_safe(path, home=home, sha256=sha256, use="embed")
        self._lock = threading.Lock()
        self._model = LlamaModel(path)
        self._memory = ModelMemory(self._model)
        weakref.finalize(self, self._memory.free).atexit = False  # frees the memory of an embedder that nobody closed
        self._given_input_ids = input_ids
        self._num_special = len(self._input_ids(""))
        longest = min(info.n_ctx_train, MAX_TEXT_TOKENS) - self._num_special
        self.max_tokens = longest if max_tokens is None else max_tokens
        if not 0 < self.max_tokens <= longest:
            self.close()
            raise ModelFileError(f"{path.name} accepts {longest} tokens per text, not {self.max_tokens}.", hint="Use another embedder.")
        self.dim = int(self._model.lib.llama_model_n_embd_out(self._model.handle))

    @cached_property
    def fingerprint(self) -> str:
        """The original's fingerprint for a converted copy, else the sha256 of the file."""
        if self._fingerprint is not None:
            return self._fingerprint
        with self.path.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()

    def input_ids(self, text: str) -> list[int]:
        """Return the token ids that are evaluated for a text, special ones included."""
        with self._lock:
            return self._checked_ids(text)

    def count(self, text: str) -> int:
        return len(self.input_ids(text)) - self._num_special

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return a float32 array of shape (len(texts), dim) whose rows have unit length.

        KnowledgeBaseError for a text over `max_tokens`; UsageError for a text without tokens, not even special ones.
        """
        import numpy as np  # noqa: PLC0415  # heavy

        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        with self._lock:
            ids = [self._checked_ids(text) for text in texts]
            check_length(max(map(len, ids), default=0) - self._num_special, self.max_tokens)
            if not all(ids):  # for an empty text llama.cpp writes before its buffer and aborts later
                raise UsageError("An empty text has no vector.", hint="Leave empty texts out.")
            for batch in batches([len(row) for row in ids]):
                part = np.empty((len(batch), self.dim), dtype=np.float32)
                self._memory.ready(sum(len(ids[row]) for row in batch)).embed([ids[row] for row in batch], part)
                vectors[batch] = part
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not (np.isfinite(lengths).all() and (lengths > 0).all()):
            raise EngineError(f"{self.path.name} gives zero or NaN vectors.", hint="The file is damaged: compare its sha256.")
        vectors /= lengths
        return vectors

    def _checked_ids(self, text: str) -> list[int]:
        if not self._model.handle:
            raise EngineError("The embedder is closed.")
        return self._input_ids(text)

    def _input_ids(self, text: str) -> list[int]:
        return tokenize(self._model, text, special=True) if self._given_input_ids is None else self._given_input_ids(text)

    def close(self) -> None:
        """Free the memory. Later calls raise EngineError."""
        with self._lock:
            self._memory.free()


def tokenize(model: LlamaModel, text: str, *, special: bool) -> list[int]:
    """Tokenize with the file's own tokenizer. `special` adds the tokens that begin and end a text. Such strings in the text stay text."""
    raw = text.encode("utf-8", "replace")  # lone surrogates, as in file names, have no UTF-8
    if len(raw) > MAX_TEXT_BYTES:
        raise UsageError(f"A text of {len(raw)} bytes is too long to tokenize; the limit is {MAX_TEXT_BYTES}.")
    room = abs(int(model.lib.llama_tokenize(model.vocab, raw, len(raw), None, 0, special, False)))
    buffer = (model.lib.llama_token * room)()
    count = int(model.lib.llama_tokenize(model.vocab, raw, len(raw), buffer, room, special, False))
    return buffer[:count]  # type: ignore[no-any-return]  # a slice of a ctypes array is a list of int


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Group texts of these lengths, by their indices, into batches of at most BATCH_TEXTS texts and BATCH_TOKENS tokens.

    The longest come first, so that a batch holds texts of similar length. A longer text gets its own batch.
    """
    groups: list[list[int]] = []
    used = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if groups and used + lengths[row] <= BATCH_TOKENS and len(groups[-1]) < BATCH_TEXTS:
            groups[-1].append(row)
            used += lengths[row]
        else:
            groups.append([row])
            used = lengths[row]
    return groups
