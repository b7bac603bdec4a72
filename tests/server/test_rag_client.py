"""The client of the KAITO RAG engine, as it comes from PyPI, with a server that it believes to be one."""

import pytest
from kaito_rag_engine_client import Client
from kaito_rag_engine_client.api.index import (
    create_index,
    delete_documents_in_index,
    delete_index,
    list_documents_in_index,
    list_indexes,
    load_index,
    persist_index,
    retrieve_index,
    update_documents_in_index,
)
from kaito_rag_engine_client.api.monitoring import get_health
from kaito_rag_engine_client.errors import UnexpectedStatus
from kaito_rag_engine_client.models import (
    DeleteDocumentRequest,
    Document,
    DocumentMetadataType0,
    HTTPValidationError,
    IndexRequest,
    RetrieveRequest,
    RetrieveRequestMetadataFilterType0,
    UpdateDocumentRequest,
)

from localrag.server.app import make_app
from localrag.server.routing import ServerState
from localrag.settings import Settings
from tests.kb.hash_embedder import HashEmbedder
from tests.server.in_thread import served_in_thread

LONG = "\n\n".join(f"Part {at} tells of zebra{at}. " + " ".join(f"It is number {at}{n}." for n in range(40)) for at in range(12))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    app = make_app(ServerState(settings=Settings(home=tmp_path_factory.mktemp("home")), embedder=HashEmbedder()))
    with served_in_thread(app) as url, Client(base_url=url, raise_on_unexpected_status=True) as client:
        yield client


@pytest.fixture
def book(client):
    """The documents of an index as they were answered when it was made."""
    metadata = [DocumentMetadataType0.from_dict(each) for each in ({"author": "Ann", "deep": {"n": [1, 2.5, None]}}, {"author": "Bo"})]
    documents = [Document(text=LONG, metadata=metadata[0]), Document(text="A cat sleeps.", metadata=metadata[1]), Document(text="Alone.")]
    found = create_index.sync(client=client, body=IndexRequest(index_name="book", documents=documents))
    yield found
    if "book" in list_indexes.sync(client=client):
        delete_index.sync("book", client=client)


def _refused(status):
    return pytest.raises(UnexpectedStatus, match=f"Unexpected status code: {status}")


def test_health(client):
    assert (get_health.sync(client=client).status, get_health.sync(client=client).detail) == ("Healthy", None)


def test_documents_are_indexed(client, book):
    assert [(each.text, each.is_truncated, len(each.doc_id)) for each in book] == [
        (LONG, False, 64),
        ("A cat sleeps.", False, 64),
        ("Alone.", False, 64),
    ]
    assert book[0].metadata.to_dict() == {"author": "Ann", "deep": {"n": [1, 2.5, None]}}
    assert all(each.hash_value for each in book)
    assert list_indexes.sync(client=client) == ["book"]


def test_documents_are_listed(client, book):
    found = list_documents_in_index.sync("book", client=client)
    assert (found.count, found.total_items, [each.doc_id for each in found.documents]) == (3, 3, [each.doc_id for each in book])
    assert [each.is_truncated for each in found.documents] == [True, False, False]
    found = list_documents_in_index.sync("book", client=client, limit=1, offset=1, max_text_length=5)
    assert (found.count, found.total_items, found.documents[0].text, found.documents[0].is_truncated) == (1, 3, "A cat", True)
    found = list_documents_in_index.sync("book", client=client, max_text_length=100_000, metadata_filter='{"author":"Ann"}')
    assert [each.to_dict() for each in found.documents] == [book[0].to_dict()]
    with _refused(400):
        list_documents_in_index.sync("book", client=client, metadata_filter="{")
    assert isinstance(list_documents_in_index.sync("book", client=client, limit=101), HTTPValidationError)


def test_documents_are_updated(client, book):
    book[1].text = "A dog sleeps."
    body = UpdateDocumentRequest(documents=[book[1], book[2], Document(doc_id="none", text="x")])
    found = update_documents_in_index.sync("book", client=client, body=body)
    assert [each.text for each in found.updated_documents] == ["A dog sleeps."]
    assert [each.to_dict() for each in found.unchanged_documents] == [book[2].to_dict()]
    assert [each.doc_id for each in found.not_found_documents] == ["none"]


def test_documents_are_deleted(client, book):
    body = DeleteDocumentRequest(doc_ids=[book[0].doc_id, "none"])
    found = delete_documents_in_index.sync("book", client=client, body=body)
    assert (found.deleted_doc_ids, found.not_found_doc_ids) == ([book[0].doc_id], ["none"])
    assert list_documents_in_index.sync("book", client=client).total_items == 2


def test_passages_are_found(client, book):
    found = retrieve_index.sync(client=client, body=RetrieveRequest(index_name="book", query="zebra7", max_node_count=3))
    assert (found.query, found.count) == ("zebra7", len(found.results))
    node = found.results[0]
    assert (node.doc_id, node.metadata.to_dict()) == (book[0].doc_id, book[0].metadata.to_dict())
    assert ("zebra7" in node.text, node.source, node.sparse_score > 0, node.score > 0) == (True, "sparse_only", True, True)
    wanted = RetrieveRequestMetadataFilterType0.from_dict({"author": "Bo"})
    found = retrieve_index.sync(client=client, body=RetrieveRequest(index_name="book", query="A cat sleeps.", metadata_filter=wanted))
    assert [(node.doc_id, node.source) for node in found.results] == [(book[1].doc_id, "both")]
    assert found.results[0].dense_score == pytest.approx(1)
    with _refused(400):
        retrieve_index.sync(client=client, body=RetrieveRequest(index_name="book", query=" "))
    body = RetrieveRequest(index_name="book", query="x", max_node_count=301)
    assert isinstance(retrieve_index.sync(client=client, body=body), HTTPValidationError)


def test_an_index_is_kept_and_loaded(client, book):
    assert persist_index.sync("book", client=client) == {"message": "Successfully persisted index book to storage/book."}
    assert persist_index.sync("book", client=client, path="./mine") == {"message": "Successfully persisted index book to ./mine."}
    with _refused(409):
        load_index.sync("book", client=client)
    delete_index.sync("book", client=client)
    assert load_index.sync("book", client=client) == {"message": "Successfully loaded index book from storage/book."}
    assert load_index.sync("book", client=client, path="./mine", overwrite=True) == {
        "message": "Successfully loaded index book from ./mine."
    }
    found = list_documents_in_index.sync("book", client=client, max_text_length=100_000)
    assert [each.to_dict() for each in found.documents] == [each.to_dict() for each in book]
    with _refused(404):
        load_index.sync("other", client=client, path="nowhere")
    with _refused(400):
        persist_index.sync("book", client=client, path="../outside")


def test_an_index_is_deleted(client, book):
    assert delete_index.sync("book", client=client) == {"message": "Successfully deleted index book."}
    assert list_indexes.sync(client=client) == []


@pytest.mark.parametrize("name", ["nowhere", "../book", "a b", "book/documents", "Ünï"])
def test_an_unknown_index(client, name):
    calls = [
        lambda: list_documents_in_index.sync(name, client=client),
        lambda: update_documents_in_index.sync(name, client=client, body=UpdateDocumentRequest(documents=[])),
        lambda: delete_documents_in_index.sync(name, client=client, body=DeleteDocumentRequest(doc_ids=[])),
        lambda: delete_index.sync(name, client=client),
        lambda: persist_index.sync(name, client=client),
        lambda: retrieve_index.sync(client=client, body=RetrieveRequest(index_name=name, query="x")),
    ]
    for call in calls:
        with _refused("40[45]"):
            call()


def test_a_name_that_cannot_be(client):
    body = IndexRequest(index_name="No Name", documents=[Document(text="x")])
    assert isinstance(create_index.sync(client=client, body=body), HTTPValidationError)
    assert isinstance(load_index.sync("No Name", client=client), HTTPValidationError)
