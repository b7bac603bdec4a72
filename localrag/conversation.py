"""Conversations: split one into its current question and past exchanges, choose the newest that fit, and summarise the rest.

An exchange is never separated: a question stays with its answer, a tool call with its result. The newest exchanges are kept
without a gap, so the oldest are dropped. A rolling summary covers the dropped ones; most of it stays the same as the
conversation goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from json import dumps
from typing import Literal, NamedTuple

from localrag.errors import InterruptedRunError, LocalragError, UsageError
from localrag.summary import SummaryCache, extract
from localrag.summary import split as split_text
from localrag.text.thinking import without_thoughts
from localrag.types import Message

_SPEAKERS = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


class Numbered(NamedTuple):
    """A message and its number in the conversation, from 1."""

    number: int
    message: Message

    @property
    def name(self) -> str:
        """The name of this message in ledgers."""
        return f"message {self.number}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages that are kept or dropped together: a question and everything up to the next question."""

    messages: tuple[Numbered, ...]

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.messages)

    @property
    def transcript(self) -> str:
        """The messages as lines that begin with `User: …` or `Assistant: …`; further lines of a message are indented."""
        lines = []
        for _, message in self.messages:
            text = replace(message, content=without_thoughts(message.content)).text if message.role == "assistant" else message.content
            lines.append(f"{_SPEAKERS[message.role]}: " + "\n  ".join(text.strip().splitlines()))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Split:
    """A conversation split up: the system text, the past exchanges (oldest first), and the current question.

    `pinned` are the past exchanges that are always sent, `history` the others.
    """

    system: str
    history: tuple[Exchange, ...]
    current: tuple[Numbered, ...]
    pinned: tuple[Exchange, ...] = ()


def split(messages: Sequence[Message], pinned: Collection[int] = (), *, needs_question: bool = True) -> Split:
    """Separate the current question from past exchanges. `pinned` are numbers of messages whose exchanges are always sent.

    `current` begins with the user messages since the last answer and includes the tool round after them, if any. System
    messages are joined in order, wherever they are. Raises UsageError if there is no question since the last answer. Without
    `needs_question`, `current` is then empty and the last exchange is pinned.
    """
    system: list[str] = []
    runs: list[list[Numbered]] = []
    answered = True
    for number, message in enumerate(messages, 1):
        if message.role == "system":
            system.append(message.content)
            continue
        if not runs or (answered and message.role == "user"):
            runs.append([])
            answered = False
        answered = answered or message.role == "assistant"
        runs[-1].append(Numbered(number, message))
    last = runs.pop() if runs else []
    if not any(message.role == "user" for _, message in last) or last[-1].message.role == "assistant":
        if needs_question:
            raise UsageError("There is no question since the last answer.", hint="End the conversation with a user message.")
        pinned = {*pinned, *(number for number, _ in last)}
        runs, last = ([*runs, last] if last else runs), []
    over = [Exchange(tuple(run)) for run in runs]
    history: list[Exchange] = []
    pinned_exchanges: list[Exchange] = []
    for exchange in over:
        is_pinned = any(number in pinned for number, _ in exchange.messages)
        (pinned_exchanges if is_pinned else history).append(exchange)
    return Split("\n\n".join(system), tuple(history), tuple(last), tuple(pinned_exchanges))


def search_query(messages: Sequence[Message], *, needs_question: bool = True) -> str:
    """Return the search query: all user messages since the last answer, joined by empty lines. Raises UsageError as `split` does.

    Without `needs_question`, returns "" if there is no question.
    """
    current = split(messages, needs_question=needs_question).current
    texts = [message.content.strip() for _, message in current if message.role == "user"]
    if current and not any(texts):
        raise UsageError("The user text is empty.", hint="Write a text, or leave it out.")
    return "\n\n".join(text for text in texts if text)


def newest(history: Sequence[Exchange], max_messages: int) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """Return (kept, dropped): the newest whole exchanges with at most `max_messages` messages in total, and those before them."""
    return fit(history, max_messages, len)


def fit(history: Sequence[Exchange], room: int, cost: Callable[[Exchange], int]) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """Return (kept, dropped): the newest whole exchanges whose costs add up to at most `room`, and those before them.

    The first exchange that does not fit ends the search, so that the conversation has no gaps.
    """
    first = len(history)
    while first and (room := room - cost(history[first - 1])) >= 0:
        first -= 1
    return tuple(history[first:]), tuple(history[:first])


MIN_SUMMARY_TOKENS = 16
"""A shorter summary would say nothing and is not written."""
SHARE = 8
"""A summary has at most 1/SHARE of the tokens of its text."""
JOIN_TOKENS = 2
"""The most tokens that joining two texts adds (measured)."""

Method = Literal["model", "extractive"]


@dataclass(frozen=True, slots=True)
class Covered:
    """A summary of old exchanges.

    `names` are the messages that it covers. `levels` is 0 without a summary, 1 for summaries of messages, and one more each
    time that summaries were summarised again.
    """

    text: str = ""
    num_tokens: int = 0
    names: tuple[str, ...] = ()
    method: Method = "extractive"
    levels: int = 0


@dataclass(frozen=True, slots=True)
class _Node:
    """The summary of a stretch of the conversation. `method` is None for text that is quoted in full."""

    text: str
    cost: int
    names: tuple[str, ...]
    method: Method | None
    height: int


@dataclass(slots=True)
class Rolling:
    """Summarises old exchanges so that most of the summary stays the same while the conversation goes on.

    Exchanges fill blocks of `part_tokens`, starting with the first exchange, and each block is summarised. If the summaries are
    too long together, the oldest are summarised again in groups, level by level, so that newer text keeps more detail. The end
    of a block or group depends only on the text before it. So one more exchange changes only the last summary of a level, and
    the group that is merged to make room for it; all others come from the cache.

    `write(text, limit)` has a model write at most `limit` tokens, from a text of at most `part_tokens`. If it is None, or
    fails, sentences are extracted instead, unless the cache has a summary. One `cover` writes at most `max_writes` texts and
    extracts the rest; a later `cover` continues. `count` counts tokens as they are sent; `model` identifies the writer in the
    cache.
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
        """Summarise all exchanges, oldest first, in at most `limit` tokens. The summary is empty if `limit` is too small."""
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
        """Return the maximum tokens of one summary and of all together; (0, 0) if `limit` is too small to say anything.

        One summary gets 1/SHARE of a block, halved until it fits `limit`. Both numbers are rounded, so that similar limits give
        the same summaries.
        """
        cap = self.part_tokens // SHARE
        while cap > limit >= MIN_SUMMARY_TOKENS:
            cap = max(cap // 2, MIN_SUMMARY_TOKENS)
        return (cap, max(cap, limit - limit % (cap + JOIN_TOKENS))) if cap <= limit else (0, 0)

    def _blocks(self, exchanges: Sequence[Exchange]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the text of each block and the names of its messages. An exchange larger than a block is split."""
        texts: list[str] = []
        names: list[str] = []
        size = 0
        for exchange in exchanges:
            for text in split_text(exchange.transcript, self.part_tokens, self.count):
                cost = self.count(text) + JOIN_TOKENS
                if texts and size + cost > self.part_tokens:
                    yield "\n".join(texts), tuple(names)
                    texts, names, size = [], [], 0
                texts.append(text)
                names.extend(exchange.names)
                size += cost
        yield "\n".join(texts), tuple(names)

    def _merge(self, nodes: Sequence[_Node], limit: int, cap: int) -> list[_Node]:
        """Replace groups of summaries by one summary each, oldest first, until all fit or this level is done."""
        size = _size(nodes)
        merged: list[_Node] = []
        num_done = 0
        for whole in self._groups(nodes, cap):
            group = _fewest(whole, size - limit, cap)
            names = (name for node in group for name in node.names)
            merged.append(self._node(_joined(group), tuple(names), cap, group) if len(group) > 1 else group[0])
            num_done += len(group)
            size += merged[-1].cost - sum(node.cost for node in group)
            if size <= limit:
                break
        return [*merged, *nodes[num_done:]]

    def _groups(self, nodes: Sequence[_Node], cap: int) -> Iterator[list[_Node]]:
        """Group summaries. A group ends when one more summary might not fit, however long it is, so later summaries never move its end."""
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
        """Summarise `text` in at most `cap` tokens, and name the method. A text that is short enough is returned unchanged."""
        if self.count(text) <= cap:
            return text, None
        kinds: tuple[Method, ...] = ("model", "extractive")
        for kind in kinds:
            cached_summary = self.cache.get(self._key(kind, cap, text), None) if self.cache is not None else None
            if cached_summary and self.count(cached_summary) <= cap:
                return cached_summary, kind
        return self._written(text, cap)

    def _written(self, text: str, cap: int) -> tuple[str, Method]:
        """Use the model if possible. Errors are not cached, because they may pass; an unusable text is, because it would not improve."""
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
        """Extract sentences of the text. Extracts of the last `cover` are cached, because the next one needs nearly all of them."""
        cached_extract = self._extracts_before.get((cap, text))
        self._extracts[cap, text] = extract(text, cap, self.count) if cached_extract is None else cached_extract
        return self._extracts[cap, text]

    def _key(self, kind: Method, cap: int, text: str) -> str:
        made_of = dumps(["rolling", kind, self.model, cap, text], ensure_ascii=False, separators=(",", ":"))
        return blake2b(made_of.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _joined(nodes: Sequence[_Node]) -> str:
    return "\n".join(node.text for node in nodes if node.text)


def _size(nodes: Sequence[_Node]) -> int:
    """Return an upper bound of the tokens of all summaries joined."""
    return sum(node.cost for node in nodes) - JOIN_TOKENS


def _fewest(group: list[_Node], excess: int, cap: int) -> list[_Node]:
    """Return the oldest nodes of a group, at least two, whose summary of `cap` tokens saves `excess`; the whole group if that is
    not enough.
    """
    saved = -cap - JOIN_TOKENS
    for num, node in enumerate(group, 1):
        saved += node.cost
        if num > 1 and saved >= excess:
            return group[:num]
    return group


def _method(methods: Iterable[Method | None]) -> Method | None:
    """Combine methods: with one extract among them, the whole is extractive."""
    used = {method for method in methods if method}
    return "extractive" if "extractive" in used else "model" if used else None
