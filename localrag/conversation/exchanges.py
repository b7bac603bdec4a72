"""A conversation in its parts: what is asked now, what came before it, and what of that is kept.

An exchange is never separated: a question stays with its answer, a tool call with its result. What is kept is always the
newest part without a gap, so what is dropped is always the oldest part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localrag.errors import UsageError
from localrag.text.thinking import without_thoughts
from localrag.types import Message

_SPEAKERS = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


class Numbered(NamedTuple):
    """A message and its place in the conversation as it was given, from 1."""

    number: int
    message: Message

    @property
    def name(self) -> str:
        """How ledgers name it."""
        return f"message {self.number}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages that are kept or dropped together: what was asked, and all that followed up to the next question."""

    messages: tuple[Numbered, ...]

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.messages)

    @property
    def transcript(self) -> str:
        """`User: …` and `Assistant: …` at the beginning of a line and nowhere else: further lines of a message are indented."""
        lines = []
        for _, message in self.messages:
            content = without_thoughts(message.content) if message.role == "assistant" else message.content
            lines.append(f"{_SPEAKERS[message.role]}: " + "\n  ".join(content.strip().splitlines()))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Split:
    """A conversation in its parts: the system text, the exchanges that are over, oldest first, and what is being asked now.

    Of what is over, `pinned` is what is kept whatever it takes, and `history` the rest.
    """

    system: str
    history: tuple[Exchange, ...]
    current: tuple[Numbered, ...]
    pinned: tuple[Exchange, ...] = ()


def split(messages: Sequence[Message], pinned: Collection[int] = (), *, needs_question: bool = True) -> Split:
    """Tell what is asked now from what came before. `pinned` are numbers of messages whose exchanges are kept whatever they take.

    `current` begins with the user messages since the last answer and holds the tool round that followed them, if there was
    one. System messages are joined in order, wherever they stand. UsageError if nothing was asked since the last answer;
    without `needs_question`, `current` is empty then, and the last exchange is pinned.
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
            raise UsageError("There must be a question since the last answer.", hint="End the conversation with a user message.")
        pinned = {*pinned, *(number for number, _ in last)}
        runs, last = ([*runs, last] if last else runs), []
    over = [Exchange(tuple(run)) for run in runs]
    history: list[Exchange] = []
    kept: list[Exchange] = []
    for exchange in over:
        is_pinned = any(number in pinned for number, _ in exchange.messages)
        (kept if is_pinned else history).append(exchange)
    return Split("\n\n".join(system), tuple(history), tuple(last), tuple(kept))


def search_query(messages: Sequence[Message], *, needs_question: bool = True) -> str:
    """The search query: all that the user said since the last answer, joined by empty lines. UsageError as for `split`.

    Without `needs_question`, an empty text where nothing was asked.
    """
    current = split(messages, needs_question=needs_question).current
    said = [message.content.strip() for _, message in current if message.role == "user"]
    if current and not any(said):
        raise UsageError("The user text is empty.", hint="Give a text, or leave it out.")
    return "\n\n".join(text for text in said if text)


def newest(history: Sequence[Exchange], max_messages: int) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """(kept, dropped): the newest whole exchanges that have at most `max_messages` messages together, and those before them."""
    return fit(history, max_messages, len)


def fit(history: Sequence[Exchange], room: int, cost: Callable[[Exchange], int]) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """(kept, dropped): the newest whole exchanges whose costs add up to at most `room`, and those before them.

    The first exchange that does not fit ends it, so that no gap is left in the conversation.
    """
    first = len(history)
    while first and (room := room - cost(history[first - 1])) >= 0:
        first -= 1
    return tuple(history[first:]), tuple(history[:first])
