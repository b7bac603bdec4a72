"""The door to llama.cpp for a model that turns texts into vectors: a context that pools. Every number is checked before it goes into C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from localrag.engine.llama import MAX_SEQUENCES, Abort, LlamaModel
from localrag.engine.llama_lib import begin_log, complaint
from localrag.errors import EngineError, ModelFileError

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
