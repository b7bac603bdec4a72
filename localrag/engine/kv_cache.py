"""Manage the cells of a KV cache: shared by several sequences, or exclusive to one. Main memory holds evicted states and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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
    """The state after evaluating `token_ids`. `checkpoints` is None if a restored sequence can be truncated anywhere."""

    token_ids: list[int]
    data: bytes
    checkpoints: Mapping[int, bytes] | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.data) + sum(map(len, (self.checkpoints or {}).values()))

    def num_reusable(self, token_ids: Ids[int]) -> int:
        """Number of tokens that a prompt can reuse."""
        length = common_length(self.token_ids, token_ids)
        return length if self.checkpoints is None else resumable(length, len(self.token_ids), self.checkpoints)


def resumable(num_common: int, num_tokens: int, checkpoints: Iterable[int]) -> int:
    """Number of tokens to which a sequence of `num_tokens` can be truncated, if a prompt shares `num_common` of them.

    That is all of them, or the last checkpoint within the shared ones; 0 without one.
    """
    if num_common >= num_tokens:
        return num_tokens
    return max((position for position in checkpoints if position <= num_common), default=0)


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
        return sum(each.num_bytes for each in self._states)

    def put(self, token_ids: list[int], data: bytes, checkpoints: Mapping[int, bytes] | None = None) -> None:
        """Store a state and drop those of its prefixes. A state larger than the capacity is not stored."""
        state = SwappedState(token_ids, data, checkpoints)
        if state.num_bytes > self.max_bytes:
            return
        self._states = [each for each in self._states if token_ids[: len(each.token_ids)] != each.token_ids]
        self._states.append(state)
        while self.num_bytes > self.max_bytes:
            self._states.pop(0)

    def longest(self, token_ids: Ids[int]) -> tuple[SwappedState, int] | None:
        """The state of which a prompt can reuse most tokens, and their number; the smallest among equals. None without a match."""
        ids = list(token_ids)
        matches = [(each.num_reusable(ids), each) for each in self._states]
        length, best = max(matches, key=lambda pair: (pair[0], -len(pair[1].token_ids)), default=(0, None))
        return (best, length) if best is not None and length else None

    def use(self, state: SwappedState, num_tokens: int) -> None:
        """Record that a sequence resumed from a state. If it uses all of the tokens, the state is dropped, since the cells hold them."""
        self._states = [each for each in self._states if each is not state]
        if num_tokens < len(state.token_ids):
            self._states.append(state)

    def clear(self) -> None:
        self._states = []


class Checkpoints:
    """Checkpoints of sequences that cannot be truncated without them, by number of tokens.

    Sequences copied from each other share them. All together take at most `max_bytes`; the ones that were used longest ago go first.
    """

    def __init__(self, memory: Memory, *, max_bytes: float = math.inf) -> None:
        self._memory = memory
        self._max_bytes = max_bytes
        self._held: dict[int, dict[int, bytes]] = {}
        self._order: dict[int, bytes] = {}  # by id of the bytes, which makes them unique; the least recently used first

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._order.values()))

    def take(self, seq_id: int, num_tokens: int) -> None:
        """Take a checkpoint at the end of a sequence of a recurrent memory, which has `num_tokens` tokens. Others are cut anywhere."""
        if self._memory.is_recurrent:
            with suppress(EngineError):  # without it, more is evaluated again
                self.put(seq_id, {num_tokens: self._memory.checkpoint(seq_id)})

    def put(self, seq_id: int, checkpoints: Mapping[int, bytes]) -> None:
        """Add checkpoints of a sequence, such as those of a restored state."""
        for position, data in checkpoints.items():
            if len(data) <= self._max_bytes:
                self._held.setdefault(seq_id, {})[position] = data
                self._order[id(data)] = data
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._order)))

    def of(self, seq_id: int) -> Mapping[int, bytes]:
        """The checkpoints of a sequence."""
        return self._held.get(seq_id, {})

    def at(self, seq_id: int, num_tokens: int) -> bytes | None:
        """The checkpoint of a sequence after `num_tokens`, marked as just used; None if there is none."""
        data = self._held.get(seq_id, {}).get(num_tokens)
        if data is not None:
            self._order[id(data)] = self._order.pop(id(data))
        return data

    def share(self, source: int, seq_id: int, num_tokens: int) -> None:
        """Let a copy of the first `num_tokens` tokens of a sequence use its checkpoints."""
        held = {position: data for position, data in self.of(source).items() if position <= num_tokens}
        if held:
            self._held[seq_id] = held

    def cut(self, seq_id: int, num_tokens: int) -> None:
        """Drop the checkpoints of a sequence after its first `num_tokens` tokens."""
        held = {position: data for position, data in self._held.pop(seq_id, {}).items() if position <= num_tokens}
        if held:
            self._held[seq_id] = held
        used = {id(data) for each in self._held.values() for data in each.values()}
        self._order = {key: data for key, data in self._order.items() if key in used}

    def _drop(self, key: int) -> None:
        del self._order[key]
        for held in self._held.values():
            for position in [position for position, data in held.items() if id(data) == key]:
                del held[position]


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

    In a recurrent memory, a prompt resumes at the end of a cached sequence or at a checkpoint, which is taken at each breakpoint. The same
    holds for a sequence that was swapped out of a memory with sliding windows: its state has only the window before its end, so checkpoints
    are saved with it, of the windows before the places where a prompt is likely to diverge.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        num_sequences: int,
        host_swap: HostSwap | None = None,
        most_kept: Callable[[], float] = lambda: math.inf,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self._memory = memory
        self._host_swap = HostSwap() if host_swap is None else host_swap
        self._checkpoints = checkpoints or Checkpoints(memory)
        self._most_kept = most_kept
        self._ids = range(num_sequences)
        self._running: dict[int, Sequence] = {}
        self._holders: dict[int, Sequence] = {}
        self._windowed: dict[int, int] = {}  # restored sequences, with the length from which they can be truncated to any other
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
            in_place = source is not None and self._moves_in(source, shared)
            seq_id = source if in_place else self._free_id()
            needed = sequence.num_reserved - shared
            num_own = self.cache.num_own_cells(source, shared) if source is not None and in_place else 0
            if seq_id is not None and self.num_free + num_own >= needed:
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
        match = self._longest(sequence.prompt_ids[:-1])  # the last token must be evaluated for its logits
        return match if match is not None and match[1] >= MIN_SHARED_TOKENS else (None, 0)

    def _longest(self, token_ids: Ids[int]) -> tuple[int, int] | None:
        """(sequence id, number of tokens) of the longest cached prefix that a prompt can reuse; None without a match."""
        if not self._memory.is_recurrent and not self._windowed:
            return self.cache.longest(token_ids)
        matches = [(self._resumable(seq_id, token_ids), seq_id) for seq_id in self._ids if seq_id in self.cache]
        length, seq_id = max(matches, key=lambda match: (match[0], self.cache.last_used(match[1])), default=(0, 0))
        return (seq_id, length) if length else None

    def _resumable(self, seq_id: int, token_ids: Ids[int]) -> int:
        """Number of tokens of a cached sequence that a prompt can reuse."""
        held = self.cache.tokens(seq_id)
        length = common_length(held, token_ids)
        if not self._memory.is_recurrent and not self._moves_in(seq_id, length):
            return length
        length = resumable(length, len(held), self._checkpoints.of(seq_id))
        return 0 if seq_id in self._running and self._moves_in(seq_id, length) else length

    def _moves_in(self, seq_id: int, num_tokens: int) -> bool:
        """Whether a prompt can resume there only in the cells of that sequence: a copy would need more cells, for the window before."""
        return num_tokens < self._windowed.get(seq_id, 0)

    def _swap_in(self, sequence: Sequence, shared: int) -> bool:
        """Restore a swapped-out state if it shares a much longer prefix with the prompt than the cells do."""
        match = self._host_swap.longest(sequence.prompt_ids[:-1])
        if match is None or match[1] < shared + MIN_SWAPPED_TOKENS:
            return False
        state, length = match
        if self.num_free + sum(self.cache.num_own_cells(seq_id) for seq_id in self.kept) < len(state.token_ids):
            return False
        if not self.restore(State(tuple(state.token_ids), (), state.data, state.checkpoints or {})):
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
                state = self._memory.save(seq_id)
                if self._memory.moves_cells and not self._memory.is_recurrent:
                    self._save_windows(seq_id, len(tokens), max_bytes=len(state))
                needs_checkpoints = self._memory.moves_cells or self._memory.is_recurrent
                self._host_swap.put(tokens, state, dict(self._checkpoints.of(seq_id)) if needs_checkpoints else None)
        self.forget(seq_id)

    def _save_windows(self, seq_id: int, num_tokens: int, *, max_bytes: int) -> None:
        """Take checkpoints at the places in a sequence where a prompt is likely to diverge, the last ones first, up to a total size."""
        holder, copy_id = self._holders.get(seq_id), self._free_id()
        if holder is None or copy_id is None:
            return
        num_bytes = 0
        for position in holder.marks:
            is_held = self._windowed.get(seq_id, 0) <= position < num_tokens
            if is_held and self._memory.copy(seq_id, copy_id, position):
                window = self._memory.checkpoint(copy_id)
                num_bytes += len(window)
                if num_bytes > max_bytes:
                    break
                self._checkpoints.put(seq_id, {position: window})
        self._memory.cut(copy_id, 0)

    def swap_out_all(self) -> None:
        """Swap out all cached sequences, so that the next context can restore them. No sequence may be running."""
        for seq_id in sorted(self.kept, key=self.cache.last_used):
            self._swap_out(seq_id)

    def _may_share_more(self, sequence: Sequence, shared: int) -> bool:
        """Whether a running prompt is about to evaluate a longer prefix of this one, which is worth waiting for."""
        for other in self._running.values():
            if other.num_evaluated < len(other.prompt_ids):
                length = common_length(other.prompt_ids, sequence.prompt_ids[:-1])
                if self._memory.is_recurrent:
                    length = resumable(length, len(other.prompt_ids), other.breakpoints)
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
            if not self._truncate(seq_id, shared):
                return False
        elif source is not None:
            if not self._memory.copy(source, seq_id, shared, self._checkpoint(source, shared)):
                return False
            self.cache.share(source, seq_id, shared)
            self._checkpoints.share(source, seq_id, shared)
            self._windowed.update({seq_id: self._windowed[source]} if source in self._windowed else {})
            self.cache.touch(source)
        sequence.slot = seq_id
        sequence.num_evaluated = sequence.num_cached_tokens = shared
        self._running[seq_id] = self._holders[seq_id] = sequence
        return True

    def _truncate(self, seq_id: int, num_tokens: int) -> bool:
        """Truncate a sequence to tokens that it holds. If the memory cannot, returns False and leaves it empty."""
        if not self._memory.cut(seq_id, num_tokens, self._checkpoint(seq_id, num_tokens)):
            self.forget(seq_id)
            return False
        self.cache.cut(seq_id, num_tokens)
        self._checkpoints.cut(seq_id, num_tokens)
        if self._moves_in(seq_id, num_tokens):
            self._windowed[seq_id] = num_tokens
        return True

    def _checkpoint(self, seq_id: int, num_tokens: int) -> bytes | None:
        """The checkpoint that truncating a sequence there needs; None if it needs none."""
        needs_one = self._memory.is_recurrent or self._moves_in(seq_id, num_tokens)
        return self._checkpoints.at(seq_id, num_tokens) if needs_one else None

    def num_held(self, prefix: Ids[int]) -> int:
        """Number of cached tokens of a prefix that can be reused."""
        longest = self._longest(prefix)
        return 0 if longest is None else longest[1]

    def state(self, prefix: Ids[int]) -> bytes | None:
        """The state after a prefix; None if it is not fully cached or no sequence id is free. No sequence may be running."""
        longest = self._longest(prefix)
        seq_id = self._free_id()
        if longest is None or longest[1] < len(prefix) or seq_id is None:
            return None
        if not self._memory.copy(longest[0], seq_id, len(prefix), self._checkpoint(longest[0], len(prefix))):
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
        self._checkpoints.put(seq_id, state.checkpoints)
        self._windowed.update({seq_id: num_tokens} if self._memory.moves_cells else {})
        return True

    def touch(self, prefix: Ids[int]) -> None:
        """Mark the sequence with the longest part of a prefix as just used."""
        longest = self._longest(prefix)
        if longest is not None:
            self.cache.touch(longest[0])

    def evaluated(self, sequence: Sequence, token_ids: Ids[int]) -> None:
        """Record that these tokens of a running sequence, counted in `sequence.num_evaluated`, have been evaluated."""
        if sequence.slot is not None:
            self.cache.extend(sequence.slot, token_ids)
            if sequence.num_evaluated in sequence.breakpoints:
                self._checkpoints.take(sequence.slot, sequence.num_evaluated)

    def recover(self, sequence: Sequence) -> int:
        """Truncate a running sequence, whose batch was cancelled, to what it surely holds. Returns the number of tokens."""
        seq_id, num_tokens = slot_of(sequence), sequence.num_evaluated
        num_left = resumable(num_tokens, num_tokens + 1, self._checkpoints.of(seq_id)) if self._memory.is_recurrent else num_tokens
        is_left = self._memory.cut(seq_id, num_left, self._checkpoint(seq_id, num_left))
        self.cache.cut(seq_id, num_left if is_left else 0)
        self._checkpoints.cut(seq_id, num_left if is_left else 0)
        return num_left if is_left else 0

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
        shared = max((self._resumable(seq_id, prompt) for prompt in prompts), default=0)
        if shared < MIN_SHARED_TOKENS:
            self.forget(seq_id)
            return False
        return self._truncate(seq_id, shared)

    def clear(self) -> None:
        """Clear the cells and the host swap. No sequence may be running."""
        self._host_swap.clear()
        for seq_id in self.kept:
            self.forget(seq_id)

    def forget(self, seq_id: int) -> None:
        """Free the cells of a sequence that is not running."""
        self._memory.cut(seq_id, 0)
        self.cache.drop(seq_id)
        self._checkpoints.cut(seq_id, 0)
        self._windowed.pop(seq_id, None)
        self._holders.pop(seq_id, None)


def slot_of(sequence: Sequence) -> int:
    """A sequence's id in the KV cache. Raises EngineError if it was not admitted."""
    if sequence.slot is None:
        raise EngineError("A sequence runs without a slot.")
    return sequence.slot


def common_breakpoint(
    cached_ids: Ids[int],
    cached_breakpoints: Ids[int],
    prompt_ids: Ids[int],
    breakpoints: Ids[int],
    *,
    last_only: bool = False,
    reachable: Callable[[int], bool] = lambda _: True,
) -> int:
    """The last breakpoint up to which a prompt can reuse the cached tokens; 0 if there is none.

    It must be `reachable` by truncation. With `last_only`, it must be the last breakpoint of both.
    """
    common = common_length(cached_ids, prompt_ids[:-1])  # the last token must be evaluated for its logits
    position = 0
    for ours, theirs in zip(cached_breakpoints, breakpoints, strict=False):
        if ours != theirs or ours > common:
            break
        position = ours if reachable(ours) else position
    if last_only and position and (position != cached_breakpoints[-1] or position != breakpoints[-1]):
        return 0
    return position


class ExclusiveCells:
    """The cells of a context for one sequence: `token_ids`, and the `breakpoints` at which batches ended.

    `repeatable` means that the results are the same with any number of threads.
    """

    def __init__(self, memory: Memory, *, repeatable: bool = False, checkpoints: Checkpoints | None = None) -> None:
        self._memory = memory
        self._checkpoints = checkpoints or Checkpoints(memory)
        self.repeatable = repeatable
        self._running: Sequence | None = None
        self.token_ids: list[int] = []
        self.breakpoints: tuple[int, ...] = ()

    @property
    def last_only(self) -> bool:
        """Whether a prompt can resume only at its last breakpoint, because a restored sequence cannot be truncated."""
        return self._memory.moves_cells

    def common(self, prompt_ids: Ids[int], breakpoints: Ids[int]) -> int:
        """Number of tokens that a prompt would reuse."""
        return common_breakpoint(
            self.token_ids, self.breakpoints, prompt_ids, breakpoints, last_only=self.last_only, reachable=self._is_reachable
        )

    def _is_reachable(self, num_tokens: int) -> bool:
        is_any = not self._memory.is_recurrent
        return is_any or resumable(num_tokens, len(self.token_ids), self._checkpoints.of(0)) == num_tokens

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
        self._checkpoints.take(0, sequence.num_evaluated)
        if self._memory.moves_cells and sequence.num_evaluated == sequence.breakpoints[-1]:
            self._settle(sequence.num_evaluated)

    def _settle(self, num_tokens: int) -> None:
        """Restore the state just evaluated. Later prompts use restored cells, so the first must too, for the same results."""
        if not self._memory.restore(0, self._memory.save(0), num_tokens):
            raise EngineError("llama.cpp does not accept a state that it saved.")

    def recover(self, sequence: Sequence) -> int:
        """Truncate the running sequence, whose batch was cancelled, to what it surely holds. Returns the number of tokens."""
        num_tokens = sequence.num_evaluated
        self._keep(resumable(num_tokens, num_tokens + 1, self._checkpoints.of(0)) if self._memory.is_recurrent else num_tokens)
        return len(self.token_ids)

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
        if not self.token_ids:
            return None
        return State(tuple(self.token_ids), self.breakpoints, self._memory.save(0), dict(self._checkpoints.of(0)))

    def restore(self, state: State) -> bool:
        """Restore a state. If the memory refuses it, returns False and leaves the cells empty. No sequence may be running."""
        self._keep(0)
        if len(state.token_ids) > self._memory.num_cells or not self._memory.restore(0, state.data, len(state.token_ids)):
            return False
        self.token_ids, self.breakpoints = list(state.token_ids), state.breakpoints
        self._checkpoints.put(0, state.checkpoints)
        return True

    def _keep(self, num_tokens: int) -> None:
        """Truncate to the first `num_tokens` tokens, or to nothing if the memory cannot do that."""
        if not self._memory.cut(0, num_tokens, self._checkpoints.at(0, num_tokens)):
            num_tokens = 0
        self._checkpoints.cut(0, num_tokens)
        del self.token_ids[num_tokens:]
        self.breakpoints = tuple(position for position in self.breakpoints if position <= num_tokens)
