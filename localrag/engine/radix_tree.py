"""A radix tree of the tokens in the KV cache. It finds the longest cached prefix of a prompt.

A node is a run of cells; a sequence is a path of nodes from the root. Sequences copied from each other share the nodes of their common
prefix, as they share its cells, so the lengths of all nodes add up to the cells in use. Sequences evaluated separately have nodes of their
own, even for the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from localrag.text.tokens import common_length


class _Node:
    """Cells of consecutive tokens, shared by the sequences `holders`. Its children follow the last token."""

    __slots__ = ("children", "holders", "parent", "tokens")

    def __init__(self, tokens: list[int], parent: _Node | None, holders: set[int]) -> None:
        self.tokens = tokens
        self.parent = parent
        self.holders = holders
        self.children: list[_Node] = []
        if parent is not None:
            parent.children.append(self)


class RadixTree:
    """The tokens of each sequence in a KV cache, searchable for the longest common prefix with a prompt."""

    def __init__(self) -> None:
        self._root = _Node([], None, set())
        self._leaves: dict[int, _Node] = {}
        self._used: dict[int, int] = {}
        self._clock = count()
        self.num_cells = 0
        """Number of cells that all sequences use together."""

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._leaves

    def touch(self, seq_id: int) -> None:
        """Mark a sequence as just used."""
        self._used[seq_id] = next(self._clock)

    def last_used(self, seq_id: int) -> int:
        """LRU time of a sequence, which grows with every use; -1 if it was never used."""
        return self._used.get(seq_id, -1)

    def oldest(self, seq_ids: Sequence[int]) -> int | None:
        """The least recently used of these sequences; None if there are none."""
        return min(seq_ids, key=self.last_used, default=None)

    def tokens(self, seq_id: int) -> list[int]:
        """The tokens of a sequence, in order."""
        return [token for node in self._path(seq_id) for token in node.tokens]

    def longest(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """(sequence id, number of tokens) of the longest cached prefix of `token_ids`; None without a match."""
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
        """Let `seq_id`, which must be empty, share the first `num_tokens` tokens of `source`, in the same cells."""
        num_remaining = num_tokens
        node = self._root
        for each in self._path(source):
            if num_remaining <= 0:
                break
            if len(each.tokens) > num_remaining:
                _split(each, num_remaining)
                self._leaves = {holder: _deepest(leaf, holder) for holder, leaf in self._leaves.items()}
            each.holders.add(seq_id)
            num_remaining -= len(each.tokens)
            node = each
        if node is not self._root:
            self._leaves[seq_id] = node
        self.touch(seq_id)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Append tokens in new cells to a sequence."""
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
        """Truncate a sequence to its first `num_tokens` tokens."""
        path = self._path(seq_id)
        excess = sum(len(node.tokens) for node in path) - num_tokens
        while excess > 0:
            node = path.pop()
            if len(node.tokens) > excess:
                _split(node, len(node.tokens) - excess)
                self._leaves = {holder: _deepest(leaf, holder) for holder, leaf in self._leaves.items()}
                path.append(node)
                node = next(child for child in node.children if seq_id in child.holders)
            excess -= len(node.tokens)
            self._release(node, seq_id)
        if path:
            self._leaves[seq_id] = path[-1]
        else:
            self._leaves.pop(seq_id, None)

    def drop(self, seq_id: int) -> None:
        """Remove a sequence."""
        self.cut(seq_id, 0)
        self._used.pop(seq_id, None)

    def num_own_cells(self, seq_id: int, start: int = 0) -> int:
        """Number of cells that only this sequence uses, from token `start` on. Truncating it there would free them."""
        own = position = 0
        for node in self._path(seq_id):
            position += len(node.tokens)
            if len(node.holders) == 1:
                own += min(len(node.tokens), max(0, position - start))
        return own

    def num_cells_of(self, seq_ids: Iterable[int]) -> int:
        """Number of cells that these sequences use together."""
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
    """Split a node in two. The second part becomes its only child and takes over its children."""
    children, node.children = node.children, []
    rest = _Node(node.tokens[length:], node, set(node.holders))
    rest.children = children
    for child in children:
        child.parent = rest
    node.tokens = node.tokens[:length]


def _deepest(leaf: _Node, seq_id: int) -> _Node:
    """The last node of a sequence, after its former leaf was split."""
    while (deeper := next((child for child in leaf.children if seq_id in child.holders), None)) is not None:
        leaf = deeper
    return leaf
