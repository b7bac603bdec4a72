"""What the routes take and give, as the OpenAPI document tells it: what several of them share, and the state of the server.

Bodies that are read by hand, in an order of their own (questions.py), are described here and not checked by these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field


def example(value: dict[str, Any], extra: Literal["ignore", "forbid", "allow"] = "ignore") -> ConfigDict:
    """The configuration of a model that is shown by this value; `extra` is what it makes of other fields."""
    return ConfigDict(json_schema_extra={"examples": [value]}, extra=extra)


def shown_by(model: type[BaseModel]) -> Any:  # noqa: ANN401  # JSON
    """The value that a model is shown by, its fields in the order in which it was written; None if there is none."""
    extra = model.model_config.get("json_schema_extra")
    return extra["examples"][0] if isinstance(extra, dict) else None  # type: ignore[index]  # `example` wrote it


SLOT = {"n_ctx": 8192, "n_ctx_train": 131072, "requested": 8192, "bound": "requested"}
LEDGER = {
    "window": 8192,
    "entries": [
        {"name": "scaffold", "wanted": 19, "allotted": 19, "used": 19, "omitted": []},
        {"name": "question", "wanted": 12, "allotted": 12, "used": 12, "omitted": []},
        {"name": "answer", "wanted": 512, "allotted": 512, "used": 0, "omitted": []},
    ],
    "spare": 7649,
}


# --- what went wrong ---


class Error(BaseModel):
    """What is said, and the status, which a stream cannot have any more."""

    message: str
    code: int


class Failure(BaseModel):
    """What went wrong."""

    model_config = example(
        {"detail": "No such index: 'nowhere' exists.", "error": {"message": "No such index: 'nowhere' exists.", "code": 404}}
    )

    detail: str
    error: Error


class StreamFailure(BaseModel):
    """What went wrong in the middle of a stream, which it ends."""

    model_config = example({"error": {"message": "The model could not answer.", "code": 503}})

    error: Error


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
            "error": {"message": "body.documents: Field required", "code": 422},
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
    shortened: list[Shortening] = Field(default_factory=list, description="What is there in a shorter form.")
    covered: list[str] = Field(default_factory=list, description="The messages that a summary stands for.")
    parts: list[LedgerEntry] = Field(default_factory=list, description="The tiers of a section.")


class TimePlan(BaseModel):
    """What a limit of time came to; speeds are in tokens per second."""

    max_seconds: float
    is_bound: bool
    planned_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


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
    """A source that the answer names; `supplied` if it was in the prompt."""

    id: str
    supplied: bool


# --- the state of the server ---


class Health(BaseModel):
    """The server answers. It says nothing of the model: see /v1/models."""

    model_config = example({"status": "Healthy", "detail": None})

    status: Literal["Healthy"]
    detail: str | None


ModelName = Annotated[str, Path(min_length=1, max_length=200, description="As /v1/models has it.", examples=["echo"])]


class ModelCard(BaseModel):
    """A model, with the window that an answer has."""

    model_config = example({"id": "echo", "object": "model", "created": 1795395674, "owned_by": "localrag", "slot": SLOT})

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    slot: SlotInfo


class ModelList(BaseModel):
    """The one model that answers."""

    model_config = example(
        {
            "object": "list",
            "data": [{"id": "echo", "object": "model", "created": 1795395674, "owned_by": "localrag", "slot": SLOT}],
        }
    )

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeRequest(BaseModel):
    """A plain text: strings in it that look like control tokens are text, too."""

    model_config = example({"text": "PLA"})

    text: str


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    model_config = example({"num_tokens": 3, "token_ids": [80, 76, 65]})

    num_tokens: int
    token_ids: list[int]


class BudgetResponse(BaseModel):
    """What a prompt would take, and what would be in it."""

    model_config = example({"prompt_tokens": 31, "slot": SLOT, "ledger": LEDGER, "evidence": []})

    prompt_tokens: int
    slot: SlotInfo
    sections: list[dict[str, Any]] = Field(default_factory=list, description="How the window was negotiated: each section as a flex item.")
    ledger: LedgerInfo
    evidence: list[Evidence]
