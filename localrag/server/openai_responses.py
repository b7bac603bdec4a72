"""/v1/responses: OpenAI's newer API for chat completions, text only. Responses are not stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from localrag.server.chat_request import (
    CITE_MEANS,
    EVIDENCE_MEANS,
    EVIDENCE_TOKENS_MEAN,
    MAX_MESSAGES,
    QUOTE_MEANS,
    RATIO_MEANS,
    UNANSWERABLE_MEANS,
    ChatQuestion,
    ChatRequest,
    CiteField,
    Effort,
    EvidenceField,
    FreeForm,
    NumTokens,
    Ratio,
    Stop,
    Temperature,
    TopP,
    UnanswerableField,
    Unused,
    read,
)
from localrag.server.errors import Problem
from localrag.server.openapi import ENGINE_FAILS, route_docs
from localrag.server.routing import Engine, State, answer_details, body_of, data_of, send_answer
from localrag.server.schemas import ACCOUNT, LocalAccount, NodeWithScore, example, parse, with_message

router = APIRouter(tags=["completions"])

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "truncation": ("disabled",), "tools": ([],), "tool_choice": ("auto", "none"), "include": ([],), "background": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
}  # fmt: skip
"""Values without effect, accepted for parameters that are not supported."""


# --- request and response ---


class InputPart(BaseModel):
    """A part of a message's content. Only text is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """One message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]


class SchemaFormat(BaseModel):
    """JSON that matches a schema. Every field is validated, because the response repeats the format."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """The format of the answer."""

    format: Annotated[FreeForm | SchemaFormat, with_message("text.format must be text, json_object, or json_schema.")] | None = None


class ReasoningOptions(BaseModel):
    """The limit for a model's reasoning."""

    effort: Effort | None = None


class ResponsesRequest(Unused):
    """A question or a conversation. Responses are not stored, so each request must contain the whole conversation."""

    model_config = example({"model": "echo", "instructions": "Be brief.", "input": "What is PLA?", "max_output_tokens": 60}, extra="forbid")

    input: Annotated[
        str | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)],
        with_message("input must be a string, or a list of messages with text content."),
    ]
    instructions: str | None = Field(default=None, description="The system message.")
    max_output_tokens: NumTokens | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    reasoning: ReasoningOptions | None = None
    index_name: str | None = Field(
        default=None, description="The index to answer from. Without it, the model answers from its own knowledge."
    )
    context_token_ratio: Ratio | None = Field(default=None, description=RATIO_MEANS)
    evidence: EvidenceField | None = Field(default=None, description=EVIDENCE_MEANS)
    evidence_tokens: NumTokens | None = Field(default=None, description=EVIDENCE_TOKENS_MEAN)
    cite: CiteField | None = Field(default=None, description=CITE_MEANS)
    unanswerable: UnanswerableField | None = Field(default=None, description=UNANSWERABLE_MEANS)
    quote: bool | None = Field(default=None, description=QUOTE_MEANS)
    seed: int | None = None
    stop: Stop | None = None


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]] = Field(default_factory=list)


class OutputMessage(BaseModel):
    """The answer."""

    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(BaseModel):
    """The model's reasoning before its answer."""

    type: Literal["reasoning"]
    id: str
    summary: list[dict[str, Any]]
    content: list[dict[str, Any]]


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class InputTokens(BaseModel):
    cached_tokens: int


class OutputTokens(BaseModel):
    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponsesAnswer(BaseModel):
    """A complete response."""

    model_config = example(
        {
            "id": "resp_dd10960f2f3b54b0c4841143",
            "object": "response",
            "created_at": 1795395678,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "model": "echo",
            "output": [
                {
                    "type": "message",
                    "id": "msg_dd10960f2f3b54b0c4841143",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "You asked: What is PLA?", "annotations": []}],
                }
            ],
            "usage": {
                "input_tokens": 31,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 24,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 55,
            },
            "localrag": ACCOUNT,
        }
    )

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | ReasoningItem]
    usage: ResponsesUsage | None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: dict[str, Any] | None = None
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None
    metadata: dict[str, Any] | None = None
    source_nodes: list[NodeWithScore] | None = None
    localrag: LocalAccount | None = None


class ResponsesEvent(BaseModel):
    """An event of a stream. Its other fields depend on its type."""

    model_config = example({"type": "response.output_text.delta", "sequence_number": 4, "delta": "You"}, extra="allow")

    type: str
    sequence_number: int


# --- the route ---


@router.post(
    "/v1/responses",
    operation_id="create_response",
    **route_docs(ResponsesAnswer, body=ResponsesRequest, stream=ResponsesEvent, fails=(*ENGINE_FAILS, 404, 409)),
)
async def respond(request: Request, state: State, engine: Engine) -> Response:
    """Answer a text or a conversation, with `index_name` from that index."""
    body = await body_of(request)
    question = read(chat_body(body), has_index=state.has_index)
    form = _ResponseForm(question, body, engine.about["model"], state.metrics.record_answer)
    return await send_answer(request, engine, question, form)


def chat_body(body: object) -> dict[str, Any]:
    """Convert a body to that of an equivalent chat completion. Problem for an invalid body."""
    request = parse(ResponsesRequest, body, _NEUTRAL)
    chat = request.model_dump(include=set(ChatRequest.model_fields), exclude_none=True, warnings=False)  # unused fields are of any type
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    chat["messages"] = [*system, *_messages(request.input)]
    chat["max_tokens"] = request.max_output_tokens
    chat["response_format"] = _format(request.text)
    chat["reasoning_effort"] = request.reasoning.effort if request.reasoning else None
    return chat


def _messages(messages: str | list[InputMessage]) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [{"role": each.role, "content": _content(each.content)} for each in messages]


def _content(content: str | list[InputPart]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    """Convert a format to `response_format`."""
    if text is None or text.format is None:
        return None
    if isinstance(text.format, SchemaFormat):
        return {"type": "json_schema", "json_schema": {"schema": text.format.schema_}}
    return {"type": text.format.type}


class _ResponseForm:
    """Writes a response as one object or as a sequence of events."""

    def __init__(self, question: ChatQuestion, body: Mapping[str, Any], model: str, on_done: Callable[[Mapping[str, Any]], None]) -> None:
        self._question = question
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
            "metadata": metadata if isinstance(metadata := body.get("metadata"), dict) else {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": False,
            "temperature": question.sampling.get("temperature", 0.0),
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": question.sampling.get("top_p"),
            "truncation": "disabled",
            "user": user if isinstance(user := body.get("user"), str) else None,
        }

    def whole(self, result: Mapping[str, Any]) -> dict[str, Any]:
        self._on_done(result)
        is_cut = result["finish_reason"] in ("length", "time")
        counted = result["usage"]
        thought = result.get("reasoning", "")
        reasoning = {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": []}
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [
                self._message([_part(result["answer"])], "incomplete" if is_cut else "completed"),
                *([{**reasoning, "content": [{"type": "reasoning_text", "text": thought}]}] if thought else []),
            ],
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": counted["cached_tokens"]},
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": counted.get("reasoning_tokens", 0)},
                "total_tokens": counted["total_tokens"],
            },
            **answer_details(self._question, result),
        }

    def _message(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {"type": "message", "id": self._message_id, "status": status, "role": "assistant", "content": content}

    async def chunks(self, _first: dict[str, Any], replies: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]:
        """Yield server-sent events in OpenAI's order. Reasoning is only in the last event."""
        response = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
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
                failed = problem.event["error"]
                yield self._event("error", **{name: failed[name] for name in ("code", "message", "param", "status")})
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
