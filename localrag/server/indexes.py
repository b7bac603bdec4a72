"""Indexes: knowledge bases that other programs fill with texts, and search.

An index is a knowledge base of the home, so that `localrag ask --kb` answers from it too. What `localrag index` made of files in it is
found by a search; the routes of documents have to do with those that were given as texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from localrag.errors import KnowledgeBaseNotFoundError, UsageError
from localrag.kb import KnowledgeBase, Where, import_kb, list_kbs
from localrag.kb.failures import make_folder
from localrag.kb.location import Folder
from localrag.kb.names import NAME
from localrag.kb.readers.draft import MAX_TEXT_CHARS
from localrag.kb.text_rows import TextRow
from localrag.kb.texts import Text
from localrag.passages import Hit
from localrag.server.documenting import INDEX_FAILS, failures, shown
from localrag.server.index_schemas import (
    DEFAULT_PATH,
    DOCUMENT,
    DeleteDocumentRequest,
    DeleteDocumentResponse,
    Document,
    IndexName,
    IndexRequest,
    KeptAt,
    Limit,
    ListDocumentsResponse,
    LoadedFrom,
    MaxTextLength,
    Message,
    MetadataFilter,
    NewIndexName,
    NodeWithScore,
    Offset,
    Overwrite,
    RetrieveRequest,
    RetrieveResponse,
    UpdateDocumentRequest,
    UpdateDocumentResponse,
)
from localrag.server.problems import Problem
from localrag.session.opening import open_knowledge_base

if TYPE_CHECKING:
    from localrag.server.app import Shared

router = APIRouter(tags=["Index"])

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MAX_PARTS = 4


@router.post(
    "/index",
    operation_id="create_index",
    responses={**shown([DOCUMENT], "The documents as they are stored."), **failures(400, 409, 422, 503)},
)
def create_index(body: IndexRequest, request: Request) -> list[Document]:
    """Store documents in an index, each in place of the one with its id; an index that is not there is made."""
    shared = _shared(request)
    texts = _texts(body.documents)
    if texts:
        embedder = shared.embedders.for_texts()
        with open_knowledge_base(body.index_name, settings=shared.settings, create=True) as kb:
            kb.texts.put(texts, embedder)
    return [_document(text) for text in texts]


@router.get("/indexes", operation_id="list_indexes", responses=shown(["example_index"], "Names, sorted."))
def list_indexes(request: Request) -> list[str]:
    """The names of all indexes."""
    return list_kbs(_shared(request).settings.kb_dir)


@router.get("/indexes/{index_name}/documents", operation_id="list_documents_in_index", responses=failures(400, *INDEX_FAILS))
def list_documents(
    index_name: IndexName,
    request: Request,
    limit: Limit = 10,
    offset: Offset = 0,
    max_text_length: MaxTextLength = 1000,
    metadata_filter: MetadataFilter = None,
) -> ListDocumentsResponse:
    """Some of the documents that were given to an index, the first given first."""
    with _opened(request, index_name) as kb:
        where = _filter(metadata_filter)
        found, total = kb.texts.page(offset=offset, limit=limit, max_chars=max_text_length or MAX_TEXT_CHARS, where=where)
    return ListDocumentsResponse(documents=[_listed(row) for row in found], count=len(found), total_items=total)


@router.post("/indexes/{index_name}/documents", operation_id="update_documents_in_index", responses=failures(400, *INDEX_FAILS))
def update_documents(index_name: IndexName, body: UpdateDocumentRequest, request: Request) -> UpdateDocumentResponse:
    """Store documents in place of those with their ids."""
    found = UpdateDocumentResponse(updated_documents=[], unchanged_documents=[], not_found_documents=[])
    kinds = {"updated": found.updated_documents, "unchanged": found.unchanged_documents, "not_found": found.not_found_documents}
    with _opened(request, index_name) as kb:
        named = [document for document in body.documents if document.doc_id]
        texts = _texts(named)
        outcomes = iter(kb.texts.update(texts, _shared(request).embedders.for_texts()) if texts else ())
    for document in body.documents:
        kinds[next(outcomes) if document.doc_id else "not_found"].append(document)
    return found


@router.post("/indexes/{index_name}/documents/delete", operation_id="delete_documents_in_index", responses=failures(*INDEX_FAILS))
def delete_documents(index_name: IndexName, body: DeleteDocumentRequest, request: Request) -> DeleteDocumentResponse:
    """Delete documents by their ids."""
    with _opened(request, index_name) as kb:
        removed = kb.texts.remove(body.doc_ids)
    return DeleteDocumentResponse(
        deleted_doc_ids=[one for one in body.doc_ids if one in removed],
        not_found_doc_ids=[one for one in body.doc_ids if one not in removed],
    )


@router.delete("/indexes/{index_name}", operation_id="delete_index", responses=failures(*INDEX_FAILS))
def delete_index(index_name: IndexName, request: Request) -> Message:
    """Delete an index with all that is in it, also one that is damaged."""
    settings = _shared(request).settings
    if index_name not in list_kbs(settings.kb_dir):
        raise _no_index(index_name)
    Folder(settings.kb_dir, index_name).remove()
    return Message(message=f"Successfully deleted index {index_name}.")


@router.post("/persist/{index_name}", operation_id="persist_index", responses=failures(400, *INDEX_FAILS))
def persist_index(index_name: IndexName, request: Request, path: KeptAt = DEFAULT_PATH) -> Message:
    """Write an index into a file of the server's own folder, from which it can be loaded."""
    with _opened(request, index_name) as kb:
        shown, file = _place(request, index_name, path)
        make_folder(file.parent)
        kb.export(file)
    return Message(message=f"Successfully persisted index {index_name} to {shown}.")


@router.post("/load/{index_name}", operation_id="load_index", responses=failures(400, *INDEX_FAILS))
def load_index(index_name: NewIndexName, request: Request, path: LoadedFrom = None, overwrite: Overwrite = False) -> Message:  # noqa: FBT002  # by name in the address
    """Make an index of a file that was written by `/persist`."""
    kb_dir = _shared(request).settings.kb_dir
    shown, file = _place(request, index_name, DEFAULT_PATH if path is None else path)
    if not file.is_file():
        raise Problem(404, f"Path does not exist: {shown}")
    if not overwrite and index_name in list_kbs(kb_dir):
        raise Problem(409, f"Index '{index_name}' already exists. Use a different name or delete the existing index first.")
    import_kb(kb_dir, file, index_name, replace=overwrite)
    return Message(message=f"Successfully loaded index {index_name} from {shown}.")


@router.post("/retrieve", operation_id="retrieve_index", responses=failures(400, *INDEX_FAILS))
def retrieve(body: RetrieveRequest, request: Request) -> RetrieveResponse:
    """The passages of an index that fit a query best, by meaning and by words. Fewer, or none, if no more are relevant."""
    shared = _shared(request)
    with _opened(request, body.index_name) as kb:
        if not body.query.strip():
            raise Problem(400, "Query string cannot be empty.")
        where = Where.equals(body.metadata_filter or {})
        embedder = shared.embedders.for_queries()
        hits = kb.retrieve(body.query, embedder, k=body.max_node_count, where=where, learning=shared.settings.learn)
        results = list(nodes(kb, hits))
    return RetrieveResponse(query=body.query, results=results, count=len(results))


def nodes(kb: KnowledgeBase, hits: Sequence[Hit]) -> Iterator[NodeWithScore]:
    """Passages as they are shown; what was deleted since they were found is left out."""
    names = kb.texts.names([hit.chunk.document_id for hit in hits])
    for hit in hits:
        if hit.chunk.document_id in names:
            doc_id, metadata = names[hit.chunk.document_id]
            dense, sparse = hit.scores.get("semantic"), hit.scores.get("keyword")
            yield NodeWithScore(
                doc_id=doc_id,
                node_id=hit.label,
                text=hit.chunk.text,
                score=hit.score,
                dense_score=dense,
                sparse_score=sparse,
                source="dense_only" if sparse is None else "sparse_only" if dense is None else "both",
                metadata=metadata,
            )


def _shared(request: Request) -> Shared:
    shared: Shared = request.app.state.shared
    return shared


@contextmanager
def _opened(request: Request, index_name: str) -> Iterator[KnowledgeBase]:
    """An index, opened for one request: it belongs to the thread that opened it."""
    if not NAME.fullmatch(index_name):  # the address of a server would be opened, too
        raise _no_index(index_name)
    try:
        with open_knowledge_base(index_name, settings=_shared(request).settings) as kb:
            yield kb
    except KnowledgeBaseNotFoundError:
        raise _no_index(index_name) from None


def _no_index(index_name: str) -> Problem:
    return Problem(404, f"No such index: '{index_name[:64]}' exists.")


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
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Problem(400, "Invalid metadata filter format. Must be a valid JSON string.")
    return Where.equals(found)


def _place(request: Request, index_name: str, path: str) -> tuple[str, Path]:
    """Where an index is kept: as it is shown, and the file. Nothing outside the folder of exports can be named."""
    shown = f"{DEFAULT_PATH}/{index_name}" if path == DEFAULT_PATH else path
    parts = shown.removeprefix("./").rstrip("/").split("/")
    if len(parts) > _MAX_PARTS or not all(_PART.fullmatch(part) for part in parts):
        raise Problem(400, f"The path must be 1 to {_MAX_PARTS} names of letters, digits, '-' and '_', with / between them.")
    return shown, (_shared(request).settings.home / "exports").joinpath(*parts[:-1], f"{parts[-1]}.kb")
