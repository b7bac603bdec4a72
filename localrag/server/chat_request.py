"""Validate the body of a chat completion and convert it to a question for the engine, tools included."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SkipValidation, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from localrag.engine.grammar import schema_of_calls
from localrag.question import DEFAULT_CITE, DEFAULT_UNANSWERABLE, Cite, EvidenceKind, Unanswerable
from localrag.server.errors import Problem
from localrag.server.schemas import example, fault, parse, with_message
from localrag.session.answer import Bypass, bypass
from localrag.types import Message, Role, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools in a prompt, and the names of those that may be called: `choices`.

    `strict` names the tools whose arguments must match their schema. `schema` is the JSON schema of a call. With `or_text`, the answer may
    also be text. With `parallel`, it may make several calls. `is_legacy` means that the client sent them as "functions".
    """

    specs: tuple[ToolSpec, ...]
    choices: tuple[str, ...]
    strict: frozenset[str]
    schema: str
    or_text: bool
    parallel: bool
    is_legacy: bool

    @property
    def calls(self) -> dict[str, Any]:
        """The permitted calls, in the format of the engine's process."""
        return {"choices": list(self.choices), "strict": sorted(self.strict), "or_text": self.or_text, "parallel": self.parallel}


MIN_RATIO, MAX_RATIO = 0.2, 0.8
RATIO_MEANS = (
    "Maximum share of the window for sources: as many passages as fit in it. Without it, sources are chosen as in localrag ask: only those "
    "that come near the best."
)
MAX_MESSAGES = 2048
NO_QUESTION = "There must be a user prompt since the latest assistant message."

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OURS: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Maps API roles to the roles in chat templates. All other roles become "tool"."""
_THINK_TOKENS = {"none": 0, "minimal": 128, "low": 512, "medium": 1024, "high": 4096}
"""The token limit for each `reasoning_effort`."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"logit_bias": ({},), "modalities": (["text"],)}
"""Values without effect, accepted for parameters that are not supported."""
_NO_ARGUMENTS = {"type": "object", "properties": {}}


# --- the request body ---


Ratio = Annotated[
    float,
    Field(ge=MIN_RATIO, le=MAX_RATIO, description="Maximum share of the window for sources, after sections that cannot be cut."),
    with_message(f"context_token_ratio must be between {MIN_RATIO} and {MAX_RATIO}."),
]
Temperature = Annotated[float, Field(ge=0, le=100, description="The default, 0, always picks the most likely token.")]
TopP = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumTokens = Annotated[int, Field(ge=1, lt=2**31)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=64)],
    with_message("stop must be a string or a list of up to 64 strings of 1 to 1024 characters."),
]
"""Texts that end the answer. They are not part of it."""
Effort = Literal["none", "minimal", "low", "medium", "high"]


class Unused(BaseModel):
    """Fields that OpenAI's clients send. They are accepted without validation and ignored."""

    model: SkipValidation[str | None] = Field(default=None, description="Ignored: this server has one model.")
    user: SkipValidation[str | None] = Field(default=None, description="Ignored, like the next six fields.")
    metadata: SkipValidation[dict[str, Any] | None] = None
    store: SkipValidation[bool | None] = None
    service_tier: SkipValidation[str | None] = None
    safety_identifier: SkipValidation[str | None] = None
    prompt_cache_key: SkipValidation[str | None] = None


class TextPart(BaseModel):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class EarlierFunction(BaseModel):
    """A function and its arguments."""

    name: str
    arguments: str = Field(default="{}", description="A JSON object, as text.")


class EarlierCall(BaseModel):
    """A tool call in an earlier answer."""

    id: SkipValidation[str | None] = None
    type: SkipValidation[Literal["function"] | None] = None
    function: EarlierFunction


_CALLS = with_message("A call must have a function with a name and arguments, both strings.")


class ChatMessage(BaseModel):
    """One message. An assistant message with tool calls needs no content. A tool message names the call that it answers."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[TextPart] | None, with_message("Only text content is supported.")] = None
    name: SkipValidation[str | None] = None
    tool_calls: Annotated[list[EarlierCall] | None, _CALLS] = None
    function_call: Annotated[EarlierFunction | None, _CALLS] = Field(default=None, description="The older form of `tool_calls`.")
    tool_call_id: SkipValidation[str | None] = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not self.calls:
            raise fault(f"messages must contain 'content' for role '{self.role}'.")
        return self

    @property
    def calls(self) -> list[EarlierFunction]:
        """The functions that the message calls."""
        if self.role != "assistant":
            return []
        return [*(call.function for call in self.tool_calls or ()), *([self.function_call] if self.function_call else [])]

    def to_message(self) -> Message:
        """Convert the message for the engine, and join its parts."""
        parts = [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]
        ids = [call.id or "" for call in self.tool_calls or ()] + [""]
        calls = tuple(ToolCall(each.name, each.arguments or "{}", id_) for each, id_ in zip(self.calls, ids, strict=False))
        role = _OURS.get(self.role, "tool")
        return Message(role, "\n\n".join(parts), tool_calls=calls, tool_call_id=(self.tool_call_id or "") if role == "tool" else "")


def _validate_messages(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """Report invalid messages with error texts that clients know, and with the number of the message."""
    try:
        return handler(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    at = first["loc"]
    if not at:
        if first["type"] == "too_long" and isinstance(value, list):
            raise fault(f"{len(value)} messages are too many. The limit is {MAX_MESSAGES}.")
        raise fault("Invalid request format: messages must be a list of at least one message.")
    number = int(at[0]) + 1
    if at[1:] == ("role",):
        if first["type"] == "missing" or not first["input"]:
            raise fault(f"Message {number} has no role: messages must contain 'role'.")
        raise fault(f"Message {number} has the unknown role {str(first['input'])[:80]!r}. Roles: {', '.join(_ROLES)}.")
    raise fault(first["msg"] if at[1:] else f"Message {number}: {first['msg']}")


class FunctionSpec(BaseModel):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call. With tools, no index is searched."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class FunctionName(BaseModel):
    """A function, by name."""

    name: str


class ToolChoice(BaseModel):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class JsonSchemaForm(BaseModel):
    """A JSON schema for the answer."""

    name: SkipValidation[str | None] = None
    description: SkipValidation[str | None] = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: SkipValidation[bool | None] = None


class FreeForm(BaseModel):
    """Free text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaForm(BaseModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaForm


class StreamOptions(BaseModel):
    """Additional content of a stream."""

    include_usage: bool | None = Field(
        default=None, description="If true, the first chunk has the prompt's ledger, and the last chunk has usage, sources and ledger."
    )


CiteField = Annotated[Cite, with_message("cite must be enforced or free.")]
CITE_MEANS = (
    "enforced: an answer with sources begins with the tag of one, or [none], and can name no other. free: the model may cite or not. "
    f"By default {DEFAULT_CITE}."
)

QUOTE_MEANS = "The model may choose a sentence of the sources, whose exact text is copied into the answer. Includes cite: enforced."


EvidenceField = Annotated[EvidenceKind, with_message("evidence must be sentences or passages.")]
EVIDENCE_MEANS = (
    "What to send of the sources: their sentences nearest to the question, or all of each. By default sentences for small models, and "
    "passages with context_token_ratio."
)
EVIDENCE_TOKENS_MEAN = "Maximum tokens of the sources in the prompt."


UnanswerableField = Annotated[Unanswerable, with_message("unanswerable must be say, answer or error.")]
UNANSWERABLE_MEANS = (
    "What to do if the index probably does not answer the question. say: say so, without asking the model. answer: let the model answer. "
    f"error: respond with an error. By default {DEFAULT_UNANSWERABLE}."
)


class ChatRequest(Unused):
    """A conversation to answer. Unknown parameters are refused. Fields are checked in this order."""

    model_config = example(
        {
            "model": "echo",
            "messages": [{"role": "user", "content": "At what temperature is PLA annealed?"}],
            "max_tokens": 60,
            "temperature": 0,
        },
        extra="forbid",
    )

    n: Literal[1] | None = None
    index_name: str | None = Field(
        default=None, description="The index to answer from. Without it, the model answers from its own knowledge."
    )
    context_token_ratio: Ratio | None = Field(default=None, description=RATIO_MEANS)
    evidence: EvidenceField | None = Field(default=None, description=EVIDENCE_MEANS)
    evidence_tokens: NumTokens | None = Field(default=None, description=EVIDENCE_TOKENS_MEAN)
    cite: CiteField | None = Field(default=None, description=CITE_MEANS)
    unanswerable: UnanswerableField | None = Field(default=None, description=UNANSWERABLE_MEANS)
    quote: bool | None = Field(default=None, description=QUOTE_MEANS)
    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, description="Must have a question after the last answer."),
        WrapValidator(_validate_messages),
    ]
    max_tokens: NumTokens | None = Field(
        default=None,
        description="Maximum tokens of the answer, lowered if the window has less room. By default, all that the prompt leaves.",
    )
    max_completion_tokens: NumTokens | None = Field(default=None, description="Same as max_tokens, and overrides it.")
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = Field(default=None, description="The same seed gives the same text.")
    stop: Stop | None = None
    stream: bool | None = Field(default=None, description="Whether to send the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    response_format: (
        Annotated[FreeForm | SchemaForm, with_message("response_format must be text, json_object, or json_schema with a schema.")] | None
    ) = None
    reasoning_effort: Effort | None = None
    tools: list[Tool] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | ToolChoice,
            with_message("tool_choice must be none, auto, required, or a function by name."),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="If false, an answer has at most one call. By default, as many as the model's form has a place for."
    )
    functions: list[FunctionSpec] | None = Field(default=None, description="The older form of `tools`; the choice is `function_call`.")
    function_call: (
        Annotated[Literal["none", "auto"] | FunctionName, with_message("function_call must be none, auto, or a function by name.")] | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


# --- the question ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatQuestion:
    """A validated chat completion. `bypass` says why the index is not searched, if so."""

    messages: list[Message]
    index: str | None
    bypass: Bypass | None
    sampling: dict[str, Any]
    ratio: float | None
    evidence: EvidenceKind | None
    evidence_tokens: int | None
    cite: Cite | None
    unanswerable: Unanswerable | None
    quote: bool
    streams: bool
    includes_usage: bool
    tools: Tools | None = None
    is_plain: bool = False
    """Whether the only message is sent as plain text, without the model's chat template."""
    has_question: bool = True
    """Whether a user message follows the last answer. Otherwise the conversation is sent to the model unchanged."""

    @property
    def searches(self) -> bool:
        return self.index is not None and self.bypass is None

    def to_message(self) -> dict[str, Any]:
        """Return the message for the engine's process.

        Without `max_tokens`, the answer gets all tokens that the prompt leaves. With a ratio, as many passages are sent as fit in it.
        """
        ratio = {"context_ratio": self.ratio, "top_k": "fit"} if self.ratio is not None and self.searches else {}
        chosen = {
            "evidence": self.evidence,
            "evidence_tokens": self.evidence_tokens,
            "cite": self.cite,
            "quote": self.quote or None,
            "unanswerable": self.unanswerable,
        }
        options: dict[str, Any] = ratio | {name: value for name, value in chosen.items() if value is not None}
        forms = {} if self.tools is None else {"json_schema": self.tools.schema, "or_text": self.tools.or_text}
        return {
            "op": "ask",
            "is_plain": self.is_plain,
            "tools": [] if self.tools is None else [spec.to_dict()["function"] for spec in self.tools.specs],
            "calls": None if self.tools is None else self.tools.calls,
            "messages": list(map(to_json, self.messages)),
            "kbs": [self.index] if self.searches else [],
            "sampling": {"max_tokens": None, **self.sampling, **forms},
            "options": options if self.has_question else {**options, "needs_question": False},
        }


def to_json(message: Message) -> dict[str, Any]:
    """Return a message for the engine's process."""
    calls = {"tool_calls": [[call.name, call.arguments, call.id] for call in message.tool_calls]} if message.tool_calls else {}
    return {"role": message.role, "content": message.content, "tool_call_id": message.tool_call_id, **calls}


def read(body: object, *, has_index: Callable[[str], bool], rejects_tools: bool = False, is_plain: bool = False) -> ChatQuestion:
    """Validate a body. Raises Problem, checked in this order: n > 1, an unknown index, an invalid field, tools with an index if
    `rejects_tools`, and no question although the index is to be searched. UsageError for tools as in `read_tools`.
    """
    if not isinstance(body, dict):
        raise Problem(400, "The body is not a JSON object.")
    _check_one_answer(body.get("n"))
    index = _index(body.get("index_name"), has_index)
    request = parse(ChatRequest, {**body, "messages": body.get("messages") or []}, _NEUTRAL)
    messages = [message.to_message() for message in request.messages]
    has_tools = bool(request.tools or request.functions)
    reason = bypass(messages, has_kb=index is not None, has_tools=has_tools)
    if has_tools and index is not None and rejects_tools:
        raise Problem(400, "tools and functions are not supported.", param="tools")
    tools = read_tools(request)
    if request.quote and request.cite == "free":
        raise Problem(400, "quote needs enforced citations, but cite is free. Leave one out.", param="quote")
    has_question = _has_question(messages)
    if not has_question and (reason is None or not any(each.content.strip() for each in messages)):
        raise Problem(400, NO_QUESTION, param="messages")
    sampling = _sampling(request)
    if tools is not None and "json_schema" in sampling:
        raise Problem(400, "response_format and tools exclude each other. Leave one out.")
    return ChatQuestion(
        messages=messages,
        index=index,
        bypass=reason,
        sampling=sampling,
        ratio=request.context_token_ratio,
        evidence=request.evidence,
        evidence_tokens=request.evidence_tokens,
        cite=request.cite,
        unanswerable=request.unanswerable,
        quote=bool(request.quote),
        streams=bool(request.stream),
        includes_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        tools=tools,
        is_plain=is_plain,
        has_question=has_question,
    )


def _check_one_answer(n: object) -> None:
    if n is not None and n != 1:
        raise Problem(400, "n > 1 is not supported." if isinstance(n, int) and n > 1 else "n must be 1.", param="n")


def _index(name: object, has_index: Callable[[str], bool]) -> str | None:
    if name is None or name == "":
        return None
    if not isinstance(name, str) or not has_index(name):
        raise Problem(404, f"No such index: '{str(name)[:64]}' exists.", "index_not_found", "index_name")
    return name


def _has_question(messages: Sequence[Message]) -> bool:
    """Return whether a user message, or a tool's result for one, follows the last answer."""
    if messages[-1].role == "tool" and any(each.role == "user" and each.content.strip() for each in messages):
        return True
    answered = max((at for at, each in enumerate(messages) if each.role == "assistant"), default=-1)
    return any(each.role == "user" and each.content.strip() for each in messages[answered + 1 :])


def _sampling(request: ChatRequest) -> dict[str, Any]:
    """Return the fields of SamplingParams that the body sets."""
    fields = request.model_dump(include={"temperature", "top_p", "presence_penalty", "frequency_penalty"}, exclude_none=True)
    if request.seed is not None:
        fields |= {"seed": request.seed % 2**32, "repeatable": True}
    if most := request.max_completion_tokens or request.max_tokens:
        fields["max_tokens"] = most
    if request.stop:
        fields["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.presence_penalty or request.frequency_penalty:
        fields["repeat_last_n"] = 1_000_000  # the whole answer
    if request.reasoning_effort is not None:
        fields["think_tokens"] = _THINK_TOKENS[request.reasoning_effort]
    if request.logprobs:
        fields["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise Problem(400, "top_logprobs needs logprobs.", param="top_logprobs")
    form = request.response_format
    if isinstance(form, SchemaForm):
        fields["json_schema"] = json.dumps(form.json_schema.schema_)
    elif form is not None and form.type == "json_object":
        fields["json_schema"] = json.dumps({"type": "object"})
    return fields


# --- tools ---


def read_tools(request: ChatRequest) -> Tools | None:
    """Return the tools that may be called, or None if there are none or the choice is "none".

    Problem for a choice that is not among the tools. UsageError for an invalid name, and for a "strict" tool with an unsupported schema.
    Other tools with an unsupported schema accept any object: OpenAI's API gives no guarantee for them either.
    """
    if request.tools and request.functions:
        raise Problem(400, "Give tools or functions, not both.", param="tools")
    is_legacy = bool(request.functions)
    functions = request.functions or [tool.function for tool in request.tools or ()]
    specs = tuple(ToolSpec(each.name, each.description or "", each.parameters or _NO_ARGUMENTS) for each in functions)
    choice = request.function_call if is_legacy else request.tool_choice
    if choice not in (None, "none") and not specs:
        raise Problem(400, "tool_choice is set, but there are no tools.", param="tool_choice")
    if len({spec.name for spec in specs}) < len(specs):
        raise Problem(400, "Two tools have the same name.", param="tools")
    tool_name = choice.function.name if isinstance(choice, ToolChoice) else choice.name if isinstance(choice, FunctionName) else None
    candidates = [spec for spec in specs if tool_name in (None, spec.name)]
    if tool_name is not None and not candidates:
        raise Problem(400, f"There is no tool {tool_name[:80]!r}.", param="tool_choice")
    if not candidates or choice == "none":
        return None
    names = tuple(spec.name for spec in candidates)
    strict = frozenset(each.name for each in functions if each.strict) & set(names)
    return Tools(
        specs=specs,
        choices=names,
        strict=strict,
        schema=schema_of_calls(candidates, strict),
        or_text=choice in (None, "auto"),
        parallel=not is_legacy and tool_name is None and request.parallel_tool_calls is not False,
        is_legacy=is_legacy,
    )
