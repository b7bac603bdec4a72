"""What the routes of indexes take and give, field by field as the clients of the KAITO RAG engine know them."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import BaseModel, Field

from localrag.server.schemas import example

NAME = r"^[a-z0-9][a-z0-9_-]{0,63}$"
MAX_NODES = 300
MAX_OFFSET = 2**53
DEFAULT_PATH = "storage"
"""Where an index is kept whose place is not named: there, under its name."""


_TEXT, _METADATA = "PLA is annealed at 80 degrees.", {"filename": "pla.md", "branch": "main"}
DOCUMENT = {
    "doc_id": hashlib.sha256(_TEXT.encode()).hexdigest(),
    "text": _TEXT,
    "metadata": _METADATA,
    "hash_value": hashlib.sha256(b"example").hexdigest(),
    "is_truncated": False,
}
NODE = {
    "doc_id": DOCUMENT["doc_id"],
    "node_id": "KB#1",
    "text": _TEXT,
    "score": 0.0328,
    "dense_score": 0.91,
    "sparse_score": 1.7,
    "source": "both",
    "metadata": _METADATA,
}


class Document(BaseModel):
    """A text with what is said of it. What is given needs no more than `text`; to be updated, it needs its `doc_id`."""

    model_config = example(DOCUMENT)

    doc_id: str = Field(default="", description="The sha256 of the text, unless it was given another one.")
    text: str
    metadata: dict[str, Any] | None = Field(default_factory=dict)
    hash_value: str | None = Field(default=None, description="Of text and metadata.")
    is_truncated: bool = Field(default=False, description="Whether `text` is only the beginning, as a listing was asked to give it.")


class IndexRequest(BaseModel):
    """Documents for an index."""

    model_config = example({"index_name": "example_index", "documents": [{"text": _TEXT, "metadata": _METADATA}]})

    index_name: Annotated[str, Field(pattern=NAME, examples=["example_index"])]
    documents: list[Document]


class UpdateDocumentRequest(BaseModel):
    """Documents in place of those with their ids."""

    model_config = example({"documents": [DOCUMENT]})

    documents: list[Document]


class DeleteDocumentRequest(BaseModel):
    """The ids of documents that are to go."""

    model_config = example({"doc_ids": [DOCUMENT["doc_id"]]})

    doc_ids: list[str]


class ListDocumentsResponse(BaseModel):
    """One page: `count` documents of the `total_items` that pass."""

    model_config = example({"documents": [DOCUMENT], "count": 1, "total_items": 1})

    documents: list[Document]
    count: int
    total_items: int


class UpdateDocumentResponse(BaseModel):
    """What became of each document."""

    model_config = example({"updated_documents": [DOCUMENT], "unchanged_documents": [], "not_found_documents": []})

    updated_documents: list[Document]
    unchanged_documents: list[Document]
    not_found_documents: list[Document]


class DeleteDocumentResponse(BaseModel):
    """What became of each id."""

    model_config = example({"deleted_doc_ids": [DOCUMENT["doc_id"]], "not_found_doc_ids": []})

    deleted_doc_ids: list[str]
    not_found_doc_ids: list[str]


class RetrieveRequest(BaseModel):
    """A query for an index."""

    model_config = example({"index_name": "example_index", "query": "annealing PLA", "max_node_count": 5})

    index_name: str = Field(examples=["example_index"])
    query: str = Field(examples=["What is KAITO?"])
    max_node_count: int = Field(default=5, ge=1, le=MAX_NODES)
    metadata_filter: dict[str, Any] | None = Field(default=None, description="Keys and values that the metadata must have.")


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


class RetrieveResponse(BaseModel):
    """The passages that fit best, the best first."""

    model_config = example({"query": "annealing PLA", "results": [NODE], "count": 1})

    query: str
    results: list[NodeWithScore]
    count: int


class Message(BaseModel):
    """What was done."""

    model_config = example({"message": "Successfully deleted index example_index."})

    message: str


IndexName = Annotated[str, Path(description="The name of an index.", examples=["example_index"])]
NewIndexName = Annotated[str, Path(pattern=NAME, description="The name that the index gets.", examples=["example_index"])]
_PLACE = "Names with / between them, in the server's own folder; the name of the index is its own place."
KeptAt = Annotated[str, Query(description=f"Where it is kept. {_PLACE}", examples=["backups/monday"])]
LoadedFrom = Annotated[str | None, Query(description=f"Where it was kept. {_PLACE}", examples=["backups/monday"])]
Limit = Annotated[int, Query(ge=1, le=100, description="The most documents to return.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="How many documents to pass over.")]
MaxTextLength = Annotated[int | None, Query(ge=1, description="The most characters of each text.")]
MetadataFilter = Annotated[
    str | None, Query(description="A JSON object: the keys and values that the metadata must have.", examples=['{"branch": "main"}'])
]
Overwrite = Annotated[bool, Query(description="Whether an index of that name is replaced.")]
