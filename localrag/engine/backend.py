"""What an engine needs of whatever runs a model: llama.cpp, or the echo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from localrag.engine.speed import Speed
from localrag.text.tokens import ChatTemplate, Tokenizer
from localrag.types import ModelInfo, SamplingParams, Slot

if TYPE_CHECKING:
    from localrag.engine.memory import MemoryPlan


@dataclass(frozen=True, slots=True)
class State:
    """What evaluating `token_ids` left behind. The last of its `breakpoints` is their end; a shared context has none."""

    token_ids: tuple[int, ...]
    breakpoints: tuple[int, ...]
    data: bytes | bytearray


class Memory(Protocol):
    """What sequences hold, checked by positions: a method that says False has left the sequence empty."""

    num_cells: int
    moves_cells: bool
    """Whether a state that is restored lies in other cells than one that was evaluated, so that sums over it round otherwise, and
    whether the end of what a sequence holds cannot always be removed: sliding windows and recurrent states."""

    def copy(self, source: int, seq_id: int, num_tokens: int, /) -> bool:
        """Have `seq_id` hold the first tokens of `source`, in the same cells."""
        ...

    def cut(self, seq_id: int, num_tokens: int, /) -> bool:
        """Drop what a sequence holds from position `num_tokens` on."""
        ...

    def save(self, seq_id: int, /) -> bytes:
        """The state of a sequence."""
        ...

    def restore(self, seq_id: int, state: bytes | bytearray, num_tokens: int, /) -> bool:
        """Have a sequence hold a state that `save` gave."""
        ...


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logarithms of how likely tokens are in one place: `of` each by its id, and the ids of the likeliest, the first before all."""

    of: Callable[[int], float]
    likeliest: tuple[int, ...]


class MakeRunner(Protocol):
    """Makes what evaluates tokens."""

    def __call__(self, num_cells: int, num_sequences: int, /, *, repeatable: bool = False) -> Runner:
        """With `repeatable`, sums do not depend on how many threads add them up. EngineError if memory has no room for it."""
        ...


class Runner(Memory, Protocol):
    """What evaluates tokens: llama.cpp's context, or the echo. Sequence ids count from 0 to the number of sequences."""

    def check(self, sampling: SamplingParams, /) -> None:
        """UsageError for what no answer of this one can keep to, before it gets into a step that others share."""
        ...

    def begin(self, seq_id: int, prompt_ids: list[int], sampling: SamplingParams, /) -> None: ...
    def decode(self, entries: list[tuple[int, int, int, bool]], /) -> bool:
        """Evaluate (token id, position, sequence id, logits wanted); False if `cancel` stopped it."""
        ...

    def sample(self, seq_id: int, index: int, /) -> int: ...
    def logits(self, index: int, token_ids: tuple[int, ...], /) -> tuple[float, ...]:
        """Of these tokens, behind the `index`-th entry of the last batch, which must have asked for logits."""
        ...

    def logprobs(self, index: int, num_top: int, /) -> Logprobs:
        """Of the whole vocabulary, behind that entry; `num_top` of its likeliest tokens. To be read before the next batch."""
        ...

    def num_tokens(self, seq_id: int, /) -> int: ...
    def end(self, seq_id: int, /) -> None: ...
    def prepare(self) -> None:
        """An answer is about to begin, and none is running."""
        ...

    def cancel(self) -> None: ...
    def resume(self) -> None:
        """A `cancel` from before this does not stop the next decode."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """A model that is open: its tokenizer, its template, its facts, and the contexts that evaluate its tokens."""

    name: str
    info: ModelInfo
    sha256: str | None
    """Hash of the model's file, if the catalogue knows it."""
    counts_are_exact: bool
    """Whether the tokenizer counts exactly as many tokens as are evaluated."""
    load_s: float
    """Seconds that loading the model took."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def template(self) -> ChatTemplate | None:
        """None for a model that has no chat template."""
        ...

    @property
    def can_generate(self) -> bool:
        """Whether there are weights, and not just a vocabulary."""
        ...

    @property
    def speed(self) -> Speed: ...
    def save_speed(self) -> None:
        """Keep the speed for later runs."""
        ...

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """Memory that the model takes with the context that was made last; None before there is one, and for the echo."""
        ...

    def make_slot(self, n_ctx: int | None, /) -> Slot: ...
    def make_runner(self, num_cells: int, num_sequences: int, /, *, repeatable: bool = False) -> Runner: ...
    def close(self) -> None: ...
