"""/v1/chat/completions answers a conversation, from an index if given. /v1/completions continues a plain text, without a chat template."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from localrag.server.chat_request import (
    ChatQuestion,
    ChatRequest,
    NumTokens,
    Penalty,
    Stop,
    StreamOptions,
    Temperature,
    TopP,
    Unused,
    read,
)
from localrag.server.errors import Problem
from localrag.server.openapi import ENGINE_FAILS, route_docs
from localrag.server.routing import FINISHES, Engine, State, answer_details, body_of, data_of, send_answer, usage, warnings_of
from localrag.server.schemas import (
    ACCOUNT,
    USAGE,
    ChatUsage,
    CitationInfo,
    Evidence,
    LedgerInfo,
    LocalAccount,
    NodeWithScore,
    SentenceSupport,
    SlotInfo,
    UnsupportedClaim,
    example,
    parse,
    with_message,
)

router = APIRouter(tags=["completions"])

_HEAD = {"id": "chatcmpl-dd10960f2f3b54b0c4841143", "created": 1795395678, "model": "echo"}
_TEXT_HEAD = {**_HEAD, "id": "cmpl-dd10960f2f3b54b0c4841143", "object": "text_completion"}
_MESSAGE = {"role": "assistant", "content": "You asked: What is PLA?"}
DEFAULT_MAX_TOKENS = 16
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",), "echo": (False,), "best_of": (1,), "logit_bias": ({},), "modalities": (["text"],)
}  # fmt: skip
"""Values without effect, accepted for parameters of /v1/completions that are not supported."""
_ONE_PROMPT = "prompt must be one non-empty string."


# --- chat completions ---


class LikelyToken(BaseModel):
    """A token and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(LikelyToken):
    """A token of the answer, and its most likely alternatives."""

    top_logprobs: list[LikelyToken]


class Logprobs(BaseModel):
    """The probabilities of an answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionCall(BaseModel):
    """A function and its arguments."""

    name: str
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(BaseModel):
    """A tool call by the model."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatAnswer(BaseModel):
    """The model's answer, and its reasoning under both names that clients use."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(BaseModel):
    """The answer. There is always exactly one."""

    index: int
    message: ChatAnswer
    finish_reason: FinishReason
    logprobs: Logprobs | None = None


class ChatCompletion(BaseModel):
    """An answer with its sources and its token ledger."""

    model_config = example(
        {
            **_HEAD,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop", "logprobs": None}],
            "usage": USAGE,
            "source_nodes": None,
            "localrag": ACCOUNT,
        }
    )

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    source_nodes: list[NodeWithScore] | None = Field(description="The passages in the prompt; null if no index was searched.")
    localrag: LocalAccount


class ToolCallDelta(BaseModel):
    """A piece of a tool call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: dict[str, str] | None = None


class ChatDelta(BaseModel):
    """A piece of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionCall | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    logprobs: Logprobs | None = None


class LiveAccount(BaseModel):
    """Details of a streamed answer: about the prompt in the first chunk, and complete in the last chunk. In every stream, the chunk with
    the `finish_reason` has the warnings."""

    finish_reason: str | None = None
    prompt_tokens: int | None = None
    slot: SlotInfo | None = None
    sections: list[dict[str, Any]] | None = Field(
        default=None, description="Each section of the ledger as a CSS flex item. `allotted` is the same as in the ledger."
    )
    ledger: LedgerInfo | None = None
    evidence: list[Evidence] | None = None
    completion_tokens: int | None = Field(default=None, description="Number of tokens generated so far.")
    citations: list[CitationInfo] | None = None
    unsupported_citations: list[str] | None = None
    support: list[SentenceSupport] | None = None
    unsupported_claims: list[UnsupportedClaim] | None = None
    coverage: dict[str, Any] | None = None
    timings: dict[str, float] | None = None
    tokens_per_s: float | None = None
    warnings: list[str] = Field(default_factory=list)
    bypass: str | None = None


class ChatChunk(BaseModel):
    """A chunk of a stream. With `include_usage`, the first chunk has the details of the prompt, and the last chunk, which has no choices,
    has usage, sources and all details."""

    model_config = example(
        {
            **_HEAD,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": {"content": "You"}, "finish_reason": None, "logprobs": None}],
        }
    )

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | None = None
    source_nodes: list[NodeWithScore] | None = None
    localrag: LiveAccount | None = None


@router.post(
    "/v1/chat/completions",
    operation_id="create_chat_completion",
    **route_docs(ChatCompletion, body=ChatRequest, stream=ChatChunk, fails=(*ENGINE_FAILS, 404, 409)),
)
async def complete_chat(request: Request, state: State, engine: Engine) -> Response:
    """Answer a conversation, with `index_name` from that index. See docs/how-to/server.md for the order of the checks."""
    question = read(await body_of(request), has_index=state.has_index, rejects_tools=state.rejects_tools)
    return await send_answer(request, engine, question, _ChatForm(question, engine.about["model"], state.metrics.record_answer))


def _call_delta(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a piece of a call in OpenAI's format."""
    if call["name"]:
        function = {"name": call["name"], "arguments": call["arguments"]}
        return {"index": call["index"], "id": call["id"], "type": "function", "function": function}
    return {"index": call["index"], "function": {"arguments": call["arguments"]}}


class _ChatForm:
    """Writes a chat completion in OpenAI's format, as one object or in chunks."""

    def __init__(self, question: ChatQuestion, model: str, on_done: Callable[[Mapping[str, Any]], None]) -> None:
        self._question = question
        self._on_done = on_done
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, result: Mapping[str, Any]) -> dict[str, Any]:
        self._on_done(result)
        calls = self._calls(result)
        content = {"content": result["answer"] or None if calls else result["answer"], **calls}
        choice = {
            "index": 0,
            "message": {"role": "assistant", **content, **_reasoning(result.get("reasoning", ""))},
            "finish_reason": self._finish(result),
            "logprobs": self._logprobs(result["logprobs"]),
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(result),
            **answer_details(self._question, result),
        }

    async def chunks(self, first: dict[str, Any], replies: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]:
        """Yield server-sent events. With `include_usage`, the first has the prompt's ledger, and the last before [DONE] the usage.

        The event with the finish_reason has the warnings, so that every stream includes them.
        """
        yield self._event({"choices": [_choice({"role": "assistant", "content": ""})], **self._begun(first["begun"])})
        async with aclosing(replies):
            try:
                reply = await anext(replies)
                while "done" not in reply:
                    for chunk in self._chunks_of(reply):
                        yield chunk
                    reply = await anext(replies)
            except Problem as problem:
                yield {"data": data_of(problem.event)}
                return
        result = reply["done"]
        self._on_done(result)
        if self._is_legacy and (calls := self._calls(result)):
            yield self._event({"choices": [_choice(calls)]})
        yield self._event({"choices": [_choice({}, self._finish(result))], **warnings_of(result)})
        if self._question.includes_usage:
            yield self._event({"choices": [], "usage": usage(result), **answer_details(self._question, result)})
        yield {"data": "[DONE]"}

    def _chunks_of(self, reply: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the chunks for a piece of an answer: one for its text, and one for each piece of a call."""
        text, logprobs = reply["text"], reply["logprobs"]
        delta = {**({"content": text} if text else {}), **_reasoning(reply["thought"])}
        counted = {"localrag": {"completion_tokens": reply["num_tokens"]}} if self._question.includes_usage else {}
        choice = _choice(delta, logprobs=self._logprobs(logprobs) if logprobs else None)
        chunks = [self._event({"choices": [choice], **counted})] if delta or logprobs or counted else []
        calls = [] if self._is_legacy else reply.get("calls", [])
        return [*chunks, *(self._event({"choices": [_choice({"tool_calls": [_call_delta(call)]})]}) for call in calls)]

    @property
    def _is_legacy(self) -> bool:
        return self._question.tools is not None and self._question.tools.is_legacy

    def _calls(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields for the calls of an answer; {} without any."""
        calls = result.get("tool_calls") or []
        functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        if not functions:
            return {}
        if self._is_legacy:
            return {"function_call": functions[0]}
        named = zip(calls, functions, strict=True)
        return {"tool_calls": [{"id": call["id"], "type": "function", "function": function} for call, function in named]}

    def _finish(self, result: Mapping[str, Any]) -> str:
        if result["finish_reason"] != "stop" or not result.get("tool_calls"):
            return FINISHES[result["finish_reason"]]
        return "function_call" if self._is_legacy else "tool_calls"

    def _logprobs(self, logprobs: Sequence[Any]) -> dict[str, Any] | None:
        if "logprobs" not in self._question.sampling:
            return None
        content = [{**_token(piece, value), "top_logprobs": [_token(*each) for each in top]} for piece, value, top in logprobs]
        return {"content": content, "refusal": None}

    def _event(self, more: Mapping[str, Any]) -> dict[str, str]:
        return {"data": data_of({**self._head, "object": "chat.completion.chunk", **more})}

    def _begun(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the details of the prompt, before it is evaluated."""
        if not self._question.includes_usage:
            return {}
        local = {name: facts[name] for name in ("prompt_tokens", "slot", "sections", "ledger", "evidence")}
        return {"source_nodes": facts["nodes"] if self._question.searches else None, "localrag": local}


def _choice(delta: Mapping[str, Any], finish: str | None = None, *, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


def _token(piece: Sequence[int], logprob: float) -> dict[str, Any]:
    return {"token": bytes(piece).decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def _reasoning(thought: str) -> dict[str, str]:
    """Return the reasoning under localrag's field name and under the name that most clients use."""
    return {"reasoning": thought, "reasoning_content": thought} if thought else {}


# --- text completions ---


class CompletionRequest(Unused):
    """A text to continue."""

    model_config = example({"model": "echo", "prompt": "PLA is annealed at", "max_tokens": 16, "temperature": 0}, extra="forbid")

    prompt: Annotated[str | Annotated[list[str], Field(min_length=1, max_length=1)], with_message(_ONE_PROMPT)]
    max_tokens: NumTokens | None = Field(default=None, description=f"The default is {DEFAULT_MAX_TOKENS}.")
    n: Literal[1] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class CompletionLogprobs(BaseModel):
    """Lists with one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """The text, or a piece of it in a stream."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None = None


class TextCompletion(BaseModel):
    """The text that the model generated."""

    model_config = example(
        {
            **_TEXT_HEAD,
            "choices": [{"index": 0, "text": " 80 degrees.", "finish_reason": "stop", "logprobs": None}],
            "usage": USAGE,
            "source_nodes": None,
            "localrag": ACCOUNT,
        }
    )

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage
    source_nodes: None = Field(description="Always null: no index is searched.")
    localrag: LocalAccount


class TextChunk(BaseModel):
    """A chunk of a stream. With `include_usage`, the last chunk, which has no choices, has usage and details."""

    model_config = example(
        {
            **_TEXT_HEAD,
            "choices": [{"index": 0, "text": " 80", "finish_reason": None, "logprobs": None}],
        }
    )

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage | None = None
    source_nodes: None = None
    localrag: LiveAccount | None = None


@router.post(
    "/v1/completions",
    operation_id="create_completion",
    **route_docs(TextCompletion, body=CompletionRequest, stream=TextChunk, fails=ENGINE_FAILS),
)
async def complete_text(request: Request, state: State, engine: Engine) -> Response:
    """Continue a plain text. Special tokens in it are treated as text."""
    question = read_text(await body_of(request))
    return await send_answer(request, engine, question, _TextForm(question, engine.about["model"], state.metrics.record_answer))


def read_text(body: object) -> ChatQuestion:
    """Convert a body to a conversation with one message. Problem for an invalid body."""
    request = parse(CompletionRequest, body, _NEUTRAL)
    prompt = request.prompt if isinstance(request.prompt, str) else request.prompt[0]
    if not prompt.strip():
        raise Problem(400, _ONE_PROMPT, param="prompt")
    chat = request.model_dump(exclude={"prompt", "logprobs"}, exclude_none=True, warnings=False)  # unused fields are of any type
    if request.logprobs is not None:
        chat |= {"logprobs": True, "top_logprobs": request.logprobs}
    messages = [{"role": "user", "content": prompt}]
    return read({"max_tokens": DEFAULT_MAX_TOKENS, **chat, "messages": messages}, has_index=lambda _: False, is_plain=True)


class _TextForm:
    """Writes a text completion in OpenAI's older format, as one object or in chunks."""

    def __init__(self, question: ChatQuestion, model: str, on_done: Callable[[Mapping[str, Any]], None]) -> None:
        self._question = question
        self._on_done = on_done
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": model}
        self._offset = len(question.messages[0].content)

    def whole(self, result: Mapping[str, Any]) -> dict[str, Any]:
        self._on_done(result)
        choice = self._choice(result["answer"], result["logprobs"], FINISHES[result["finish_reason"]])
        return {**self._head, "choices": [choice], "usage": usage(result), **answer_details(self._question, result)}

    async def chunks(self, _first: dict[str, Any], replies: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]:
        """Yield server-sent events. With `include_usage`, the last before [DONE] has the usage. Warnings as in a chat."""
        async with aclosing(replies):
            try:
                reply = await anext(replies)
                while "done" not in reply:
                    yield self._event([self._choice(reply["text"], reply["logprobs"])])
                    reply = await anext(replies)
            except Problem as problem:
                yield {"data": data_of(problem.event)}
                return
        result = reply["done"]
        self._on_done(result)
        yield self._event([self._choice("", [], FINISHES[result["finish_reason"]])], warnings_of(result))
        if self._question.includes_usage:
            yield self._event([], {"usage": usage(result), **answer_details(self._question, result)})
        yield {"data": "[DONE]"}

    def _event(self, choices: list[Any], more: Mapping[str, Any] | None = None) -> dict[str, str]:
        return {"data": data_of({**self._head, "choices": choices, **(more or {})})}

    def _choice(self, text: str, logprobs: Sequence[Any], finish: str | None = None) -> dict[str, Any]:
        logprobs_object = self._logprobs(logprobs) if "logprobs" in self._question.sampling else None
        return {"index": 0, "text": text, "logprobs": logprobs_object, "finish_reason": finish}

    def _logprobs(self, logprobs: Sequence[Any]) -> dict[str, Any]:
        """Return logprobs in the older format. Offsets are in characters from the start of the prompt."""
        texts, offsets = [bytes(piece).decode("utf-8", "replace") for piece, _, _ in logprobs], []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        tops = [{bytes(piece).decode("utf-8", "replace"): value for piece, value in top} for _, _, top in logprobs]
        return {"tokens": texts, "token_logprobs": [value for _, value, _ in logprobs], "top_logprobs": tops, "text_offset": offsets}
