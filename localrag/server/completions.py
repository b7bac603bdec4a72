"""/v1/chat/completions: a conversation is answered, from an index if it names one."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from localrag.server.asking import FINISHES, accounts, answered, body_of, data_of, opened, usage
from localrag.server.chat_answer_schemas import ChatChunk, ChatCompletion
from localrag.server.chat_schemas import ChatRequest
from localrag.server.documenting import ENGINE_FAILS, described
from localrag.server.problems import Problem, stream_failure
from localrag.server.questions import Asked, read
from localrag.server.tools import Call, may_be_call

if TYPE_CHECKING:
    from localrag.server.app import Shared

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/chat/completions",
    operation_id="create_chat_completion",
    **described(ChatCompletion, body=ChatRequest, stream=ChatChunk, fails=(*ENGINE_FAILS, 404, 409)),
)
async def complete_chat(request: Request) -> Response:
    """Answer a conversation; with `index_name` from what is found there. See docs/how-to/server.md for the order of the checks."""
    shared: Shared = request.app.state.shared
    engine = await opened(shared)
    asked = read(await body_of(request), has_index=shared.has_index, rejects_tools=shared.rejects_tools)
    return await answered(request, engine, asked, _Answered(asked, engine.about["model"], shared.metrics.answered))


class _Answered:
    """One completion in OpenAI's form, whole or in chunks."""

    def __init__(self, asked: Asked, model: str, on_done: Callable[[Mapping[str, Any]], None]) -> None:
        self._asked = asked
        self._on_done = on_done
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._held = ""
        """Text that may come to be a call, with its logprobs."""
        self._held_logprobs: list[Any] = []

    def whole(self, done: Mapping[str, Any]) -> dict[str, Any]:
        self._on_done(done)
        call = self._call(done["answer"])
        said = {"content": done["answer"]} if call is None else {"content": None, **self._called(call)}
        choice = {
            "index": 0,
            "message": {"role": "assistant", **said, **_reasoning(done.get("reasoning", ""))},
            "finish_reason": self._finish(done, call),
            "logprobs": self._logprobs(done["logprobs"]),
        }
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage(done), **accounts(self._asked, done)}

    async def chunks(self, first: dict[str, Any], replies: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]:
        """Server-sent events. If the usage was asked for, the last one but the end carries it, and the first one the prompt's ledger."""
        yield self._event({"choices": [_choice({"role": "assistant", "content": ""})], **self._begun(first["begun"])})
        async with aclosing(replies):
            try:
                reply = await anext(replies)
                while "done" not in reply:
                    for chunk in self._heard(reply):
                        yield chunk
                    reply = await anext(replies)
            except Problem as problem:
                yield {"data": data_of(stream_failure(problem.status, problem.detail))}
                return
        done = reply["done"]
        self._on_done(done)
        call = self._call(done["answer"])
        if call is not None:
            yield self._event({"choices": [_choice(self._called(call, index=0))]})
        elif self._held:
            yield self._event({"choices": [_choice({"content": self._held}, logprobs=self._logprobs(self._held_logprobs))]})
        yield self._event({"choices": [_choice({}, self._finish(done, call))]})
        if self._asked.includes_usage:
            yield self._event({"choices": [], "usage": usage(done), **accounts(self._asked, done)})
        yield {"data": "[DONE]"}

    def _heard(self, reply: Mapping[str, Any]) -> list[dict[str, str]]:
        """The chunk for a piece of an answer; none for one that may come to be a call."""
        text, tools = self._held + reply["text"], self._asked.tools
        logprobs = [*self._held_logprobs, *reply["logprobs"]]
        if tools is not None and (not tools.or_text or may_be_call(text)):
            self._held, self._held_logprobs, text, logprobs = text, logprobs, "", []
        else:
            self._held, self._held_logprobs = "", []
        delta = {**({"content": text} if text else {}), **_reasoning(reply["thought"])}
        counted = {"localrag": {"completion_tokens": reply["num_tokens"]}} if self._asked.includes_usage else {}
        choice = _choice(delta, logprobs=self._logprobs(logprobs) if logprobs else None)
        return [self._event({"choices": [choice], **counted})] if delta or logprobs or counted else []

    def _call(self, answer: str) -> Call | None:
        return None if self._asked.tools is None else self._asked.tools.call(answer)

    def _called(self, call: Call, **more: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        if self._asked.tools is not None and self._asked.tools.is_legacy:
            return {"function_call": function}
        return {"tool_calls": [{**more, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}]}

    def _finish(self, done: Mapping[str, Any], call: Call | None) -> str:
        if call is None or self._asked.tools is None:
            return FINISHES[done["finish_reason"]]
        return "function_call" if self._asked.tools.is_legacy else "tool_calls"

    def _logprobs(self, found: Sequence[Any]) -> dict[str, Any] | None:
        if "logprobs" not in self._asked.sampling:
            return None
        content = [{**_token(piece, value), "top_logprobs": [_token(*each) for each in top]} for piece, value, top in found]
        return {"content": content, "refusal": None}

    def _event(self, more: Mapping[str, Any]) -> dict[str, str]:
        return {"data": data_of({**self._head, "object": "chat.completion.chunk", **more})}

    def _begun(self, begun: Mapping[str, Any]) -> dict[str, Any]:
        """The prompt before it is evaluated."""
        if not self._asked.includes_usage:
            return {}
        local = {name: begun[name] for name in ("slot", "sections", "ledger", "evidence")}
        return {"source_nodes": begun["nodes"] if self._asked.searches else None, "localrag": local}


def _choice(delta: Mapping[str, Any], finish: str | None = None, *, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


def _token(piece: Sequence[int], logprob: float) -> dict[str, Any]:
    return {"token": bytes(piece).decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def _reasoning(thought: str) -> dict[str, str]:
    """Under the name that this project uses and the one that most clients know."""
    return {"reasoning": thought, "reasoning_content": thought} if thought else {}
