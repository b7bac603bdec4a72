"""Measure the speed of a model file and its quality relative to a reference file, on a shipped text (data/reading.txt).

All files evaluate the same tokens, so only the file differs. Quality compares next-token distributions: mean Kullback-Leibler divergence
from the reference, top-1 agreement, and perplexity.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from localrag.engine.llama import LlamaContext, LlamaModel, LlamaTokenizer
from localrag.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.float32]
    """One row per token, one column per vocabulary entry."""

TEXT_FILE = Path(__file__).with_name("data") / "reading.txt"
WINDOW_TOKENS = 512
SKIPPED_SHARE = 4  # the first 1/4 of a window is evaluated but not scored: with little context, every file guesses
MAX_SCORED_TOKENS = 766  # two windows
MAX_REFERENCE_BYTES = 512 << 20
OUTPUT_TOKENS = 128  # tokens per batch when all logits are requested; llama.cpp's buffer holds this many rows of the vocabulary
BATCH_TOKENS = 512
PROMPT_TOKENS, ANSWER_TOKENS = 256, 48
"""Tokens that one `Evaluation.time` evaluates: PROMPT_TOKENS in one batch, then ANSWER_TOKENS one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Quality over `num_tokens` positions. `mean_kl` and `p99_kl` (99th percentile) are in nats; `top1_agreement` is from 0 to 1."""

    num_tokens: int
    perplexity: float
    mean_kl: float
    p99_kl: float
    top1_agreement: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens to evaluate in an empty context. Predictions after the first `num_skipped` tokens are not scored."""

    ids: list[int]
    num_skipped: int

    @property
    def num_scored(self) -> int:
        return len(self.ids) - 1 - self.num_skipped


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds for a prompt in one batch, and for the answer's tokens, decoded one at a time. A small window reduces both counts."""

    prompt_tokens: int
    prompt_s: float
    answer_tokens: int
    answer_s: float


class Evaluation:
    """A model and a context that returns the logits of every token of a window.

    Validate and try the file first (gguf.py, sandbox.py). `num_cells` is the context length in tokens, at most the model's own.
    """

    def __init__(self, path: Path, *, num_cells: int, num_threads: int, flash_attention: bool) -> None:
        self._model = LlamaModel(path)
        self.num_cells = num_cells
        self.vocab_size = self._model.num_vocab_tokens
        try:
            self._context = LlamaContext(
                self._model,
                num_cells=num_cells,
                num_outputs=OUTPUT_TOKENS,
                batch_tokens=BATCH_TOKENS,
                num_threads=num_threads,
                flash_attention=flash_attention,
            )
        except BaseException:
            self._model.close()
            raise

    @property
    def num_weights(self) -> int:
        return int(self._model.lib.llama_model_n_params(self._model.handle))

    def windows(self, text: str) -> list[Window]:
        """Cut a text into windows of tokens, up to the number to score. Each begins with the BOS token if the model adds one."""
        tokenizer = LlamaTokenizer(self._model)
        start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
        most = min(MAX_SCORED_TOKENS, MAX_REFERENCE_BYTES // (4 * self.vocab_size))
        return cut(tokenizer.encode(text), min(WINDOW_TOKENS, self.num_cells), start=start, most=most)

    def log_probabilities(self, ids: Sequence[int]) -> Iterator[tuple[int, Rows]]:
        """Evaluate `ids` in batches. Yield for each its start position and the next-token log-probabilities (nats), a row per token."""
        import numpy as np  # noqa: PLC0415  # heavy

        self._clear()
        for start in range(0, len(ids), OUTPUT_TOKENS):
            piece = ids[start : start + OUTPUT_TOKENS]
            logits = self._decode(piece, start, outputs=True)
            yield start, log_softmax(np.ctypeslib.as_array(logits, shape=(len(piece), self.vocab_size)))

    def time(self, ids: Sequence[int]) -> Run:
        """Time one run on the first tokens of `ids`. Nothing is sampled, so that every file does the same work."""
        most = min(len(ids), self.num_cells)
        answer_tokens = min(ANSWER_TOKENS, most // 4)
        prompt_tokens = min(PROMPT_TOKENS, most - answer_tokens)
        self._clear()
        started = time.perf_counter()
        self._decode(ids[:prompt_tokens], 0, outputs=False)
        prompt_end = time.perf_counter()
        for position in range(prompt_tokens, prompt_tokens + answer_tokens):
            self._decode(ids[position : position + 1], position, outputs=False)
        return Run(prompt_tokens, prompt_end - started, answer_tokens, time.perf_counter() - prompt_end)

    def warm_up(self, ids: Sequence[int]) -> None:
        """Evaluate a few tokens to load all weights, since an mmapped file is read on first use."""
        self._clear()
        self._decode(ids[:32], 0, outputs=False)

    def _clear(self) -> None:
        self._context.cut(0, 0)

    def _decode(self, ids: Sequence[int], start: int, *, outputs: bool) -> Any:  # noqa: ANN401  # a pointer of C
        """Evaluate tokens from position `start` on. Wait for the logits of all tokens, or of the last one, and return a pointer to them."""
        last = len(ids) - 1
        self._context.decode([(token, start + index, 0, outputs or index == last) for index, token in enumerate(ids)])
        return self._context.all_logits()

    def close(self) -> None:
        self._context.close()
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shipped_text() -> str:
    """Return the shipped text: about 1,400 words of English prose with a table, code and JSON."""
    return TEXT_FILE.read_text(encoding="utf-8")


def cut(ids: Sequence[int], window_tokens: int, *, start: Sequence[int], most: int) -> list[Window]:
    """Cut `ids` into windows of at most `window_tokens` that begin with `start`, until `most` tokens are scored in total.

    The last window can be shorter. A window without scored tokens is omitted.
    """
    windows: list[Window] = []
    room = window_tokens - len(start)
    for first in range(0, len(ids), room):
        window = [*start, *ids[first : first + room]]
        num_skipped = len(window) // SKIPPED_SHARE
        num_scored = min(len(window) - 1 - num_skipped, most)
        if num_scored < 1:
            break
        windows.append(Window(window[: num_skipped + num_scored + 1], num_skipped))
        most -= num_scored
    return windows


def log_softmax(logits: Rows) -> Rows:
    """Return the log-probabilities of rows of logits as a new array."""
    import numpy as np  # noqa: PLC0415  # heavy

    rows: Rows = logits - logits.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return rows


def score(evaluation: Evaluation, windows: Sequence[Window], reference: IO[bytes], *, is_reference: bool = False) -> Quality:
    """Score a model against the log-probabilities in the file `reference`. With `is_reference`, write that file instead.

    A reference model is scored against itself. EngineError if the model produces NaN.
    """
    import numpy as np  # noqa: PLC0415  # heavy

    totals = _Totals()
    reference.seek(0)
    for window in windows:
        for start, rows in evaluation.log_probabilities(window.ids):
            scored = rows[max(0, window.num_skipped - start) : len(window.ids) - 1 - start]
            if not len(scored):
                continue
            if not np.isfinite(scored).all():
                raise EngineError(
                    "The model's logits are not numbers.", hint="Its weights are damaged: compare its sha256 with the publisher's."
                )
            if is_reference:
                reference.write(scored.tobytes())
                before = scored
            else:
                before = np.frombuffer(reference.read(scored.nbytes), np.float32).reshape(scored.shape)
            following = max(start, window.num_skipped) + 1
            totals.add(before, scored, window.ids[following : following + len(scored)])
    return totals.quality()


class _Totals:
    """Collects the comparison of two models, one value per position."""

    def __init__(self) -> None:
        self._kl: list[Any] = []
        self._same: list[Any] = []
        self._surprise: list[Any] = []

    def add(self, before: Rows, after: Rows, next_ids: Sequence[int]) -> None:
        import numpy as np  # noqa: PLC0415  # heavy

        self._kl.append(np.maximum(0.0, (np.exp(before) * (before - after)).sum(axis=-1)))
        self._same.append(before.argmax(axis=-1) == after.argmax(axis=-1))
        self._surprise.append(-after[np.arange(len(after)), np.asarray(next_ids)])

    def quality(self) -> Quality:
        import numpy as np  # noqa: PLC0415  # heavy

        if not self._kl:
            raise EngineError("The text is too short to score this model.")
        kl, same, surprise = (np.concatenate(parts).astype(np.float64) for parts in (self._kl, self._same, self._surprise))
        return Quality(
            num_tokens=len(kl),
            perplexity=float(np.exp(surprise.mean())),
            mean_kl=float(kl.mean()),
            p99_kl=float(np.quantile(kl, 0.99)),
            top1_agreement=float(same.mean()),
        )
