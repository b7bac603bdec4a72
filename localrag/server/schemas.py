"""Models that several routes share (errors, the token ledger, sources), and validation of bodies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from localrag.server.errors import Problem

_Form = TypeVar("_Form", bound=BaseModel)
_WORDED = "with_message"
"""The error type whose message is shown to clients unchanged."""


def example(value: dict[str, Any], extra: Literal["ignore", "forbid", "allow"] = "ignore") -> ConfigDict:
    """Return a model's configuration with this example. `extra` says how to treat unknown fields."""
    return ConfigDict(json_schema_extra={"examples": [value]}, extra=extra)


def example_of(model: type[BaseModel]) -> Any:  # noqa: ANN401  # JSON
    """Return a model's example with its fields in the written order, or None."""
    extra = model.model_config.get("json_schema_extra")
    return extra["examples"][0] if isinstance(extra, dict) else None  # type: ignore[index]  # `example` wrote it


def parse(form: type[_Form], body: object, neutral: Mapping[str, tuple[object, ...]] | None = None) -> _Form:
    """Validate a JSON value strictly. Problem 400 for the first error, in the order of the model's fields.

    Fields that are null, or have a value without effect listed in `neutral`, are ignored.
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
        raise Problem(400, f"The parameter {name!r} is not supported.", "unsupported_parameter", name)
    message = first["msg"] if first["type"] == _WORDED else f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise Problem(400, message, param=name)


def fault(message: str) -> PydanticCustomError:
    """Return an error for validators to raise. Its message is shown to clients unchanged."""
    return PydanticCustomError(_WORDED, "{message}", {"message": message})


def with_message(message: str) -> WrapValidator:
    """Annotate a type with one error message, which replaces the separate messages for each member of a union."""

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
    "support": [],
    "unsupported_claims": [],
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
    "score": 0.94,
    "dense_score": 0.91,
    "sparse_score": 1.7,
    "source": "both",
    "metadata": METADATA,
}


# --- errors ---


class Error(BaseModel):
    """An error in OpenAI's format."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The invalid field of the body.")
    code: str = Field(description="A code for programs, such as `context_length_exceeded`, `model_not_found` or `index_not_found`.")


class StreamError(Error):
    """An error in a stream. It includes the status, because the HTTP status has already been sent."""

    status: int = Field(description="The status that an unstreamed response would have.")


class Failure(BaseModel):
    """The body of an error response."""

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
    """An error that ends a stream."""

    model_config = example(
        {
            "error": {
                "message": "The model could not answer.", "type": "server_error", "param": None, "code": "model_unavailable", "status": 503,
            }
        }
    )  # fmt: skip

    error: StreamError


class Fault(BaseModel):
    """A validation error at a place in the request."""

    type: str
    loc: list[str | int] = Field(description="The path to the field: names and list positions.")
    msg: str


class Invalid(BaseModel):
    """The body of the response to an invalid request."""

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


# --- the token ledger of a prompt ---


class SlotInfo(BaseModel):
    """The context window in tokens, and what limited it."""

    n_ctx: int
    n_ctx_train: int
    requested: int | None
    bound: Literal["requested", "training", "memory"]


class Shortening(BaseModel):
    """An item that was shortened from `of` to `tokens` tokens."""

    id: str
    level: str
    tokens: int
    of: int
    sentences: tuple[int, int] | None = Field(default=None, description="For `sentences`: how many were chosen, of how many.")


class LedgerEntry(BaseModel):
    """One section of a prompt, in tokens, with its omitted and shortened items."""

    name: str
    wanted: int
    allotted: int
    used: int
    omitted: list[str] = Field(description="Passages, messages and tools that were left out.")
    omitted_reasons: dict[str, str] = Field(
        default_factory=dict, description="Reasons for omissions other than lack of space, such as `identical to KB#1`."
    )
    shortened: list[Shortening] = Field(default_factory=list, description="Items that were shortened.")
    covered: list[str] = Field(default_factory=list, description="Messages that are replaced by a summary.")
    parts: list[LedgerEntry] = Field(default_factory=list, description="The tiers of a section.")
    copied: int = Field(default=0, description="How many of the used tokens were copied from sources, not written by the model.")


class TimePlan(BaseModel):
    """The effect of a time limit. Speeds are in tokens per second."""

    max_seconds: float
    is_bound: bool
    planned_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    skipped: list[str] = Field(default_factory=list, description="Steps skipped for lack of time, such as `rerank`.")


class LedgerInfo(BaseModel):
    """The token ledger of one window. The prompt's size is the sum of `used` over all entries except the answer's."""

    window: int
    entries: list[LedgerEntry]
    spare: int = Field(description="Tokens not allotted to any section.")
    time: TimePlan | None = None


class Evidence(BaseModel):
    """A passage in the prompt, with the parts of its score."""

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
    level: str = Field(default="full", description="The level of detail, `full` unless the passage was shortened.")
    spans: list[tuple[int, int]] | None = Field(default=None, description="For the level `sentences`: what was sent of the document.")
    omitted_sentences: int | None = Field(default=None, description="For the level `sentences`: how many were not sent.")


class CitationInfo(BaseModel):
    """A source that the answer cites. `supplied` is true if it was in the prompt."""

    id: str
    supplied: bool
    spans: list[tuple[int, int]] = Field(description="Positions of the citations in the answer: start and exclusive end, in code points.")


class SupportingSpan(BaseModel):
    """The stretch of a source that supports a sentence best. Start and end are code points of the document."""

    id: str
    source: str
    start: int
    end: int
    place: str = ""
    text: str


class SentenceSupport(BaseModel):
    """A sentence of the answer, the sources that it cites, and how well the best span in them supports it."""

    start: int
    end: int
    citations: list[str]
    span: SupportingSpan | None
    score: float | None = Field(description="0 to 1, the sum of `contributions`; null for a sentence without a citation.")
    contributions: dict[str, float] = Field(description="`words` and, if an embedder is loaded, `cosine`.")


class UnsupportedClaim(BaseModel):
    """A part of a cited sentence that none of its sources has."""

    kind: Literal["number", "unit", "name", "negation"]
    text: str
    start: int
    end: int


# --- sources and tokens of an answer ---


class NodeWithScore(BaseModel):
    """A passage of a document. Answers cite it by its `node_id`."""

    model_config = example(NODE)

    doc_id: str
    node_id: str
    text: str
    score: float = Field(description="Weighted sum of both scores, each divided by the largest one.")
    dense_score: float | None = Field(default=None, description="Cosine similarity with the query, if found by semantic search.")
    sparse_score: float | None = Field(default=None, description="BM25 score, if found by keyword search.")
    source: Literal["both", "dense_only", "sparse_only"] | None = None
    metadata: dict[str, Any] | None = None


class PromptTokens(BaseModel):
    cached_tokens: int = Field(description="Tokens reused from the KV cache.")


class CompletionTokens(BaseModel):
    reasoning_tokens: int


class ChatUsage(BaseModel):
    """The tokens of the prompt and of the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class QuoteInfo(BaseModel):
    """A sentence of a source that was copied into the answer. Positions are in code points, ends exclusive."""

    id: str = Field(description="The passage.")
    sentence: int = Field(description="Its number within the passage, from 1.")
    source: str
    start: int = Field(description="Its position in the document.")
    end: int
    span: tuple[int, int] = Field(description="Its position in the answer, without quotation marks.")


class LocalAccount(BaseModel):
    """Details of an answer, as in the output of `localrag ask --json`."""

    finish_reason: str = Field(default="stop", description="localrag's own finish reason, e.g. `time` if the time limit ended the answer.")
    slot: SlotInfo
    ledger: LedgerInfo
    evidence: list[Evidence]
    citations: list[CitationInfo]
    unsupported_citations: list[str]
    answerable: float | None = Field(default=None, description="The probability that the sources answer the question; null if unknown.")
    abstained: bool = Field(default=False, description="Whether the answer says that the sources do not answer. The model was not asked.")
    support: list[SentenceSupport] = Field(description="Each sentence of the answer, compared with its sources.")
    unsupported_claims: list[UnsupportedClaim] = Field(description="What cited sentences say and their sources do not.")
    quotes: list[QuoteInfo] = Field(default_factory=list, description="Sentences copied into the answer, with `quote`.")
    coverage: dict[str, Any]
    timings: dict[str, float] = Field(description="In seconds.")
    tokens_per_s: float | None = Field(default=None, description="Decode speed; null for fewer than two tokens.")
    warnings: list[str] = Field(default_factory=list)
    bypass: str | None = Field(default=None, description="The reason why the index was not searched, or not used for the answer.")
