"""Separate a reasoning model's thoughts from its answer, while it writes.

Models mark thoughts in different ways, which their chat templates reveal: between two marks, or as messages in channels
(gpt-oss). Marks are searched for in text, because they are one token in some vocabularies and several in others. The text of
control tokens is normally hidden; a splitter gets the text of those that make up marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Literal, Protocol

Part = Literal["thoughts", "answer", "both"]
"""What a piece of output belongs to: thoughts, with their marks and the white space around them; the answer; or the end of one and the
beginning of the other."""

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
    """Reads a model's output piece by piece and separates thoughts from the answer."""

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
        """Whether no more output can follow."""
        ...

    def part_of(self, text: str) -> Part:
        """Tell what a piece would belong to if it came next. Reads nothing. A part of an opening mark counts as answer."""
        ...

    def feed(self, text: str) -> tuple[str, str]:
        """Read a piece. Return (thought, answer): the text that is now certain to belong to each."""
        ...

    def end(self) -> None:
        """End the thoughts from outside: the answer comes next. Text held back because it might begin a mark is dropped."""
        ...

    def finish(self) -> tuple[str, str]:
        """Read the end of the output. Return (thought, answer): the text that was held back."""
        ...


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """How a family of models marks thoughts: between `opens` and `closes`, or in channels if both are empty.

    `end` is the text that ends thoughts that have used up their tokens, and begins the answer.
    """

    opens: str
    closes: str
    writes_marks: bool = True
    """Whether the template itself writes `opens`, so that its models are known to think."""

    @property
    def end(self) -> str:
        """The text that ends thoughts and begins the answer."""
        return f"\n{self.closes}\n\n" if self.closes else f"{_END}{_START}assistant{_FINAL}"

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that mark thoughts."""
        return (self.opens, self.closes) if self.closes else _CHANNEL_MARKS

    def is_open(self, tail: str) -> bool:
        """Tell whether a prompt that ends with `tail`, text of the template, ends inside thoughts."""
        return bool(self.opens) and tail.rfind(self.opens) > tail.rfind(self.closes)

    def has_ended(self, tail: str) -> bool:
        """Tell whether a prompt that ends with `tail` ends after its thoughts."""
        return tail.endswith(_FINAL) if not self.closes else tail.rstrip().endswith(self.closes)

    def without(self, tail: str) -> str:
        """Return the text to append to a prompt that ends with `tail` so that the model does not think; "" if it would not anyway."""
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
    """Return the form of a chat template; None if its models do not think."""
    if _CHANNEL in template and "analysis" in template:
        return ThinkingForm("", "")
    for opens, closes in _PAIRS:
        if opens in template or closes in template:
            return ThinkingForm(opens, closes, writes_marks=opens in template)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How an engine handles the thoughts of a prompt: at most `max_tokens`, including the `end_ids` that end them.

    `mark_ids` are control tokens whose text is part of a mark. `is_open`: the prompt ends inside thoughts. With `shows_beginning`, the
    first token tells thoughts from an answer, so a grammar can leave thoughts alone.
    """

    form: ThinkingForm
    is_open: bool
    max_tokens: int
    end_ids: tuple[int, ...]
    mark_ids: frozenset[int]
    shows_beginning: bool = False


def mark_ids(form: ThinkingForm, special_texts: Iterable[tuple[str, int]]) -> frozenset[int]:
    """Return the control tokens of a vocabulary that make up a form's marks."""
    return frozenset(token for text, token in special_texts if text in form.marks)


class _Pair:
    """Thoughts between two marks, before the answer. Marks inside the answer are part of it."""

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

    def part_of(self, text: str) -> Part:
        ahead = copy(self)
        _, answer = ahead.feed(text)
        if ahead.is_thinking or (not ahead.is_answering and text and not text.strip()):
            return "thoughts"
        if self.is_thinking:
            return "both" if answer else "thoughts"
        return "answer"

    def _begin(self) -> None:
        """Handle the first text. A model may open thoughts that its prompt has already opened."""
        text = self._held.lstrip()
        if text.startswith(self._opens):
            self._held, self._state = text[len(self._opens) :], "thinking"
        elif not self._opens.startswith(text):
            self._state = "thinking" if self._is_open else "answering"

    def _think(self) -> str:
        """Read thoughts up to their end. White space is held back along with a possible start of the mark, and dropped before it."""
        thought, mark, rest = self._held.partition(self._closes)
        if mark:
            self._held, self._state = rest, "after"
            return self._first(thought.rstrip())
        thought = self._held[: len(self._held) - may_begin(self._held, self._closes)].rstrip()
        self._held = self._held[len(thought) :]
        return self._first(thought)

    def _first(self, thought: str) -> str:
        """Remove white space before the first thought."""
        thought = thought if self._has_thought else thought.lstrip()
        self._has_thought = self._has_thought or bool(thought)
        return thought

    def end(self) -> None:
        self._held, self._state = "", "after"

    def finish(self) -> tuple[str, str]:
        text, self._held = self._held, ""
        if self._state == "after":
            return "", ""
        return (text, "") if self.is_thinking else ("", text)


class _Channels:
    """Messages of gpt-oss: `final` is the answer and ends the output; messages in other channels are thoughts."""

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
            piece, ends = self._said()
            if self._channel == _FINAL_CHANNEL:
                answer += piece
            elif piece:
                thought += self._gap + piece
                self._gap = ""
            if not ends:
                break
            self._gap = "\n\n"
            self._channel = _OVER if self.is_answering else None
        return thought, answer

    def part_of(self, text: str) -> Part:
        ahead = copy(self)
        _, answer = ahead.feed(text)
        if ahead.is_thinking:
            return "thoughts"
        if self._held.strip() or self._gap or self._channel is not None:
            return "both" if answer else "thoughts"
        return "answer"

    def _read_header(self) -> bool:
        """Tell whether the header of a message is complete. Output that begins without one is the answer."""
        text = self._held.lstrip()
        if text and not self._gap and not any(text.startswith(mark) or mark.startswith(text) for mark in _CHANNEL_MARKS):
            self._channel = _FINAL_CHANNEL
            return True
        header, mark, rest = self._held.partition(_MESSAGE)
        if mark:
            words = header.partition(_CHANNEL)[2].split()
            self._channel, self._held = words[0] if words else _FINAL_CHANNEL, rest
        return bool(mark)

    def _said(self) -> tuple[str, bool]:
        """Return the held text that belongs to the message, and whether the message ends there."""
        ends = [at for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        at = min(ends) if ends else len(self._held) - max(may_begin(self._held, mark) for mark in _ENDS)
        text, self._held = self._held[:at], self._held[at:].removeprefix(_END)
        return text, bool(ends)

    def end(self) -> None:
        self._held, self._channel = "", _FINAL_CHANNEL

    def finish(self) -> tuple[str, str]:
        text, self._held = self._held, ""
        if self._channel is None or self.is_over:
            return "", ""
        return ("", text) if self.is_answering else (text, "")


def without_thoughts(text: str) -> str:
    """Return an answer without the thoughts before it, in any of these forms: this is how it goes back to a model as an earlier
    answer.

    A text has thoughts if it begins with an opening mark or with a channel's header. If the prompt held the opening mark,
    thoughts end with a line that begins with the closing mark. Any other text is returned unchanged, and so are thoughts that
    never end: an answer that only mentions the marks, or a tool call that contains them, loses nothing.
    """
    if _HEADER.match(text):
        return _without_channels(text)
    pairs = [(opens, closes) for opens, closes in _PAIRS if text.lstrip().startswith(opens)] or _PAIRS
    ends = [end for opens, closes in pairs if (end := _end_of_thoughts(text, opens, closes)) is not None]
    return text[min(ends) :].lstrip() if ends else text


def _end_of_thoughts(text: str, opens: str, closes: str) -> int | None:
    body = text.lstrip()
    line_ends = re.compile(rf"^[ \t]*{re.escape(closes)}", re.MULTILINE).search(text)
    if not body.startswith(opens):
        is_open = line_ends is not None and opens not in text[: line_ends.start()]
        return line_ends.end() if line_ends is not None and is_open else None
    if line_ends is not None and body[len(opens) :].lstrip(" \t").startswith("\n"):
        return line_ends.end()
    at = text.find(closes)
    return at + len(closes) if at >= 0 else None


def _without_channels(text: str) -> str:
    """Return the message of the channel `final`. Without one, return all but the analysis: tool calls are in the commentary."""
    messages: list[str] = []
    at = 0
    while header := _HEADER.match(text, at):
        if header["channel"] == _FINAL_CHANNEL:
            return _LAST_ENDS.sub("", text[header.end() :])
        end = _MESSAGE_ENDS.search(text, header.end())
        if end is None and header["channel"] == "analysis":
            return text if not messages else "".join(messages).lstrip()  # thoughts that never end
        stop = end.end() if end is not None else len(text)
        if header["channel"] != "analysis":
            messages.append(text[at:stop])
        at = stop
    return ("".join(messages) + text[at:]).lstrip()


def may_begin(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` that the text ends with."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
