"""Tools that a chat completion offers: how its answer is held to a call of one, and how calls and results stand in a conversation.

A call is written as `{"name": …, "arguments": {…}}`, in the answer as in earlier messages, whatever a model's own form is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from localrag.engine.grammar import CALL_CLOSES, CALL_OPENS
from localrag.types import ToolSpec


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Tools that are shown, and the names of those that may be called: `choices`.

    `strict` names those whose parameters must be kept to, `schema` is the JSON schema of a call. `or_text`: an answer may also be a
    text. `is_legacy`: they were given as "functions".
    """

    specs: tuple[ToolSpec, ...]
    choices: tuple[str, ...]
    strict: frozenset[str]
    schema: str
    or_text: bool
    is_legacy: bool

    @property
    def calls(self) -> dict[str, Any]:
        """What calls may be, for the engine's process."""
        return {"choices": list(self.choices), "strict": sorted(self.strict), "or_text": self.or_text}

    def call(self, answer: str) -> Call | None:
        """The call that an answer is; None for a text, and for what was cut off within a call."""
        text = answer.strip()
        if text.startswith(CALL_OPENS):
            text = text.removeprefix(CALL_OPENS).removesuffix(CALL_CLOSES).strip()
        try:
            found = json.loads(text) if text.startswith("{") else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or not any(found.get("name") == spec.name for spec in self.specs):
            return None
        arguments = found.get("arguments")
        return Call(found["name"], compact(arguments)) if isinstance(arguments, dict) else None


def may_be_call(text: str) -> bool:
    """Whether an answer that begins so can still come to be a call."""
    begun = text.lstrip()
    return not begun or begun[0] == "{" or CALL_OPENS.startswith(begun) or begun.startswith(CALL_OPENS)


def compact(value: object) -> str:
    """JSON as calls are written."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
