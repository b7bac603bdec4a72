"""/v1/embeddings: vectors of texts, of the embedder that indexes are made with."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from localrag.server.documenting import failures
from localrag.server.openai_schemas import EmbeddingList, EmbeddingRequest, EmbeddingUsage, EmbeddingVector
from localrag.server.problems import Problem

if TYPE_CHECKING:
    from localrag.server.app import Shared

router = APIRouter(tags=["completions"])


@router.post("/v1/embeddings", operation_id="create_embeddings", responses=failures(400, 422, 503))
def create_embeddings(body: EmbeddingRequest, request: Request) -> EmbeddingList:
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
    data = [
        EmbeddingVector(object="embedding", index=at, embedding=_encoded(vector, body.encoding_format)) for at, vector in enumerate(vectors)
    ]
    used = EmbeddingUsage(prompt_tokens=sum(counts), total_tokens=sum(counts))
    return EmbeddingList(object="list", model=shared.embedders.name, data=data, usage=used)


def _encoded(vector: Any, form: str | None) -> list[float] | str:  # noqa: ANN401  # an array of numpy
    return base64.b64encode(vector.tobytes()).decode("ascii") if form == "base64" else [float(each) for each in vector]
