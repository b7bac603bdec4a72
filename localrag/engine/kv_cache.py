"""What sequences held that do not run, outside of the context, where it slows nobody."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from contextlib import suppress
from dataclasses import dataclass

from localrag.engine.backend import Memory, State
from localrag.engine.radix_tree import RadixTree, common_length
from localrag.engine.sequence import Sequence
from localrag.errors import EngineError

LEAST_BYTES = 256 << 20
"""What the shelf may take in any case, if that is no more than its share of the free memory."""
SHARE_OF_FREE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Shelved:
    """The state that evaluating `token_ids` left behind."""

    token_ids: list[int]
    data: bytes


class HostSwap:
    """States in memory, at most `max_bytes` of them together, the one that was used longest ago out first."""

    def __init__(self, max_bytes: int = LEAST_BYTES) -> None:
        self.max_bytes = max_bytes
        self._states: list[Shelved] = []

    def fit(self, context_bytes: int, free_bytes: int) -> bool:
        """Have room for as much as a context's cells, or LEAST_BYTES, within a share of the memory that is free.

        False where that is less than the cells: what is moved here from them could be lost sooner than there.
        """
        self.max_bytes = min(max(LEAST_BYTES, context_bytes), (free_bytes + self.num_bytes) // SHARE_OF_FREE)
        return self.max_bytes >= context_bytes

    @property
    def num_bytes(self) -> int:
        return sum(len(each.data) for each in self._states)

    def put(self, token_ids: list[int], data: bytes) -> None:
        """Keep a state; those that it begins with are in it. One that is too large for the shelf is not kept."""
        if len(data) > self.max_bytes:
            return
        self._states = [each for each in self._states if token_ids[: len(each.token_ids)] != each.token_ids]
        self._states.append(Shelved(token_ids, data))
        while self.num_bytes > self.max_bytes:
            self._states.pop(0)

    def longest(self, token_ids: Ids[int]) -> tuple[Shelved, int] | None:
        """The state with the longest beginning in common with a prompt, the smallest of equals, and that length; None without any."""
        ids = list(token_ids)
        found = [(common_length(each.token_ids, ids), each) for each in self._states]
        length, best = max(found, key=lambda pair: (pair[0], -len(pair[1].token_ids)), default=(0, None))
        return (best, length) if best is not None and length else None

    def use(self, state: Shelved, num_tokens: int) -> None:
        """A sequence went on from the first tokens of a state: with all of them it holds what the shelf need not."""
        self._states = [each for each in self._states if each is not state]
        if num_tokens < len(state.token_ids):
            self._states.append(state)

    def clear(self) -> None:
        self._states = []


MIN_SHARED_TOKENS = 16
"""A shorter beginning is evaluated again: that is as fast as bookkeeping."""
MIN_SHELVED_TOKENS = 64
"""Fewer are evaluated as fast as a state is saved and restored."""


class SharedCells:
    """Places sequences in the cells of a context.

    A prompt takes over the longest beginning that some sequence holds or held. What finished sequences hold stays in the cells until
    they or its sequence id are needed, the one that was used longest ago first, or until it is more than `most_kept` while others run:
    every token that is evaluated is weighed against all cells up to the last one in use, whoever holds them. Then it goes on the shelf,
    from which it comes back in a fraction of the time that it took to evaluate. A sequence is let in only when every cell it can come
    to need is free, so a running one never runs out. Sums are added in an order that depends on what else is there: near ties can fall
    otherwise than in a sequence alone (see ExclusiveCells).
    """

    def __init__(
        self, memory: Memory, *, num_sequences: int, shelf: HostSwap | None = None, most_kept: Callable[[], float] = lambda: math.inf
    ) -> None:
        self._memory = memory
        self._shelf = HostSwap() if shelf is None else shelf
        self._most_kept = most_kept
        self._ids = range(num_sequences)
        self._running: dict[int, Sequence] = {}
        self._holders: dict[int, Sequence] = {}
        self.cache = RadixTree()

    @property
    def kept(self) -> list[int]:
        """Ids of what is held and not running."""
        return [seq_id for seq_id in self._ids if seq_id in self.cache and seq_id not in self._running]

    @property
    def num_free(self) -> int:
        """Cells that are neither held nor promised to a running sequence."""
        promised = sum(sequence.num_reserved - sequence.num_evaluated for sequence in self._running.values())
        return self._memory.num_cells - self.cache.num_cells - promised

    def place(self, sequence: Sequence) -> bool:
        """Give a sequence an id and the longest beginning that is held; False if it has to wait."""
        source, shared = self._source(sequence)
        if self._may_share_more(sequence, shared):
            return False
        if self._take_down(sequence, shared):
            source, shared = self._source(sequence)
        self._shelve(source)
        while True:
            seq_id = self._free_id()
            needed = sequence.num_reserved - shared
            if seq_id is not None and self.num_free >= needed:
                if self._begin(sequence, source, shared, seq_id):
                    return True
                source, shared = None, 0  # the memory of this architecture cannot share that
                continue
            others = [each for each in self.kept if each != source]
            if others and (seq_id is None or self._could_fit(needed, source)):
                self._put_away(self.cache.oldest(others) or others[0])
            elif source is not None and source not in self._running:
                if self.num_free + self.cache.num_own_cells(source, shared) < needed and self._running:
                    return False
                if self._begin(sequence, source, shared, source):
                    return True
                source, shared = None, 0
            else:
                return False

    def _source(self, sequence: Sequence) -> tuple[int | None, int]:
        found = self.cache.longest(sequence.prompt_ids[:-1])  # the last token is evaluated in any case: it gives the logits
        return found if found is not None and found[1] >= MIN_SHARED_TOKENS else (None, 0)

    def _take_down(self, sequence: Sequence, shared: int) -> bool:
        """Have a sequence hold what is on the shelf, if a prompt shares much more with it than with what is held."""
        found = self._shelf.longest(sequence.prompt_ids[:-1])
        if found is None or found[1] < shared + MIN_SHELVED_TOKENS:
            return False
        state, length = found
        if self.num_free + sum(self.cache.num_own_cells(seq_id) for seq_id in self.kept) < len(state.token_ids):
            return False
        if not self.restore(State(tuple(state.token_ids), (), state.data)):
            return False
        self._shelf.use(state, length)
        return True

    def _shelve(self, source: int | None) -> None:
        """Move what is held for later out of the context, the oldest first, until the rest slows those that run but little."""
        used = [*self._running, *(() if source is None else (source,))]
        kept = sorted((seq_id for seq_id in self.kept if seq_id != source), key=self.cache.last_used)
        while kept and self.cache.num_cells - self.cache.num_cells_of(used) > self._most_kept():
            self._put_away(kept.pop(0))

    def _put_away(self, seq_id: int) -> None:
        tokens = self.cache.tokens(seq_id)
        if len(tokens) >= MIN_SHELVED_TOKENS:
            with suppress(EngineError):  # what cannot be saved is evaluated again
                self._shelf.put(tokens, self._memory.save(seq_id))
        self.forget(seq_id)

    def put_away_all(self) -> None:
        """What is held goes on the shelf, where the next context finds it. Nothing may run."""
        for seq_id in sorted(self.kept, key=self.cache.last_used):
            self._put_away(seq_id)

    def _may_share_more(self, sequence: Sequence, shared: int) -> bool:
        """Whether a running prompt is about to evaluate what this one begins with: then it is worth waiting for."""
        for other in self._running.values():
            if other.num_evaluated < len(other.prompt_ids):
                length = common_length(other.prompt_ids, sequence.prompt_ids[:-1])
                if length >= shared + MIN_SHARED_TOKENS and other.num_evaluated < length:
                    return True
        return False

    def _free_id(self) -> int | None:
        return next((seq_id for seq_id in self._ids if seq_id not in self.cache and seq_id not in self._running), None)

    def _could_fit(self, needed: int, source: int | None) -> bool:
        """Whether forgetting everything that does not run would make room. What is shared with `source` stays."""
        kept = sum(self.cache.num_own_cells(seq_id) for seq_id in self.kept)
        return not self._running or source is not None or self.num_free + kept >= needed

    def _begin(self, sequence: Sequence, source: int | None, shared: int, seq_id: int) -> bool:
        """Have `seq_id` hold what is shared, by cutting or copying; False, and it holds nothing, where the memory cannot."""
        if source == seq_id:
            if not self._memory.cut(seq_id, shared):
                self.forget(seq_id)
                return False
            self.cache.cut(seq_id, shared)
        elif source is not None:
            if not self._memory.copy(source, seq_id, shared):
                return False
            self.cache.share(source, seq_id, shared)
            self.cache.touch(source)
        sequence.slot = seq_id
        sequence.num_evaluated = sequence.num_cached_tokens = shared
        self._running[seq_id] = self._holders[seq_id] = sequence
        return True

    def num_held(self, prefix: Ids[int]) -> int:
        """How many tokens of a prefix some sequence holds."""
        found = self.cache.longest(prefix)
        return 0 if found is None else found[1]

    def state(self, prefix: Ids[int]) -> bytes | None:
        """The state behind a prefix, where a sequence holds all of it and there is an id to copy it to. Nothing may run."""
        found = self.cache.longest(prefix)
        seq_id = self._free_id()
        if found is None or found[1] < len(prefix) or seq_id is None or not self._memory.copy(found[0], seq_id, len(prefix)):
            return None
        try:
            return self._memory.save(seq_id)
        finally:
            self._memory.cut(seq_id, 0)

    def restore(self, state: State) -> bool:
        """Have a sequence hold what was kept; False, and it holds nothing, if the memory refuses it or there is no room beside others."""
        num_tokens = len(state.token_ids)
        while self.kept and (self._free_id() is None or self.num_free < num_tokens):
            self._put_away(self.cache.oldest(self.kept) or self.kept[0])
        seq_id = self._free_id()
        if seq_id is None or self.num_free < num_tokens or not self._memory.restore(seq_id, state.data, num_tokens):
            return False
        self.cache.extend(seq_id, state.token_ids)
        return True

    def touch(self, prefix: Ids[int]) -> None:
        """What holds the most of a prefix counts as used just now."""
        found = self.cache.longest(prefix)
        if found is not None:
            self.cache.touch(found[0])

    def evaluated(self, sequence: Sequence, token_ids: Ids[int]) -> None:
        """These tokens of a running sequence are in the cells now."""
        if sequence.slot is not None:
            self.cache.extend(sequence.slot, token_ids)

    def cut(self, sequence: Sequence, num_tokens: int) -> None:
        """A running sequence was cut back to so many tokens."""
        if sequence.slot is not None:
            self.cache.cut(sequence.slot, num_tokens)

    def end(self, sequence: Sequence) -> None:
        """A sequence runs no more; what it holds is kept."""
        if sequence.slot is not None:
            self._running.pop(sequence.slot, None)

    def keep_for(self, prompts: Iterable[list[int]], sequence: Sequence) -> bool:
        """Of what a finished sequence still holds, keep only what some of these prompts begins with; False if that is nothing.

        The rest is not put on the shelf: nobody is known to go on from it.
        """
        seq_id = sequence.slot
        if seq_id is None or self._holders.get(seq_id) is not sequence or seq_id in self._running:
            return False
        held = self.cache.tokens(seq_id)
        shared = max((common_length(held, prompt) for prompt in prompts), default=0)
        if shared < MIN_SHARED_TOKENS or not self._memory.cut(seq_id, shared):
            self.forget(seq_id)
            return False
        self.cache.cut(seq_id, shared)
        return True

    def clear(self) -> None:
        """Hold nothing, on the shelf neither. Nothing may run."""
        self._shelf.clear()
        for seq_id in self.kept:
            self.forget(seq_id)

    def forget(self, seq_id: int) -> None:
        """Free what a sequence that does not run holds."""
        self._memory.cut(seq_id, 0)
        self.cache.drop(seq_id)
        self._holders.pop(seq_id, None)


def common_breakpoint(
    held: Ids[int], held_borders: Ids[int], prompt_ids: Ids[int], breakpoints: Ids[int], *, last_only: bool = False
) -> int:
    """The position up to which a prompt can take over what is held; 0 for nothing.

    With `last_only`, the last border of either alone will do.
    """
    common = common_length(held, prompt_ids[:-1])  # the last token is evaluated in any case: it gives the logits
    found = 0
    for ours, theirs in zip(held_borders, breakpoints, strict=False):
        if ours != theirs or ours > common:
            break
        found = ours
    if last_only and found and (found != held_borders[-1] or found != breakpoints[-1]):
        return 0
    return found


class ExclusiveCells:
    """What the one sequence of a context holds: `token_ids`, and the `breakpoints` at which their batches ended.

    `repeatable` says whether the sums are the same on any number of threads, too.
    """

    def __init__(self, memory: Memory, *, repeatable: bool = False) -> None:
        self._memory = memory
        self.repeatable = repeatable
        self._running: Sequence | None = None
        self.token_ids: list[int] = []
        self.breakpoints: tuple[int, ...] = ()

    @property
    def last_only(self) -> bool:
        """Whether only the last border of a prompt can be gone on from: its end cannot be removed again."""
        return self._memory.moves_cells

    def common(self, prompt_ids: Ids[int], breakpoints: Ids[int]) -> int:
        """How many tokens a prompt would take over."""
        return common_breakpoint(self.token_ids, self.breakpoints, prompt_ids, breakpoints, last_only=self.last_only)

    def place(self, sequence: Sequence) -> bool:
        """Have a sequence begin behind what it takes over; False while another one runs."""
        if self._running is not None:
            return False
        self._keep(self.common(sequence.prompt_ids, sequence.breakpoints))
        sequence.slot = 0
        sequence.num_evaluated = sequence.num_cached_tokens = len(self.token_ids)
        self._running = sequence
        return True

    def evaluated(self, sequence: Sequence, token_ids: Ids[int]) -> None:
        """These tokens are in the cells now, and counted in `sequence.num_evaluated`."""
        self.token_ids += token_ids
        if sequence.num_evaluated not in sequence.breakpoints:
            return
        self.breakpoints = (*self.breakpoints, sequence.num_evaluated)
        if self._memory.moves_cells and sequence.num_evaluated == sequence.breakpoints[-1]:
            self._settle(sequence.num_evaluated)

    def _settle(self, num_tokens: int) -> None:
        """Who goes on from a state that was kept does so in other cells than who evaluated it: so let the first one do it there too."""
        if not self._memory.restore(0, self._memory.save(0), num_tokens):
            raise EngineError("llama.cpp does not take back a state that it gave.")

    def cut(self, _sequence: Sequence, num_tokens: int) -> None:
        """The running sequence was cut back to so many tokens."""
        del self.token_ids[num_tokens:]
        self.breakpoints = tuple(border for border in self.breakpoints if border <= num_tokens)

    def end(self, sequence: Sequence) -> None:
        """A sequence runs no more; what it holds is kept."""
        if sequence is self._running:
            self._running = None

    def clear(self) -> None:
        """Hold nothing. Nothing may run."""
        self._keep(0)

    def latest(self) -> State | None:
        """What can be gone on from, up to the last border; the rest is dropped. Nothing may run."""
        if self._running is not None or not self.breakpoints:
            return None
        self._keep(self.breakpoints[-1])
        return State(tuple(self.token_ids), self.breakpoints, self._memory.save(0)) if self.token_ids else None

    def restore(self, state: State) -> bool:
        """Hold what `state` gave; False, and nothing is held, if the memory refuses it. Nothing may run."""
        self._keep(0)
        if len(state.token_ids) > self._memory.num_cells or not self._memory.restore(0, state.data, len(state.token_ids)):
            return False
        self.token_ids, self.breakpoints = list(state.token_ids), state.breakpoints
        return True

    def _keep(self, num_tokens: int) -> None:
        """Only the first tokens stay, or nothing where the memory cannot have that."""
        if not self._memory.cut(0, num_tokens):
            num_tokens = 0
        del self.token_ids[num_tokens:]
        self.breakpoints = tuple(border for border in self.breakpoints if border <= num_tokens)
