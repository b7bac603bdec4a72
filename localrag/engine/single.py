"""The cells of a context that runs one sequence at a time, and goes on from where the last one can be gone on from.

Evaluating a prompt from the middle gives the very sums of evaluating it whole only if the batches are the same: how many tokens a
kernel is given decides how it adds. So a prompt has borders at which a batch ends in any case, and only at a border that both have,
with the same borders before it, does a prompt go on from what another one left. The same prompt and seed then give the same text,
whatever was asked before, in this process or in another.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids

from localrag.engine.prefix import common_length
from localrag.engine.runner import Memory, State
from localrag.engine.sequence import Sequence
from localrag.errors import EngineError


def common_border(held: Ids[int], held_borders: Ids[int], prompt_ids: Ids[int], borders: Ids[int], *, last_only: bool = False) -> int:
    """The position up to which a prompt can take over what is held; 0 for nothing.

    With `last_only`, the last border of either alone will do.
    """
    common = common_length(held, prompt_ids[:-1])  # the last token is evaluated in any case: it gives the logits
    found = 0
    for ours, theirs in zip(held_borders, borders, strict=False):
        if ours != theirs or ours > common:
            break
        found = ours
    if last_only and found and (found != held_borders[-1] or found != borders[-1]):
        return 0
    return found


class SingleCells:
    """What the one sequence of a context holds: `token_ids`, and the `borders` at which their batches ended."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._running: Sequence | None = None
        self.token_ids: list[int] = []
        self.borders: tuple[int, ...] = ()

    @property
    def last_only(self) -> bool:
        """Whether only the last border of a prompt can be gone on from: its end cannot be removed again."""
        return self._memory.moves_cells

    def common(self, prompt_ids: Ids[int], borders: Ids[int]) -> int:
        """How many tokens a prompt would take over."""
        return common_border(self.token_ids, self.borders, prompt_ids, borders, last_only=self.last_only)

    def place(self, sequence: Sequence) -> bool:
        """Have a sequence begin behind what it takes over; False while another one runs."""
        if self._running is not None:
            return False
        self._keep(self.common(sequence.prompt_ids, sequence.borders))
        sequence.slot = 0
        sequence.num_evaluated = sequence.num_cached_tokens = len(self.token_ids)
        self._running = sequence
        return True

    def evaluated(self, sequence: Sequence, token_ids: Ids[int]) -> None:
        """These tokens are in the cells now, and counted in `sequence.num_evaluated`."""
        self.token_ids += token_ids
        if sequence.num_evaluated not in sequence.borders:
            return
        self.borders = (*self.borders, sequence.num_evaluated)
        if self._memory.moves_cells and sequence.num_evaluated == sequence.borders[-1]:
            self._settle(sequence.num_evaluated)

    def _settle(self, num_tokens: int) -> None:
        """Who goes on from a state that was kept does so in other cells than who evaluated it: so let the first one do it there too."""
        if not self._memory.restore(0, self._memory.save(0), num_tokens):
            raise EngineError("llama.cpp does not take back a state that it gave.")

    def cut(self, _sequence: Sequence, num_tokens: int) -> None:
        """The running sequence was cut back to so many tokens."""
        del self.token_ids[num_tokens:]
        self.borders = tuple(border for border in self.borders if border <= num_tokens)

    def end(self, sequence: Sequence) -> None:
        """A sequence runs no more; what it holds is kept."""
        if sequence is self._running:
            self._running = None

    def clear(self) -> None:
        """Hold nothing. Nothing may run."""
        self._keep(0)

    def latest(self) -> State | None:
        """What can be gone on from, up to the last border; the rest is dropped. Nothing may run."""
        if self._running is not None or not self.borders:
            return None
        self._keep(self.borders[-1])
        return State(tuple(self.token_ids), self.borders, self._memory.save(0)) if self.token_ids else None

    def restore(self, state: State) -> bool:
        """Hold what `state` gave; False, and nothing is held, if the memory refuses it. Nothing may run."""
        self._keep(0)
        if len(state.token_ids) > self._memory.num_cells or not self._memory.restore(0, state.data, len(state.token_ids)):
            return False
        self.token_ids, self.borders = list(state.token_ids), state.borders
        return True

    def _keep(self, num_tokens: int) -> None:
        """Only the first tokens stay, or nothing where the memory cannot have that."""
        if not self._memory.cut(0, num_tokens):
            num_tokens = 0
        del self.token_ids[num_tokens:]
        self.borders = tuple(border for border in self.borders if border <= num_tokens)
