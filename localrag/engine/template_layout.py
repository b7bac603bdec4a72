"""Tools as a chat template is shown them: the words of JSON Schema, numbers and truth values, and for every other text a placeholder.

A tool's texts are a stranger's: names, descriptions, enum values. A template need not see them to write them out. Each text is
given as a placeholder of its own that keeps what templates go by: equal texts stay equal, names sort as before, and lengths are
the same up to MAX_LENGTH characters. So a template that writes JSON or TypeScript writes what it would have written.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""Up to how many characters a template sees the length of a text."""

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
INTRO = 'You can call these tools by answering with a JSON object {"name": …, "arguments": …} and nothing else:\n'
_NAME = re.compile(r"[A-Za-z0-9_.$-]{1,64}")
_SHORTER = "Describe fewer tools, or describe them in fewer words."

# The words of JSON Schema and OpenAPI that templates look at, and what stands under each: a schema, schemas by name, a type,
# or plain data. A key that is not here is a text like any other.
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

# Placeholders are made of rare letters (CJK Extension B), which no filter trims or changes the case of, and which Python's repr
# leaves alone: a first one that names the text, then random ones up to the text's length.
_FIRST, _REST, _END = 0x20000, 0x25000, 0x25100
_PLACEHOLDER = re.compile(f"([{chr(_FIRST)}-{chr(_REST - 1)}][{chr(_REST)}-{chr(_END - 1)}]*)")
_LETTER = re.compile(f"[{chr(_FIRST)}-{chr(_END - 1)}]+")
_MARK = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True, slots=True)
class Disguise:
    """Tools as they are shown to the template once, and whose text each placeholder stands for."""

    tools: list[Any]
    texts: dict[str, int]

    def split(self, parts: Sequence[str | int]) -> tuple[Part, ...] | Refusal:
        """Rendered parts with the fixed text split at the texts of the tools, if those that came out are whole."""
        found: list[Part] = []
        for part in parts:
            if isinstance(part, int):
                found.append(part)
                continue
            for index, piece in enumerate(_PLACEHOLDER.split(part)):
                if index % 2 == 1 and piece in self.texts:
                    found.append(ToolText(self.texts[piece]))
                elif _LETTER.search(piece):
                    return Refusal("alters or splits the texts of tools", lost=True, altered=True)
                elif piece:
                    found.append(piece)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class ToolForm:
    """Tools in two parts: their structure, which a template may see, and their texts, which it may not.

    `texts` are distinct and escaped as inside a JSON string; `names` are the indices of the tools' names. `lengths` are what a
    template sees of the texts' lengths. `key` is the same for tools that no template can tell apart. `listing` presents the tools
    to a model whose template has no place for them.
    """

    skeleton: str
    texts: tuple[Segment, ...]
    lengths: tuple[int, ...]
    names: frozenset[int]
    listing: Segment
    key: bytes

    def disguise(self) -> Disguise:
        """Placeholders chosen at random, in the order of the texts."""
        firsts = sorted(secrets.SystemRandom().sample(range(_FIRST, _REST), len(self.lengths)))
        rests = [secrets.token_bytes(length - 1) for length in self.lengths]
        shown = [chr(first) + "".join(chr(_REST + byte) for byte in rest) for first, rest in zip(firsts, rests, strict=True)]
        tools = json.loads(_MARK.sub(lambda mark: shown[int(mark[1])], self.skeleton))
        return Disguise(tools, {text: index for index, text in enumerate(shown)})


def hide_placeholders(text: str) -> str:
    """What a template said, without the placeholders in it."""
    return _LETTER.sub("…", text)


def to_json_lines(tools: Sequence[ToolSpec]) -> list[str]:
    """A line of compact JSON for each tool. UsageError if they are too many, too long or not JSON."""
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
    """UsageError for what `to_json_lines` refuses, for schemas nested too deep, too many texts, and parameters without a proper name."""
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
    functions = [json.loads(line) for line in lines]  # plain lists and dicts, whatever they were before
    found: set[str] = set()
    for function in functions:
        _hide_tool(function, found.add)
    if len(found) > MAX_TEXTS:
        message = f"The tools hold {len(found)} different texts, but at most {MAX_TEXTS} are accepted."
        raise UsageError(message, hint=_SHORTER, num_texts=len(found))
    texts = sorted(found, key=lambda text: (text.lower(), text))  # the order in which templates sort names
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
    shown = {"name": walk.text(name), "description": walk.text(function["description"])}
    return {"type": "function", "function": {**shown, "parameters": walk.value(function["parameters"], "schema", 1)}}


@dataclass(frozen=True, slots=True)
class _Walk:
    """Replaces the texts of one tool by what `hide` makes of them. An empty text stays as it is."""

    name: str
    hide: Callable[[str], object]

    def text(self, text: str) -> object:
        return self.hide(text) if text else text

    def value(self, value: object, place: str, depth: int) -> object:
        """`place` is one of those that KEYWORDS names."""
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
            shown = key if len(key) <= 80 else key[:79] + "…"
            message = f"The tool {self.name} has a parameter named {shown!r}, but a name is 1 to 64 letters, digits, '_', '.', '$' and '-'."
            raise UsageError(message, hint="Rename the parameter.")
        return self.text(key), self.value(value, "schema" if place in {"properties", "schemas"} else "data", depth + 1)


def _too_deep(name: str) -> UsageError:
    return UsageError(f"The parameters of the tool {name} are nested more than {MAX_DEPTH} deep.", hint="Describe them in a flatter way.")


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
"""Fixed text, the content of a message by index, a text of the tools, or fixed text that is there because of the tools."""


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
    """The rendered text as fixed text and indices of messages, if each content came out once and whole."""
    pieces = re.split(placeholder(nonce, "(0|[1-9][0-9]{0,8})"), text)
    fixed, found = pieces[::2], [int(index) for index in pieces[1::2]]
    counts = Counter(found)
    marks = (nonce, "\ue000", "\ue001")
    altered = any(mark in piece.lower() for piece in fixed for mark in marks)
    if altered or not counts.keys() <= {index for turn in turns for index in turn.messages}:
        return Refusal("alters or splits the content of messages", lost=True, altered=True)
    for turn in turns:
        least, most = min(counts[index] for index in turn.messages), max(counts[index] for index in turn.messages)
        if (least, most) != (1, 1):
            return Refusal(f"{'drops' if least == 0 else 'repeats'} the content of the {turn.role} message", lost=True)
    parts = chain.from_iterable(zip_longest(fixed, found, fillvalue=""))
    return tuple(part for part in parts if part != "")


# Fixed text is compared word by word. What stands in brackets is one word, so that no special string is cut in two.
_BRACKETS = r"<[^<>\n]*>|\[[^\[\]\n]*\]"
_WORD = re.compile(rf"{_BRACKETS}|\s|(?:(?!{_BRACKETS})\S)+")


def mark_tools(parts: Sequence[Part], bare: Sequence[Part]) -> tuple[Part, ...]:
    """`parts` with the fixed text that is not in `bare`, the same conversation without tools, marked as theirs.

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
