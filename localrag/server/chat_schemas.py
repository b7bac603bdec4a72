"""What a chat completion takes: OpenAI's body as far as it is honoured here, and what localrag adds to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from localrag.server.schemas import example

Ratio = Annotated[float, Field(ge=0.2, le=0.8, description="The most that sources take of the window beside what cannot be cut.")]
Temperature = Annotated[float, Field(ge=0, le=100, description="0, the default, takes the likeliest token.")]
TopP = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumTokens = Annotated[int, Field(ge=1, lt=2**31)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = StopText | Annotated[list[StopText], Field(max_length=64)]
"""Texts at which an answer ends; they are no part of it."""


class TextPart(BaseModel):
    """A part of a content. The model reads text alone."""

    type: Literal["text"]
    text: str


class FunctionCall(BaseModel):
    """A function and what it is called with."""

    name: str
    arguments: str = Field(description="JSON.")


class ToolCall(BaseModel):
    """A call of a tool that the model wrote."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message. That of an assistant needs no content if it calls tools; that of a tool says which call it answers."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSpec(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call. Where there is one, no index is searched."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(BaseModel):
    """A function by its name."""

    name: str


class ToolChoice(BaseModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchemaForm(BaseModel):
    """A JSON schema that the answer keeps to."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class FreeForm(BaseModel):
    """Text as it comes, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaForm(BaseModel):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaForm


class StreamOptions(BaseModel):
    """What a stream has beside the text."""

    include_usage: bool | None = Field(
        default=None, description="Whether the first chunk has the ledger of the prompt, and the last one usage, sources and ledger."
    )


class ChatRequest(BaseModel):
    """A conversation to be answered; any parameter that is not named here is refused."""

    model_config = example(
        {
            "model": "echo",
            "messages": [{"role": "user", "content": "At what temperature is PLA annealed?"}],
            "max_tokens": 60,
            "temperature": 0,
        },
        extra="forbid",
    )

    messages: list[ChatMessage] = Field(min_length=1, max_length=2048, description="With a question since the last answer.")
    model: str | None = Field(default=None, description="Taken as it is: this server has one model.")
    index_name: str | None = Field(default=None, description="The index to answer from; without one the model answers alone.")
    context_token_ratio: Ratio | None = Field(default=None, description="The default is 0.5.")
    n: Literal[1] | None = None
    max_tokens: NumTokens | None = Field(default=None, description="Of the answer, made smaller where the window has less room.")
    max_completion_tokens: NumTokens | None = Field(default=None, description="The same, and stronger.")
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = Field(default=None, description="The same one gives the same text again.")
    stop: Stop | None = None
    stream: bool | None = Field(default=None, description="Whether the answer comes as server-sent events.")
    stream_options: StreamOptions | None = None
    response_format: FreeForm | SchemaForm | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="Without effect: an answer has one call at most.")
    functions: list[FunctionSpec] | None = Field(default=None, description="The older form of tools, with `function_call` for the choice.")
    function_call: Literal["none", "auto"] | FunctionName | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    user: str | None = Field(default=None, description="Without effect, as are the five that follow.")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
