"""Tools that a chat completion offers: how its answer is held to a call of one, and how calls and results stand in a conversation.

A call is written as `{"name": …, "arguments": {…}}`, in the answer as in earlier messages, whatever a model's own form is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from localrag.engine.grammar import CALL_CLOSES, CALL_OPENS, grammar_of
from localrag.errors import UsageError
from localrag.messages import ToolSpec
from localrag.server.problems import Problem

_MAX_OPTIONS = 16  # of one anyOf
_NO_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What may be called. `or_text`: an answer may also be a text. `is_legacy`: they were given as "functions"."""

    specs: tuple[ToolSpec, ...]
    schema: str
    or_text: bool
    is_legacy: bool

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
        return Call(found["name"], _compact(arguments)) if isinstance(arguments, dict) else None


def may_be_call(text: str) -> bool:
    """Whether an answer that begins so can still come to be a call."""
    begun = text.lstrip()
    return not begun or begun[0] == "{" or CALL_OPENS.startswith(begun) or begun.startswith(CALL_OPENS)


def is_offered(body: Mapping[str, Any]) -> bool:
    """Whether a body names tools or functions, whether or not one may be called. Problem if they are no list."""
    return bool([*_list(body, "tools"), *_list(body, "functions")])


def read_tools(body: Mapping[str, Any]) -> Tools | None:
    """The tools that may be called; None if there are none, or the choice is "none".

    Problem or UsageError for what is malformed, and for parameters of a "strict" tool that are no schema of the supported kind. An
    object with any properties stands in for such parameters of others, as OpenAI's API promises nothing for them either.
    """
    modern, legacy = _list(body, "tools"), _list(body, "functions")
    if modern and legacy:
        raise Problem(400, "Give tools or functions, not both.")
    functions = [_function(number, each) for number, each in enumerate(modern, 1)] or legacy
    specs = tuple(_spec(number, each) for number, each in enumerate(functions, 1))
    choice = body.get("function_call" if legacy else "tool_choice")
    if choice not in (None, "none") and not specs:
        raise Problem(400, "There is no tool to choose.")
    if len({spec.name for spec in specs}) < len(specs):
        raise Problem(400, "Two tools have the same name.")
    named = _named(choice, is_legacy=bool(legacy))
    wanted = [at for at, spec in enumerate(specs) if named in (None, spec.name)]
    if not wanted or choice == "none":
        if named is not None:
            raise Problem(400, f"There is no tool {named[:80]!r}.")
        return None
    schema = _schema_of([specs[at] for at in wanted], {specs[at].name for at in wanted if functions[at].get("strict") is True})
    return Tools(specs=specs, schema=schema, or_text=choice in (None, "auto"), is_legacy=bool(legacy))


def called(message: Mapping[str, Any]) -> str:
    """The calls of an earlier answer as text, a line for each. Problem for what is malformed."""
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise Problem(400, "tool_calls is a list.")
    functions = [each.get("function") if isinstance(each, dict) else None for each in given]
    if message.get("function_call") is not None:
        functions.append(message["function_call"])
    return "\n".join(map(_called, functions))


def _called(function: object) -> str:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(function.get("arguments", ""), str):
        raise Problem(400, "A call has a function with a name and arguments, both texts.")
    text = function.get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = text  # what a model was cut off in stays what it is
    return _compact({"name": function["name"], "arguments": arguments})


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    found = body.get(name)
    if found is not None and not isinstance(found, list):
        raise Problem(400, f"{name} is a list.")
    return found or []


def _function(number: int, tool: object) -> Any:  # noqa: ANN401  # JSON
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise Problem(400, f"Tool {number} is not of type function.")
    return tool.get("function")


def _spec(number: int, function: object) -> ToolSpec:
    """UsageError for a name that is none."""
    given = function if isinstance(function, dict) else {}
    name, description, parameters = given.get("name"), given.get("description"), given.get("parameters")
    parameters = {} if parameters is None else parameters
    if not isinstance(name, str) or not isinstance(description or "", str) or not isinstance(parameters, dict):
        raise Problem(400, f"Function {number} has a name and a description, both texts, and parameters, a JSON schema.")
    return ToolSpec(name, description or "", parameters or _NO_ARGUMENTS)


def _named(choice: object, *, is_legacy: bool) -> str | None:
    """The one tool that must be called; None for any."""
    if choice in (None, "none", "auto") or (choice == "required" and not is_legacy):
        return None
    function = choice if is_legacy or not isinstance(choice, dict) else choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise Problem(400, "The choice of a tool is none, auto, required, or a function by its name.")
    return name


def _schema_of(specs: Iterable[ToolSpec], strict: set[str]) -> str:
    """The JSON schema of a call of any of these, simpler where the whole is more than a grammar can hold."""
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
    text = json.dumps({**_any_of(calls), "$defs": definitions})
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


def _any_of(options: list[dict[str, Any]]) -> dict[str, Any]:
    """As many as are wanted, in groups where one list cannot hold them."""
    while len(options) > _MAX_OPTIONS:
        options = [{"anyOf": options[at : at + _MAX_OPTIONS]} for at in range(0, len(options), _MAX_OPTIONS)]
    return {"anyOf": options}


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
