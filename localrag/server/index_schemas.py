"""What the routes of indexes take and give, field by field as the clients of the KAITO RAG engine know them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import BaseModel, Field

NAME = r"^[a-z0-9][a-z0-9_-]{0,63}$"
MAX_NODES = 300
MAX_OFFSET = 2**53
DEFAULT_PATH = "storage"
"""Where an index is kept whose place is not named: there, under its name."""


class Document(BaseModel):
    """A text with what is said of it. What is given needs no more than `text`; to be updated, it needs its `doc_id`."""

    doc_id: str = Field(default="", description="The sha256 of the text, unless it was given another one.")
    text: str
    metadata: dict[str, Any] | None = Field(default_factory=dict)
    hash_value: str | None = Field(default=None, description="Of text and metadata.")
    is_truncated: bool = Field(default=False, description="Whether `text` is only the beginning, as a listing was asked to give it.")


class IndexRequest(BaseModel):
    index_name: Annotated[str, Field(pattern=NAME, examples=["example_index"])]
    documents: list[Document]


class UpdateDocumentRequest(BaseModel):
    documents: list[Document]


class DeleteDocumentRequest(BaseModel):
    doc_ids: list[str]


class ListDocumentsResponse(BaseModel):
    """One page: `count` documents of the `total_items` that pass."""

    documents: list[Document]
    count: int
    total_items: int


class UpdateDocumentResponse(BaseModel):
    updated_documents: list[Document]
    unchanged_documents: list[Document]
    not_found_documents: list[Document]


class DeleteDocumentResponse(BaseModel):
    deleted_doc_ids: list[str]
    not_found_doc_ids: list[str]


class RetrieveRequest(BaseModel):
    index_name: str = Field(examples=["example_index"])
    query: str = Field(examples=["What is KAITO?"])
    max_node_count: int = Field(default=5, ge=1, le=MAX_NODES)
    metadata_filter: dict[str, Any] | None = Field(default=None, description="Keys and values that the metadata must have.")


class NodeWithScore(BaseModel):
    """A passage of a document. `node_id` is what an answer cites it by."""

    doc_id: str
    node_id: str
    text: str
    score: float = Field(description="Reciprocal rank fusion of both rankings.")
    dense_score: float | None = Field(default=None, description="Cosine similarity with the query, where it is near it.")
    sparse_score: float | None = Field(default=None, description="BM25, where it holds words of the query.")
    source: Literal["both", "dense_only", "sparse_only"] | None = None
    metadata: dict[str, Any] | None = None


class RetrieveResponse(BaseModel):
    query: str
    results: list[NodeWithScore]
    count: int


class Message(BaseModel):
    """What was done."""

    message: str


class Failure(BaseModel):
    """What went wrong."""

    detail: str


IndexName = Annotated[str, Path(examples=["example_index"])]
NewIndexName = Annotated[str, Path(pattern=NAME, examples=["example_index"])]
Limit = Annotated[int, Query(ge=1, le=100, description="The most documents to return.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="How many documents to pass over.")]
MaxTextLength = Annotated[int | None, Query(ge=1, description="The most characters of each text.")]
MetadataFilter = Annotated[str | None, Query(description="A JSON object: the keys and values that the metadata must have.")]
Overwrite = Annotated[bool, Query(description="Whether an index of that name is replaced.")]
