"""Hide the tool calls and results of a conversation from a chat template, and find them in the rendered text.

A template sees real lists and objects, so that it can go through arguments, sort them, or write them as JSON. It sees their numbers and
booleans, and a placeholder for each name, id, key, text and result. A placeholder ends in one character of each kind that the text has and
that JSON, Python or XML may escape. So the rendered text shows how the template escapes the text that belongs there. Keys sort as before.
"""

from __future__ import annotations

import html
import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from localrag.engine.template_layout import MAX_DEPTH, CallId, CallText, Part, Refusal, Turn
from localrag.text.tool_calls import short_id
from localrag.types import Message

MAX_TEXTS = 50_000
"""Most texts of all calls together. Beyond it, the arguments of a call are one text."""
_MAX_CALL_TEXTS = 2_000
_ID = re.compile(r"[A-Za-z0-9_.:-]{9,64}")
_ID_LETTERS = string.ascii_letters + string.digits
_MARK = re.compile("\ue000([0-9]+)\ue001")


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _as_attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _as_markup(text: str) -> str:
    return html.escape(text, quote=False).replace("'", "&#39;").replace('"', "&#34;")


def _as_json_in_json(text: str) -> str:
    return _as_json(_as_json(text))


ESCAPES: dict[str, Callable[[str], str]] = {
    "": str,
    "json": _as_json,
    "ascii": _as_ascii_json,
    "json in json": _as_json_in_json,
    "attribute": _as_attribute,
    "markup": _as_markup,
    "repr": repr,
}
"""How a template may escape a text. "repr" includes the quotation marks, which depend on the text."""
_KINDS = tuple(
    (re.compile(pattern), sample)
    for pattern, sample in (
        ('"', '"'),
        ("'", "'"),
        ("&", "&"),
        ("<", "<"),
        (">", ">"),
        (r"\\", "\\"),
        (r"\n", "\n"),
        (r"[\t\r]", "\t"),
        (r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\x01"),
        (r"[^\x00-\x7f]", "é"),
    )
)
"""Kinds of characters that are escaped, with one of each."""
_UNPRINTABLE = "\u200b"
"""Stands for letters outside of ASCII that Python's repr escapes."""
_END = "q"
"""The last letter of a placeholder, so that nothing before it is trimmed."""


def _kinds(text: str) -> str:
    """Return one character of each kind in a text."""
    kinds = "".join(sample for pattern, sample in _KINDS if pattern.search(text))
    is_printable = "é" not in kinds or "".join(text.split()).isprintable()
    return kinds if is_printable else kinds + _UNPRINTABLE


@dataclass(frozen=True, slots=True)
class HiddenText:
    """A text of a call, or a result: its message, and whether every prompt must contain it."""

    message: int
    text: str
    kinds: str
    """One character of each kind in the text that may be escaped."""
    is_required: bool = True
    is_result: bool = False


@dataclass(frozen=True, slots=True)
class CallForm:
    """The calls and results of a conversation: the structure, which a template may see, and the texts, which it may not.

    `calls` has the tool calls of each message as JSON, with marks for its texts, and `results` the indices of the text and the id of each
    result; both are by message. `ids` are the distinct ids, and `ranks` sorts the texts. `key` is equal for conversations that look the
    same to every template.
    """

    calls: dict[int, str]
    results: dict[int, tuple[int, int]]
    texts: tuple[HiddenText, ...]
    ranks: tuple[int, ...]
    ids: tuple[str, ...]
    empty: frozenset[int]
    """Messages that have calls and no content."""
    key: bytes

    def call_ids(self, message: int) -> list[int]:
        """Return the index of the id of each call of a message."""
        return [call["id"] for call in json.loads(self.calls[message])]

    def disguise(self, num_random_bytes: int, offer: Offer) -> CallDisguise:
        """Return fresh random placeholders. They are longer with more random bytes, except for ids."""
        nonce = secrets.token_hex(num_random_bytes)
        placeholders = [f"aZ{nonce}{rank:05d}{text.kinds}{_END}" for rank, text in zip(self.ranks, self.texts, strict=True)]
        lengths = [9 if offer.has_short_ids else min(max(9, len(text)), 64) for text in self.ids]
        ids: dict[str, int] = {}
        for index, length in enumerate(lengths):
            ids["".join(secrets.choice(_ID_LETTERS) for _ in range(length))] = index
        return CallDisguise(self, offer, nonce, tuple(placeholders), ids)


@dataclass(frozen=True, slots=True)
class Offer:
    """How calls are offered to a template: `arguments` as an object or as its JSON text, the content of a message that has only calls as ""
    or none, and ids as they are or shortened to nine letters, which Mistral's models demand.
    """

    are_objects: bool = True
    has_content: bool = True
    has_short_ids: bool = False


OFFERS = tuple(
    Offer(are_objects=are_objects, has_content=has_content, has_short_ids=has_short_ids)
    for has_short_ids in (False, True)
    for are_objects, has_content in ((True, True), (False, True), (True, False), (False, False))
)
"""Most usual first."""


@dataclass(frozen=True, slots=True)
class CallDisguise:
    """The calls of a conversation with placeholders, for a single rendering."""

    form: CallForm
    offer: Offer
    nonce: str
    placeholders: tuple[str, ...]
    ids: dict[str, int]

    def fields(self, turn: Turn) -> dict[str, Any]:
        """Return what a message has beside its role and content, and the content of a result."""
        message = turn.call
        if message is None:
            return {}
        form, ids = self.form, list(self.ids)
        if message in form.results:
            text, id_index = form.results[message]
            return {"content": self.placeholders[text], "tool_call_id": ids[id_index]}
        calls = json.loads(_MARK.sub(lambda mark: json.dumps(self.placeholders[int(mark[1])])[1:-1], form.calls[message]))
        calls = calls if turn.at is None else calls[turn.at : turn.at + 1]
        for call in calls:
            call["id"] = ids[call["id"]]
            function = call["function"]
            if not self.offer.are_objects and not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {"tool_calls": calls}

    def split(self, parts: Sequence[Part]) -> tuple[Part, ...] | Refusal:
        """Split fixed text at the placeholders. Return a Refusal if one is altered, or a required one is missing or repeated."""
        ids = "|".join(map(re.escape, self.ids)) or "(?!)"
        pattern = re.compile(f"aZ{self.nonce}([0-9]{{5}})|({ids})")
        at_rank = {rank: index for index, rank in enumerate(self.form.ranks)}
        pieces: list[Part] = []
        seen: dict[int, int] = {}
        for part in parts:
            if not isinstance(part, str):
                pieces.append(part)
                continue
            position = 0
            for match in pattern.finditer(part):
                if match[2]:
                    pieces += [part[position : match.start()], CallId(self.ids[match[2]], is_short=self.offer.has_short_ids)]
                    position = match.end()
                    continue
                index = at_rank.get(int(match[1]), -1)
                found = self._escape(part, match, self.form.texts[index].kinds + _END) if index >= 0 else None
                if found is None:
                    return Refusal("alters the texts of tool calls", lost=True, altered=True)
                escape, start, end = found
                seen[index] = seen.get(index, 0) + 1
                pieces += [part[position:start], CallText(index, escape)]
                position = end
            pieces.append(part[position:])
        if any(isinstance(piece, str) and self.nonce[:8] in piece.lower() for piece in pieces):
            return Refusal("alters or splits the texts of tool calls", lost=True, altered=True)
        for index, hidden in enumerate(self.form.texts):
            if hidden.is_required and index not in seen:
                return Refusal(f"drops {'the result of a tool' if hidden.is_result else 'a tool call'}", lost=True)
            if hidden.is_result and seen.get(index, 0) > 1:
                return Refusal("repeats the result of a tool", lost=True)
        return tuple(piece for piece in pieces if piece != "")

    def _escape(self, text: str, match: re.Match[str], ending: str) -> tuple[str, int, int] | None:
        """Return the escape of a placeholder, and where it starts and ends. Several escapes may fit: they are the same for its text."""
        quoted = repr(match[0] + ending)
        if text.startswith(quoted, match.start() - 1):
            return "repr", match.start() - 1, match.start() - 1 + len(quoted)
        for name, escape in ESCAPES.items():
            if name != "repr" and text.startswith(image := escape(ending), match.end()):
                return name, match.start(), match.end() + len(image)
        return None


def call_form(messages: Sequence[Message]) -> CallForm | None:
    """Separate the structure of calls and results from their texts. None if there are no calls.

    A result belongs to the call with its id, or without one to the first call before it that has no result yet. A result of no call is an
    ordinary message, and so is one whose call has an id twice.
    """
    if not any(message.tool_calls for message in messages):
        return None
    return _Reader(messages).form()


class _Reader:
    """Collects the texts of a conversation's calls and results."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._texts: list[HiddenText] = []
        self._ids: dict[str, int] = {}
        self._calls: dict[int, str] = {}
        self._results: dict[int, tuple[int, int]] = {}

    def form(self) -> CallForm:
        open_ids: list[int] = []
        num_calls = 0
        for number, message in enumerate(self._messages):
            if message.tool_calls and message.role == "assistant":
                ids = [self._id(call.id or f"call{num_calls + at:05d}") for at, call in enumerate(message.tool_calls)]
                num_calls += len(ids)
                open_ids = ids
                calls = [self._call(number, at, id_index) for at, id_index in enumerate(ids)]
                self._calls[number] = json.dumps(calls, ensure_ascii=False)
            elif message.role == "tool":
                given = self._ids.get(_safe_id(message.tool_call_id)) if message.tool_call_id else None
                id_index = given if given is not None else next(iter(open_ids), None)
                if id_index is not None:
                    open_ids = [each for each in open_ids if each != id_index]
                    self._results[number] = (self._add(number, message.content, is_result=True), id_index)
            else:
                open_ids = []
        texts = self._texts
        order = sorted(range(len(texts)), key=lambda index: (texts[index].text.lower(), texts[index].text, index))
        order = [index for index in order if not texts[index].is_result] + [index for index in order if texts[index].is_result]
        ranks = [0] * len(texts)
        for rank, index in enumerate(order):
            ranks[index] = rank
        empty = frozenset(number for number in self._calls if not self._messages[number].content)
        required = [(text.is_required, text.kinds) for text in texts]
        shape = json.dumps([self._calls, self._results, ranks, required, [len(text) for text in self._ids], sorted(empty)])
        key = blake2b(shape.encode("utf-8", "surrogatepass")).digest()
        return CallForm(self._calls, self._results, tuple(texts), tuple(ranks), tuple(self._ids), empty, key)

    def _id(self, text: str) -> int:
        return self._ids.setdefault(_safe_id(text), len(self._ids))

    def _add(self, message: int, text: str, *, is_result: bool = False) -> int:
        self._texts.append(HiddenText(message, text, _kinds(text), is_required=is_result or bool(text), is_result=is_result))
        return len(self._texts) - 1

    def _mark(self, message: int, text: str) -> str:
        return f"\ue000{self._add(message, text)}\ue001"

    def _call(self, number: int, at: int, id_index: int) -> dict[str, Any]:
        call = self._messages[number].tool_calls[at]
        name = self._mark(number, call.name)
        start = len(self._texts)
        parsed = call.parsed
        hidden: Any = None
        if parsed is not None and start + _MAX_CALL_TEXTS <= MAX_TEXTS:
            hidden = self._hide(number, parsed, 0, start + _MAX_CALL_TEXTS)
        if hidden is None:
            del self._texts[start:]
            hidden = self._mark(number, str(call.arguments))
        return {"id": id_index, "type": "function", "function": {"name": name, "arguments": hidden}}

    def _hide(self, number: int, value: object, depth: int, most: int) -> Any:  # noqa: ANN401  # JSON
        """Replace the texts in a value by marks. None for a value that is too deep or has too many texts."""
        if depth > MAX_DEPTH or len(self._texts) >= most:
            return None
        if isinstance(value, str):
            return self._mark(number, value) if value else value
        if isinstance(value, list):
            items = [(each, self._hide(number, each, depth + 1, most)) for each in value]
            return None if any(hidden is None and each is not None for each, hidden in items) else [hidden for _, hidden in items]
        if isinstance(value, dict):
            fields = [(self._mark(number, key), each, self._hide(number, each, depth + 1, most)) for key, each in value.items()]
            lacks = any(hidden is None and each is not None for _, each, hidden in fields)
            return None if lacks else {key: hidden for key, _, hidden in fields}
        return value


def _safe_id(text: str) -> str:
    """Return an id that no escape changes: an unusual one is replaced."""
    return text if _ID.fullmatch(text) else short_id(text)


def native_turns(turns: Sequence[Turn], form: CallForm, *, apart: bool = False) -> list[Turn]:
    """Return the turns with calls and results in the form that templates expect.

    With `apart`, text before a call is a message of its own, and so is each call, followed by its result.
    """
    native: list[Turn] = []
    for turn in turns:
        index = turn.messages[0]
        if index in form.results:
            native.append(Turn(turn.role, (), index))
        elif index not in form.calls:
            native.append(turn)
        elif apart:
            native += [turn] if index not in form.empty else []
            native += [Turn(turn.role, (), index, at) for at in range(len(form.call_ids(index)))]
        else:
            native.append(replace(turn, messages=() if index in form.empty else turn.messages, call=index))
    return _with_results(native, form) if apart else native


def _with_results(turns: Sequence[Turn], form: CallForm) -> list[Turn]:
    """Move each result to its call."""
    results: dict[int, list[Turn]] = {}
    for turn in turns:
        if turn.call in form.results:
            results.setdefault(form.results[turn.call][1], []).append(turn)
    moved: list[Turn] = []
    for turn in turns:
        if turn.call is None:
            moved.append(turn)
        elif turn.call not in form.results:
            moved += [turn, *results.pop(form.call_ids(turn.call)[turn.at or 0], [])]
    return moved + [turn for group in results.values() for turn in group]
