"""How a conversation is shown to a chat template, and how what it renders is taken apart again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest

from localrag.tokens import Segment


@dataclass(frozen=True, slots=True)
class Turn:
    """A message as the template is shown it: its role, and which messages' contents it joins by an empty line."""

    role: str
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToolText:
    """Where a text of the tools stands, by its index."""

    index: int


Part = str | int | ToolText | Segment
"""Scaffold, the content of a message by index, a text of the tools, or scaffold that is there because of the tools."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered conversation: what stands where, and how its roles and its tools were adapted."""

    parts: tuple[Part, ...]
    turns: tuple[Turn, ...]
    adaptation: str | None
    tools_adaptation: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a template did not take the turns it was shown: what it said, or if `lost`, what it did to the contents.

    `altered` says that it wrote something of them other than whole.
    """

    reason: str
    lost: bool = False
    altered: bool = False


# How the roles of a conversation are adapted to a template that refuses them, simplest first: what is done, and which
# roles become the user's. Wherever anything is adapted, neighbours of one role are joined.
ADAPTATIONS: tuple[tuple[str | None, frozenset[str]], ...] = (
    (None, frozenset()),
    ("neighbours of one role are joined", frozenset()),
    ("the system text heads the next user message", frozenset({"system"})),
    ("tool results are user messages", frozenset({"tool"})),
    ("system texts and tool results are part of the user's messages", frozenset({"system", "tool"})),
)


def adapt(turns: Sequence[Turn], as_user: frozenset[str], *, join: bool) -> tuple[Turn, ...]:
    adapted: list[Turn] = []
    for turn in turns:
        role = "user" if turn.role in as_user else turn.role
        if join and adapted and adapted[-1].role == role:
            adapted[-1] = Turn(role, (*adapted[-1].messages, *turn.messages))
        else:
            adapted.append(Turn(role, turn.messages))
    return tuple(adapted)


def with_listing(roles: Sequence[str]) -> tuple[Turn, ...]:
    """A turn a message, and a list of tools, as the message after the last, at the end of the first system text or as one of its own."""
    turns = [Turn(role, (index,)) for index, role in enumerate(roles)]
    if "system" not in roles:
        return (Turn("system", (len(roles),)), *turns)
    first = roles.index("system")
    turns[first] = Turn("system", (first, len(roles)))
    return tuple(turns)


def placeholder(nonce: str, index: object) -> str:
    # Letters of both cases, so that no change of case leaves it as it was; private-use characters, so that nothing trims it.
    return f"\ue000aZ{nonce}:{index}\ue001"


def split(text: str, nonce: str, turns: Sequence[Turn]) -> tuple[str | int, ...] | Refusal:
    """The rendered text as scaffold and indices of messages, if each content came out once and whole."""
    pieces = re.split(placeholder(nonce, "(0|[1-9][0-9]{0,8})"), text)
    scaffold, found = pieces[::2], [int(index) for index in pieces[1::2]]
    counts = Counter(found)
    marks = (nonce, "\ue000", "\ue001")
    altered = any(mark in piece.lower() for piece in scaffold for mark in marks)
    if altered or not counts.keys() <= {index for turn in turns for index in turn.messages}:
        return Refusal("alters or splits the content of messages", lost=True, altered=True)
    for turn in turns:
        least, most = min(counts[index] for index in turn.messages), max(counts[index] for index in turn.messages)
        if (least, most) != (1, 1):
            return Refusal(f"{'drops' if least == 0 else 'repeats'} the content of the {turn.role} message", lost=True)
    parts = chain.from_iterable(zip_longest(scaffold, found, fillvalue=""))
    return tuple(part for part in parts if part != "")


# Scaffold is compared word by word. What stands in brackets is one word, so that no special string is cut in two.
_BRACKETS = r"<[^<>\n]*>|\[[^\[\]\n]*\]"
_WORD = re.compile(rf"{_BRACKETS}|\s|(?:(?!{_BRACKETS})\S)+")


def mark_tools(parts: Sequence[Part], bare: Sequence[Part]) -> tuple[Part, ...]:
    """`parts` with the scaffold that is not in `bare`, the same conversation without tools, marked as theirs.

    Between one message's content and the next, that is what stands between the longest common beginning and end.
    """
    ours, theirs = _between_messages(parts), _between_messages(bare)
    if [messages for messages, _ in ours] != [messages for messages, _ in theirs]:  # messages moved: look at the whole as one
        ours, theirs = [((), list(parts))], [((), list(bare))]
    marked: list[Part] = []
    for (messages, gap), (_, bare_gap) in zip(ours, theirs, strict=True):
        marked += [*messages, *_mark(gap, bare_gap)]
    return tuple(marked)


def _between_messages(parts: Sequence[Part]) -> list[tuple[tuple[int, ...], list[Part]]]:
    """The parts in front of the first message, then each message with the parts behind it."""
    gaps: list[tuple[tuple[int, ...], list[Part]]] = [((), [])]
    for part in parts:
        if isinstance(part, int):
            gaps.append(((part,), []))
        else:
            gaps[-1][1].append(part)
    return gaps


def _mark(parts: Sequence[Part], bare: Sequence[Part]) -> list[Part]:
    ours, theirs = _words(parts), _words(bare)
    most = min(len(ours), len(theirs))
    start = next((i for i in range(most) if ours[i] != theirs[i]), most)
    end = next((i for i in range(most - start) if ours[-1 - i] != theirs[-1 - i]), most - start)
    middle = _joined(ours[start : len(ours) - end])
    marked = [Segment(part, tools=True) if isinstance(part, str) else part for part in middle]
    return [*_joined(ours[:start]), *marked, *_joined(ours[len(ours) - end :])]


def _words(parts: Sequence[Part]) -> list[Part]:
    return [word for part in parts for word in (_WORD.findall(part) if isinstance(part, str) else [part])]


def _joined(words: Sequence[Part]) -> list[Part]:
    joined: list[Part] = []
    for is_text, group in groupby(words, key=lambda word: isinstance(word, str)):
        run = list(group)
        joined += ["".join(map(str, run))] if is_text else run
    return joined
