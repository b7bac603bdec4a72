"""The server with the real model and embedder, asked by the clients that people have, on every route that they know."""

import json
import math
import re
import shutil
import subprocess
import sys

import httpx
import jsonschema
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
from selenium.webdriver.common.keys import Keys

from tests.pages import pages
from tests.server.live import served
from tests.server.openapi_forms import closed
from tests.server.test_page import MEASURE, Page, browsing

pytestmark = pytest.mark.model

TEXTS = (
    "PLA is annealed at 80 to 100 °C for one hour; after that it withstands hot water.",
    "The tenant may terminate the lease by giving three months' written notice.",
)
QUESTION = [{"role": "user", "content": "At what temperature is PLA annealed?"}]


@pytest.fixture(scope="module")
def live(converted, catalogue, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(converted[0].home, home, dirs_exist_ok=True)
    with served(home, "--models", str(catalogue), "--ctx", "2048", "--no-keep", model="smollm2-135m") as running:
        with Client(base_url=running.url, raise_on_unexpected_status=True) as client:
            create_index.sync(client=client, body=IndexRequest(index_name="facts", documents=[Document(text=text) for text in TEXTS]))
        yield running


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=300) as opened:
        yield opened


def num_answers(live):
    """As the server counts the chat completions that succeeded."""
    found = re.search(r'rag_chat_requests_total\{status="success"\} (\S+)', httpx.get(f"{live.url}/metrics").text)
    return float(found[1]) if found else 0.0


def test_the_client_of_the_rag_engine(live):
    annealing, lease = TEXTS
    before = num_answers(live)
    with Client(base_url=live.url, raise_on_unexpected_status=True, timeout=httpx.Timeout(300)) as client:
        assert get_health.sync(client=client).status == "Healthy"
        documents = [Document(text=annealing, metadata=DocumentMetadataType0.from_dict({"of": "PLA"})), Document(text=lease)]
        made = create_index.sync(client=client, body=IndexRequest(index_name="more", documents=documents))
        assert [each.text for each in made] == [annealing, lease]
        assert set(list_indexes.sync(client=client)) == {"facts", "more"}
        assert list_documents_in_index.sync("more", client=client).total_items == 2

        nodes = retrieve_index.sync(client=client, body=RetrieveRequest(index_name="more", query="heat treatment of plastic")).results
        assert (nodes[0].doc_id, nodes[0].source) == (made[0].doc_id, "dense_only")
        answer = chat.sync(client=client, body=ChatRequest.from_dict({"messages": QUESTION, "index_name": "more", "max_tokens": 24}))
        assert answer.source_nodes[0].text == annealing
        assert answer.choices[0].message.content.strip()

        made[1].text = lease.replace("three", "six")
        updated = update_documents_in_index.sync("more", client=client, body=UpdateDocumentRequest(documents=made))
        assert ([each.text for each in updated.updated_documents], len(updated.unchanged_documents)) == ([made[1].text], 1)
        gone = delete_documents_in_index.sync("more", client=client, body=DeleteDocumentRequest(doc_ids=[made[1].doc_id]))
        assert gone.deleted_doc_ids == [made[1].doc_id]

        assert "persisted" in persist_index.sync("more", client=client)["message"]
        assert "deleted" in delete_index.sync("more", client=client)["message"]
        assert "loaded" in load_index.sync("more", client=client)["message"]
        assert [each.text for each in list_documents_in_index.sync("more", client=client).documents] == [annealing]
        assert get_metrics.sync_detailed(client=client).status_code == 200
        assert num_answers(live) == before + 1
        delete_index.sync("more", client=client)


def test_the_client_of_openai(client):
    (model,) = client.models.list()
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    said = [{"role": "user", "content": "Say hello."}]
    assert client.chat.completions.create(model=model.id, messages=said, max_tokens=8).choices[0].message.content.strip()
    assert client.completions.create(model=model.id, prompt="Once upon a", max_tokens=4).choices[0].text
    assert client.responses.create(model=model.id, input="Say hello.", max_output_tokens=8).output_text.strip()
    assert len(client.embeddings.create(model=model.id, input="hello").data[0].embedding) == 384


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here, which the page uses")
def test_the_commands_of_its_page_run(live, tmp_path):
    """Those of docs/how-to/server.md, with this server's address. Its handbook has two texts."""
    page = pages()["docs/how-to/server.md"]
    serve, _, curl = page.code("sh")[0].partition("\n")
    assert serve == "localrag serve --model smollm2-135m"  # as it was started, but for the options of tests
    (program,) = page.code("python")
    commands = (["bash", "-c", curl.replace("curl ", "curl --fail --silent --show-error ")], [sys.executable, "-c", program])
    with Client(base_url=live.url, raise_on_unexpected_status=True) as client:
        create_index.sync(client=client, body=IndexRequest(index_name="handbook", documents=[Document(text=text) for text in TEXTS]))
        for *command, text in commands:
            there = text.replace("http://127.0.0.1:8642", live.url)
            done = subprocess.run([*command, there], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            assert "PLA is annealed at 80 to 100" in done.stdout
        delete_index.sync("handbook", client=client)


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


def test_an_answer_with_sources_is_what_the_document_tells(live):
    """Down to each field of the account, and a ledger too."""
    document = closed(httpx.get(f"{live.url}/openapi.json").json())
    body = {"messages": QUESTION, "index_name": "facts", "max_tokens": 8}
    for path, form in (("/v1/chat/completions", "ChatCompletion"), ("/budget", "BudgetResponse")):
        answer = httpx.post(f"{live.url}{path}", json=body, timeout=300).json()
        assert answer.get("evidence") or answer["source_nodes"]
        jsonschema.validate(answer, {"$ref": f"#/components/schemas/{form}", "components": document["components"]})


def test_a_stream_and_the_plain_model(client):
    chunks = list(
        client.chat.completions.create(
            model="any", messages=QUESTION, max_tokens=8, seed=1, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip()
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].model_extra["source_nodes"] is None


def test_an_answer_in_a_form(client):
    schema = {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "hot", "schema": schema}}
    answer = client.chat.completions.create(model="any", messages=QUESTION, response_format=form)
    assert answer.choices[0].message.content.replace(" ", "") in ('{"hot":true}', '{"hot":false}')


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}


def test_a_tool_is_called_and_its_result_answered(client):
    asked = [{"role": "user", "content": "What is the weather in Paris, in C?"}]
    choice = client.chat.completions.create(model="any", messages=asked, tools=[WEATHER], tool_choice="required").choices[0]
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (choice.finish_reason, call.function.name, set(arguments)) == ("tool_calls", "get_weather", {"city", "unit"})
    said = [
        *asked,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'},
    ]
    answer = client.chat.completions.create(model="any", messages=said, tools=[WEATHER], tool_choice="none", max_tokens=24)
    assert answer.choices[0].message.content.strip()


def test_by_itself_the_model_says_a_text_or_calls(client):
    said = [{"role": "user", "content": "Say hello."}]
    for chunks in (False, True):
        answer = client.chat.completions.create(model="any", messages=said, tools=[WEATHER], max_tokens=40, stream=chunks)
        choices = [chunk.choices[0] for chunk in answer] if chunks else answer.choices
        assert choices[-1].finish_reason in ("stop", "length", "tool_calls")


def test_logprobs_are_a_distribution(client):
    choice = client.chat.completions.create(
        model="any", messages=QUESTION, max_tokens=12, logprobs=True, top_logprobs=20, temperature=0
    ).choices[0]
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    for each in choice.logprobs.content:
        values = [top.logprob for top in each.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert each.logprob == values[0]  # greedy
        assert 0.3 < sum(map(math.exp, values)) <= 1.0 + 1e-6


def test_any_object(client):
    said = [{"role": "user", "content": 'Give the colour and the size of an apple as JSON, such as {"colour": "green"}.'}]
    answer = client.chat.completions.create(model="any", messages=said, response_format={"type": "json_object"}, max_tokens=200)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.startswith("{")


def test_a_text_goes_on_without_a_template(client):
    answer = client.completions.create(model="any", prompt="One, two, three, four, five, six,", max_tokens=8, seed=1)
    assert " seven" in answer.choices[0].text
    chunks = list(client.completions.create(model="any", prompt="One, two, three, four, five, six,", max_tokens=8, seed=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_a_response(client):
    answer = client.responses.create(model="any", input=QUESTION, max_output_tokens=24, extra_body={"index_name": "facts"})
    assert answer.output_text.strip()
    assert answer.model_extra["source_nodes"][0]["text"] == TEXTS[0]


def test_embeddings(live, client):
    texts = ["PLA softens at 60 degrees.", "When does PLA become soft?", "The lease ends in May."]
    found = client.embeddings.create(model="any", input=texts)  # base64, as this client asks for it
    first, near, far = (each.embedding for each in found.data)
    assert math.isclose(sum(value * value for value in first), 1.0, abs_tol=1e-4)
    assert sum(map(float.__mul__, first, near)) > sum(map(float.__mul__, first, far)) + 0.2
    assert found.usage.prompt_tokens > 10
    floats = client.embeddings.create(model="any", input=texts[0], encoding_format="float").data[0].embedding
    assert floats == pytest.approx(first, abs=1e-5)
    for given, says in (({"input": "word " * 2000}, "tokens. The embedder's limit is"), ({"input": "word", "dimensions": 7}, "dimensions")):
        answer = httpx.post(f"{live.url}/v1/embeddings", json=given)
        assert (answer.status_code, says in answer.json()["detail"]) == (400, True)
    for bad in ([], "", [""], [1, "a"], None, {"a": 1}):
        assert httpx.post(f"{live.url}/v1/embeddings", json={"input": bad}).status_code == 422


def test_embeddings_are_those_of_the_indexes(client):
    first, other = (each.embedding for each in client.embeddings.create(model="any", input=list(TEXTS)).data)
    asked = client.embeddings.create(model="any", input=QUESTION[0]["content"]).data[0].embedding
    assert sum(map(float.__mul__, asked, first)) > sum(map(float.__mul__, asked, other)) + 0.2


def test_the_page_draws_the_ledger_of_an_answer_as_it_comes(live):
    with browsing() as browser:
        browser.get(f"{live.url}/")
        page = Page(browser)
        page.until(lambda: page.text("#model") == "smollm2-135m", 120)
        page.until(lambda: "facts" in page.text("#kb"))
        page.choose("facts")
        page.at_most("24")
        page.write(QUESTION[0]["content"] + Keys.ENTER)
        page.until(lambda: page.all('#used [data-section="evidence"]'), 120)  # before a token is evaluated
        page.until(lambda: page.text("#send") == "Send", 120)
        turn = page.kept()
        drawn = page.script(MEASURE)
        scale = drawn["frame"] / 2048
        entries = {each["name"]: each for each in turn["ledger"]["entries"]}
        assert turn["usage"]["completion_tokens"] == entries["answer"]["used"]
        for name, width, used in drawn["used"]:
            assert abs(width - scale * entries[name]["allotted"]) < 1
            assert abs(used - scale * entries[name]["used"]) < 1
        sections = {each["name"]: each["allotted"] for each in turn["sections"]}
        for name, width, _ in drawn["given"]:
            assert abs(width - scale * sections[name]) < 1
        assert TEXTS[0] in page.text("#sources")
        assert page.text("#speed") != "–"
