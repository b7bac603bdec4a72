"""What the engine needs of whatever evaluates tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from localrag.types import SamplingParams


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
