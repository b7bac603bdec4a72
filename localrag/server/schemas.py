"""The forms that the answers of several routes share (failures, the account of a prompt, its sources), and how a body is read as a form."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from localrag.server.errors import Problem

_Form = TypeVar("_Form", bound=BaseModel)
_WORDED = "worded"
"""The type of a fault whose message stands by itself."""


def example(value: dict[str, Any], extra: Literal["ignore", "forbid", "allow"] = "ignore") -> ConfigDict:
    """The configuration of a model that is shown by this value; `extra` is what it makes of other fields."""
    return ConfigDict(json_schema_extra={"examples": [value]}, extra=extra)


def shown_by(model: type[BaseModel]) -> Any:  # noqa: ANN401  # JSON
    """The value that a model is shown by, its fields in the order in which it was written; None if there is none."""
    extra = model.model_config.get("json_schema_extra")
    return extra["examples"][0] if isinstance(extra, dict) else None  # type: ignore[index]  # `example` wrote it


def parse(form: type[_Form], body: object, neutral: Mapping[str, tuple[object, ...]] | None = None) -> _Form:
    """A JSON value as this form, strictly. Problem 400 for its first fault, in the order of the form's fields.

    A field that is null is left out, and so is one with a value that `neutral` names: it asks for nothing.
    """
    if not isinstance(body, dict):
        raise Problem(400, "The body is not a JSON object.")
    fields = {name: value for name, value in body.items() if value is not None and value not in (neutral or {}).get(name, ())}
    try:
        return form.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0])[:80]
    if first["type"] == "extra_forbidden":
        raise Problem(400, f"The parameter {name!r} cannot be honoured here.", "unsupported_parameter", name)
    message = first["msg"] if first["type"] == _WORDED else f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise Problem(400, message, param=name)


def fault(message: str) -> PydanticCustomError:
    """What a validator raises: a client is told this message as it stands."""
    return PydanticCustomError(_WORDED, "{message}", {"message": message})


def worded(message: str) -> WrapValidator:
    """Annotates a type with what a client is told for any fault in it, in place of one message for each member of a union."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise fault(message) from None

    return WrapValidator(validate)


SLOT = {"n_ctx": 8192, "n_ctx_train": 131072, "requested": 8192, "bound": "requested"}
LEDGER = {
    "window": 8192,
    "entries": [
        {"name": "template", "wanted": 19, "allotted": 19, "used": 19, "omitted": []},
        {"name": "question", "wanted": 12, "allotted": 12, "used": 12, "omitted": []},
        {"name": "answer", "wanted": 512, "allotted": 512, "used": 0, "omitted": []},
    ],
    "spare": 7649,
}
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
TEXT, METADATA = "PLA is annealed at 80 degrees.", {"filename": "pla.md", "branch": "main"}
DOCUMENT = {
    "doc_id": hashlib.sha256(TEXT.encode()).hexdigest(),
    "text": TEXT,
    "metadata": METADATA,
    "hash_value": hashlib.sha256(b"example").hexdigest(),
    "is_truncated": False,
}
NODE = {
    "doc_id": DOCUMENT["doc_id"],
    "node_id": "KB#1",
    "text": TEXT,
    "score": 0.0328,
    "dense_score": 0.91,
    "sparse_score": 1.7,
    "source": "both",
    "metadata": METADATA,
}


# --- what went wrong ---


class Error(BaseModel):
    """What went wrong, in OpenAI's form."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The field of the body that is to blame.")
    code: str = Field(description="For programs, such as `context_length_exceeded`, `model_not_found` or `index_not_found`.")


class StreamError(Error):
    """An error in a stream, whose status can no longer be told otherwise."""

    status: int = Field(description="The status that the answer would have had.")


class Failure(BaseModel):
    """What went wrong."""

    model_config = example(
        {
            "detail": "No such index: 'nowhere' exists.",
            "error": {
                "message": "No such index: 'nowhere' exists.",
                "type": "invalid_request_error",
                "param": None,
                "code": "index_not_found",
            },
        }
    )

    detail: str
    error: Error


class StreamFailure(BaseModel):
    """What went wrong in the middle of a stream, which it ends."""

    model_config = example(
        {
            "error": {
                "message": "The model could not answer.", "type": "server_error", "param": None, "code": "model_unavailable", "status": 503,
            }
        }
    )  # fmt: skip

    error: StreamError


class Fault(BaseModel):
    """A place in a request, and what is wrong with it."""

    type: str
    loc: list[str | int] = Field(description="The names and numbers that lead there.")
    msg: str


class Invalid(BaseModel):
    """A request that is not of its form."""

    model_config = example(
        {
            "detail": [{"type": "missing", "loc": ["body", "documents"], "msg": "Field required"}],
            "error": {
                "message": "body.documents: Field required",
                "type": "invalid_request_error",
                "param": "documents",
                "code": "invalid_request",
            },
        }
    )

    detail: list[Fault]
    error: Error


# --- the account of a prompt ---


class SlotInfo(BaseModel):
    """The window of an answer, in tokens, and what capped it."""

    n_ctx: int
    n_ctx_train: int
    requested: int | None
    bound: Literal["requested", "training", "memory"]


class Shortening(BaseModel):
    """Something that is in the prompt in a shorter form: `tokens` of `of` are left."""

    id: str
    level: str
    tokens: int
    of: int


class LedgerEntry(BaseModel):
    """One section of a prompt, in tokens, and what was left out of it."""

    name: str
    wanted: int
    allotted: int
    used: int
    omitted: list[str] = Field(description="Each passage, message or tool that was left out.")
    omitted_reasons: dict[str, str] = Field(
        default_factory=dict, description="Why, for each that is not left out for lack of room, such as `identical to KB#1`."
    )
    shortened: list[Shortening] = Field(default_factory=list, description="What is there in a shorter form.")
    covered: list[str] = Field(default_factory=list, description="The messages that a summary stands for.")
    parts: list[LedgerEntry] = Field(default_factory=list, description="The tiers of a section.")


class TimePlan(BaseModel):
    """The effect of a time limit. Speeds are in tokens per second."""

    max_seconds: float
    is_bound: bool
    planned_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    skipped: list[str] = Field(default_factory=list, description="Steps for which there was no time, such as `rerank`.")


class LedgerInfo(BaseModel):
    """The account of one window. The `used` of all entries but the answer's are the tokens that the model is given."""

    window: int
    entries: list[LedgerEntry]
    spare: int = Field(description="Tokens that were allotted to no section.")
    time: TimePlan | None = None


class Evidence(BaseModel):
    """A passage in the prompt, and what its score is made of."""

    id: str
    source: str
    heading: str
    place: str = ""
    start: int
    end: int
    score: float
    contributions: dict[str, float]
    relevance: float | None = None
    tokens: int | None = None
    level: str = Field(default="full", description="How much of it is there.")


class CitationInfo(BaseModel):
    """A source that the answer cites; `supplied` if it was in the prompt."""

    id: str
    supplied: bool
    spans: list[tuple[int, int]] = Field(description="Where the answer cites it: start and end in code points, end exclusive.")


# --- sources and tokens of an answer ---


class NodeWithScore(BaseModel):
    """A passage of a document. `node_id` is what an answer cites it by."""

    model_config = example(NODE)

    doc_id: str
    node_id: str
    text: str
    score: float = Field(description="Reciprocal rank fusion of both rankings.")
    dense_score: float | None = Field(default=None, description="Cosine similarity with the query, where it is near it.")
    sparse_score: float | None = Field(default=None, description="BM25, where it holds words of the query.")
    source: Literal["both", "dense_only", "sparse_only"] | None = None
    metadata: dict[str, Any] | None = None


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
    tokens_per_s: float | None = Field(default=None, description="Speed of decoding; null for fewer than two tokens.")
    warnings: list[str] = Field(default_factory=list)
    bypass: str | None = Field(default=None, description="Why the index was not searched, or has no part in the answer.")
