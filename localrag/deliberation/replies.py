"""Structured replies: JSON schemas for them, a reader that copes with replies that are cut off or hostile, and the judge's tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localrag.citation import without_cut_label
from localrag.types import ToolSpec

_MAX_DEPTH = 8
_PART = re.compile(r'"(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+(?P<end>"?)|[{}\[\],]', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class Form:
    """The values of a JSON reply by name. If it was cut off, the values before the cut are there, and `cut` names the text that
    broke off.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    cut: str = ""

    def text(self, name: str) -> str:
        """Return a text value, stripped; "" if the value is not a text."""
        text = _plain(self.values.get(name))
        return without_cut_label(text) if name == self.cut else text

    def texts(self, name: str) -> list[str]:
        """Return the non-empty texts of a list."""
        return [text for text in map(_plain, self._list(name)) if text]

    def forms(self, name: str) -> list[Form]:
        """Return the objects of a list."""
        return [Form(each) for each in self._list(name) if isinstance(each, dict)]

    def _list(self, name: str) -> list[Any]:
        value = self.values.get(name)
        return value if isinstance(value, list) else []


def form_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with these properties, in this order, and no others."""
    return {"type": "object", "properties": dict(properties), "required": list(properties), "additionalProperties": False}


def read(reply: str) -> Form:
    """Read the JSON object that a reply begins with. Any other reply gives an empty Form."""
    reply = reply.strip()
    if (whole := _loaded(reply)) is not None:
        return Form(whole, is_whole=True)
    for text, is_open in _mended(reply):
        if (values := _loaded(text)) is not None:
            return Form(values, cut=list(values)[-1] if is_open and values else "")
    return Form()


def _loaded(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _mended(text: str) -> Iterator[tuple[str, bool]]:
    """Yield possible completions of a cut-off object, longest first, and whether a text in it was cut.

    The last entry of a list is dropped if it is cut, because half a name is a different name.
    """
    if not text.startswith("{"):
        return
    closers, end, is_open = "", 0, False
    whole, whole_closers = 1, "}"
    for match in _PART.finditer(text):
        start, end = match.span()
        is_open = text[start] == '"' and not match["end"]
        if closer := _CLOSERS.get(text[start]):
            closers = closer + closers
            whole, whole_closers = end, closers
        elif text[start] in "}]":
            closers = closers[1:]
        elif text[start] == ",":
            whole, whole_closers = start, closers
        if is_open or not closers or len(closers) > _MAX_DEPTH:
            break
    if not is_open:
        yield (text + closers if closers else text[:end]), False
    elif len(closers) == 1:
        yield f'{text[:end]}"{closers}', True
    yield text[:whole] + whole_closers, False


def _plain(value: object) -> str:
    """Return the text without lone surrogates, which neither files nor terminals accept."""
    return value.encode("utf-8", "ignore").decode().strip() if isinstance(value, str) else ""


CONCLUDE = "conclude"
MAX_CALL_TOKENS = 160
"""Maximum tokens of a call: a name and a short text."""
_TEXTS: dict[str, tuple[str, str, str, int]] = {
    "kb_search": ("Search the documents.", "query", "what to search for, in words", 200),
    "kb_read": ("Read a source with what stands before and behind it in its document.", "id", "the tag of the source, such as KB#12", 90),
    "calculate": (
        "Work out an expression of numbers: + - * / // % ** ( ) sqrt abs round min max.",
        "expression",
        "such as round((3.5 + 2) * 80 / 100, 1)",
        120,
    ),
    "read_ledger": (
        "See how many tokens each part of a prompt took and what was left out.",
        "role",
        "the name of a specialist, or judge",
        70,
    ),
}
"""The purpose of each tool; its argument's name, description and maximum length in characters. Some models use one token per digit."""


@dataclass(frozen=True, slots=True)
class Call:
    tool: str
    arguments: Mapping[str, str]


def tool_specs(tools: Sequence[str]) -> tuple[ToolSpec, ...]:
    """Return the specs of these tools for a chat template, plus the one that ends the calls."""
    return (*(_spec(tool) for tool in tools), ToolSpec(CONCLUDE, "You know enough to decide.", form_schema({})))


def call_schema(tools: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of a reply that calls one of these tools or ends the calls."""
    return {"anyOf": [_call(tool, _arguments(tool)) for tool in tools] + [_call(CONCLUDE, form_schema({}))]}


def parse_call(reply: str, tools: Sequence[str]) -> Call | None:
    """Return the call in a reply; None if it ends the calls, was cut off, or lacks an argument."""
    form = read(reply)
    tool, arguments = form.text("name"), form.values.get("arguments")
    if not form.is_whole or tool not in tools or not isinstance(arguments, dict):
        return None
    texts = {name: Form(arguments).text(name) for name in _arguments(tool)["properties"]}
    return Call(tool, texts) if all(texts.values()) else None


def _spec(tool: str) -> ToolSpec:
    return ToolSpec(tool, _TEXTS[tool][0], _arguments(tool))


def _arguments(tool: str) -> dict[str, Any]:
    _, name, description, most = _TEXTS[tool]
    return form_schema({name: {"type": "string", "description": description, "minLength": 1, "maxLength": most}})


def _call(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return form_schema({"name": {"const": tool}, "arguments": arguments})
