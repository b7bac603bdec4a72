"""The body of a chat completion as a question: every check in its order, and what cannot be honoured refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrag.messages import Message
from localrag.server.problems import Problem
from localrag.server.sampling import NUMBERS, flag, given, read_sampling
from localrag.server.tools import Tools, called, is_offered, read_tools
from localrag.session.bypass import Bypass, bypass

MIN_RATIO, MAX_RATIO, DEFAULT_RATIO = 0.2, 0.8, 0.5
MAX_MESSAGES = 2048
NO_QUESTION = "There must be a user prompt since the latest assistant message."

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WITHOUT_EFFECT = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
)
"""Taken as they are: they change nothing of an answer."""
_READ = frozenset({
    "messages", "n", "index_name", "context_token_ratio", "tools", "functions", "tool_choice", "function_call", "max_tokens",
    "max_completion_tokens", "stop", "seed", "stream", "stream_options", "response_format", "reasoning_effort", "logprobs", "top_logprobs",
    *NUMBERS,
})  # fmt: skip
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"logit_bias": ({},), "modalities": (["text"],)}
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
    tools: Tools | None = None
    is_plain: bool = False
    """Whether there is one message, which is sent as it stands, without the model's template."""

    @property
    def searches(self) -> bool:
        return self.index is not None and self.bypass is None

    def to_message(self, n_ctx: int) -> dict[str, Any]:
        """For the engine's process, whose window has `n_ctx` tokens. Without a limit of its own an answer may have all that is left."""
        forms = {} if self.tools is None else {"json_schema": self.tools.schema, "or_text": self.tools.or_text}
        return {
            "op": "ask",
            "is_plain": self.is_plain,
            "tools": [] if self.tools is None else [spec.to_dict()["function"] for spec in self.tools.specs],
            "messages": [{"role": each.role, "content": each.content} for each in self.messages],
            "kbs": [self.index] if self.searches else [],
            "sampling": {"max_tokens": n_ctx, **self.sampling, **forms},
            "options": {"context_ratio": self.ratio, "top_k": "fit"} if self.searches else {},
        }


def read(body: object, *, has_index: Callable[[str], bool], rejects_tools: bool = False, is_plain: bool = False) -> Asked:
    """Problem, in the order of the checks: more than one answer, an unknown index, a ratio out of range, what is malformed, a message
    without role or content, tools with an index where that is refused, a conversation without a question."""
    if not isinstance(body, dict):
        raise Problem(400, "The body is not a JSON object.")
    if given(body, "n", 1) != 1:
        raise Problem(400, "n must be 1: one answer is written for a request.")
    index = _index(body, has_index)
    ratio = _ratio(body)
    _check_names(body)
    said = _messages(body)
    has_tools = is_offered(body)
    reason = bypass(said, has_kb=index is not None, has_tools=has_tools)
    if has_tools and index is not None and rejects_tools:
        raise Problem(400, "tools and functions are not supported.")
    tools = read_tools(body)
    messages = [Message(_role(each.role), _text(each.content)) for each in said]
    _check_question(messages)
    sampling = read_sampling(body)
    if tools is not None and "json_schema" in sampling:
        raise Problem(400, "An answer that may be a call has no other form: leave response_format out, or the tools.")
    options = given(body, "stream_options", {})
    if not isinstance(options, dict):
        raise Problem(400, "stream_options is an object.")
    return Asked(
        messages=messages,
        index=index,
        bypass=reason,
        sampling=sampling,
        ratio=ratio,
        streams=flag(body, "stream"),
        includes_usage=flag(options, "include_usage"),
        tools=tools,
        is_plain=is_plain,
    )


def _check_question(messages: Sequence[Message]) -> None:
    """There is one since the last answer, or what a tool gave for it."""
    if messages[-1].role == "tool" and any(each.role == "user" and each.content.strip() for each in messages):
        return
    answered = max((at for at, each in enumerate(messages) if each.role == "assistant"), default=-1)
    if not any(each.role == "user" and each.content.strip() for each in messages[answered + 1 :]):
        raise Problem(400, NO_QUESTION)


@dataclass(frozen=True, slots=True)
class _Said:
    role: str
    content: object


def _index(body: Mapping[str, Any], has_index: Callable[[str], bool]) -> str | None:
    index = body.get("index_name")
    if index is None or index == "":
        return None
    if not isinstance(index, str) or not has_index(index):
        raise Problem(404, f"No such index: {str(index)[:80]!r} not found.")
    return index


def _ratio(body: Mapping[str, Any]) -> float:
    ratio = given(body, "context_token_ratio", DEFAULT_RATIO)
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
    calls = called(message) if role == "assistant" else ""
    if content is None and not calls:
        raise Problem(400, f"Message {number} has no content.")
    if role not in _ROLES:
        raise Problem(400, f"Message {number} has the role {str(role)[:80]!r}; known are {', '.join(_ROLES)}.")
    if content is not None and not isinstance(content, str | list):
        raise Problem(400, f"The content of message {number} is neither text nor a list of parts.")
    if not calls:
        return _Said(role, content)
    return _Said(role, "\n".join(filter(None, ("" if content is None else _text(content), calls))))


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
