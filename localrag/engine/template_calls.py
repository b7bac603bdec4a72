"""Hide the tool calls and results of a conversation from a chat template, and find them in the rendered text.

A template sees real lists and objects, so that it can go through arguments, sort them, or write them as JSON. It sees their numbers and
booleans, and a placeholder for each name, id, key, text and result. A placeholder ends in characters that JSON, Python and XML escape in
different ways, so the rendered text shows how the template escapes the text that belongs there. Texts that are keys sort as before.
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
from localrag.types import Message

MAX_TEXTS = 50_000
"""Most texts of all calls together. Beyond it, the arguments of a call are one text."""
_MAX_CALL_TEXTS = 2_000
_ID = re.compile(r"[A-Za-z0-9_.:-]{9,64}")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
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
_PROBE = "\"'&<é"
"""The end of a placeholder. Each escape writes it in another way."""
_IMAGES = {escape(_PROBE): name for name, escape in ESCAPES.items() if name != "repr"}
_REPR_IMAGE = repr(_PROBE)[1:-1]


@dataclass(frozen=True, slots=True)
class HiddenText:
    """A text of a call, or a result: its message, and whether every prompt must contain it."""

    message: int
    text: str
    is_required: bool = True
    is_result: bool = False


@dataclass(frozen=True, slots=True)
class CallForm:
    """The calls and results of a conversation: the structure, which a template may see, and the texts, which it may not.

    `calls` has the tool calls of each message as JSON, with marks for its texts, and `results` the index of the result of each tool message;
    both are by message. `ids` are the distinct ids, and `ranks` sorts the texts. `key` is equal for conversations that look the same to
    every template.
    """

    calls: dict[int, str]
    results: dict[int, tuple[int, int]]
    texts: tuple[HiddenText, ...]
    ranks: tuple[int, ...]
    ids: tuple[str, ...]
    empty: frozenset[int]
    """Messages that have calls and no content."""
    key: bytes

    def disguise(self, num_random_bytes: int, offer: Offer) -> CallDisguise:
        """Return fresh random placeholders. They are longer with more random bytes, except for ids."""
        nonce = secrets.token_hex(num_random_bytes)
        placeholders = [f"aZ{nonce}{rank:05d}{_PROBE}" for rank in self.ranks]
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

    def fields(self, message: int) -> dict[str, Any]:
        """Return what a message has beside its role and content, and the content of a result."""
        form, ids = self.form, list(self.ids)
        if message in form.results:
            text, id_index = form.results[message]
            return {"content": self.placeholders[text], "tool_call_id": ids[id_index]}
        calls = json.loads(_MARK.sub(lambda mark: json.dumps(self.placeholders[int(mark[1])])[1:-1], form.calls[message]))
        for call in calls:
            call["id"] = ids[call["id"]]
            function = call["function"]
            if not self.offer.are_objects and not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {"tool_calls": calls}

    def split(self, parts: Sequence[Part]) -> tuple[Part, ...] | Refusal:
        """Split fixed text at the placeholders. Return a Refusal if one is altered, or a required one is missing or repeated."""
        core = f"aZ{self.nonce}([0-9]{{5}})"
        images = "|".join(map(re.escape, sorted(_IMAGES, key=len, reverse=True)))
        ids = "|".join(map(re.escape, self.ids)) or "(?!)"
        pattern = re.compile(f"'{core}{re.escape(_REPR_IMAGE)}'|{core}({images})|({ids})")
        at_rank = {rank: index for index, rank in enumerate(self.form.ranks)}
        pieces: list[Part] = []
        seen: dict[int, int] = {}
        for part in parts:
            if not isinstance(part, str):
                pieces.append(part)
                continue
            position = 0
            for match in pattern.finditer(part):
                pieces.append(part[position : match.start()])
                position = match.end()
                if match[4]:
                    pieces.append(CallId(self.ids[match[4]], is_short=self.offer.has_short_ids))
                    continue
                index = at_rank.get(int(match[1] or match[2]), -1)
                if index < 0:
                    return Refusal("alters the texts of tool calls", lost=True, altered=True)
                seen[index] = seen.get(index, 0) + 1
                pieces.append(CallText(index, "repr" if match[1] else _IMAGES[match[3]]))
            pieces.append(part[position:])
        if any(isinstance(piece, str) and self.nonce[:8] in piece.lower() for piece in pieces):
            return Refusal("alters or splits the texts of tool calls", lost=True, altered=True)
        for index, hidden in enumerate(self.form.texts):
            if hidden.is_required and index not in seen:
                return Refusal(f"drops {'the result of a tool' if hidden.is_result else 'a tool call'}", lost=True)
            if hidden.is_result and seen.get(index, 0) > 1:
                return Refusal("repeats the result of a tool", lost=True)
        return tuple(piece for piece in pieces if piece != "")


def short_id(text: str) -> str:
    """Return an id of nine letters and digits, the same for the same text."""
    if _SHORT_ID.fullmatch(text):
        return text
    number = int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    return "".join(_ID_LETTERS[number // 62**at % 62] for at in range(9))


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
        required = [text.is_required for text in texts]
        shape = json.dumps([self._calls, self._results, ranks, required, [len(text) for text in self._ids], sorted(empty)])
        key = blake2b(shape.encode("utf-8", "surrogatepass")).digest()
        return CallForm(self._calls, self._results, tuple(texts), tuple(ranks), tuple(self._ids), empty, key)

    def _id(self, text: str) -> int:
        return self._ids.setdefault(_safe_id(text), len(self._ids))

    def _add(self, message: int, text: str, *, is_result: bool = False) -> int:
        self._texts.append(HiddenText(message, text, is_required=is_result or bool(text), is_result=is_result))
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


def native_turns(turns: Sequence[Turn], form: CallForm) -> list[Turn]:
    """Return the turns with calls and results in the form that templates expect."""
    native = []
    for turn in turns:
        index = turn.messages[0]
        if index in form.results or index in form.empty:
            native.append(Turn(turn.role, (), index))
        else:
            native.append(replace(turn, call=index) if index in form.calls else turn)
    return native
