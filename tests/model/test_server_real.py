"""The server with the real model and embedder, asked by the clients that people have."""

import shutil

import httpx
import openai
import pytest
from kaito_rag_engine_client import Client
from kaito_rag_engine_client.api.chat import chat
from kaito_rag_engine_client.api.index import create_index
from kaito_rag_engine_client.models import ChatRequest, Document, IndexRequest

from tests.server.live import served

pytestmark = pytest.mark.model

TEXTS = (
    "PLA is annealed at 80 to 100 °C for one hour; after that it withstands hot water.",
    "The tenant may terminate the lease by giving three months' written notice.",
)
QUESTION = [{"role": "user", "content": "At what temperature is PLA annealed?"}]


@pytest.fixture(scope="module")
def live(converted, catalogue, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(converted[0].embedders_dir, home / "embedders")
    with served(home, "--models", str(catalogue), "--ctx", "2048", "--no-keep", model="smollm2-135m") as running:
        with Client(base_url=running.url, raise_on_unexpected_status=True) as client:
            create_index.sync(client=client, body=IndexRequest(index_name="facts", documents=[Document(text=text) for text in TEXTS]))
        yield running


def test_a_question_is_answered_from_an_index(live):
    body = ChatRequest.from_dict({"messages": QUESTION, "index_name": "facts", "max_tokens": 24})
    with Client(base_url=live.url, raise_on_unexpected_status=True, timeout=httpx.Timeout(300)) as client:
        answer = chat.sync(client=client, body=body)
    stored = httpx.get(f"{live.url}/indexes/facts/documents").json()["documents"]
    assert answer.source_nodes[0].text == TEXTS[0]
    assert answer.source_nodes[0].doc_id == next(each["doc_id"] for each in stored if each["text"] == TEXTS[0])
    assert answer.choices[0].message.content.strip()
    ledger = answer.additional_properties["localrag"]["ledger"]
    assert sum(each["used"] for each in ledger["entries"] if each["name"] != "answer") == answer.usage.prompt_tokens
    assert ledger["window"] == 2048


def test_a_stream_and_the_plain_model(live):
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=300)
    chunks = list(
        client.chat.completions.create(
            model="any", messages=QUESTION, max_tokens=8, seed=1, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip()
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].model_extra["source_nodes"] is None


def test_an_answer_in_a_form(live):
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=300)
    schema = {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "hot", "schema": schema}}
    answer = client.chat.completions.create(model="any", messages=QUESTION, response_format=form)
    assert answer.choices[0].message.content.replace(" ", "") in ('{"hot":true}', '{"hot":false}')
