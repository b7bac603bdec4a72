"""The routes for indexes, which other programs fill with texts and search.

An index is a knowledge base in localrag's home, so `localrag ask --kb` can use it too. Files added by `localrag index` are listed and
deleted like texts, by their source; their text can be changed only in the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi import Path as PathParam
from pydantic import BaseModel, Field

from localrag.errors import KnowledgeBaseNotFoundError, UsageError
from localrag.files import FILE_MODE
from localrag.kb import KnowledgeBase, Where, import_kb, list_kbs
from localrag.kb.database import make_folder
from localrag.kb.knowledge_base import FolderLocation
from localrag.kb.names import NAME
from localrag.kb.protocols import TextRow
from localrag.kb.readers.base import MAX_TEXT_CHARS
from localrag.kb.texts import Text
from localrag.server.errors import Problem
from localrag.server.openapi import INDEX_FAILS, failures, shown
from localrag.server.routing import State
from localrag.server.schemas import DOCUMENT, METADATA, NODE, TEXT, NodeWithScore, example
from localrag.session.opening import open_knowledge_base
from localrag.session.retrieval import Retriever
from localrag.settings import Settings
from localrag.types import Hit

router = APIRouter(tags=["Index"])

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MAX_PARTS = 4
_NAME = f"^{NAME.pattern}$"
MAX_NODES = 300
MAX_OFFSET = 2**53
DEFAULT_PATH = "storage"
"""The default path, which stands for a separate file for each index, below a folder of this name."""


class Document(BaseModel):
    """A text with metadata. Only `text` is required to store it; an update also needs the `doc_id`."""

    model_config = example(DOCUMENT)

    doc_id: str = Field(default="", description="The document's id, by default the SHA-256 of the text.")
    text: str
    metadata: dict[str, Any] | None = Field(default_factory=dict)
    hash_value: str | None = Field(default=None, description="A hash of text and metadata.")
    is_truncated: bool = Field(default=False, description="Whether `text` was truncated to the requested length.")


class IndexRequest(BaseModel):
    """Documents to store in an index."""

    model_config = example({"index_name": "example_index", "documents": [{"text": TEXT, "metadata": METADATA}]})

    index_name: Annotated[str, Field(pattern=_NAME, examples=["example_index"])]
    documents: list[Document]


class UpdateDocumentRequest(BaseModel):
    """Documents that replace those with the same ids."""

    model_config = example({"documents": [DOCUMENT]})

    documents: list[Document]


class DeleteDocumentRequest(BaseModel):
    """The ids of documents to delete."""

    model_config = example({"doc_ids": [DOCUMENT["doc_id"]]})

    doc_ids: list[str]


class ListDocumentsResponse(BaseModel):
    """One page of `count` documents, out of `total_items` that match the filter."""

    model_config = example({"documents": [DOCUMENT], "count": 1, "total_items": 1})

    documents: list[Document]
    count: int
    total_items: int


class UpdateDocumentResponse(BaseModel):
    """The documents by outcome: updated, unchanged or not found."""

    model_config = example({"updated_documents": [DOCUMENT], "unchanged_documents": [], "not_found_documents": []})

    updated_documents: list[Document]
    unchanged_documents: list[Document]
    not_found_documents: list[Document]


class DeleteDocumentResponse(BaseModel):
    """The ids by outcome: deleted or not found."""

    model_config = example({"deleted_doc_ids": [DOCUMENT["doc_id"]], "not_found_doc_ids": []})

    deleted_doc_ids: list[str]
    not_found_doc_ids: list[str]


class RetrieveRequest(BaseModel):
    """A query for an index."""

    model_config = example({"index_name": "example_index", "query": "annealing PLA", "max_node_count": 5})

    index_name: str = Field(examples=["example_index"])
    query: str = Field(examples=["What is KAITO?"])
    max_node_count: int = Field(default=5, ge=1, le=MAX_NODES)
    metadata_filter: dict[str, Any] | None = Field(default=None, description="Keys and values that the metadata must contain.")


class FoundNode(NodeWithScore):
    """A search result. `identical` is present only if other passages have the same text."""

    identical: list[str] = Field(default_factory=list, description="The `node_id`s of other passages with the same text.")


class RetrieveResponse(BaseModel):
    """The most relevant passages, best first."""

    model_config = example({"query": "annealing PLA", "results": [NODE], "count": 1})

    query: str
    results: list[FoundNode]
    count: int


class Message(BaseModel):
    """A confirmation."""

    model_config = example({"message": "Successfully deleted index example_index."})

    message: str


IndexName = Annotated[str, PathParam(description="The name of an index.", examples=["example_index"])]
NewIndexName = Annotated[str, PathParam(pattern=_NAME, description="The name for the index.", examples=["example_index"])]
_PLACE = "Names separated by /, within the server's own storage. By default, each index has its own path."
KeptAt = Annotated[str, Query(description=f"The path to write to. {_PLACE}", examples=["backups/monday"])]
LoadedFrom = Annotated[str | None, Query(description=f"The path to read from. {_PLACE}", examples=["backups/monday"])]
Limit = Annotated[int, Query(ge=1, le=100, description="Maximum number of documents to return.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="Number of documents to skip.")]
MaxTextLength = Annotated[int | None, Query(ge=1, description="Maximum number of characters of each text.")]
MetadataFilter = Annotated[
    str | None, Query(description="A JSON object with keys and values that the metadata must contain.", examples=['{"branch": "main"}'])
]
Overwrite = Annotated[bool, Query(description="Whether to replace an existing index of that name.")]


# --- the routes ---


@router.post(
    "/index",
    operation_id="create_index",
    responses={**shown([DOCUMENT], "The stored documents."), **failures(400, 409, 422, 503)},
)
def create_index(body: IndexRequest, state: State) -> list[Document]:
    """Store documents in an index. Documents with existing ids are replaced. A missing index is created."""
    texts = _texts(body.documents)
    if texts:
        fresh = None if state.has_index(body.index_name) else state.embedders.for_texts()  # without an embedder, none is created
        with open_knowledge_base(body.index_name, settings=state.settings, create=True) as kb:
            kb.texts.put(texts, fresh or state.embedders.for_texts(kb))
    return [_document(text) for text in texts]


@router.get("/indexes", operation_id="list_indexes", responses=shown(["example_index"], "The names, sorted."))
def list_indexes(state: State) -> list[str]:
    """List the names of all indexes."""
    return list_kbs(state.settings.kb_dir)


@router.get("/indexes/{index_name}/documents", operation_id="list_documents_in_index", responses=failures(400, *INDEX_FAILS))
def list_documents(
    index_name: IndexName,
    state: State,
    limit: Limit = 10,
    offset: Offset = 0,
    max_text_length: MaxTextLength = 1000,
    metadata_filter: MetadataFilter = None,
) -> ListDocumentsResponse:
    """List documents of an index, oldest first. For a file added by `localrag index`, the `doc_id` is the file's source."""
    with _opened(state.settings, index_name) as kb:
        where = _filter(metadata_filter)
        rows, total = kb.texts.page(offset=offset, limit=limit, max_chars=max_text_length or MAX_TEXT_CHARS, where=where)
    return ListDocumentsResponse(documents=[_listed(row) for row in rows], count=len(rows), total_items=total)


@router.post("/indexes/{index_name}/documents", operation_id="update_documents_in_index", responses=failures(400, *INDEX_FAILS))
def update_documents(index_name: IndexName, body: UpdateDocumentRequest, state: State) -> UpdateDocumentResponse:
    """Replace documents by id."""
    response = UpdateDocumentResponse(updated_documents=[], unchanged_documents=[], not_found_documents=[])
    kinds = {"updated": response.updated_documents, "unchanged": response.unchanged_documents, "not_found": response.not_found_documents}
    with _opened(state.settings, index_name) as kb:
        targets = [document for document in body.documents if document.doc_id]
        if files := kb.texts.files([document.doc_id for document in targets]):
            raise Problem(400, f"{min(files)[:200]!r} is a file. To update it, change the file and run localrag index again.")
        texts = _texts(targets)
        outcomes = iter(kb.texts.update(texts, state.embedders.for_texts(kb)) if texts else ())
    for document in body.documents:
        kinds[next(outcomes) if document.doc_id else "not_found"].append(document)
    return response


@router.post("/indexes/{index_name}/documents/delete", operation_id="delete_documents_in_index", responses=failures(*INDEX_FAILS))
def delete_documents(index_name: IndexName, body: DeleteDocumentRequest, state: State) -> DeleteDocumentResponse:
    """Delete documents by id. A file added by `localrag index` is added again by the next run."""
    with _opened(state.settings, index_name) as kb:
        removed = kb.texts.remove(body.doc_ids)
    return DeleteDocumentResponse(
        deleted_doc_ids=[one for one in body.doc_ids if one in removed],
        not_found_doc_ids=[one for one in body.doc_ids if one not in removed],
    )


@router.delete("/indexes/{index_name}", operation_id="delete_index", responses=failures(*INDEX_FAILS))
def delete_index(index_name: IndexName, state: State) -> Message:
    """Delete an index and all its documents, even if it is damaged."""
    settings = state.settings
    if index_name not in list_kbs(settings.kb_dir):
        raise _no_index(index_name)
    FolderLocation(settings.kb_dir, index_name).remove()
    return Message(message=f"Successfully deleted index {index_name}.")


@router.post("/persist/{index_name}", operation_id="persist_index", responses=failures(400, *INDEX_FAILS))
def persist_index(index_name: IndexName, state: State, path: KeptAt = DEFAULT_PATH) -> Message:
    """Save an index to a file in the server's own storage. `/load` restores it."""
    with _opened(state.settings, index_name) as kb:
        display_path, file = _place(state.settings, index_name, path)
        make_folder(file.parent)
        kb.export(file)
        file.chmod(FILE_MODE)  # its folder is already private
    return Message(message=f"Successfully persisted index {index_name} to {display_path}.")


@router.post("/load/{index_name}", operation_id="load_index", responses=failures(400, *INDEX_FAILS))
def load_index(index_name: NewIndexName, state: State, path: LoadedFrom = None, overwrite: Overwrite = False) -> Message:  # noqa: FBT002  # a query parameter
    """Load an index from a file written by `/persist`."""
    kb_dir = state.settings.kb_dir
    display_path, file = _place(state.settings, index_name, DEFAULT_PATH if path is None else path)
    if not file.is_file():
        raise Problem(404, f"Path does not exist: {display_path}")
    if not overwrite and index_name in list_kbs(kb_dir):
        raise Problem(409, f"Index '{index_name}' already exists. Use a different name or delete the existing index first.")
    import_kb(kb_dir, file, index_name, replace=overwrite)
    return Message(message=f"Successfully loaded index {index_name} from {display_path}.")


@router.post("/retrieve", operation_id="retrieve_index", response_model_exclude_unset=True, responses=failures(400, *INDEX_FAILS))
def retrieve(body: RetrieveRequest, state: State) -> RetrieveResponse:
    """Find the most relevant passages of an index by semantic and keyword search. Returns fewer than requested if no more are relevant."""
    with _opened(state.settings, body.index_name) as kb:
        if not body.query.strip():
            raise Problem(400, "Query string cannot be empty.")
        where = Where.equals(body.metadata_filter or {})
        embedder = state.embedders.for_queries(kb)
        retriever = Retriever(knowledge_bases=[kb], embedder=embedder, learning=state.settings.learn)
        hits = retriever.search(body.query, top_k=body.max_node_count, where=where)
        results = list(nodes(kb, hits))
    return RetrieveResponse(query=body.query, results=results, count=len(results))


def nodes(kb: KnowledgeBase, hits: Sequence[Hit]) -> Iterator[FoundNode]:
    """Yield search results for the response, without passages that were deleted since the search."""
    names = kb.texts.names([hit.chunk.document_id for hit in hits])
    for hit in hits:
        if hit.chunk.document_id in names:
            doc_id, metadata = names[hit.chunk.document_id]
            dense, sparse = hit.scores.get("semantic"), hit.scores.get("keyword")
            yield FoundNode(
                doc_id=doc_id,
                node_id=hit.label,
                text=hit.chunk.text,
                score=hit.score,
                dense_score=dense,
                sparse_score=sparse,
                source="dense_only" if sparse is None else "sparse_only" if dense is None else "both",
                metadata=metadata,
                **({"identical": [chunk.label for chunk in hit.copies]} if hit.copies else {}),
            )


@contextmanager
def _opened(settings: Settings, index_name: str) -> Iterator[KnowledgeBase]:
    """Open an index for one request. It may be used only in the thread that opened it."""
    if not NAME.fullmatch(index_name):  # a database URL would be opened as well
        raise _no_index(index_name)
    try:
        with open_knowledge_base(index_name, settings=settings) as kb:
            yield kb
    except KnowledgeBaseNotFoundError:
        raise _no_index(index_name) from None


def _no_index(index_name: str) -> Problem:
    return Problem(404, f"No such index: '{index_name[:64]}' exists.", "index_not_found", "index_name")


def _texts(documents: Sequence[Document]) -> list[Text]:
    texts = []
    for number, document in enumerate(documents):
        try:
            texts.append(Text.of(document.text, document.metadata, text_id=document.doc_id))
        except UsageError as error:
            raise Problem(400, f"documents[{number}]: {error.message}") from None
    return texts


def _document(text: Text) -> Document:
    return Document(doc_id=text.id, text=text.text, metadata=dict(text.metadata), hash_value=text.sha256)


def _listed(row: TextRow) -> Document:
    return Document(doc_id=row.id, text=row.text, metadata=row.metadata, hash_value=row.sha256, is_truncated=not row.is_whole)


def _filter(text: str | None) -> Where:
    if not text:
        return Where()
    try:
        conditions = json.loads(text)
    except (ValueError, RecursionError):
        conditions = None
    if not isinstance(conditions, dict):
        raise Problem(400, "Invalid metadata filter format. Must be a valid JSON string.")
    return Where.equals(conditions)


def _place(settings: Settings, index_name: str, path: str) -> tuple[str, Path]:
    """Return the path to show to clients, and the file. Problem 400 for a path that could lead out of the exports folder."""
    display_path = f"{DEFAULT_PATH}/{index_name}" if path == DEFAULT_PATH else path
    parts = display_path.removeprefix("./").rstrip("/").split("/")
    if len(parts) > _MAX_PARTS or not all(_PART.fullmatch(part) for part in parts):
        raise Problem(400, f"The path must be 1 to {_MAX_PARTS} names separated by /, each of letters, digits, '-' and '_'.")
    return display_path, (settings.home / "exports").joinpath(*parts[:-1], f"{parts[-1]}.kb")
