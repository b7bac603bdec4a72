"""An index of a server with the real default embedder."""

import pytest
from fastapi.testclient import TestClient

from localrag.server.app import make_app
from localrag.server.routing import ServerState
from localrag.settings import Settings

pytestmark = pytest.mark.model

TEXTS = (
    "PLA softens at 60 degrees, so a printed cup does not survive the dishwasher.",
    "The tenant may terminate the lease by giving three months' written notice.",
    "Sailors without fresh fruit fell ill with scurvy, for they lacked vitamin C. " * 60,
)


def test_texts_are_found_by_what_they_mean(home_after_indexing, catalogue):
    shared = ServerState(settings=Settings(home=home_after_indexing, models_file=catalogue))
    client = TestClient(make_app(shared), base_url="http://127.0.0.1")
    stored = client.post("/index", json={"index_name": "book", "documents": [{"text": text} for text in TEXTS]}).json()
    assert [each["is_truncated"] for each in stored] == [False] * 3
    for query, number in (("Can I wash a cup?", 0), ("How do I end a rental agreement?", 1), ("Which disease comes of a bad diet?", 2)):
        found = client.post("/retrieve", json={"index_name": "book", "query": query, "max_node_count": 1}).json()["results"]
        assert [(node["doc_id"], node["dense_score"] > 0.3) for node in found] == [(stored[number]["doc_id"], True)]
    assert client.post("/retrieve", json={"index_name": "book", "query": "Who painted the Mona Lisa?"}).json()["results"] == []
    assert type(shared.embedders.for_queries()._embedder).__name__ == "LlamaEmbedder"
    assert type(shared.embedders.for_texts()._embedder).__name__ == "SentenceTransformerEmbedder"


def test_one_embedder_does_where_there_is_no_copy_for_questions(tmp_path, catalogue):
    embedders = ServerState(settings=Settings(home=tmp_path, models_file=catalogue)).embedders
    assert embedders.for_texts() is embedders.for_queries()


def test_an_updated_document_is_a_source_where_one_is_relevant(home_after_indexing, catalogue):
    """KAITO's engine gives every document of so small an index; docs/how-to/server.md says that here one must be relevant."""
    shared = ServerState(settings=Settings(home=home_after_indexing, models_file=catalogue))
    client = TestClient(make_app(shared), base_url="http://127.0.0.1")
    documents = [{"text": "This is a test document"}, {"text": "Another test document"}]
    made = client.post("/index", json={"index_name": "updated", "documents": documents}).json()
    made[1]["text"] = "This is an updated test document"
    client.post("/indexes/updated/documents", json={"documents": [made[1]]})

    def retrieved(query):
        results = client.post("/retrieve", json={"index_name": "updated", "query": query, "max_node_count": 10}).json()["results"]
        return [node["text"] for node in results]

    for query in ("Which test document is updated?", "updates test query"):
        assert retrieved(query) == ["This is an updated test document", "This is a test document"]
    assert retrieved("How is bread baked?") == []
