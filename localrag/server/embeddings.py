"""/v1/embeddings: vectors of texts, of the embedder that indexes are made with."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from localrag.server.problems import Problem

if TYPE_CHECKING:
    from localrag.server.app import Shared

router = APIRouter(tags=["completions"])

MAX_INPUTS = 2048
_Text = Annotated[str, Field(min_length=1, max_length=1_000_000)]


class EmbeddingRequest(BaseModel):
    """OpenAI's body. `model` and `user` change nothing."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"input": ["What is PLA?"], "encoding_format": "float"}})

    input: _Text | Annotated[list[_Text], Field(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    """None, or as many as the embedder gives: vectors are not cut."""
    user: str | None = None


class Embedding(BaseModel):
    """A unit vector; in base64, its 32-bit floats, the lowest byte first."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


@router.post("/v1/embeddings", operation_id="create_embeddings")
def create_embeddings(body: EmbeddingRequest, request: Request) -> EmbeddingResponse:
    """The vectors of one text or several. A text that is longer than the embedder reads is refused with the numbers, never cut."""
    shared: Shared = request.app.state.shared
    embedder = shared.embedders.for_queries()
    texts = [body.input] if isinstance(body.input, str) else body.input
    if body.dimensions not in (None, embedder.dim):
        raise Problem(400, f"The embedder gives vectors of {embedder.dim} dimensions, and no others.")
    counts = [embedder.count(text) for text in texts]
    for number, count in enumerate(counts, 1):
        if count > embedder.max_tokens:
            raise Problem(400, f"Text {number} has {count} tokens, but the embedder reads {embedder.max_tokens} at most.")
    vectors = embedder.embed(texts).astype("<f4")
    data = [Embedding(index=at, embedding=_encoded(vector, body.encoding_format)) for at, vector in enumerate(vectors)]
    used = EmbeddingUsage(prompt_tokens=sum(counts), total_tokens=sum(counts))
    return EmbeddingResponse(model=shared.embedders.name, data=data, usage=used)


def _encoded(vector: Any, form: str | None) -> list[float] | str:  # noqa: ANN401  # an array of numpy
    return base64.b64encode(vector.tobytes()).decode("ascii") if form == "base64" else [float(each) for each in vector]
