"""Score pairs of a question and a passage with a cross-encoder in llama.cpp: a GGUF file, or a copy of a sentence-transformers folder.

Many published files are broken, and give scores all the same. So a file is tested whenever it is loaded: of two questions and two passages,
each question must prefer the passage that answers it. A model that looks at the passage alone cannot pass.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from localrag.engine import gguf, sandbox
from localrag.engine.embed import MAX_TEXT_TOKENS, EmbeddingContext, ModelMemory, batches, tokenize
from localrag.engine.llama import LlamaModel
from localrag.engine.query_embedder import CopyPlace, Verdict, maker, sha256_of
from localrag.errors import EngineError, LocalragError, ModelFileError
from localrag.files import locked, make_private_folder
from localrag.settings import Settings

if TYPE_CHECKING:
    import numpy as np

PLAIN = (
    ("How many people live in Berlin?", "Berlin had 3,755,251 registered inhabitants at the end of 2022."),
    ("What do bees make from nectar?", "Bees turn the nectar of flowers into honey and keep it in wax combs."),
)
"""Two questions, each with the passage that answers it and says nothing about the other."""
MIN_GAP = 1e-4
"""Least difference of two scores that is not a rounding error."""
OF_GGUF = "llama.cpp, since the reranker is a GGUF file."
_HEAD = "cls.output.weight"
_TAKE_ANOTHER = "Many published conversions are broken. Use another one, or the folder of the original model."


class LlamaReranker:
    """Implements `localrag.kb.protocols.Reranker` and `TimedScores` with the GGUF file at `path`. One thread at a time evaluates.

    A pair that exceeds `max_tokens` loses the end of its passage, on whole tokens; a question gets half of them at most. `num_cut` counts
    these pairs. `close` frees the memory, and so does dropping the last reference.

    Unless `is_trusted`, the file is first tried in a child process; `home` stores the files that passed. `encode` replaces the file's
    tokenizer, and returns the token ids of a text without special ones. `is_tested` skips the test of the order. ModelFileError if the
    file is damaged, not a cross-encoder, or fails the test.
    """

    def __init__(
        self,
        path: Path,
        *,
        home: Path | None = None,
        is_trusted: bool = False,
        sha256: str | None = None,
        encode: Callable[[str], list[int]] | None = None,
        is_tested: bool = False,
    ) -> None:
        self.path = path
        self.num_cut = 0
        info, tensors = gguf.read_header_and_tensors(path)
        _check_head(path, tensors)
        if not is_trusted:
            sandbox.ensure_safe(path, home=home, sha256=sha256, use="rank")
        self._lock = threading.Lock()
        self._model = LlamaModel(path)
        self._segments = _Segments(path, tensors) if info.tokenizer_model == "bert" and _num_segments(tensors) > 1 else None
        self._memory = ModelMemory(self._model, ranks=True, takes_vectors=self._segments is not None)
        weakref.finalize(self, self._memory.free).atexit = False  # frees the memory of a reranker that nobody closed
        self._encode = encode
        try:
            self._start, self._middle, self._end = _special_ids(self._model)
            self.max_tokens = min(info.n_ctx_train, MAX_TEXT_TOKENS)
            if not is_tested:
                self._test_order()
                self.num_cut = 0
        except LocalragError:
            self.close()
            raise

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Score each text: what the classification head says, higher is better."""
        scores = self.scores_until(query, texts, math.inf)
        assert scores is not None, "it has no deadline"
        return scores

    def scores_until(self, query: str, texts: Sequence[str], ends_at: float) -> list[float] | None:
        """Like `scores`, but None if it cannot finish by `ends_at` (time.perf_counter()). Each batch shows how long the rest takes."""
        import numpy as np  # noqa: PLC0415  # heavy

        scores = np.empty((len(texts), 1), dtype=np.float32)
        with self._lock:
            question = self._ids(query)
            pairs = [self._pair(question, self._ids(text)) for text in texts]
            lengths = [len(ids) for ids, _ in pairs]
            started, num_left = time.perf_counter(), sum(lengths)
            num_tokens = num_left
            for rows in batches(lengths):
                now = time.perf_counter()
                if now + (now - started) * num_left / max(1, num_tokens - num_left) > ends_at:
                    return None
                part = np.empty((len(rows), 1), dtype=np.float32)
                self._evaluate([pairs[row] for row in rows], part)
                scores[rows] = part
                num_left -= sum(lengths[row] for row in rows)
        return [float(score) for score in scores[:, 0]]

    def _pair(self, question: list[int], passage: list[int]) -> tuple[list[int], int]:
        """Return the token ids of a pair, and where those of the passage begin."""
        room = self.max_tokens - len(self._start) - len(self._middle) - len(self._end)
        if len(question) + len(passage) > room:
            self.num_cut += 1
            question = question[: max(room // 2, room - len(passage))]
            passage = passage[: room - len(question)]
        first = [*self._start, *question, *self._middle]
        return [*first, *passage, *self._end], len(first)

    def _evaluate(self, pairs: Sequence[tuple[list[int], int]], out: np.ndarray) -> None:
        context: EmbeddingContext = self._memory.ready(sum(len(ids) for ids, _ in pairs))
        context.embed([ids for ids, _ in pairs], out, vectors=None if self._segments is None else self._segments.vectors(pairs))

    def _ids(self, text: str) -> list[int]:
        if not self._model.handle:
            raise EngineError("The reranker is closed.")
        return tokenize(self._model, text, special=False) if self._encode is None else self._encode(text)

    def _test_order(self) -> None:
        """Raise ModelFileError unless each question of PLAIN prefers its own passage."""
        passages = [passage for _, passage in PLAIN]
        for number, (question, _) in enumerate(PLAIN):
            scores = self.scores(question, passages)
            shown = " and ".join(f"{score:.4g}" for score in scores)
            if not all(map(math.isfinite, scores)):
                fault = f"the scores of two passages are {shown}"
            elif abs(scores[0] - scores[1]) < MIN_GAP:
                fault = f"two passages get the same score, {shown}"
            elif scores[number] < scores[1 - number]:
                fault = f"the passage that answers it gets {scores[number]:.4g}, an unrelated one {scores[1 - number]:.4g}"
            else:
                continue
            raise ModelFileError(
                f'{self.path.name} cannot rerank: for "{question}", {fault}.', hint=_TAKE_ANOTHER, question=question, scores=scores
            )

    def close(self) -> None:
        """Free the memory. Later calls raise EngineError."""
        with self._lock:
            self._memory.free()


def _check_head(path: Path, tensors: Mapping[str, gguf.Tensor]) -> None:
    """Raise ModelFileError unless the file has a classification head with one output. llama.cpp would read other memory as scores."""
    head = tensors.get(_HEAD)
    if head is None:
        raise ModelFileError(
            f"{path.name} is not a reranker: it has no classification head ({_HEAD}).",
            hint="Use the GGUF file of a cross-encoder. A chat model reranks with: --rerank llm",
        )
    if (num_scores := head.sizes[1] if len(head.sizes) > 1 else 1) != 1:
        raise ModelFileError(
            f"{path.name} is not a reranker: it returns {num_scores} numbers per pair instead of one.",
            hint="Use a cross-encoder with one output. A model that answers yes or no reranks with: --model FILE --rerank llm",
            num_scores=num_scores,
        )


def _special_ids(model: LlamaModel) -> tuple[list[int], list[int], list[int]]:
    """Return the token ids before a pair, between question and passage, and after it, as the tokenizer of the model joins two texts."""
    lib, vocab = model.lib, model.vocab
    start, separator, end = (int(get(vocab)) for get in (lib.llama_vocab_bos, lib.llama_vocab_sep, lib.llama_vocab_eos))
    ends = [end] if lib.llama_vocab_get_add_eos(vocab) and end >= 0 else []
    separators = [separator] if lib.llama_vocab_get_add_sep(vocab) and separator >= 0 else []
    if not ends and not separators:
        raise ModelFileError(f"{model.path.name} is not a reranker: its tokenizer does not separate two texts.", hint=_TAKE_ANOTHER)
    return [start] if start >= 0 else [], ends + separators, ends or separators  # BERT: no end, so [SEP] twice; RoBERTa: </s></s>, </s>


def _num_segments(tensors: Mapping[str, gguf.Tensor]) -> int:
    types = tensors.get("token_types.weight")
    return 0 if types is None else types.sizes[1] if len(types.sizes) > 1 else 1


class _Segments:
    """Token vectors that tell a question from a passage.

    BERT adds an embedding to each token that says in which of two texts it stands. llama.cpp always adds that of the first text, which
    ranks the best passage last. So tokens are handed over as vectors, those of the passage with the difference added.
    """

    def __init__(self, path: Path, tensors: Mapping[str, gguf.Tensor]) -> None:
        self._rows = _rows(path, tensors["token_embd.weight"])
        try:
            first, second = _rows(path, tensors["token_types.weight"])([0, 1])
            self._rows([0])
        except (NotImplementedError, ValueError) as error:
            raise ModelFileError(
                f"{path.name} stores its token vectors in a type that cannot be read: {error}", hint=_TAKE_ANOTHER
            ) from error
        self._difference = second - first

    def vectors(self, pairs: Sequence[tuple[Sequence[int], int]]) -> np.ndarray:
        vectors = self._rows([token for ids, _ in pairs for token in ids])
        end = 0
        for ids, passage_at in pairs:
            vectors[end + passage_at : end + len(ids)] += self._difference
            end += len(ids)
        return vectors


def _rows(path: Path, tensor: gguf.Tensor) -> Callable[[Sequence[int]], np.ndarray]:
    """Map a matrix of a file whose header was checked. Returns a function that gives some rows as float32."""
    import numpy as np  # noqa: PLC0415  # heavy

    width, height = tensor.sizes[:2]
    if tensor.type in (0, 1):
        matrix = np.memmap(path, np.float32 if tensor.type == 0 else np.float16, "r", tensor.start, (height, width))
        return lambda rows: matrix[rows].astype(np.float32)
    from gguf import GGMLQuantizationType  # noqa: PLC0415  # heavy
    from gguf.quants import dequantize  # noqa: PLC0415

    block_elements, block_bytes = gguf.TENSOR_TYPES[tensor.type]
    raw = np.memmap(path, np.uint8, "r", tensor.start, (height, width // block_elements * block_bytes))
    return lambda rows: dequantize(raw[rows], GGMLQuantizationType(tensor.type)).astype(np.float32)


class FolderReranker(Protocol):
    """A cross-encoder with its weights, tokenizer and settings in a folder."""

    @property
    def folder(self) -> Path: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text without special ones."""
        ...


def open_copy(original: FolderReranker, settings: Settings) -> LlamaReranker | None:
    """Open the llama.cpp copy of a folder, and make it if it does not exist: a second, once. None if llama.cpp cannot replace the folder.

    No torch is needed: what is converted, llama.cpp computes in the same way, and the copy is tested like any file.
    """
    place = CopyPlace(original.fingerprint, settings)
    verdict = place.settled()
    with suppress(OSError):  # without a home that can be written there is no copy
        verdict = verdict or _made(place, original)
    if verdict is not None and verdict.is_accepted:
        with suppress(LocalragError):
            return _opened(place, original, verdict.sha256)
    return None


def scoring_path(original: FolderReranker, settings: Settings) -> str:
    """Return a sentence that says what scores passages, and why. No heavy imports."""
    place = CopyPlace(original.fingerprint, settings)
    verdict = place.settled()
    if verdict is None:
        return "llama.cpp if its copy passes the test; the first question makes the copy."
    if not verdict.is_accepted:
        return f"sentence-transformers, since llama.cpp cannot replace it: {verdict.reason}."
    return f"llama.cpp, from a copy of the folder: {verdict.reason}."


def _made(place: CopyPlace, original: FolderReranker) -> Verdict:
    """Convert the folder and test the copy, unless another process did meanwhile."""
    make_private_folder(place.gguf.parent)
    with locked(place.lock):
        verdict = place.settled()
        if verdict is None:
            verdict = _judged(place, original)
            if not verdict.is_accepted:
                place.gguf.unlink(missing_ok=True)
            place.keep(verdict)
    return verdict


def _judged(place: CopyPlace, original: FolderReranker) -> Verdict:
    from localrag.engine.convert import convert  # noqa: PLC0415  # needed once

    try:
        convert(original.folder, place.gguf, ranks=True)
        sha256 = sha256_of(place.gguf)
        _opened(place, original, sha256).close()
    except LocalragError as error:
        return Verdict(is_accepted=False, reason=error.message.rstrip("."), maker=maker())
    status = place.gguf.stat()
    return Verdict(
        is_accepted=True,
        reason="it orders plain passages correctly",
        maker=maker(),
        sha256=sha256,
        file_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _opened(place: CopyPlace, original: FolderReranker, sha256: str) -> LlamaReranker:
    """Load the copy. It uses the original's tokenizer, since llama.cpp's differs in some scripts."""
    return LlamaReranker(place.gguf, home=place.home, sha256=sha256, encode=original.encode)
