"""What sequences held that do not run, outside of the context, where it slows nobody."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass

from localrag.engine.radix_tree import common_length

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
