"""What OpenAI's other routes take and give, as far as they are honoured here: text completions, embeddings, responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from localrag.server.chat_answer_schemas import ACCOUNT, USAGE, ChatUsage, LocalAccount
from localrag.server.chat_schemas import NumTokens, Penalty, Ratio, Stop, StreamOptions, Temperature, TopP
from localrag.server.index_schemas import NodeWithScore
from localrag.server.schemas import example

# --- text completions ---


class CompletionRequest(BaseModel):
    """A text to be gone on with."""

    model_config = example({"model": "echo", "prompt": "PLA is annealed at", "max_tokens": 16, "temperature": 0}, extra="forbid")

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    model: str | None = Field(default=None, description="Taken as it is: this server has one model.")
    max_tokens: NumTokens | None = Field(default=None, description="The default is 16.")
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
    user: str | None = Field(default=None, description="Without effect.")


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
    """What the model wrote, or in a stream a piece of it."""

    model_config = example(
        {
            "id": "cmpl-dd10960f2f3b54b0c4841143",
            "object": "text_completion",
            "created": 1795395678,
            "model": "echo",
            "choices": [{"index": 0, "text": " 80 degrees.", "finish_reason": "stop", "logprobs": None}],
            "usage": USAGE,
        }
    )

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage | None = None
    source_nodes: None = Field(default=None, description="Nothing is searched.")
    localrag: LocalAccount | None = None


# --- embeddings ---


InputText = Annotated[str, Field(min_length=1, max_length=1_000_000)]


class EmbeddingRequest(BaseModel):
    """Texts whose vectors are wanted."""

    model_config = example({"model": "minilm", "input": ["What is PLA?", "A plastic."], "encoding_format": "float"}, extra="forbid")

    input: InputText | Annotated[list[InputText], Field(min_length=1, max_length=2048)]
    model: str | None = Field(default=None, description="Taken as it is: this server has one embedder.")
    encoding_format: Literal["float", "base64"] | None = Field(default=None, description="base64 is of little-endian float32.")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(default=None, description="As many as the embedder gives, or left out.")
    user: str | None = Field(default=None, description="Without effect.")


class EmbeddingVector(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Vectors in the order of the texts."""

    model_config = example(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}],
            "model": "minilm",
            "usage": {"prompt_tokens": 5, "total_tokens": 5},
        }
    )

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


# --- responses ---


class InputPart(BaseModel):
    """A part of a content. The model reads text alone."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """One message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]


class FreeFormat(BaseModel):
    """Text as it comes, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(BaseModel):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """The form of the answer."""

    format: FreeFormat | SchemaFormat | None = None


class ReasoningOptions(BaseModel):
    """How long a model that thinks may think."""

    effort: Literal["none", "minimal", "low", "medium", "high"] | None = None


class ResponsesRequest(BaseModel):
    """A question or a conversation. Nothing of it is kept: each request says all."""

    model_config = example({"model": "echo", "instructions": "Be brief.", "input": "What is PLA?", "max_output_tokens": 60}, extra="forbid")

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=2048)]
    model: str | None = Field(default=None, description="Taken as it is: this server has one model.")
    instructions: str | None = Field(default=None, description="The system message.")
    max_output_tokens: NumTokens | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    reasoning: ReasoningOptions | None = None
    index_name: str | None = Field(default=None, description="The index to answer from; without one the model answers alone.")
    context_token_ratio: Ratio | None = Field(default=None, description="The default is 0.5.")
    seed: int | None = None
    stop: Stop | None = None
    user: str | None = Field(default=None, description="Without effect, as are the six that follow.")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None


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
    """What a model thought before its answer."""

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
    """A response."""

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
    """One event of a stream: what it has beside its type depends on that."""

    model_config = example({"type": "response.output_text.delta", "sequence_number": 4, "delta": "You"}, extra="allow")

    type: str
    sequence_number: int
