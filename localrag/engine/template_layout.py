"""Hide message contents and tool texts from a chat template, and split the rendered text at their placeholders.

The texts of tools (names, descriptions, enum values) are untrusted, and a template need not see them to print them. It sees JSON Schema's
keywords, numbers and booleans, and a placeholder for every other text. Placeholders preserve what templates depend on: equal texts stay
equal, names sort as before, and lengths are the same up to MAX_LENGTH characters. A template that prints JSON or TypeScript therefore
prints the same structure.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, groupby, zip_longest
from typing import Any

from localrag.errors import UsageError
from localrag.text.tokens import Segment
from localrag.types import ToolSpec

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
