"""An embedder that runs in llama.cpp, from a .gguf file: import and load take a fifth of a second, and no torch."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.engine import gguf, threads, trial
from localrag.engine.embed_context import EmbeddingContext
from localrag.engine.llama import LlamaModel
from localrag.errors import EngineError, ModelFileError, UsageError
from localrag.settings import MAX_TEXT_BYTES
from localrag.tokens import check_length

if TYPE_CHECKING:
    import numpy as np

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
    """Implements `localrag.tokens.Embedder` with the GGUF file at `path`. One thread at a time evaluates; others wait.

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
            trial.ensure_safe(path, home=home, sha256=sha256, embeds=True)
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
