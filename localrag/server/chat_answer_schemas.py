"""What a chat completion gives, whole or in chunks: OpenAI's form, with the sources and the account of localrag."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from localrag.server.chat_schemas import FunctionCall, ToolCall
from localrag.server.index_schemas import NodeWithScore
from localrag.server.schemas import LEDGER, SLOT, CitationInfo, Evidence, LedgerInfo, SlotInfo, example


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


class PromptTokens(BaseModel):
    cached_tokens: int = Field(description="Held already, and not evaluated again.")


class CompletionTokens(BaseModel):
    reasoning_tokens: int


class ChatUsage(BaseModel):
    """Tokens that the model was given, and that it wrote."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class LocalAccount(BaseModel):
    """The account of an answer, as `localrag ask --json` gives it."""

    finish_reason: str = Field(default="stop", description="As localrag tells it: `time` where a limit of time ended the answer.")
    slot: SlotInfo
    ledger: LedgerInfo
    evidence: list[Evidence]
    citations: list[CitationInfo]
    unsupported_citations: list[str]
    coverage: dict[str, Any]
    timings: dict[str, float] = Field(description="In seconds.")
    warnings: list[str] = Field(default_factory=list)
    bypass: str | None = Field(default=None, description="Why the index was not searched, or has no part in the answer.")


USAGE = {
    "prompt_tokens": 31,
    "completion_tokens": 24,
    "total_tokens": 55,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
ACCOUNT = {
    "slot": SLOT,
    "ledger": LEDGER,
    "evidence": [],
    "citations": [],
    "unsupported_citations": [],
    "coverage": {"chunks_read": 0, "chunks_in_kb": 0},
    "timings": {"load_s": 0.0, "prefill_s": 0.01, "first_token_s": 0.02, "decode_s": 0.2, "total_s": 0.22},
}
_HEAD = {"id": "chatcmpl-dd10960f2f3b54b0c4841143", "created": 1795395678, "model": "echo"}
_MESSAGE = {"role": "assistant", "content": "You asked: What is PLA?"}


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
    """The account of an answer that is being written: of its prompt in the first chunk, of all in the last."""

    slot: SlotInfo | None = None
    sections: list[dict[str, Any]] | None = Field(default=None, description="How the window was negotiated: each section as a flex item.")
    ledger: LedgerInfo | None = None
    evidence: list[Evidence] | None = None
    completion_tokens: int | None = Field(default=None, description="How many were written so far.")
    citations: list[CitationInfo] | None = None
    timings: dict[str, float] | None = None


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
