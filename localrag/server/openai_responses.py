"""/v1/responses: OpenAI's newer form of a chat completion, for text. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from localrag.server.asking import accounts, answered, body_of, data_of, opened
from localrag.server.documenting import ENGINE_FAILS, described
from localrag.server.openai_schemas import ResponsesAnswer, ResponsesEvent, ResponsesRequest
from localrag.server.problems import Problem
from localrag.server.questions import Asked, read

if TYPE_CHECKING:
    from localrag.server.app import Shared

router = APIRouter(tags=["completions"])

_SAME = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "temperature", "top_p", "stream",
         "seed", "stop", "index_name", "context_token_ratio", "parallel_tool_calls")  # fmt: skip
"""Fields that mean what they mean of a chat completion."""
_READ = ("input", "instructions", "max_output_tokens", "text", "reasoning", *_SAME)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "truncation": ("disabled",), "tools": ([],), "tool_choice": ("auto", "none"), "include": ([],), "background": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
}  # fmt: skip
_TEXT_PARTS = ("input_text", "output_text", "text")


@router.post(
    "/v1/responses",
    operation_id="create_response",
    **described(ResponsesAnswer, body=ResponsesRequest, stream=ResponsesEvent, fails=(*ENGINE_FAILS, 404, 409)),
)
async def respond(request: Request) -> Response:
    """Answer a text or a conversation; with `index_name` from what is found there."""
    shared: Shared = request.app.state.shared
    engine = await opened(shared)
    body = await body_of(request)
    asked = read(chat_body(body), has_index=shared.has_index)
    return await answered(request, engine, asked, _Answered(asked, body, engine.about["model"], shared.metrics.answered))


def chat_body(body: object) -> dict[str, Any]:
    """The body of the chat completion that asks the same. Problem for what none can ask."""
    if not isinstance(body, dict):
        raise Problem(400, "The body is not a JSON object.")
    for name, value in body.items():
        if name not in _READ and value is not None and value not in _NEUTRAL.get(name, ()):
            raise Problem(400, f"The parameter {name[:80]!r} cannot be honoured here.")
    chat = {name: body[name] for name in _SAME if name in body}
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise Problem(400, "instructions is a text.")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = [*system, *_messages(body.get("input"))]
    chat["max_tokens"] = body.get("max_output_tokens")
    chat["response_format"] = _format(body.get("text"))
    reasoning = body.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise Problem(400, "reasoning is an object.")
    chat["reasoning_effort"] = (reasoning or {}).get("effort")
    return chat


def _messages(given: object) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise Problem(400, "input is a text or a list of messages.")
    return [_message(number, each) for number, each in enumerate(given, 1)]


def _message(number: int, item: object) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type") not in (None, "message"):
        raise Problem(400, f"Item {number} of the input is not a message.")
    content = item.get("content")
    if isinstance(content, list):
        content = [{**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part for part in content]
    return {"role": item.get("role"), "content": content}


def _format(text: object) -> Any:  # noqa: ANN401  # JSON
    """As `response_format` has it."""
    if text is not None and not isinstance(text, dict):
        raise Problem(400, "text is an object.")
    wanted = (text or {}).get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
    return wanted


class _Answered:
    """One response, whole or as the events that build it up."""

    def __init__(self, asked: Asked, body: Mapping[str, Any], model: str, on_done: Callable[[Mapping[str, Any]], None]) -> None:
        self._asked = asked
        self._on_done = on_done
        self._numbers = count()
        self._message_id = f"msg_{secrets.token_hex(12)}"
        reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": False,
            "temperature": asked.sampling.get("temperature", 0.0),
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": asked.sampling.get("top_p"),
            "truncation": "disabled",
            "user": body.get("user"),
        }

    def whole(self, done: Mapping[str, Any]) -> dict[str, Any]:
        self._on_done(done)
        is_cut = done["finish_reason"] in ("length", "time")
        counted = done["usage"]
        thought = done.get("reasoning", "")
        reasoning = {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": []}
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [
                self._message([_part(done["answer"])], "incomplete" if is_cut else "completed"),
                *([{**reasoning, "content": [{"type": "reasoning_text", "text": thought}]}] if thought else []),
            ],
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": counted["cached_tokens"]},
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": counted.get("reasoning_tokens", 0)},
                "total_tokens": counted["total_tokens"],
            },
            **accounts(self._asked, done),
        }

    def _message(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {"type": "message", "id": self._message_id, "status": status, "role": "assistant", "content": content}

    async def chunks(self, _first: dict[str, Any], replies: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]:
        """Server-sent events in OpenAI's order; thoughts come with the last one alone."""
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event("response.output_item.added", output_index=0, item=self._message([], "in_progress"))
        yield self._event("response.content_part.added", **place, part=_part(""))
        async with aclosing(replies):
            try:
                reply = await anext(replies)
                while "done" not in reply:
                    if reply["text"]:
                        yield self._event("response.output_text.delta", **place, delta=reply["text"], logprobs=[])
                    reply = await anext(replies)
            except Problem as problem:
                yield self._event("error", code=str(problem.status), message=problem.detail, param=None)
                return
        whole = self.whole(reply["done"])
        message = whole["output"][0]
        part = message["content"][0]
        yield self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _event(self, kind: str, **more: object) -> dict[str, str]:
        return {"event": kind, "data": data_of({"type": kind, "sequence_number": next(self._numbers), **more})}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
