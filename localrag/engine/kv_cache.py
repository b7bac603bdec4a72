"""Manage the cells of a KV cache: shared by several sequences, or exclusive to one. A host swap holds evicted states in main memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from contextlib import suppress
from dataclasses import dataclass

from localrag.engine.backend import Memory, State
from localrag.engine.jobs import Sequence
from localrag.engine.radix_tree import RadixTree
from localrag.errors import EngineError
from localrag.text.tokens import common_length

MIN_BYTES = 256 << 20
"""Minimum capacity of the host swap in bytes, as far as its share of the free memory allows."""
SHARE_OF_FREE = 4


@dataclass(frozen=True, slots=True, eq=False)
class SwappedState:
    """The state after evaluating `token_ids`."""

    token_ids: list[int]
    data: bytes


class HostSwap:
    """An LRU cache of sequence states in main memory, with at most `max_bytes` in all."""

    def __init__(self, max_bytes: int = MIN_BYTES) -> None:
        self.max_bytes = max_bytes
        self._states: list[SwappedState] = []

    def fit(self, context_bytes: int, free_bytes: int) -> bool:
        """Set the capacity to the size of a context's cells, at least MIN_BYTES, within a share of the free memory.

        Returns False if it is smaller than the cells. States swapped out could then be lost sooner than in the cells.
        """
        self.max_bytes = min(max(MIN_BYTES, context_bytes), (free_bytes + self.num_bytes) // SHARE_OF_FREE)
        return self.max_bytes >= context_bytes

    @property
    def num_bytes(self) -> int:
        return sum(len(each.data) for each in self._states)

    def put(self, token_ids: list[int], data: bytes) -> None:
        """Store a state and drop those of its prefixes. A state larger than the capacity is not stored."""
        if len(data) > self.max_bytes:
            return
        self._states = [each for each in self._states if token_ids[: len(each.token_ids)] != each.token_ids]
        self._states.append(SwappedState(token_ids, data))
        while self.num_bytes > self.max_bytes:
            self._states.pop(0)

    def longest(self, token_ids: Ids[int]) -> tuple[SwappedState, int] | None:
        """The state with the longest common prefix with a prompt, and that length; the smallest among equals. None without a match."""
        ids = list(token_ids)
        matches = [(common_length(each.token_ids, ids), each) for each in self._states]
        length, best = max(matches, key=lambda pair: (pair[0], -len(pair[1].token_ids)), default=(0, None))
        return (best, length) if best is not None and length else None

    def use(self, state: SwappedState, num_tokens: int) -> None:
        """Record that a sequence resumed from a state. If it uses all of the tokens, the state is dropped, since the cells hold them."""
        self._states = [each for each in self._states if each is not state]
        if num_tokens < len(state.token_ids):
            self._states.append(state)

    def clear(self) -> None:
        self._states = []


MIN_SHARED_TOKENS = 16
"""Minimum length in tokens of a prefix to share. Evaluating a shorter one again is as fast as the bookkeeping."""
MIN_SWAPPED_TOKENS = 64
"""Minimum length in tokens of a state to swap out. A shorter one is evaluated as fast as it is saved and restored."""


class SharedCells:
    """Places several sequences in the cells of one context.

    A prompt resumes after the longest prefix that is in the cells or in the host swap. Cells of finished sequences stay until they or their
    sequence id are needed, in LRU order, or until there are more than `most_kept` of them while others run, since attention scans all cells
    up to the last one in use. Then they are swapped out; restoring them takes a fraction of the time to evaluate them. A sequence is
    admitted only if all cells that it may need are free, so a running sequence never runs out of cells. The order of sums depends on the
    other sequences, so near-ties may be decided differently than in a sequence alone (see ExclusiveCells).
    """

    def __init__(
        self, memory: Memory, *, num_sequences: int, host_swap: HostSwap | None = None, most_kept: Callable[[], float] = lambda: math.inf
    ) -> None:
        self._memory = memory
        self._host_swap = HostSwap() if host_swap is None else host_swap
        self._most_kept = most_kept
        self._ids = range(num_sequences)
        self._running: dict[int, Sequence] = {}
        self._holders: dict[int, Sequence] = {}
        self.cache = RadixTree()

    @property
    def kept(self) -> list[int]:
        """Ids of cached sequences that are not running."""
        return [seq_id for seq_id in self._ids if seq_id in self.cache and seq_id not in self._running]

    @property
    def num_free(self) -> int:
        """Number of cells neither in use nor reserved for a running sequence."""
        promised = sum(sequence.num_reserved - sequence.num_evaluated for sequence in self._running.values())
        return self._memory.num_cells - self.cache.num_cells - promised

    def place(self, sequence: Sequence) -> bool:
        """Admit a sequence: give it an id and the longest cached prefix. Returns False if it has to wait."""
        source, shared = self._source(sequence)
        if self._may_share_more(sequence, shared):
            return False
        if self._swap_in(sequence, shared):
            source, shared = self._source(sequence)
        self._swap_out_idle(source)
        while True:
            seq_id = self._free_id()
            needed = sequence.num_reserved - shared
            if seq_id is not None and self.num_free >= needed:
                if self._begin(sequence, source, shared, seq_id):
                    return True
                source, shared = None, 0  # this architecture cannot share that prefix
                continue
            others = [each for each in self.kept if each != source]
            if others and (seq_id is None or self._could_fit(needed, source)):
                self._swap_out(self.cache.oldest(others) or others[0])
            elif source is not None and source not in self._running:
                if self.num_free + self.cache.num_own_cells(source, shared) < needed and self._running:
                    return False
                if self._begin(sequence, source, shared, source):
                    return True
                source, shared = None, 0
            else:
                return False

    def _source(self, sequence: Sequence) -> tuple[int | None, int]:
        match = self.cache.longest(sequence.prompt_ids[:-1])  # the last token must be evaluated for its logits
        return match if match is not None and match[1] >= MIN_SHARED_TOKENS else (None, 0)

    def _swap_in(self, sequence: Sequence, shared: int) -> bool:
        """Restore a swapped-out state if it shares a much longer prefix with the prompt than the cells do."""
        match = self._host_swap.longest(sequence.prompt_ids[:-1])
        if match is None or match[1] < shared + MIN_SWAPPED_TOKENS:
            return False
        state, length = match
        if self.num_free + sum(self.cache.num_own_cells(seq_id) for seq_id in self.kept) < len(state.token_ids):
            return False
        if not self.restore(State(tuple(state.token_ids), (), state.data)):
            return False
        self._host_swap.use(state, length)
        return True

    def _swap_out_idle(self, source: int | None) -> None:
        """Swap out cached sequences in LRU order until the remaining ones hardly slow down running sequences."""
        used = [*self._running, *(() if source is None else (source,))]
        idle = sorted((seq_id for seq_id in self.kept if seq_id != source), key=self.cache.last_used)
        while idle and self.cache.num_cells - self.cache.num_cells_of(used) > self._most_kept():
            self._swap_out(idle.pop(0))

    def _swap_out(self, seq_id: int) -> None:
        tokens = self.cache.tokens(seq_id)
        if len(tokens) >= MIN_SWAPPED_TOKENS:
            with suppress(EngineError):  # a state that cannot be saved is evaluated again
                self._host_swap.put(tokens, self._memory.save(seq_id))
        self.forget(seq_id)

    def swap_out_all(self) -> None:
        """Swap out all cached sequences, so that the next context can restore them. No sequence may be running."""
        for seq_id in sorted(self.kept, key=self.cache.last_used):
            self._swap_out(seq_id)

    def _may_share_more(self, sequence: Sequence, shared: int) -> bool:
        """Whether a running prompt is about to evaluate a longer prefix of this one, which is worth waiting for."""
        for other in self._running.values():
            if other.num_evaluated < len(other.prompt_ids):
                length = common_length(other.prompt_ids, sequence.prompt_ids[:-1])
                if length >= shared + MIN_SHARED_TOKENS and other.num_evaluated < length:
                    return True
        return False

    def _free_id(self) -> int | None:
        return next((seq_id for seq_id in self._ids if seq_id not in self.cache and seq_id not in self._running), None)

    def _could_fit(self, needed: int, source: int | None) -> bool:
        """Whether evicting all cached sequences would make enough room. Cells shared with `source` stay."""
        num_evictable = sum(self.cache.num_own_cells(seq_id) for seq_id in self.kept)
        return not self._running or source is not None or self.num_free + num_evictable >= needed

    def _begin(self, sequence: Sequence, source: int | None, shared: int, seq_id: int) -> bool:
        """Give the shared prefix to `seq_id` by truncation or copying. If the memory cannot, returns False and leaves it empty."""
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
        """Number of tokens of a prefix that are cached."""
        longest = self.cache.longest(prefix)
        return 0 if longest is None else longest[1]

    def state(self, prefix: Ids[int]) -> bytes | None:
        """The state after a prefix; None if it is not fully cached or no sequence id is free. No sequence may be running."""
        longest = self.cache.longest(prefix)
        seq_id = self._free_id()
        if longest is None or longest[1] < len(prefix) or seq_id is None or not self._memory.copy(longest[0], seq_id, len(prefix)):
            return None
        try:
            return self._memory.save(seq_id)
        finally:
            self._memory.cut(seq_id, 0)

    def restore(self, state: State) -> bool:
        """Restore a state to the cells. If the memory refuses it or has no room, returns False and restores nothing."""
        num_tokens = len(state.token_ids)
        while self.kept and (self._free_id() is None or self.num_free < num_tokens):
            self._swap_out(self.cache.oldest(self.kept) or self.kept[0])
        seq_id = self._free_id()
        if seq_id is None or self.num_free < num_tokens or not self._memory.restore(seq_id, state.data, num_tokens):
            return False
        self.cache.extend(seq_id, state.token_ids)
        return True

    def touch(self, prefix: Ids[int]) -> None:
        """Mark the sequence with the longest part of a prefix as just used."""
        longest = self.cache.longest(prefix)
        if longest is not None:
            self.cache.touch(longest[0])

    def evaluated(self, sequence: Sequence, token_ids: Ids[int]) -> None:
        """Record that these tokens of a running sequence have been evaluated."""
        if sequence.slot is not None:
            self.cache.extend(sequence.slot, token_ids)

    def cut(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that a running sequence was truncated."""
        if sequence.slot is not None:
            self.cache.cut(sequence.slot, num_tokens)

    def end(self, sequence: Sequence) -> None:
        """Record that a sequence has finished. Its cells stay cached."""
        if sequence.slot is not None:
            self._running.pop(sequence.slot, None)

    def keep_for(self, prompts: Iterable[list[int]], sequence: Sequence) -> bool:
        """Evict from a finished sequence everything except the longest prefix of these prompts. Returns False if nothing remains.

        Evicted cells are not swapped out, because no prompt is known to need them.
        """
        seq_id = sequence.slot
        if seq_id is None or self._holders.get(seq_id) is not sequence or seq_id in self._running:
            return False
        tokens = self.cache.tokens(seq_id)
        shared = max((common_length(tokens, prompt) for prompt in prompts), default=0)
        if shared < MIN_SHARED_TOKENS or not self._memory.cut(seq_id, shared):
            self.forget(seq_id)
            return False
        self.cache.cut(seq_id, shared)
        return True

    def clear(self) -> None:
        """Clear the cells and the host swap. No sequence may be running."""
        self._host_swap.clear()
        for seq_id in self.kept:
            self.forget(seq_id)

    def forget(self, seq_id: int) -> None:
        """Free the cells of a sequence that is not running."""
        self._memory.cut(seq_id, 0)
        self.cache.drop(seq_id)
        self._holders.pop(seq_id, None)


def common_breakpoint(
    cached_ids: Ids[int], cached_breakpoints: Ids[int], prompt_ids: Ids[int], breakpoints: Ids[int], *, last_only: bool = False
) -> int:
    """The last breakpoint up to which a prompt can reuse the cached tokens; 0 if there is none.

    With `last_only`, it must be the last breakpoint of both.
    """
    common = common_length(cached_ids, prompt_ids[:-1])  # the last token must be evaluated for its logits
    position = 0
    for ours, theirs in zip(cached_breakpoints, breakpoints, strict=False):
        if ours != theirs or ours > common:
            break
        position = ours
    if last_only and position and (position != cached_breakpoints[-1] or position != breakpoints[-1]):
        return 0
    return position


class ExclusiveCells:
    """The cells of a context for one sequence: `token_ids`, and the `breakpoints` at which batches ended.

    `repeatable` means that the results are the same with any number of threads.
    """

    def __init__(self, memory: Memory, *, repeatable: bool = False) -> None:
        self._memory = memory
        self.repeatable = repeatable
        self._running: Sequence | None = None
        self.token_ids: list[int] = []
        self.breakpoints: tuple[int, ...] = ()

    @property
    def last_only(self) -> bool:
        """Whether a prompt can resume only at its last breakpoint, because the sequence cannot be truncated reliably."""
        return self._memory.moves_cells

    def common(self, prompt_ids: Ids[int], breakpoints: Ids[int]) -> int:
        """Number of tokens that a prompt would reuse."""
        return common_breakpoint(self.token_ids, self.breakpoints, prompt_ids, breakpoints, last_only=self.last_only)

    def place(self, sequence: Sequence) -> bool:
        """Admit a sequence after the prefix that it reuses. Returns False while another one is running."""
        if self._running is not None:
            return False
        self._keep(self.common(sequence.prompt_ids, sequence.breakpoints))
        sequence.slot = 0
        sequence.num_evaluated = sequence.num_cached_tokens = len(self.token_ids)
        self._running = sequence
        return True

    def evaluated(self, sequence: Sequence, token_ids: Ids[int]) -> None:
        """Record that these tokens, counted in `sequence.num_evaluated`, have been evaluated."""
        self.token_ids += token_ids
        if sequence.num_evaluated not in sequence.breakpoints:
            return
        self.breakpoints = (*self.breakpoints, sequence.num_evaluated)
        if self._memory.moves_cells and sequence.num_evaluated == sequence.breakpoints[-1]:
            self._settle(sequence.num_evaluated)

    def _settle(self, num_tokens: int) -> None:
        """Restore the state just evaluated. Later prompts use restored cells, so the first must too, for the same results."""
        if not self._memory.restore(0, self._memory.save(0), num_tokens):
            raise EngineError("llama.cpp does not accept a state that it saved.")

    def cut(self, _sequence: Sequence, num_tokens: int) -> None:
        """Record that the running sequence was truncated."""
        del self.token_ids[num_tokens:]
        self.breakpoints = tuple(position for position in self.breakpoints if position <= num_tokens)

    def end(self, sequence: Sequence) -> None:
        """Record that a sequence has finished. Its cells stay cached."""
        if sequence is self._running:
            self._running = None

    def clear(self) -> None:
        """Clear the cells. No sequence may be running."""
        self._keep(0)

    def latest(self) -> State | None:
        """The state up to the last breakpoint; the rest is dropped. No sequence may be running."""
        if self._running is not None or not self.breakpoints:
            return None
        self._keep(self.breakpoints[-1])
        return State(tuple(self.token_ids), self.breakpoints, self._memory.save(0)) if self.token_ids else None

    def restore(self, state: State) -> bool:
        """Restore a state. If the memory refuses it, returns False and leaves the cells empty. No sequence may be running."""
        self._keep(0)
        if len(state.token_ids) > self._memory.num_cells or not self._memory.restore(0, state.data, len(state.token_ids)):
            return False
        self.token_ids, self.breakpoints = list(state.token_ids), state.breakpoints
        return True

    def _keep(self, num_tokens: int) -> None:
        """Truncate to the first `num_tokens` tokens, or to nothing if the memory cannot do that."""
        if not self._memory.cut(0, num_tokens):
            num_tokens = 0
        del self.token_ids[num_tokens:]
        self.breakpoints = tuple(position for position in self.breakpoints if position <= num_tokens)
