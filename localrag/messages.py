"""What is said to the model, and by whom."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localrag.errors import UsageError
from localrag.thinking import without_thoughts

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `content` is plain text: nothing in it is ever read as markup."""

    role: Role
    content: str
    sent: str = ""
    """What was sent for it when it was asked, where that was more than its content: the sources that came with it. It is sent so again."""


_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call: `parameters` is a JSON Schema of its arguments. UsageError for an invalid name."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _TOOL_NAME.fullmatch(self.name):
            raise UsageError(f"A tool's name is 1 to 64 letters, digits, '-' and '_', not {self.name[:80]!r}.", hint="Rename the tool.")

    def to_dict(self) -> dict[str, Any]:
        """The tool as OpenAI's API and chat templates know it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A fact that is kept across conversations. `importance` is 0 to 1; `label` is how ledgers name it."""

    label: str
    text: str
    importance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file that a person gave with the question. `label` is its path as given; `relevance` for the task is 0 to 1."""

    label: str
    text: str
    relevance: float = 1.0
    modified: float | None = None
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a member of a council proposes. `label` is the name by which the reader and ledgers know it."""

    label: str
    text: str


def strip_reasoning(text: str) -> str:
    """What a reasoning model said after it had thought, without leading white space: see `without_thoughts`."""
    return without_thoughts(text)
