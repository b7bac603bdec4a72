"""/v1/completions: a text is gone on with, as it stands, without a chat template."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from localrag.server.asking import FINISHES, accounts, answered, body_of, data_of, opened, usage
from localrag.server.documenting import ENGINE_FAILS, described
from localrag.server.openai_schemas import CompletionRequest, TextCompletion
from localrag.server.problems import Problem, stream_failure
from localrag.server.questions import Asked, read

if TYPE_CHECKING:
    from localrag.server.app import Shared

router = APIRouter(tags=["completions"])

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5
_NOT_HERE = ("messages", "index_name", "context_token_ratio", "tools", "functions", "tool_choice", "function_call", "response_format",
             "reasoning_effort", "top_logprobs", "max_completion_tokens")  # fmt: skip
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"suffix": ("",), "echo": (False,), "best_of": (1,), "logit_bias": ({},)}


@router.post(
    "/v1/completions",
    operation_id="create_completion",
    **described(TextCompletion, body=CompletionRequest, stream=TextCompletion, fails=ENGINE_FAILS),
)
async def complete_text(request: Request) -> Response:
    """Go on with a text. Special strings in it are text."""
    shared: Shared = request.app.state.shared
    engine = await opened(shared)
    asked = read_text(await body_of(request))
    return await answered(request, engine, asked, _Answered(asked, engine.about["model"], shared.metrics.answered))


def read_text(body: object) -> Asked:
    """The body as a conversation of one message. Problem for what it cannot be."""
    if not isinstance(body, dict):
        raise Problem(400, "The body is not a JSON object.")
    for name in body:
        if name in _NOT_HERE and body[name] is not None:
            raise Problem(400, f"The parameter {name!r} cannot be honoured here.")
    prompt, wanted = body.get("prompt"), body.get("logprobs")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt.strip():
        raise Problem(400, "prompt is one text that is not empty.")
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= MAX_LOGPROBS):
        raise Problem(400, f"logprobs is a whole number of 0 to {MAX_LOGPROBS}.")
    chat = {name: value for name, value in body.items() if name not in ("prompt", "logprobs") and value not in _NEUTRAL.get(name, ())}
    chat["messages"] = [{"role": "user", "content": prompt}]
    if wanted is not None:
        chat |= {"logprobs": True, "top_logprobs": wanted}
    if chat.get("max_tokens") is None:
        chat["max_tokens"] = DEFAULT_MAX_TOKENS
    return read(chat, has_index=lambda _: False, is_plain=True)


class _Answered:
    """One completion in OpenAI's older form, whole or in chunks."""

    def __init__(self, asked: Asked, model: str, on_done: Callable[[Mapping[str, Any]], None]) -> None:
        self._asked = asked
        self._on_done = on_done
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": model}
        self._offset = len(asked.messages[0].content)

    def whole(self, done: Mapping[str, Any]) -> dict[str, Any]:
        self._on_done(done)
        choice = self._choice(done["answer"], done["logprobs"], FINISHES[done["finish_reason"]])
        return {**self._head, "choices": [choice], "usage": usage(done), **accounts(self._asked, done)}

    async def chunks(self, _first: dict[str, Any], replies: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]:
        """Server-sent events; the last one but the end carries the usage, if it was asked for."""
        async with aclosing(replies):
            try:
                reply = await anext(replies)
                while "done" not in reply:
                    yield self._event([self._choice(reply["text"], reply["logprobs"])])
                    reply = await anext(replies)
            except Problem as problem:
                yield {"data": data_of(stream_failure(problem.status, problem.detail))}
                return
        done = reply["done"]
        self._on_done(done)
        yield self._event([self._choice("", [], FINISHES[done["finish_reason"]])])
        if self._asked.includes_usage:
            yield self._event([], {"usage": usage(done), **accounts(self._asked, done)})
        yield {"data": "[DONE]"}

    def _event(self, choices: list[Any], more: Mapping[str, Any] | None = None) -> dict[str, str]:
        return {"data": data_of({**self._head, "choices": choices, **(more or {})})}

    def _choice(self, text: str, logprobs: Sequence[Any], finish: str | None = None) -> dict[str, Any]:
        told = self._logprobs(logprobs) if "logprobs" in self._asked.sampling else None
        return {"index": 0, "text": text, "logprobs": told, "finish_reason": finish}

    def _logprobs(self, found: Sequence[Any]) -> dict[str, Any]:
        """Offsets are in characters, from the beginning of the prompt on."""
        texts, offsets = [bytes(piece).decode("utf-8", "replace") for piece, _, _ in found], []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        tops = [{bytes(piece).decode("utf-8", "replace"): value for piece, value in top} for _, _, top in found]
        return {"tokens": texts, "token_logprobs": [value for _, value, _ in found], "top_logprobs": tops, "text_offset": offsets}
