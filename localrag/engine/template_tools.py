"""Tools as a chat template is shown them: the words of JSON Schema, numbers and truth values, and for every other text a placeholder.

A tool's texts are a stranger's: names, descriptions, enum values. A template need not see them to write them out. Each text is
given as a placeholder of its own that keeps what templates go by: equal texts stay equal, names sort as before, and lengths are
the same up to MAX_LENGTH characters. So a template that writes JSON or TypeScript writes what it would have written.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from localrag.engine.template_layout import Part, Refusal, ToolText
from localrag.errors import UsageError
from localrag.messages import ToolSpec
from localrag.tokens import Segment

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
        """Rendered parts with the scaffold split at the texts of the tools, if those that came out are whole."""
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
