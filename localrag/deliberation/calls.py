"""The judge's tools: what each is told to be, the form of a call, and how one is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrag.deliberation import replies
from localrag.types import ToolSpec

CONCLUDE = "conclude"
MAX_TOKENS = 160
"""Of a call: a name and a short text."""
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
"""What a tool does; its argument's name, what that is, and its most characters: some models have a token for each digit."""


@dataclass(frozen=True, slots=True)
class Call:
    tool: str
    arguments: Mapping[str, str]


def specs(tools: Sequence[str]) -> tuple[ToolSpec, ...]:
    """The tools of these names as a chat template is shown them, with the one that ends the calls."""
    return (*(_spec(tool) for tool in tools), ToolSpec(CONCLUDE, "You know enough to decide.", replies.schema({})))


def schema(tools: Sequence[str]) -> dict[str, Any]:
    """Of a reply that is a call of one of these tools, or ends the calls."""
    return {"anyOf": [_call(tool, _arguments(tool)) for tool in tools] + [_call(CONCLUDE, replies.schema({}))]}


def parse(reply: str, tools: Sequence[str]) -> Call | None:
    """The call that a reply is; None for one that ends the calls, that was cut off, or that lacks an argument."""
    form = replies.read(reply)
    tool, given = form.text("name"), form.values.get("arguments")
    if not form.is_whole or tool not in tools or not isinstance(given, dict):
        return None
    texts = {name: replies.Form(given).text(name) for name in _arguments(tool)["properties"]}
    return Call(tool, texts) if all(texts.values()) else None


def _spec(tool: str) -> ToolSpec:
    return ToolSpec(tool, _TEXTS[tool][0], _arguments(tool))


def _arguments(tool: str) -> dict[str, Any]:
    _, name, description, most = _TEXTS[tool]
    return replies.schema({name: {"type": "string", "description": description, "minLength": 1, "maxLength": most}})


def _call(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return replies.schema({"name": {"const": tool}, "arguments": arguments})
