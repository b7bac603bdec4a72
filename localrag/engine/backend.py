"""Protocols of whatever runs a model: llama.cpp or the echo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from localrag.engine.speed import Speed
from localrag.text.thinking import Part
from localrag.text.tokens import ChatTemplate, Tokenizer
from localrag.types import ModelInfo, SamplingParams, Slot

if TYPE_CHECKING:
    from localrag.engine.memory import MemoryPlan

MAX_SEQUENCES = 256
"""llama.cpp's limit. It aborts on a larger sequence id."""

PartOf = Callable[[int], Part]
"""Tells what a token would belong to if it came next, for a model that thinks before it answers."""


@dataclass(frozen=True, slots=True)
class State:
    """The KV cache state after evaluating `token_ids`. Its last breakpoint is the end; a state of a shared context has no breakpoints.

    `checkpoints` are those of a recurrent memory by number of tokens (see Memory). They are not stored on disk.
    """

    token_ids: tuple[int, ...]
    breakpoints: tuple[int, ...]
    data: bytes | bytearray
    checkpoints: Mapping[int, bytes] = field(default_factory=dict)


class Memory(Protocol):
    """The KV cache of a context. Every method checks positions; one that returns False has emptied the sequence.

    A recurrent memory has one state for all tokens of a sequence, so the sequence can only be truncated where a checkpoint was taken. So
    can one that was restored to a memory with sliding windows.
    """

    num_cells: int
    moves_cells: bool
    """True for models with sliding windows: a restored state occupies different cells, so its results may round differently, and holds only
    the window, so it cannot be truncated."""
    is_recurrent: bool
    """True for models with recurrent layers, alone or beside attention."""

    def copy(self, source: int, seq_id: int, num_tokens: int, checkpoint: bytes | None = None, /) -> bool:
        """Copy the first `num_tokens` tokens of `source` to `seq_id`, sharing the same cells.

        Less than the whole of such a sequence needs its `checkpoint` there.
        """
        ...

    def cut(self, seq_id: int, num_tokens: int, checkpoint: bytes | None = None, /) -> bool:
        """Truncate a sequence to its first `num_tokens` tokens. Such a sequence needs its `checkpoint` there."""
        ...

    def checkpoint(self, seq_id: int, /) -> bytes:
        """Return the state of the recurrent layers at the end of a sequence, or the window of those that slide."""
        ...

    def save(self, seq_id: int, /) -> bytes:
        """Return the state of a sequence."""
        ...

    def restore(self, seq_id: int, state: bytes | bytearray, num_tokens: int, /) -> bool:
        """Restore a state returned by `save`."""
        ...


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of the next token: `of` returns that of a token id; `likeliest` are the most probable ids, in order."""

    of: Callable[[int], float]
    likeliest: tuple[int, ...]


class MakeRunner(Protocol):
    """Creates runners."""

    def __call__(self, num_cells: int, num_sequences: int, /, *, repeatable: bool = False) -> Runner:
        """Create a runner. With `repeatable`, results do not depend on the number of threads. Raises EngineError if memory is too small."""
        ...


class Runner(Memory, Protocol):
    """Evaluates tokens: llama.cpp's context, or the echo. Sequence ids count from 0."""

    def check(self, sampling: SamplingParams, /) -> None:
        """Raise UsageError for options that this runner does not support, before they can affect a shared step."""
        ...

    def begin(self, seq_id: int, prompt_ids: list[int], sampling: SamplingParams, /) -> None: ...
    def decode(self, entries: list[tuple[int, int, int, bool]], /) -> bool:
        """Evaluate (token id, position, sequence id, logits wanted); False if `cancel` stopped it."""
        ...

    def sample(self, seq_id: int, index: int, part_of: PartOf | None = None, /) -> int:
        """The next token of a sequence after the `index`-th entry of the last batch.

        With `part_of`, a grammar leaves the thoughts alone.
        """
        ...

    def take_copied(self, seq_id: int, /) -> tuple[int, ...]:
        """Tokens to append after the one just sampled, which closed the tag of a quote; mostly none. Returned once."""
        ...

    def logits(self, index: int, token_ids: tuple[int, ...], /) -> tuple[float, ...]:
        """Logits of these tokens after the `index`-th entry of the last batch. That entry must have requested logits."""
        ...

    def logprobs(self, index: int, num_top: int, /) -> Logprobs:
        """Logprobs after that entry, with the `num_top` most probable tokens. Must be called before the next batch."""
        ...

    def num_tokens(self, seq_id: int, /) -> int: ...
    def end(self, seq_id: int, /) -> None: ...
    def prepare(self) -> None:
        """Called before an answer begins while none is running."""
        ...

    def cancel(self) -> None: ...
    def resume(self) -> None:
        """Discard earlier calls of `cancel`, so that they do not stop the next decode."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """An open model: its tokenizer, template, metadata and contexts."""

    name: str
    info: ModelInfo
    sha256: str | None
    """Hash of the model's file, if the catalogue has one."""
    counts_are_exact: bool
    """Whether the tokenizer's counts equal the number of evaluated tokens."""
    load_s: float
    """Seconds spent loading the model."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template; None if it has none."""
        ...

    @property
    def can_generate(self) -> bool:
        """Whether the model has weights, not only a vocabulary."""
        ...

    @property
    def speed(self) -> Speed: ...
    def save_speed(self) -> None:
        """Store the speed for later runs."""
        ...

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """Memory needed by the model with its latest context; None before one exists, and for the echo."""
        ...

    def make_slot(self, n_ctx: int | None, /) -> Slot: ...
    def make_runner(self, num_cells: int, num_sequences: int, /, *, repeatable: bool = False) -> Runner: ...
    def close(self) -> None: ...
