"""Tools that a chat completion offers: how its answer is held to a call of one, and how calls and results stand in a conversation.

A call is written as `{"name": …, "arguments": {…}}`, in the answer as in earlier messages, whatever a model's own form is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from localrag.engine.grammar import CALL_CLOSES, CALL_OPENS, grammar_of
from localrag.errors import UsageError
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


def schema_of_calls(specs: Iterable[ToolSpec], strict: Collection[str]) -> str:
    """The JSON schema of a call of any of these, simpler where the whole is more than a grammar can hold.

    UsageError for parameters of a tool named in `strict` to which no grammar holds an answer.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for number, spec in enumerate(specs):
        parameters, own = _hoisted(spec.parameters, f"{number}-")
        try:
            _check_arguments(spec.name, parameters, own)
        except UsageError:
            if spec.name in strict:
                raise
            parameters, own = {"type": "object"}, {}
        calls.append(_call({"const": spec.name}, parameters))
        definitions |= own
    text = json.dumps({"anyOf": calls, "$defs": definitions})
    try:
        grammar_of(text)
    except UsageError:
        if strict:
            raise
        text = json.dumps(_call({"enum": [spec.name for spec in specs]}, {"type": "object"}))
    return text


def _check_arguments(name: str, parameters: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
    """UsageError if no grammar holds an answer to them."""
    if parameters.get("type") != "object":
        raise UsageError(f"The parameters of the tool {name} are no object.", hint='Give a JSON schema of type "object".')
    grammar_of({**parameters, "$defs": definitions})


def _call(name: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"name": name, "arguments": arguments}, "required": ["name", "arguments"]}


def _hoisted(parameters: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema that can stand within another, and its definitions, renamed, for the outer one."""
    renamed = json.loads(json.dumps(parameters), object_hook=lambda each: _renamed(each, prefix))
    found = {key: renamed.pop(key, {}) for key in ("$defs", "definitions")}
    own = {f"{prefix}{name}": each for group in found.values() if isinstance(group, dict) for name, each in group.items()}
    return renamed, own


def _renamed(schema: dict[str, Any], prefix: str) -> dict[str, Any]:
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith(("#/$defs/", "#/definitions/")):
        schema["$ref"] = f"#/$defs/{prefix}{ref.split('/', 2)[2]}"
    return schema
