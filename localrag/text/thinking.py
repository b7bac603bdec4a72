"""What a reasoning model thinks, told apart from what it answers while it writes.

Models mark it in their own ways, which their chat templates show: thoughts between two marks, or messages in channels (gpt-oss). A mark
is looked for in text, for in some vocabularies it is one token and in others several; of control tokens, whose text is not shown else,
those that marks are made of are shown to what splits here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

_PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_CHANNEL, _MESSAGE, _START, _END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
_CHANNEL_MARKS = (_CHANNEL, _MESSAGE, _START, _END)
_ENDS = (_END, _START, _CHANNEL)
_FINAL_CHANNEL, _OVER = "final", "(over)"
_FINAL = f"{_CHANNEL}{_FINAL_CHANNEL}{_MESSAGE}"
_HEADER = re.compile(
    r"\s*(?:<\|start\|>assistant[^<\n]{0,100})?<\|channel\|>(?P<channel>[a-z]+)\b[^<\n]{0,200}(?:<\|constrain\|>[^<\n]{0,40})?<\|message\|>"
)
_MESSAGE_ENDS = re.compile(r"<\|end\|>|(?=<\|start\|>assistant[^<\n]{0,100}<\|channel\|>)")
_LAST_ENDS = re.compile(r"(?:<\|end\|>|<\|return\|>)\s*\Z")


class Splitter(Protocol):
    """Reads what a model writes, piece by piece, and tells thoughts from the answer."""

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts have begun and not ended."""
        ...

    @property
    def is_answering(self) -> bool:
        """Whether the answer has begun."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing can follow any more."""
        ...

    def feed(self, text: str) -> tuple[str, str]:
        """(thought, answer): what is certain now of both."""
        ...

    def end(self) -> None:
        """End the thoughts from outside: what comes now is the answer. What was held back, which may have begun a mark, is dropped."""
        ...

    def finish(self) -> tuple[str, str]:
        """(thought, answer): what was held back, as there is no more."""
        ...


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """How a family of models marks thoughts: `opens` and `closes` around them, or channels, where both are empty.

    `end` is what ends thoughts that have taken all their tokens, and begins the answer.
    """

    opens: str
    closes: str
    writes_marks: bool = True
    """Whether the template writes `opens` itself, so that a model of it is known to think."""

    @property
    def end(self) -> str:
        return f"\n{self.closes}\n\n" if self.closes else f"{_END}{_START}assistant{_FINAL}"

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts by which thoughts are told."""
        return (self.opens, self.closes) if self.closes else _CHANNEL_MARKS

    def is_open(self, tail: str) -> bool:
        """Whether a prompt with this end, which is the template's, ends in thoughts."""
        return bool(self.opens) and tail.rfind(self.opens) > tail.rfind(self.closes)

    def has_ended(self, tail: str) -> bool:
        """Whether a prompt with this end leaves nothing to think."""
        return tail.endswith(_FINAL) if not self.closes else tail.rstrip().endswith(self.closes)

    def without(self, tail: str) -> str:
        """What must follow a prompt with this end so that the model does not think; nothing where it would not."""
        if self.has_ended(tail):
            return ""
        if not self.closes:
            return _FINAL
        if self.is_open(tail):
            return f"\n{self.closes}\n\n"
        return f"{self.opens}\n\n{self.closes}\n\n" if self.writes_marks else ""

    def splitter(self, *, is_open: bool) -> Splitter:
        return _Pair(self.opens, self.closes, is_open=is_open) if self.closes else _Channels()


def form_of(template: str) -> ThinkingForm | None:
    """How a model thinks whose chat template this is; None for one that does not."""
    if _CHANNEL in template and "analysis" in template:
        return ThinkingForm("", "")
    for opens, closes in _PAIRS:
        if opens in template or closes in template:
            return ThinkingForm(opens, closes, writes_marks=opens in template)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """What an engine needs to know of a prompt's thoughts: at most `max_tokens`, the fewer `end_ids`, which end them, included.

    `mark_ids` are control tokens whose text is part of a mark; `is_open`: the prompt ends in thoughts.
    """

    form: ThinkingForm
    is_open: bool
    max_tokens: int
    end_ids: tuple[int, ...]
    mark_ids: frozenset[int]


def mark_ids(form: ThinkingForm, special_texts: Iterable[tuple[str, int]]) -> frozenset[int]:
    """The control tokens of a vocabulary that a form's marks are made of."""
    return frozenset(token for text, token in special_texts if text in form.marks)


class _Pair:
    """Thoughts between two marks, before the answer. Marks in the answer are part of it."""

    def __init__(self, opens: str, closes: str, *, is_open: bool) -> None:
        self._opens = opens
        self._closes = closes
        self._state: Literal["before", "thinking", "after", "answering"] = "before"
        self._is_open = is_open
        self._has_thought = False
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        return self._state == "thinking" or (self._state == "before" and self._is_open)

    @property
    def is_answering(self) -> bool:
        return self._state == "answering"

    @property
    def is_over(self) -> bool:
        return False

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        if self._state == "before":
            self._begin()
        thought = self._think() if self._state == "thinking" else ""
        if self._state == "after" and self._held.strip():
            self._held, self._state = self._held.lstrip(), "answering"
        answer = ""
        if self._state == "answering":
            answer, self._held = self._held, ""
        return thought, answer

    def _begin(self) -> None:
        """A model may open thoughts that its prompt has opened already."""
        said = self._held.lstrip()
        if said.startswith(self._opens):
            self._held, self._state = said[len(self._opens) :], "thinking"
        elif not self._opens.startswith(said):
            self._state = "thinking" if self._is_open else "answering"

    def _think(self) -> str:
        """Thoughts up to their end. White space is held back with what may begin the mark: there is none before it."""
        thought, mark, rest = self._held.partition(self._closes)
        if mark:
            self._held, self._state = rest, "after"
            return self._first(thought.rstrip())
        thought = self._held[: len(self._held) - may_begin(self._held, self._closes)].rstrip()
        self._held = self._held[len(thought) :]
        return self._first(thought)

    def _first(self, thought: str) -> str:
        """Without the white space before all thoughts."""
        thought = thought if self._has_thought else thought.lstrip()
        self._has_thought = self._has_thought or bool(thought)
        return thought

    def end(self) -> None:
        self._held, self._state = "", "after"

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._state == "after":
            return "", ""
        return (held, "") if self.is_thinking else ("", held)


class _Channels:
    """Messages of gpt-oss: `final` is the answer, what comes on other channels are thoughts, and the answer ends it all."""

    def __init__(self) -> None:
        self._held = ""
        self._channel: str | None = None  # in a header
        self._gap = ""

    @property
    def is_thinking(self) -> bool:
        return not self.is_answering

    @property
    def is_answering(self) -> bool:
        return self._channel in (_FINAL_CHANNEL, _OVER)

    @property
    def is_over(self) -> bool:
        return self._channel == _OVER

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        thought = answer = ""
        while not self.is_over and (self._channel is not None or self._read_header()):
            said, ends = self._said()
            if self._channel == _FINAL_CHANNEL:
                answer += said
            elif said:
                thought += self._gap + said
                self._gap = ""
            if not ends:
                break
            self._gap = "\n\n"
            self._channel = _OVER if self.is_answering else None
        return thought, answer

    def _read_header(self) -> bool:
        """Whether the header of a message is there whole. What begins without one is the answer."""
        said = self._held.lstrip()
        if said and not self._gap and not any(said.startswith(mark) or mark.startswith(said) for mark in _CHANNEL_MARKS):
            self._channel = _FINAL_CHANNEL
            return True
        header, mark, rest = self._held.partition(_MESSAGE)
        if mark:
            words = header.partition(_CHANNEL)[2].split()
            self._channel, self._held = words[0] if words else _FINAL_CHANNEL, rest
        return bool(mark)

    def _said(self) -> tuple[str, bool]:
        """What of the held text belongs to the message, and whether that ends it."""
        ends = [at for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        at = min(ends) if ends else len(self._held) - max(may_begin(self._held, mark) for mark in _ENDS)
        said, self._held = self._held[:at], self._held[at:].removeprefix(_END)
        return said, bool(ends)

    def end(self) -> None:
        self._held, self._channel = "", _FINAL_CHANNEL

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._channel is None or self.is_over:
            return "", ""
        return ("", held) if self.is_answering else (held, "")


def without_thoughts(text: str) -> str:
    """An answer without the thoughts before it, in whichever of these forms: what goes back to a model as its earlier answer.

    A text has thoughts if it begins with the mark that opens them, or with a channel's header; where the prompt had the opening mark, they
    end with a line that begins with the closing one. Any other text is returned as it is, and so are thoughts that never end: an answer
    that only speaks of the marks, or a tool call that holds them, loses nothing.
    """
    if _HEADER.match(text):
        return _without_channels(text)
    pairs = [(opens, closes) for opens, closes in _PAIRS if text.lstrip().startswith(opens)] or _PAIRS
    ends = [end for opens, closes in pairs if (end := _end_of_thoughts(text, opens, closes)) is not None]
    return text[min(ends) :].lstrip() if ends else text


def _end_of_thoughts(text: str, opens: str, closes: str) -> int | None:
    said = text.lstrip()
    line_ends = re.compile(rf"^[ \t]*{re.escape(closes)}", re.MULTILINE).search(text)
    if not said.startswith(opens):
        is_open = line_ends is not None and opens not in text[: line_ends.start()]
        return line_ends.end() if line_ends is not None and is_open else None
    if line_ends is not None and said[len(opens) :].lstrip(" \t").startswith("\n"):
        return line_ends.end()
    at = text.find(closes)
    return at + len(closes) if at >= 0 else None


def _without_channels(text: str) -> str:
    """The message of the last channel, `final`. Without one, all but the analysis: a call of a tool stands in the commentary."""
    kept: list[str] = []
    at = 0
    while header := _HEADER.match(text, at):
        if header["channel"] == _FINAL_CHANNEL:
            return _LAST_ENDS.sub("", text[header.end() :])
        end = _MESSAGE_ENDS.search(text, header.end())
        if end is None and header["channel"] == "analysis":
            return text if not kept else "".join(kept).lstrip()  # thoughts that never end
        stop = end.end() if end is not None else len(text)
        if header["channel"] != "analysis":
            kept.append(text[at:stop])
        at = stop
    return ("".join(kept) + text[at:]).lstrip()


def may_begin(text: str, mark: str) -> int:
    """Length of the longest end of a text that is the beginning of a mark, and not all of it."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
