"""The clients that people have, on every route that they know, against a live server with the real model and embedder."""

import shutil

import httpx
import openai
import pytest
from kaito_rag_engine_client import Client
from kaito_rag_engine_client.api.chat import chat
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
from kaito_rag_engine_client.api.monitoring import get_health, get_metrics
from kaito_rag_engine_client.models import (
    ChatRequest,
    DeleteDocumentRequest,
    Document,
    DocumentMetadataType0,
    IndexRequest,
    RetrieveRequest,
    UpdateDocumentRequest,
)

from tests.server.live import served

pytestmark = pytest.mark.model

ANNEALING = "PLA is annealed at 80 to 100 °C for one hour; after that it withstands hot water."
LEASE = "The tenant may terminate the lease by giving three months' written notice."
QUESTION = "At what temperature is PLA annealed?"


@pytest.fixture(scope="module")
def live(converted, catalogue, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(converted[0].embedders_dir, home / "embedders")
    with served(home, "--models", str(catalogue), "--ctx", "2048", "--no-keep", model="smollm2-135m") as running:
        yield running


def test_the_client_of_the_rag_engine(live):
    with Client(base_url=live.url, raise_on_unexpected_status=True, timeout=httpx.Timeout(300)) as client:
        assert get_health.sync(client=client).status == "Healthy"
        documents = [Document(text=ANNEALING, metadata=DocumentMetadataType0.from_dict({"of": "PLA"})), Document(text=LEASE)]
        made = create_index.sync(client=client, body=IndexRequest(index_name="facts", documents=documents))
        assert [each.text for each in made] == [ANNEALING, LEASE]
        assert list_indexes.sync(client=client) == ["facts"]
        assert list_documents_in_index.sync("facts", client=client).total_items == 2

        nodes = retrieve_index.sync(client=client, body=RetrieveRequest(index_name="facts", query="heat treatment of plastic")).results
        assert (nodes[0].doc_id, nodes[0].source) == (made[0].doc_id, "dense_only")
        body = ChatRequest.from_dict({"messages": [{"role": "user", "content": QUESTION}], "index_name": "facts", "max_tokens": 24})
        answer = chat.sync(client=client, body=body)
        assert answer.source_nodes[0].text == ANNEALING
        assert answer.choices[0].message.content.strip()

        made[1].text = LEASE.replace("three", "six")
        updated = update_documents_in_index.sync("facts", client=client, body=UpdateDocumentRequest(documents=made))
        assert ([each.text for each in updated.updated_documents], len(updated.unchanged_documents)) == ([made[1].text], 1)
        gone = delete_documents_in_index.sync("facts", client=client, body=DeleteDocumentRequest(doc_ids=[made[1].doc_id]))
        assert gone.deleted_doc_ids == [made[1].doc_id]

        assert "persisted" in persist_index.sync("facts", client=client)["message"]
        assert "deleted" in delete_index.sync("facts", client=client)["message"]
        assert "loaded" in load_index.sync("facts", client=client)["message"]
        assert [each.text for each in list_documents_in_index.sync("facts", client=client).documents] == [ANNEALING]
        assert get_metrics.sync_detailed(client=client).status_code == 200
        assert 'rag_chat_requests_total{status="success"} 1.0' in httpx.get(f"{live.url}/metrics").text
        delete_index.sync("facts", client=client)


def test_the_client_of_openai(live):
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=300)
    (model,) = client.models.list()
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    said = [{"role": "user", "content": "Say hello."}]
    assert client.chat.completions.create(model=model.id, messages=said, max_tokens=8).choices[0].message.content.strip()
    assert client.completions.create(model=model.id, prompt="Once upon a", max_tokens=4).choices[0].text
    assert client.responses.create(model=model.id, input="Say hello.", max_output_tokens=8).output_text.strip()
    assert len(client.embeddings.create(model=model.id, input="hello").data[0].embedding) == 384
