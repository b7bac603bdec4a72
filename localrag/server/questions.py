"""The body of a chat completion as a question: every check in its order, and what cannot be honoured refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrag.messages import Message
from localrag.server.problems import Problem
from localrag.session.bypass import Bypass, bypass

MIN_RATIO, MAX_RATIO, DEFAULT_RATIO = 0.2, 0.8, 0.5
MAX_MESSAGES = 2048
NO_QUESTION = "There must be a user prompt since the latest assistant message."

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_THINK_TOKENS = {"none": 0, "minimal": 128, "low": 512, "medium": 1024, "high": 4096}
"""What `reasoning_effort` comes to."""
_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_WITHOUT_EFFECT = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
)
"""Taken as they are: they change nothing of an answer."""
_READ = frozenset({
    "messages", "n", "index_name", "context_token_ratio", "tools", "functions", "tool_choice", "function_call", "max_tokens",
    "max_completion_tokens", "stop", "seed", "stream", "stream_options", "response_format", "reasoning_effort", *_NUMBERS,
})  # fmt: skip
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "modalities": (["text"],)}
"""Values that ask for nothing, of parameters that cannot be honoured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A chat completion that can be answered. `bypass` says why the index is not searched."""

    messages: list[Message]
    index: str | None
    bypass: Bypass | None
    sampling: dict[str, Any]
    ratio: float
    streams: bool
    includes_usage: bool

    def to_message(self, n_ctx: int) -> dict[str, Any]:
        """For the engine's process, whose window has `n_ctx` tokens. Without a limit of its own an answer may have all that is left."""
        searches = self.index is not None and self.bypass is None
        return {
            "op": "ask",
            "messages": [{"role": each.role, "content": each.content} for each in self.messages],
            "kbs": [self.index] if searches else [],
            "sampling": {"max_tokens": n_ctx, **self.sampling},
            "options": {"context_ratio": self.ratio, "top_k": "fit"} if searches else {},
        }


def read(body: object, *, has_index: Callable[[str], bool]) -> Asked:
    """Problem, in the order of the checks: more than one answer, an unknown index, a ratio out of range, what is malformed, a message
    without role or content, tools, a conversation without a question."""
    if not isinstance(body, dict):
        raise Problem(400, "The body is not a JSON object.")
    if _given(body, "n", 1) != 1:
        raise Problem(400, "n must be 1: one answer is written for a request.")
    index = _index(body, has_index)
    ratio = _ratio(body)
    _check_names(body)
    said = _messages(body)
    tools = [*_list(body, "tools"), *_list(body, "functions")]
    reason = bypass(said, has_kb=index is not None, has_tools=bool(tools))
    if tools:
        raise Problem(400, "tools and functions are not supported.")
    messages = [Message(_role(each.role), _text(each.content)) for each in said]
    answered = max((at for at, each in enumerate(messages) if each.role == "assistant"), default=-1)
    if not any(each.role == "user" and each.content.strip() for each in messages[answered + 1 :]):
        raise Problem(400, NO_QUESTION)
    options = _given(body, "stream_options", {})
    if not isinstance(options, dict):
        raise Problem(400, "stream_options is an object.")
    return Asked(
        messages=messages,
        index=index,
        bypass=reason,
        sampling=_sampling(body),
        ratio=ratio,
        streams=_flag(body, "stream"),
        includes_usage=_flag(options, "include_usage"),
    )


@dataclass(frozen=True, slots=True)
class _Said:
    role: str
    content: object


def _given(body: Mapping[str, Any], name: str, default: object) -> Any:  # noqa: ANN401  # JSON
    value = body.get(name)
    return default if value is None else value


def _index(body: Mapping[str, Any], has_index: Callable[[str], bool]) -> str | None:
    index = body.get("index_name")
    if index is None or index == "":
        return None
    if not isinstance(index, str) or not has_index(index):
        raise Problem(404, f"No such index: {str(index)[:80]!r} not found.")
    return index


def _ratio(body: Mapping[str, Any]) -> float:
    ratio = _given(body, "context_token_ratio", DEFAULT_RATIO)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not MIN_RATIO <= ratio <= MAX_RATIO:
        raise Problem(400, f"context_token_ratio must be between {MIN_RATIO} and {MAX_RATIO}.")
    return float(ratio)


def _check_names(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _READ or name in _WITHOUT_EFFECT or value is None or value in _NEUTRAL.get(name, ()):
            continue
        raise Problem(400, f"The parameter {name[:80]!r} cannot be honoured here.")


def _messages(body: Mapping[str, Any]) -> list[_Said]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Problem(400, "messages must be a list of at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise Problem(400, f"{len(messages)} messages are too many; the limit is {MAX_MESSAGES}.")
    return [_message(number, each) for number, each in enumerate(messages, 1)]


def _message(number: int, message: object) -> _Said:
    if not isinstance(message, dict):
        raise Problem(400, f"Message {number} is not an object.")
    role, content = message.get("role"), message.get("content")
    if not role:
        raise Problem(400, f"Message {number} has no role.")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise Problem(400, f"Message {number} has no content.")
    if role not in _ROLES:
        raise Problem(400, f"Message {number} has the role {str(role)[:80]!r}; known are {', '.join(_ROLES)}.")
    if content is not None and not isinstance(content, str | list):
        raise Problem(400, f"The content of message {number} is neither text nor a list of parts.")
    return _Said(role, "" if content is None else content)


def _role(role: str) -> Any:  # noqa: ANN401  # one of messages.Role
    return {"developer": "system", "function": "tool"}.get(role, role)


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise Problem(400, "This model reads text alone.")
    return "\n\n".join(str(text) for text in texts)


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    found = _given(body, name, [])
    if not isinstance(found, list):
        raise Problem(400, f"{name} is a list.")
    return found


def _flag(body: Mapping[str, Any], name: str) -> bool:
    found = _given(body, name, default=False)
    if not isinstance(found, bool):
        raise Problem(400, f"{name} is true or false.")
    return found


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that the body names; their ranges are checked there."""
    found: dict[str, Any] = {}
    for name in _NUMBERS:
        value = body.get(name)
        if value is not None:
            found[name] = _number(name, value, int | float)
    seed, most = body.get("seed"), _given(body, "max_completion_tokens", body.get("max_tokens"))
    if seed is not None:
        found["seed"] = _number("seed", seed, int) % 2**32
    if most is not None:
        found["max_tokens"] = _number("max_tokens", most, int)
    stop = _given(body, "stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise Problem(400, "stop is a text or a list of texts.")
    if stops:
        found["stop"] = stops
    if found.get("presence_penalty") or found.get("frequency_penalty"):
        found["repeat_last_n"] = 1_000_000  # all that was written
    effort = body.get("reasoning_effort")
    if effort is not None:
        if effort not in _THINK_TOKENS:
            raise Problem(400, f"reasoning_effort is one of {', '.join(_THINK_TOKENS)}.")
        found["think_tokens"] = _THINK_TOKENS[effort]
    schema = _schema(body)
    return found if schema is None else {**found, "json_schema": schema}


def _number(name: str, value: object, kind: Any) -> Any:  # noqa: ANN401  # a number of that kind
    if isinstance(value, bool) or not isinstance(value, kind):
        raise Problem(400, f"{name} is {'a whole number' if kind is int else 'a number'}.")
    return value


def _schema(body: Mapping[str, Any]) -> str | None:
    """The JSON schema that an answer must keep to."""
    wanted = _given(body, "response_format", {"type": "text"})
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    given = wanted.get("json_schema") if kind == "json_schema" else None
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise Problem(400, "response_format is text, json_object, or json_schema with a schema.")
    return json.dumps(schema)
