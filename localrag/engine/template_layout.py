"""Hide message contents and tool texts from a chat template, and split the rendered text at their placeholders.

The texts of tools (names, descriptions, enum values) are untrusted, and a template need not see them to print them. It sees JSON Schema's
keywords, numbers and booleans, and a placeholder for every other text. Placeholders preserve what templates depend on: equal texts stay
equal, names sort as before, and lengths are the same up to MAX_LENGTH characters. A template that prints JSON or TypeScript therefore
prints the same structure.

Of tool calls and their results, a template sees real lists and objects, so that it can go through arguments, sort them, or write them as
JSON. It sees their numbers and booleans, and a placeholder for each name, id, key, text and result. Such a placeholder ends in one
character of each kind that the text has and that JSON, Python or XML may escape. So the rendered text shows how the template escapes the
text that belongs there.
"""

from __future__ import annotations

import html
import json
import re
import secrets
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, groupby, zip_longest
from typing import Any

from localrag.errors import UsageError
from localrag.text.tokens import Segment
from localrag.text.tool_calls import short_id
from localrag.types import Message, ToolSpec

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
MAX_DEPTH = 64
MAX_TEXTS = 8192
MAX_LENGTH = 64
"""Longest placeholder, in characters. Longer texts all look this long to a template."""

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
INTRO = 'You can call these tools by answering with a JSON object {"name": …, "arguments": …} and nothing else:\n'
_NAME = re.compile(r"[A-Za-z0-9_.$-]{1,64}")
_SHORTER = "Offer fewer tools, or shorten their descriptions."

# Keywords of JSON Schema and OpenAPI that templates read, and the kind of their values: a schema, schemas by name, a type, or plain data.
# Any other key is hidden like a text.
_SCHEMA = "additionalProperties allOf anyOf contains else if items not oneOf prefixItems propertyNames then"
_DATA = (
    "$comment $id $ref $schema const default dependentRequired deprecated description discriminator enum example examples "
    "exclusiveMaximum exclusiveMinimum format maxItems maxLength maxProperties maximum minItems minLength minProperties minimum "
    "multipleOf nullable optional pattern readOnly required title uniqueItems writeOnly"
)
KEYWORDS = {
    **dict.fromkeys(_SCHEMA.split(), "schema"),
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas", "patternProperties"), "schemas"),
    **dict.fromkeys(_DATA.split(), "data"),
    "properties": "properties",
    "type": "type",
}

# Placeholders consist of rare letters (CJK Extension B), which have no case, are not trimmed, and are not escaped by Python's repr. The
# first letter identifies the text; random letters follow, up to the text's length.
_FIRST, _REST, _END = 0x20000, 0x25000, 0x25100
_PLACEHOLDER = re.compile(
    f"([{chr(_FIRST)}-{chr(_REST - 1)}][{chr(_REST)}-{chr(_END - 1)}]*)"
    r"|(\\ud8[4-5][0-9a-f]\\ud[c-f][0-9a-f]{2}(?:\\ud854\\udc[0-9a-f]{2})*)"  # in a JSON string that has only ASCII
)
_LETTER = re.compile(f"[{chr(_FIRST)}-{chr(_END - 1)}]+")
_MARK = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True, slots=True)
class Disguise:
    """Tools with placeholders for a single rendering, and the index of the text that each placeholder represents."""

    tools: list[Any]
    texts: dict[str, int]

    def split(self, parts: Sequence[str | int]) -> tuple[Part, ...] | Refusal:
        """Split the fixed text at the tools' placeholders. Return a Refusal if a placeholder is incomplete."""
        pieces: list[Part] = []
        for part in parts:
            if isinstance(part, int):
                pieces.append(part)
                continue
            position = 0
            for match in _PLACEHOLDER.finditer(part):
                placeholder = match[1] or json.loads(f'"{match[2]}"')
                if placeholder not in self.texts or _LETTER.search(part, position, match.start()):
                    return Refusal("alters or splits the texts of tools", lost=True, altered=True)
                pieces += [part[position : match.start()], ToolText(self.texts[placeholder], is_ascii=match[2] is not None)]
                position = match.end()
            if _LETTER.search(part, position):
                return Refusal("alters or splits the texts of tools", lost=True, altered=True)
            pieces.append(part[position:])
        return tuple(piece for piece in pieces if piece != "")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """Tools in two parts: the structure, which a template may see, and the texts, which it may not.

    `texts` are distinct and escaped as in a JSON string. `names` are the indices of the tools' names in `texts`. `lengths` are the lengths
    that a template sees. `key` is equal for tools that look the same to every template. `listing` describes the tools to a model whose
    template has no place for them.
    """

    skeleton: str
    texts: tuple[Segment, ...]
    lengths: tuple[int, ...]
    names: frozenset[int]
    listing: Segment
    key: bytes

    def disguise(self) -> Disguise:
        """Return the tools with fresh random placeholders, which sort like the texts."""
        firsts = sorted(secrets.SystemRandom().sample(range(_FIRST, _REST), len(self.lengths)))
        rests = [secrets.token_bytes(length - 1) for length in self.lengths]
        placeholders = [chr(first) + "".join(chr(_REST + byte) for byte in rest) for first, rest in zip(firsts, rests, strict=True)]
        tools = json.loads(_MARK.sub(lambda mark: placeholders[int(mark[1])], self.skeleton))
        return Disguise(tools, {text: index for index, text in enumerate(placeholders)})


def hide_placeholders(text: str) -> str:
    """Replace the placeholders in a template's message by "…"."""
    return _LETTER.sub("…", text)


def to_json_lines(tools: Sequence[ToolSpec]) -> list[str]:
    """Return one line of compact JSON per tool. UsageError if there are too many tools, or they are too long or not JSON."""
    if len(tools) > MAX_TOOLS:
        message = f"{len(tools)} tools are offered, but at most {MAX_TOOLS} are accepted."
        raise UsageError(message, hint="Offer fewer tools.", num_tools=len(tools))
    lines = [_to_json(tool) for tool in tools]
    num_bytes = sum(len(line.encode("utf-8", "surrogatepass")) for line in lines)
    if num_bytes > MAX_TOOLS_BYTES:
        message = f"The tools take {num_bytes} bytes of JSON, but at most {MAX_TOOLS_BYTES} are accepted."
        raise UsageError(message, hint=_SHORTER, num_bytes=num_bytes)
    return lines


def tool_form(tools: Sequence[ToolSpec]) -> ToolForm:
    """Separate the structure of tools from their texts.

    UsageError for whatever `to_json_lines` refuses, for schemas nested too deeply, too many texts, and parameters with invalid names.
    """
    return _form(tuple(to_json_lines(tools)))


def _to_json(tool: ToolSpec) -> str:
    try:
        return json.dumps(tool.to_dict()["function"], ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise _too_deep(tool.name) from None
    except (TypeError, ValueError) as error:
        message = f"The parameters of the tool {tool.name} are not JSON: {' '.join(str(error).split())[:200]}."
        raise UsageError(message, hint="Give a JSON Schema.") from None


@lru_cache(maxsize=8)
def _form(lines: tuple[str, ...]) -> ToolForm:
    functions = [json.loads(line) for line in lines]  # plain lists and dicts
    distinct: set[str] = set()
    for function in functions:
        _hide_tool(function, distinct.add)
    if len(distinct) > MAX_TEXTS:
        message = f"The tools hold {len(distinct)} different texts, but at most {MAX_TEXTS} are accepted."
        raise UsageError(message, hint=_SHORTER, num_texts=len(distinct))
    texts = sorted(distinct, key=lambda text: (text.lower(), text))  # the order in which templates sort names
    index = {text: i for i, text in enumerate(texts)}
    skeleton = json.dumps([_hide_tool(function, lambda text: f"\ue000{index[text]}\ue001") for function in functions], ensure_ascii=False)
    lengths = tuple(min(len(text), MAX_LENGTH) for text in texts)
    return ToolForm(
        skeleton=skeleton,
        texts=tuple(_content(json.dumps(text, ensure_ascii=False)[1:-1]) for text in texts),
        lengths=lengths,
        names=frozenset(index[function["name"]] for function in functions),
        listing=_content(INTRO + "\n".join(lines)),
        key=blake2b(f"{lengths}{skeleton}".encode()).digest(),
    )


def _content(text: str) -> Segment:
    return Segment(text, tools=True, is_content=True)


def _hide_tool(function: dict[str, Any], hide: Callable[[str], object]) -> dict[str, Any]:
    name = function["name"]
    walk = _Walk(name, hide)
    fields = {"name": walk.text(name), "description": walk.text(function["description"])}
    return {"type": "function", "function": {**fields, "parameters": walk.value(function["parameters"], "schema", 1)}}


@dataclass(frozen=True, slots=True)
class _Walk:
    """Replaces each text of a tool by `hide(text)`. Empty texts are kept."""

    name: str
    hide: Callable[[str], object]

    def text(self, text: str) -> object:
        return self.hide(text) if text else text

    def value(self, value: object, place: str, depth: int) -> object:
        """Replace the texts in a value. `place` is one of the kinds in KEYWORDS."""
        if depth > MAX_DEPTH:
            raise _too_deep(self.name)
        if isinstance(value, str):
            return value if place == "type" and value in TYPES else self.text(value)
        if isinstance(value, list):
            inner = place if place in {"schema", "type"} else "data"
            return [self.value(item, inner, depth + 1) for item in value]
        if isinstance(value, dict):
            return dict(self.item(key, item, place, depth) for key, item in value.items())
        return value

    def item(self, key: str, value: object, place: str, depth: int) -> tuple[object, object]:
        if place == "schema" and key in KEYWORDS:
            return key, self.value(value, KEYWORDS[key], depth + 1)
        if place == "properties" and not _NAME.fullmatch(key):
            label = key if len(key) <= 80 else key[:79] + "…"
            message = f"The tool {self.name} has a parameter named {label!r}, but a name is 1 to 64 letters, digits, '_', '.', '$' and '-'."
            raise UsageError(message, hint="Rename the parameter.")
        return self.text(key), self.value(value, "schema" if place in {"properties", "schemas"} else "data", depth + 1)


def _too_deep(name: str) -> UsageError:
    return UsageError(f"The parameters of the tool {name} are nested more than {MAX_DEPTH} levels deep.", hint="Flatten its schema.")


@dataclass(frozen=True, slots=True)
class Turn:
    """A message for the template: its role, and the indices of the messages whose contents it joins with a blank line.

    `call` is the index of the message whose tool calls it has, or whose result it is, in the form that templates expect: all calls, or only
    the one at `at`.
    """

    role: str
    messages: tuple[int, ...]
    call: int | None = None
    at: int | None = None


@dataclass(frozen=True, slots=True)
class ToolText:
    """The position of a tool's text in the prompt, with its index in ToolForm.texts. `is_ascii`: the template escapes other letters."""

    index: int
    is_ascii: bool = False


@dataclass(frozen=True, slots=True)
class CallText:
    """The position of a text of a tool call, or of a result: its index in CallForm.texts, and the name of its escape."""

    index: int
    escape: str = ""


@dataclass(frozen=True, slots=True)
class CallId:
    """The position of a call's id: its index in CallForm.ids."""

    index: int
    is_short: bool = False


Part = str | int | ToolText | CallText | CallId | Segment
"""Fixed text, the index of a message whose content goes here, a text of a tool or of a call, or fixed text that belongs to the tools."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered conversation: its parts in order, and how its roles, tools and calls were adapted."""

    parts: tuple[Part, ...]
    turns: tuple[Turn, ...]
    adaptation: str | None
    tools_adaptation: str | None = None
    calls_adaptation: str | None = None
    writes_calls: bool = False
    """Whether calls follow the content of their message as text."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a template could not be used: its own message or, if `lost`, how it mishandled contents.

    `altered` means that it printed a content or a tool's text in changed form.
    """

    reason: str
    lost: bool = False
    altered: bool = False


# Adaptations for templates that refuse a conversation's roles, simplest first: a description, and the roles that become the user's. All but
# the first also join neighbors of the same role.
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
        if join and adapted and adapted[-1].role == role and turn.call is None and adapted[-1].call is None:
            adapted[-1] = Turn(role, (*adapted[-1].messages, *turn.messages))
        else:
            adapted.append(replace(turn, role=role))
    return tuple(adapted)


def with_listing(roles: Sequence[str]) -> tuple[Turn, ...]:
    """Return one turn per message, with a list of tools at the end of the first system message or as a system message of its own.

    The list has the index after the last message.
    """
    turns = [Turn(role, (index,)) for index, role in enumerate(roles)]
    if "system" not in roles:
        return (Turn("system", (len(roles),)), *turns)
    first = roles.index("system")
    turns[first] = Turn("system", (first, len(roles)))
    return tuple(turns)


def placeholder(nonce: str, index: object) -> str:
    # Letters of both cases reveal a change of case; private-use characters are not trimmed.
    return f"\ue000aZ{nonce}:{index}\ue001"


def split(text: str, nonce: str, turns: Sequence[Turn]) -> tuple[str | int, ...] | Refusal:
    """Split rendered text into fixed text and indices of messages. Return a Refusal unless each content appears once, unchanged."""
    pieces = re.split(placeholder(nonce, "(0|[1-9][0-9]{0,8})"), text)
    fixed, indices = pieces[::2], [int(index) for index in pieces[1::2]]
    counts = Counter(indices)
    marks = (nonce, "\ue000", "\ue001")
    altered = any(mark in piece.lower() for piece in fixed for mark in marks)
    if altered or not counts.keys() <= {index for turn in turns for index in turn.messages}:
        return Refusal("alters or splits the content of messages", lost=True, altered=True)
    for turn in turns:
        if not turn.messages:
            continue
        least, most = min(counts[index] for index in turn.messages), max(counts[index] for index in turn.messages)
        if (least, most) != (1, 1):
            return Refusal(f"{'drops' if least == 0 else 'repeats'} the content of the {turn.role} message", lost=True)
    parts = chain.from_iterable(zip_longest(fixed, indices, fillvalue=""))
    return tuple(part for part in parts if part != "")


# Fixed text is compared word by word. Text in brackets is one word, so that special strings are not cut in two.
_BRACKETS = r"<[^<>\n]*>|\[[^\[\]\n]*\]"
_WORD = re.compile(rf"{_BRACKETS}|\s|(?:(?!{_BRACKETS})\S)+")


def mark_tools(parts: Sequence[Part], bare: Sequence[Part]) -> tuple[Part, ...]:
    """Mark the fixed text of `parts` that the tools added. `bare` is the same conversation without tools.

    Between two messages, the added text is what remains after removing the longest common prefix and suffix.
    """
    ours, theirs = _between_messages(parts), _between_messages(bare)
    if [messages for messages, _ in ours] != [messages for messages, _ in theirs]:  # messages moved: compare the whole text
        ours, theirs = [((), list(parts))], [((), list(bare))]
    marked: list[Part] = []
    for (messages, gap), (_, bare_gap) in zip(ours, theirs, strict=True):
        marked += [*messages, *_mark(gap, bare_gap)]
    return tuple(marked)


def _between_messages(parts: Sequence[Part]) -> list[tuple[tuple[Part, ...], list[Part]]]:
    """Return the parts before the first message, then each message, or text of a call, with the parts after it."""
    gaps: list[tuple[tuple[Part, ...], list[Part]]] = [((), [])]
    for part in parts:
        if isinstance(part, (int, CallText, CallId)):
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


# --- calls and results ---

MAX_HIDDEN_TEXTS = 50_000
"""Most texts of all calls together. Beyond it, the arguments of a call are one text."""
_MAX_CALL_TEXTS = 2_000
_ID = re.compile(r"[A-Za-z0-9_.:-]{9,64}")
_ID_LETTERS = string.ascii_letters + string.digits


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
_LAST = "q"
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
        placeholders = [f"aZ{nonce}{rank:05d}{text.kinds}{_LAST}" for rank, text in zip(self.ranks, self.texts, strict=True)]
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
                found = self._escape(part, match, self.form.texts[index].kinds + _LAST) if index >= 0 else None
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
        if parsed is not None and start + _MAX_CALL_TEXTS <= MAX_HIDDEN_TEXTS:
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
