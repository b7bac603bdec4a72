"""The rolling summary: what was said too long ago to be kept, in a few words that stay as they are while the talk goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from json import dumps
from typing import Literal

from localrag.conversation.exchanges import Exchange
from localrag.errors import InterruptedRunError, LocalragError, UsageError
from localrag.summary import SummaryCache, extract, split

MIN_SUMMARY_TOKENS = 16
"""A summary that may not be this long says nothing and is not written."""
SHARE = 8
"""A summary has at most one part in so many of the text that it may cover."""
JOIN_TOKENS = 2
"""The most that putting two texts together was seen to add to their tokens."""

Method = Literal["model", "extractive"]


@dataclass(frozen=True, slots=True)
class Covered:
    """A summary of old exchanges. `names` are the messages that it covers; `levels` is 1 for summaries of the messages
    themselves and one more for each time that summaries were summarised, 0 where there is no summary."""

    text: str = ""
    num_tokens: int = 0
    names: tuple[str, ...] = ()
    method: Method = "extractive"
    levels: int = 0


@dataclass(frozen=True, slots=True)
class _Node:
    """The summary of a stretch of the conversation. `method` is None for words that stand as they were said."""

    text: str
    cost: int
    names: tuple[str, ...]
    method: Method | None
    height: int


@dataclass(slots=True)
class Rolling:
    """Summaries of old exchanges that stay as they are while the conversation goes on.

    Exchanges fill blocks of `part_tokens` from the first one on, and each block is summarised. Where the summaries together
    are too long, the oldest are summarised again in groups, level by level, so what is newer keeps more detail. Where a block
    or group ends depends only on what stands before that end. One more exchange therefore changes the last summary of a level
    and no other, but for the group that is merged to make room for it; all others are found in the cache.

    `write(text, limit)` has a model write at most `limit` tokens; None extracts sentences where nothing was written before, and
    so does a text that it cannot do. `part_tokens` is the most that it is given. At most `max_writes` texts are written for one
    `cover`; those after them are extracted, and a later `cover` goes on. `count` is tokens as they are sent, `model` names who
    writes.
    """

    write: Callable[[str, int], str] | None
    cache: SummaryCache | None
    count: Callable[[str], int]
    model: str
    part_tokens: int
    max_writes: int | None = field(default=None, kw_only=True)
    _num_writes: int = field(default=0, init=False, repr=False)
    _extracts: dict[tuple[int, str], str] = field(default_factory=dict, init=False, repr=False)
    _extracts_before: dict[tuple[int, str], str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        least = SHARE * MIN_SUMMARY_TOKENS
        if self.part_tokens < least:
            message = f"A block of {self.part_tokens} tokens is too small to be summarised."
            raise UsageError(message, hint=f"Use {least} or more.", part_tokens=self.part_tokens)

    def cover(self, exchanges: Sequence[Exchange], limit: int) -> Covered:
        """A summary of all exchanges, oldest first, in at most `limit` tokens; an empty one if they are too few to say anything."""
        cap, limit = self.sizes(limit)
        if not exchanges or not cap:
            return Covered()
        self._num_writes = 0
        self._extracts_before, self._extracts = self._extracts, {}
        nodes = [self._node(text, names, cap) for text, names in self._blocks(exchanges)]
        while len(nodes) > 1 and (_size(nodes) > limit or self.count(_joined(nodes)) > limit):
            nodes = self._merge(nodes, limit, cap)
        nodes = [node for node in nodes if node.text]
        if not nodes:
            return Covered()
        text = _joined(nodes)
        names = tuple(dict.fromkeys(name for node in nodes for name in node.names))
        method = _method(node.method for node in nodes) or "extractive"
        return Covered(text, self.count(text), names, method, max(node.height for node in nodes))

    def sizes(self, limit: int) -> tuple[int, int]:
        """The most tokens of one summary and of them all; (0, 0) if `limit` is too little to say anything.

        One has a share of a block, halved until `limit` holds it. All have a round number, so near limits have the same summaries.
        """
        cap = self.part_tokens // SHARE
        while cap > limit >= MIN_SUMMARY_TOKENS:
            cap = max(cap // 2, MIN_SUMMARY_TOKENS)
        return (cap, max(cap, limit - limit % (cap + JOIN_TOKENS))) if cap <= limit else (0, 0)

    def _blocks(self, exchanges: Sequence[Exchange]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The text of each block and the messages in it. An exchange that is larger than a block is cut into pieces."""
        texts: list[str] = []
        names: list[str] = []
        size = 0
        for exchange in exchanges:
            for text in split(exchange.transcript, self.part_tokens, self.count):
                cost = self.count(text) + JOIN_TOKENS
                if texts and size + cost > self.part_tokens:
                    yield "\n".join(texts), tuple(names)
                    texts, names, size = [], [], 0
                texts.append(text)
                names.extend(exchange.names)
                size += cost
        yield "\n".join(texts), tuple(names)

    def _merge(self, nodes: Sequence[_Node], limit: int, cap: int) -> list[_Node]:
        """Groups of summaries replaced by their summary, oldest first, until all fits or this level is done."""
        size = _size(nodes)
        merged: list[_Node] = []
        done = 0
        for whole in self._groups(nodes, cap):
            group = _fewest(whole, size - limit, cap)
            names = (name for node in group for name in node.names)
            merged.append(self._node(_joined(group), tuple(names), cap, group) if len(group) > 1 else group[0])
            done += len(group)
            size += merged[-1].cost - sum(node.cost for node in group)
            if size <= limit:
                break
        return [*merged, *nodes[done:]]

    def _groups(self, nodes: Sequence[_Node], cap: int) -> Iterator[list[_Node]]:
        """A group ends where one more summary might not fit, however long it is: so what comes next never moves the end."""
        group: list[_Node] = []
        size = 0
        for node in nodes:
            group.append(node)
            size += node.cost
            if size + cap + JOIN_TOKENS > self.part_tokens:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _node(self, text: str, names: tuple[str, ...], cap: int, children: Sequence[_Node] = ()) -> _Node:
        summary, method = self._summarise(text, cap)
        height = 1 + max((node.height for node in children), default=0)
        method = _method([method, *(node.method for node in children)])
        return _Node(summary, self.count(summary) + JOIN_TOKENS, names, method, height)

    def _summarise(self, text: str, cap: int) -> tuple[str, Method | None]:
        """At most `cap` tokens that say what `text` says, and who chose them. A text that is short enough stands as it is."""
        if self.count(text) <= cap:
            return text, None
        kinds: tuple[Method, ...] = ("model", "extractive")
        for kind in kinds:
            known = self.cache.get(self._key(kind, cap, text), None) if self.cache is not None else None
            if known and self.count(known) <= cap:
                return known, kind
        return self._written(text, cap)

    def _written(self, text: str, cap: int) -> tuple[str, Method]:
        """By the model if it can: what it fails at once, it may do later, but a text of no use will not get better."""
        if self.write is None or (self.max_writes is not None and self._num_writes >= self.max_writes):
            return self._extract(text, cap), "extractive"
        self._num_writes += 1
        try:
            summary = self.write(text, cap).strip()
        except InterruptedRunError:
            raise
        except LocalragError:
            return self._extract(text, cap), "extractive"
        kind: Method = "model"
        if not summary or self.count(summary) > cap:
            summary, kind = self._extract(text, cap), "extractive"
        if self.cache is not None:
            self.cache.put(self._key(kind, cap, text), summary)
        return summary, kind

    def _extract(self, text: str, cap: int) -> str:
        """The text's own sentences. Those of the last `cover` are remembered, for nearly all are wanted again by the next."""
        known = self._extracts_before.get((cap, text))
        self._extracts[cap, text] = extract(text, cap, self.count) if known is None else known
        return self._extracts[cap, text]

    def _key(self, kind: Method, cap: int, text: str) -> str:
        made_of = dumps(["rolling", kind, self.model, cap, text], ensure_ascii=False, separators=(",", ":"))
        return blake2b(made_of.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _joined(nodes: Sequence[_Node]) -> str:
    return "\n".join(node.text for node in nodes if node.text)


def _size(nodes: Sequence[_Node]) -> int:
    """Tokens of the summaries put together, never less than they are."""
    return sum(node.cost for node in nodes) - JOIN_TOKENS


def _fewest(group: list[_Node], excess: int, cap: int) -> list[_Node]:
    """The oldest of a group whose summary of `cap` tokens saves `excess`, two at least; the whole group if that is not enough."""
    saved = -cap - JOIN_TOKENS
    for num, node in enumerate(group, 1):
        saved += node.cost
        if num > 1 and saved >= excess:
            return group[:num]
    return group


def _method(methods: Iterable[Method | None]) -> Method | None:
    """One extract among them, and the whole cannot be called the model's."""
    used = {method for method in methods if method}
    return "extractive" if "extractive" in used else "model" if used else None
