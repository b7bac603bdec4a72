"""When a question is answered by the model alone, without passages of a knowledge base: decided here for all who ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

from localrag.types import Hit

ROLES = ("system", "developer", "user", "assistant")
"""Whose messages make a conversation that can be searched for."""


class Said(Protocol):
    """A message of a conversation, ours or as an API gets it."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> object: ...


class Bypass(Enum):
    """Why an answer has no sources. The value is its name in JSON."""

    NO_KNOWLEDGE_BASE = "no_knowledge_base"
    TOOLS = "tools"
    ROLE = "role"
    CONTENT = "content"
    NOTHING_FOUND = "nothing_found"
    NO_ROOM = "no_room"

    def told(self, kbs: Sequence[str]) -> str:
        """What a person is told of it, in one line; empty where nobody named a knowledge base and so nobody expects sources."""
        return f"{_TOLD[self].format(kbs=', '.join(kbs))}: answered without sources." if kbs else ""


_TOLD = {
    Bypass.NO_KNOWLEDGE_BASE: "{kbs} cannot be searched here",
    Bypass.TOOLS: "{kbs} is not searched where the model has tools",
    Bypass.ROLE: "{kbs} is not searched for a conversation with other roles than " + ", ".join(ROLES),
    Bypass.CONTENT: "{kbs} is not searched for a question that is not all text",
    Bypass.NOTHING_FOUND: "Nothing relevant was found in {kbs}",
    Bypass.NO_ROOM: "What was found in {kbs} has no room in the window",
}


def bypass(messages: Sequence[Said], *, has_kb: bool, has_tools: bool = False) -> Bypass | None:
    """Why nothing is searched for; None if it is. `has_tools` is for tools and functions that the model may call.

    A question that is a list of parts, as in OpenAI's API, can be searched for if all of them are text. That there is a question
    since the last answer is for `conversation.split` to tell.
    """
    if not has_kb:
        return Bypass.NO_KNOWLEDGE_BASE
    if has_tools:
        return Bypass.TOOLS
    if any(message.role not in ROLES for message in messages):
        return Bypass.ROLE
    if not all(_is_text(message.content) for message in messages if message.role == "user"):
        return Bypass.CONTENT
    return None


def outcome(reason: Bypass | None, offered: Sequence[Hit], supplied: Sequence[object]) -> Bypass | None:
    """Why an answer has no sources, after the search if there was one; None if it has some: `supplied`, of those `offered`."""
    if supplied:
        return None
    return Bypass.NO_ROOM if offered else reason or Bypass.NOTHING_FOUND


def _is_text(content: object) -> bool:
    if isinstance(content, list | tuple):
        return bool(content) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
    return isinstance(content, str)
