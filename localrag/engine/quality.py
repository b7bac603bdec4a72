"""How close a model file is to another one, and how fast it is: both on a text that ships (data/reading.txt).

Every file evaluates the very same tokens, so what differs is the file. Closeness is told by the distributions of the next token:
the mean Kullback-Leibler divergence from the other file's, how often both hold the same token for the likeliest, and perplexity.
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
    """One row a token, one column an entry of the vocabulary."""

TEXT_FILE = Path(__file__).with_name("data") / "reading.txt"
WINDOW_TOKENS = 512
SKIPPED_SHARE = 4  # of a window, the first part in so many is read and not scored: with little before it, every file guesses
MAX_SCORED_TOKENS = 766  # two windows
MAX_REFERENCE_BYTES = 512 << 20
OUTPUT_TOKENS = 128  # evaluated at once with the logits of each; their buffer is so many times the vocabulary
BATCH_TOKENS = 512
PROMPT_TOKENS, ANSWER_TOKENS = 256, 48
"""What one run of `Evaluation.time` evaluates in one batch, and then one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Over `num_tokens` positions. `mean_kl` and `p99_kl` (of the worst hundredth) are in nats; `top1_agreement` is a share, 0 to 1."""

    num_tokens: int
    perplexity: float
    mean_kl: float
    p99_kl: float
    top1_agreement: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are evaluated from an empty context. What is said behind each of the first `num_skipped` is not scored."""

    ids: list[int]
    num_skipped: int

    @property
    def num_scored(self) -> int:
        return len(self.ids) - 1 - self.num_skipped


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds for PROMPT_TOKENS in one batch, and for ANSWER_TOKENS one by one behind them (fewer of both in a small window)."""

    prompt_tokens: int
    prompt_s: float
    answer_tokens: int
    answer_s: float


class Evaluation:
    """A loaded model with a context of its own, which gives the logits of every token of a window.

    Load only what was validated (gguf.py) and tried (trial.py). `num_cells` is a context length in tokens that the model has.
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
        """The text in windows of tokens, as many as are scored; each begins with the token that begins a text, if the model wants one."""
        tokenizer = LlamaTokenizer(self._model)
        start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
        most = min(MAX_SCORED_TOKENS, MAX_REFERENCE_BYTES // (4 * self.vocab_size))
        return cut(tokenizer.encode(text), min(WINDOW_TOKENS, self.num_cells), start=start, most=most)

    def log_probabilities(self, ids: Sequence[int]) -> Iterator[tuple[int, Rows]]:
        """The position of a first token, and a row of log-probabilities (nats) of what follows it and each one after it, piece by piece."""
        import numpy as np  # noqa: PLC0415  # weight

        self._clear()
        for start in range(0, len(ids), OUTPUT_TOKENS):
            piece = ids[start : start + OUTPUT_TOKENS]
            logits = self._decode(piece, start, outputs=True)
            yield start, log_softmax(np.ctypeslib.as_array(logits, shape=(len(piece), self.vocab_size)))

    def time(self, ids: Sequence[int]) -> Run:
        """One run on the first tokens of `ids`. What is decoded one by one is given, not sampled: every file does the same work."""
        most = min(len(ids), self.num_cells)
        answer_tokens = min(ANSWER_TOKENS, most // 4)
        prompt_tokens = min(PROMPT_TOKENS, most - answer_tokens)
        self._clear()
        started = time.perf_counter()
        self._decode(ids[:prompt_tokens], 0, outputs=False)
        read = time.perf_counter()
        for position in range(prompt_tokens, prompt_tokens + answer_tokens):
            self._decode(ids[position : position + 1], position, outputs=False)
        return Run(prompt_tokens, read - started, answer_tokens, time.perf_counter() - read)

    def warm_up(self, ids: Sequence[int]) -> None:
        """Have every weight in memory: a file that was just opened is read on first use."""
        self._clear()
        self._decode(ids[:32], 0, outputs=False)

    def _clear(self) -> None:
        self._context.cut(0, 0)

    def _decode(self, ids: Sequence[int], start: int, *, outputs: bool) -> Any:  # noqa: ANN401  # a pointer of C
        """Evaluate tokens from position `start` on; their logits, of all or of the last alone, once they are there."""
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
    """About 1,400 words of English prose with a table, code and JSON in it."""
    return TEXT_FILE.read_text(encoding="utf-8")


def cut(ids: Sequence[int], window_tokens: int, *, start: Sequence[int], most: int) -> list[Window]:
    """Windows of at most `window_tokens`, `start` at the head of each, so many that at most `most` tokens are scored in all.

    A window of which nothing would be scored is left out. The last one can be shorter.
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
    """Log-probabilities of rows of logits, as a new array."""
    import numpy as np  # noqa: PLC0415  # weight

    rows: Rows = logits - logits.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return rows


def score(evaluation: Evaluation, windows: Sequence[Window], reference: IO[bytes], *, is_reference: bool = False) -> Quality:
    """Compare with the rows in the file `reference`, which is read from its start; or else write it, and be compared with nothing.

    EngineError for a model whose answers are not numbers.
    """
    import numpy as np  # noqa: PLC0415  # weight

    told = _Told()
    reference.seek(0)
    for window in windows:
        for start, rows in evaluation.log_probabilities(window.ids):
            kept = rows[max(0, window.num_skipped - start) : len(window.ids) - 1 - start]
            if not len(kept):
                continue
            if not np.isfinite(kept).all():
                raise EngineError(
                    "The model's answers are not numbers.", hint="Its weights are damaged: compare its sha256 with the publisher's."
                )
            if is_reference:
                reference.write(kept.tobytes())
                before = kept
            else:
                before = np.frombuffer(reference.read(kept.nbytes), np.float32).reshape(kept.shape)
            following = max(start, window.num_skipped) + 1
            told.add(before, kept, window.ids[following : following + len(kept)])
    return told.quality()


class _Told:
    """Position by position, what two models said."""

    def __init__(self) -> None:
        self._kl: list[Any] = []
        self._same: list[Any] = []
        self._surprise: list[Any] = []

    def add(self, before: Rows, after: Rows, next_ids: Sequence[int]) -> None:
        import numpy as np  # noqa: PLC0415  # weight

        self._kl.append(np.maximum(0.0, (np.exp(before) * (before - after)).sum(axis=-1)))
        self._same.append(before.argmax(axis=-1) == after.argmax(axis=-1))
        self._surprise.append(-after[np.arange(len(after)), np.asarray(next_ids)])

    def quality(self) -> Quality:
        import numpy as np  # noqa: PLC0415  # weight

        if not self._kl:
            raise EngineError("The text is too short for a window of this model.")
        kl, same, surprise = (np.concatenate(parts).astype(np.float64) for parts in (self._kl, self._same, self._surprise))
        return Quality(
            num_tokens=len(kl),
            perplexity=float(np.exp(surprise.mean())),
            mean_kl=float(kl.mean()),
            p99_kl=float(np.quantile(kl, 0.99)),
            top1_agreement=float(same.mean()),
        )
