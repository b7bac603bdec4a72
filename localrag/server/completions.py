"""/v1/chat/completions: a conversation is answered, from an index if it names one."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sse_starlette import EventSourceResponse

from localrag.server.problems import Problem
from localrag.server.questions import Asked, read
from localrag.server.responses import CompactResponse

if TYPE_CHECKING:
    from localrag.server.app import Shared
    from localrag.server.engine_process import EngineProcess

router = APIRouter(tags=["completions"])

_FINISHES = {"stop": "stop", "length": "length", "time": "length", "cancelled": "stop"}
_LOOK_S = 0.2
"""How often it is looked whether a client is still there."""


@router.post("/v1/chat/completions")
async def complete_chat(request: Request) -> Response:
    """Answer a conversation; with `index_name` from what is found there. See docs/server.md for the order of the checks."""
    shared: Shared = request.app.state.shared
    engine = await opened(shared)
    asked = read(await body_of(request), has_index=shared.has_index)
    answered = _Answered(asked, engine.about["model"], shared.metrics.answered)
    replies = engine.run(client_of(request), asked.to_message(engine.about["slot"]["n_ctx"]))
    if not asked.streams:
        done = await heard_out(request, replies)
        return CompactResponse(answered.whole(done))
    first = await anext(replies)  # what cannot be answered is no stream
    return EventSourceResponse(answered.chunks(first, replies), sep="\n", ping=15)


async def opened(shared: Shared) -> EngineProcess:
    """The engine, once its model is open. Problem 503 if there is none."""
    if shared.engine is None:
        raise Problem(503, "There is no model.")
    await shared.engine.opened()
    if shared.engine.failure is not None:
        raise Problem(503, "There is no model.")
    return shared.engine


async def body_of(request: Request) -> Any:  # noqa: ANN401  # JSON
    """Problem 400 for what is not JSON."""
    try:
        return json.loads(await request.body(), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Problem(400, "The body is not JSON.") from None


def _no_number(text: str) -> float:
    raise ValueError(text)


def client_of(request: Request) -> str:
    """Whose share of the engine a request takes."""
    return request.client.host if request.client is not None else ""


async def heard_out(request: Request, replies: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    """What was done in the end. A client that goes away ends it at once."""
    task = asyncio.ensure_future(_last(replies))
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S)
            if not task.done() and await request.is_disconnected():
                raise Problem(499, "The client went away.")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _last(replies: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    async with aclosing(replies):
        async for reply in replies:
            if "done" in reply:
                return dict(reply["done"])
    raise Problem(503, "The model could not answer.")


class _Answered:
    """One completion in OpenAI's form, whole or in chunks."""

    def __init__(self, asked: Asked, model: str, on_done: Callable[[Mapping[str, Any]], None]) -> None:
        self._asked = asked
        self._on_done = on_done
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, done: Mapping[str, Any]) -> dict[str, Any]:
        self._on_done(done)
        message = {"role": "assistant", "content": done["answer"], **_reasoning(done.get("reasoning", ""))}
        choice = {"index": 0, "message": message, "finish_reason": _FINISHES[done["finish_reason"]], "logprobs": None}
        return {**self._head, "object": "chat.completion", "choices": [choice], **self._accounts(done)}

    async def chunks(self, first: dict[str, Any], replies: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]:
        """Server-sent events. If the usage was asked for, the last one but the end carries it, and the first one the prompt's ledger."""
        yield self._event({"choices": [_choice({"role": "assistant", "content": ""})], **self._begun(first["begun"])})
        async with aclosing(replies):
            try:
                reply = await anext(replies)
                while "done" not in reply:
                    delta = {**({"content": reply["text"]} if reply["text"] else {}), **_reasoning(reply["thought"])}
                    yield self._event({"choices": [_choice(delta)], **self._counted(reply["num_tokens"])})
                    reply = await anext(replies)
            except Problem as problem:
                yield {"data": json.dumps({"error": {"message": problem.detail, "code": problem.status}})}
                return
        done = reply["done"]
        self._on_done(done)
        yield self._chunk({}, _FINISHES[done["finish_reason"]])
        if self._asked.includes_usage:
            yield self._event({"choices": [], **self._accounts(done)})
        yield {"data": "[DONE]"}

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, str]:
        return self._event({"choices": [_choice(delta, finish)]})

    def _event(self, more: Mapping[str, Any]) -> dict[str, str]:
        chunk = {**self._head, "object": "chat.completion.chunk", **more}
        return {"data": json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))}

    def _begun(self, begun: Mapping[str, Any]) -> dict[str, Any]:
        """The prompt before it is evaluated."""
        if not self._asked.includes_usage:
            return {}
        local = {name: begun[name] for name in ("slot", "sections", "ledger", "evidence")}
        return {"source_nodes": begun["nodes"] if self._searched else None, "localrag": local}

    def _counted(self, num_tokens: int) -> dict[str, Any]:
        """What was written so far."""
        return {"localrag": {"completion_tokens": num_tokens}} if self._asked.includes_usage else {}

    @property
    def _searched(self) -> bool:
        return self._asked.index is not None and self._asked.bypass is None

    def _accounts(self, done: Mapping[str, Any]) -> dict[str, Any]:
        """Usage, sources and ledger; `source_nodes` is null where nothing was searched."""
        asked, usage = self._asked, done["usage"]
        kept = ("slot", "ledger", "evidence", "citations", "unsupported_citations", "coverage", "timings", "warnings", "bypass")
        local = {name: done[name] for name in kept if name in done}
        if asked.index is not None and asked.bypass is not None:
            local["bypass"] = asked.bypass.value
        return {
            "usage": {
                "prompt_tokens": usage["prompt_tokens"],
                "completion_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
                "completion_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)},
            },
            "source_nodes": done["nodes"] if self._searched else None,
            "localrag": local,
        }


def _choice(delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}


def _reasoning(thought: str) -> dict[str, str]:
    """Under the name that this project uses and the one that most clients know."""
    return {"reasoning": thought, "reasoning_content": thought} if thought else {}
