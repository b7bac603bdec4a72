"""What the KV cache holds, as a trie of tokens, so that a prompt takes over the longest beginning that was evaluated before.

A node is a stretch of cells; a sequence is a path of nodes from the root. Sequences that were copied from each other share the nodes
of what they have in common, as they share its cells, so the lengths of all nodes add up to the cells in use. Two sequences that were
evaluated apart have nodes of their own, also where their tokens are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count


class _Node:
    """Cells of consecutive tokens, held by the sequences `holders`. Children begin behind its last token."""

    __slots__ = ("children", "holders", "parent", "tokens")

    def __init__(self, tokens: list[int], parent: _Node | None, holders: set[int]) -> None:
        self.tokens = tokens
        self.parent = parent
        self.holders = holders
        self.children: list[_Node] = []
        if parent is not None:
            parent.children.append(self)


class RadixTree:
    """The tokens of each sequence id in a KV cache, and which sequence has the longest beginning in common with a prompt."""

    def __init__(self) -> None:
        self._root = _Node([], None, set())
        self._leaves: dict[int, _Node] = {}
        self._used: dict[int, int] = {}
        self._clock = count()
        self.num_cells = 0
        """Cells that all sequences together take."""

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._leaves

    def touch(self, seq_id: int) -> None:
        """This sequence was used just now."""
        self._used[seq_id] = next(self._clock)

    def last_used(self, seq_id: int) -> int:
        """Grows with every use; -1 for one that was never used."""
        return self._used.get(seq_id, -1)

    def oldest(self, seq_ids: Sequence[int]) -> int | None:
        """Of these, the one that was used longest ago; None of none."""
        return min(seq_ids, key=self.last_used, default=None)

    def tokens(self, seq_id: int) -> list[int]:
        """What a sequence holds, in order."""
        return [token for node in self._path(seq_id) for token in node.tokens]

    def longest(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """(sequence id, number of tokens) of the longest beginning of `token_ids` that some sequence holds; None if none holds any."""
        ids = list(token_ids)
        best: tuple[int, int] | None = None
        stack = [(child, 0) for child in self._root.children]
        while stack:
            node, start = stack.pop()
            common = common_length(node.tokens, ids, start)
            if common and (best is None or start + common > best[1]):
                best = max(node.holders, key=self.last_used), start + common
            if common == len(node.tokens):
                stack += [(child, start + common) for child in node.children]
        return best

    def share(self, source: int, seq_id: int, num_tokens: int) -> None:
        """`seq_id`, which held nothing, now holds the first `num_tokens` tokens of `source` in the very same cells."""
        left = num_tokens
        node = self._root
        for each in self._path(source):
            if left <= 0:
                break
            if len(each.tokens) > left:
                _split(each, left)
                self._leaves = {held: _deepest(leaf, held) for held, leaf in self._leaves.items()}
            each.holders.add(seq_id)
            left -= len(each.tokens)
            node = each
        if node is not self._root:
            self._leaves[seq_id] = node
        self.touch(seq_id)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """A sequence holds more tokens, in new cells."""
        if not token_ids:
            return
        leaf = self._leaves.get(seq_id, self._root)
        if leaf is not self._root and leaf.holders == {seq_id} and not leaf.children:
            leaf.tokens.extend(token_ids)
        else:
            self._leaves[seq_id] = _Node(list(token_ids), leaf, {seq_id})
        self.num_cells += len(token_ids)
        self.touch(seq_id)

    def cut(self, seq_id: int, num_tokens: int) -> None:
        """A sequence holds no more than its first `num_tokens` tokens."""
        path = self._path(seq_id)
        excess = sum(len(node.tokens) for node in path) - num_tokens
        while excess > 0:
            node = path.pop()
            if len(node.tokens) > excess:
                _split(node, len(node.tokens) - excess)
                self._leaves = {held: _deepest(leaf, held) for held, leaf in self._leaves.items()}
                path.append(node)
                node = next(child for child in node.children if seq_id in child.holders)
            excess -= len(node.tokens)
            self._release(node, seq_id)
        if path:
            self._leaves[seq_id] = path[-1]
        else:
            self._leaves.pop(seq_id, None)

    def drop(self, seq_id: int) -> None:
        """A sequence holds nothing any more."""
        self.cut(seq_id, 0)
        self._used.pop(seq_id, None)

    def num_own_cells(self, seq_id: int, start: int = 0) -> int:
        """Cells that only this sequence holds, from its `start`-th token on: what cutting it there would free."""
        own = position = 0
        for node in self._path(seq_id):
            position += len(node.tokens)
            if len(node.holders) == 1:
                own += min(len(node.tokens), max(0, position - start))
        return own

    def num_cells_of(self, seq_ids: Iterable[int]) -> int:
        """Cells that these sequences take together."""
        nodes = {id(node): len(node.tokens) for seq_id in seq_ids for node in self._path(seq_id)}
        return sum(nodes.values())

    def _path(self, seq_id: int) -> list[_Node]:
        path = []
        node = self._leaves.get(seq_id)
        while node is not None and node is not self._root:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _release(self, node: _Node, seq_id: int) -> None:
        node.holders.discard(seq_id)
        if not node.holders:
            self.num_cells -= len(node.tokens)
            if node.parent is not None:
                node.parent.children.remove(node)


def _split(node: _Node, length: int) -> None:
    """Cut a node in two; the second part becomes its only child and takes over its children."""
    children, node.children = node.children, []
    rest = _Node(node.tokens[length:], node, set(node.holders))
    rest.children = children
    for child in children:
        child.parent = rest
    node.tokens = node.tokens[:length]


def _deepest(leaf: _Node, seq_id: int) -> _Node:
    """The last node of a sequence, after nodes were split below what was its last."""
    while (deeper := next((child for child in leaf.children if seq_id in child.holders), None)) is not None:
        leaf = deeper
    return leaf


def common_length(tokens: Sequence[int], ids: Sequence[int], start: int = 0) -> int:
    """How many of `tokens` are those of `ids` from `start` on, by bisection on slices, which compare fast. Both are lists."""
    low, high = 0, min(len(tokens), len(ids) - start)
    if tokens[:high] == ids[start : start + high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        low, high = (middle, high) if tokens[low:middle] == ids[start + low : start + middle] else (low, middle)
    return low
