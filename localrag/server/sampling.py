"""The part of a body that says how an answer is sampled, and in which form it comes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from localrag.server.problems import Problem

_THINK_TOKENS = {"none": 0, "minimal": 128, "low": 512, "medium": 1024, "high": 4096}
"""What `reasoning_effort` comes to."""
NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


def given(body: Mapping[str, Any], name: str, default: object) -> Any:  # noqa: ANN401  # JSON
    value = body.get(name)
    return default if value is None else value


def flag(body: Mapping[str, Any], name: str) -> bool:
    found = given(body, name, default=False)
    if not isinstance(found, bool):
        raise Problem(400, f"{name} is true or false.")
    return found


def read_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that the body names; their ranges are checked there."""
    found: dict[str, Any] = {}
    for name in NUMBERS:
        value = body.get(name)
        if value is not None:
            found[name] = _number(name, value, int | float)
    seed, most = body.get("seed"), given(body, "max_completion_tokens", body.get("max_tokens"))
    if seed is not None:
        found["seed"] = _number("seed", seed, int) % 2**32
    if most is not None:
        found["max_tokens"] = _number("max_tokens", most, int)
    if stops := _stops(body):
        found["stop"] = stops
    if found.get("presence_penalty") or found.get("frequency_penalty"):
        found["repeat_last_n"] = 1_000_000  # all that was written
    effort = body.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in _THINK_TOKENS:
            raise Problem(400, f"reasoning_effort is one of {', '.join(_THINK_TOKENS)}.")
        found["think_tokens"] = _THINK_TOKENS[effort]
    if (wanted := _logprobs(body)) is not None:
        found["logprobs"] = wanted
    schema = _schema(body)
    return found if schema is None else {**found, "json_schema": schema}


def _number(name: str, value: object, kind: Any) -> Any:  # noqa: ANN401  # a number of that kind
    if isinstance(value, bool) or not isinstance(value, kind):
        raise Problem(400, f"{name} is {'a whole number' if kind is int else 'a number'}.")
    return value


def _schema(body: Mapping[str, Any]) -> str | None:
    """The JSON schema that an answer must keep to."""
    wanted = given(body, "response_format", {"type": "text"})
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    form = wanted.get("json_schema") if kind == "json_schema" else None
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(schema, dict):
        raise Problem(400, "response_format is text, json_object, or json_schema with a schema.")
    return json.dumps(schema)


def _stops(body: Mapping[str, Any]) -> list[str]:
    stop = given(body, "stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise Problem(400, "stop is a text or a list of texts.")
    return stops


def _logprobs(body: Mapping[str, Any]) -> int | None:
    """How many of the likeliest tokens are wanted beside each; None for no logprobs at all."""
    top = given(body, "top_logprobs", 0)
    if flag(body, "logprobs"):
        return int(_number("top_logprobs", top, int))
    if top:
        raise Problem(400, "top_logprobs needs logprobs.")
    return None
