"""/v1/chat/completions and /v1/completions: a conversation is answered, from an index if it names one, and a text is gone on with as it
stands, without a chat template."""

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
    Asked,
    Call,
    ChatRequest,
    NumTokens,
    Penalty,
    Stop,
    StreamOptions,
    Temperature,
    TopP,
    Unused,
    may_be_call,
    read,
)
from localrag.server.errors import Problem
from localrag.server.openapi import ENGINE_FAILS, described
from localrag.server.routing import FINISHES, Engine, State, accounts, answered, body_of, data_of, usage, warned
from localrag.server.schemas import (
    ACCOUNT,
    USAGE,
    ChatUsage,
    CitationInfo,
    Evidence,
    LedgerInfo,
    LocalAccount,
    NodeWithScore,
    SlotInfo,
    example,
    parse,
    worded,
)

router = APIRouter(tags=["completions"])

_HEAD = {"id": "chatcmpl-dd10960f2f3b54b0c4841143", "created": 1795395678, "model": "echo"}
_TEXT_HEAD = {**_HEAD, "id": "cmpl-dd10960f2f3b54b0c4841143", "object": "text_completion"}
_MESSAGE = {"role": "assistant", "content": "You asked: What is PLA?"}
DEFAULT_MAX_TOKENS = 16
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",), "echo": (False,), "best_of": (1,), "logit_bias": ({},), "modalities": (["text"],)
}  # fmt: skip
"""Values that ask for nothing, of parameters of /v1/completions that cannot be honoured."""
_ONE_PROMPT = "prompt is one text that is not empty."


# --- a conversation ---


class LikelyToken(BaseModel):
    """A token and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(LikelyToken):
    """A token of the answer, and those that might have stood there."""

    top_logprobs: list[LikelyToken]


class Logprobs(BaseModel):
    """The probabilities of an answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionCall(BaseModel):
    """A function and what it is called with."""

    name: str
    arguments: str = Field(description="JSON.")


class ToolCall(BaseModel):
    """A call of a tool that the model wrote."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatAnswer(BaseModel):
    """What the model said, and what it thought before, under both names that are known for it."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(BaseModel):
    """The one answer."""

    index: int
    message: ChatAnswer
    finish_reason: FinishReason
    logprobs: Logprobs | None = None


class ChatCompletion(BaseModel):
    """An answer with its sources and its account."""

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
    source_nodes: list[NodeWithScore] | None = Field(description="The passages in the prompt; null where nothing was searched.")
    localrag: LocalAccount


class ToolCallDelta(BaseModel):
    """A piece of a call of a tool."""

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
    """The account of an answer that is being written: of its prompt in the first chunk, of all in the last. The chunk with the
    `finish_reason` has the warnings, in every stream."""

    finish_reason: str | None = None
    prompt_tokens: int | None = None
    slot: SlotInfo | None = None
    sections: list[dict[str, Any]] | None = Field(
        default=None, description="Each section of the ledger as a flex item; its `allotted` is the ledger's."
    )
    ledger: LedgerInfo | None = None
    evidence: list[Evidence] | None = None
    completion_tokens: int | None = Field(default=None, description="How many were written so far.")
    citations: list[CitationInfo] | None = None
    unsupported_citations: list[str] | None = None
    coverage: dict[str, Any] | None = None
    timings: dict[str, float] | None = None
    tokens_per_s: float | None = None
    warnings: list[str] = Field(default_factory=list)
    bypass: str | None = None


class ChatChunk(BaseModel):
    """A piece of a stream. If `include_usage` asked for them, the first one has the account of the prompt, and the last one, without a
    choice, usage, sources and the whole account."""

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
    **described(ChatCompletion, body=ChatRequest, stream=ChatChunk, fails=(*ENGINE_FAILS, 404, 409)),
)
async def complete_chat(request: Request, state: State, engine: Engine) -> Response:
    """Answer a conversation; with `index_name` from what is found there. See docs/how-to/server.md for the order of the checks."""
    asked = read(await body_of(request), has_index=state.has_index, rejects_tools=state.rejects_tools)
    return await answered(request, engine, asked, _ChatForm(asked, engine.about["model"], state.metrics.answered))


class _ChatForm:
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
        """Server-sent events. If the usage was asked for, the last one but the end carries it, and the first one the prompt's ledger.

        The one with the finish_reason carries the warnings, so that no stream goes without.
        """
        yield self._event({"choices": [_choice({"role": "assistant", "content": ""})], **self._begun(first["begun"])})
        async with aclosing(replies):
            try:
                reply = await anext(replies)
                while "done" not in reply:
                    for chunk in self._heard(reply):
                        yield chunk
                    reply = await anext(replies)
            except Problem as problem:
                yield {"data": data_of(problem.event)}
                return
        done = reply["done"]
        self._on_done(done)
        call = self._call(done["answer"])
        if call is not None:
            yield self._event({"choices": [_choice(self._called(call, index=0))]})
        elif self._held:
            yield self._event({"choices": [_choice({"content": self._held}, logprobs=self._logprobs(self._held_logprobs))]})
        yield self._event({"choices": [_choice({}, self._finish(done, call))], **warned(done)})
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
        local = {name: begun[name] for name in ("prompt_tokens", "slot", "sections", "ledger", "evidence")}
        return {"source_nodes": begun["nodes"] if self._asked.searches else None, "localrag": local}


def _choice(delta: Mapping[str, Any], finish: str | None = None, *, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


def _token(piece: Sequence[int], logprob: float) -> dict[str, Any]:
    return {"token": bytes(piece).decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def _reasoning(thought: str) -> dict[str, str]:
    """Under the name that this project uses and the one that most clients know."""
    return {"reasoning": thought, "reasoning_content": thought} if thought else {}


# --- a text ---


class CompletionRequest(Unused):
    """A text to be gone on with."""

    model_config = example({"model": "echo", "prompt": "PLA is annealed at", "max_tokens": 16, "temperature": 0}, extra="forbid")

    prompt: Annotated[str | Annotated[list[str], Field(min_length=1, max_length=1)], worded(_ONE_PROMPT)]
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
    """One item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """The one text, or a piece of it in a stream."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None = None


class TextCompletion(BaseModel):
    """What the model wrote."""

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
    source_nodes: None = Field(description="Nothing is searched.")
    localrag: LocalAccount


class TextChunk(BaseModel):
    """A piece of a stream. If `include_usage` asked for them, the last one, without a choice, has usage and account."""

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
    **described(TextCompletion, body=CompletionRequest, stream=TextChunk, fails=ENGINE_FAILS),
)
async def complete_text(request: Request, state: State, engine: Engine) -> Response:
    """Go on with a text. Special strings in it are text."""
    asked = read_text(await body_of(request))
    return await answered(request, engine, asked, _TextForm(asked, engine.about["model"], state.metrics.answered))


def read_text(body: object) -> Asked:
    """The body as a conversation of one message. Problem for what it cannot be."""
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
        """Server-sent events; the last one but the end carries the usage, if it was asked for. Warnings as of a chat."""
        async with aclosing(replies):
            try:
                reply = await anext(replies)
                while "done" not in reply:
                    yield self._event([self._choice(reply["text"], reply["logprobs"])])
                    reply = await anext(replies)
            except Problem as problem:
                yield {"data": data_of(problem.event)}
                return
        done = reply["done"]
        self._on_done(done)
        yield self._event([self._choice("", [], FINISHES[done["finish_reason"]])], warned(done))
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
