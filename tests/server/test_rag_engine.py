"""What the tests of KAITO's RAG engine expect of its HTTP API, asked of this server with an engine and an embedder of its own."""

from __future__ import annotations

import re
import time

import httpx
import pytest

from tests.server.live import served

QUESTION = {"role": "user", "content": "At what temperature is PLA annealed?"}
ANNEALED = "PLA is annealed at 80 to 100 °C: at what temperature PLA is annealed, the table tells."


@pytest.fixture(scope="module")
def http(tmp_path_factory, tiny_catalogue):
    with (
        served(tmp_path_factory.mktemp("home"), "--models", str(tiny_catalogue), "--no-keep", "--ctx", "4096") as live,
        httpx.Client(base_url=live.url, timeout=120) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def index(http):
    """Two documents; gives their ids."""
    documents = [{"text": ANNEALED}, {"text": "PETG is dried at 65 °C."}]
    return [each["doc_id"] for each in http.post("/index", json={"index_name": "facts", "documents": documents}).json()]


def chat(http, *messages, **more):
    return http.post("/v1/chat/completions", json={"index_name": "facts", "model": "echo", "messages": list(messages), **more})


def metric(http, name, **labels):
    told = ",".join(f'{key}="{value}"' for key, value in labels.items())
    found = re.search(rf"^{name}{re.escape('{' + told + '}') if labels else ''} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {"index_name": "nowhere", "messages": [QUESTION]}),
        ("POST", "/budget", {"index_name": "nowhere", "messages": [QUESTION]}),
        ("POST", "/v1/responses", {"index_name": "nowhere", "input": "What?"}),
        ("POST", "/retrieve", {"index_name": "nowhere", "query": "x"}),
        ("GET", "/indexes/nowhere/documents", None),
        ("POST", "/indexes/nowhere/documents", {"documents": []}),
        ("POST", "/indexes/nowhere/documents/delete", {"doc_ids": []}),
        ("POST", "/persist/nowhere", None),
        ("DELETE", "/indexes/nowhere", None),
    ],
)
def test_an_unknown_index_is_told_in_the_same_words_on_every_route(http, method, path, body):
    answer = http.request(method, path, json=body)
    assert (answer.status_code, answer.json()["detail"]) == (404, "No such index: 'nowhere' exists.")
    assert answer.json()["error"]["code"] == "index_not_found"


SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
DEVELOPER = {"role": "developer", "content": "Debug: the user asks about printing."}
ANSWERED = [{"role": "user", "content": "I print."}, {"role": "assistant", "content": "Good."}]


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, *ANSWERED, QUESTION],
        [SYSTEM, *ANSWERED, QUESTION, DEVELOPER],
        [SYSTEM, *ANSWERED, DEVELOPER, QUESTION],
        [DEVELOPER, QUESTION],
        [{"role": "user", "content": [{"type": "text", "text": QUESTION["content"]}]}],
    ],
    ids=["system", "developer last", "developer before the question", "developer first", "parts"],
)
def test_a_conversation_of_several_roles_is_answered_from_the_index(http, index, messages):
    answer = chat(http, *messages, max_tokens=50)
    assert answer.status_code == 200
    nodes = answer.json()["source_nodes"]
    assert nodes[0]["doc_id"] == index[0]
    assert {"doc_id", "node_id", "text", "score", "metadata"} <= nodes[0].keys()
    assert "bypass" not in answer.json()["localrag"]


def test_a_quote_is_copied_from_the_source_and_streams_in_one_piece(http, index):
    answer = chat(http, QUESTION, max_tokens=300, quote=True).json()
    local, text = answer["localrag"], answer["choices"][0]["message"]["content"]
    [quote] = local["quotes"]
    start, end = quote["span"]
    assert text[start:end] == ANNEALED[quote["start"] : quote["end"]] != ""
    assert local["citations"] == [{"id": quote["id"], "supplied": True, "spans": [[text.index("KB#"), start - 3]]}]
    assert next(each["copied"] for each in local["ledger"]["entries"] if each["name"] == "answer") == len(text[start:end].encode()) + 3
    streamed = chat(http, QUESTION, max_tokens=300, quote=True, stream=True).text
    assert sum(f'] \\"{text[start:end]}\\"' in line for line in streamed.splitlines()) == 1
    assert chat(http, QUESTION, quote=True, cite="free").status_code == 400


@pytest.mark.parametrize("messages", [[QUESTION, {"role": "tool", "tool_call_id": "x", "content": "80"}]])
def test_roles_that_no_index_is_searched_for_are_answered_by_the_model_alone(http, index, messages):
    answer = chat(http, *messages)
    assert (answer.status_code, answer.json()["source_nodes"], answer.json()["localrag"]["bypass"]) == (200, None, "role")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            [SYSTEM, QUESTION, {"role": "assistant", "content": "80."}, SYSTEM],
            "There must be a user prompt since the latest assistant message.",
        ),
        ([{"content": "x"}], "messages must contain 'role'"),
        ([{"role": "user"}], "messages must contain 'content' for role 'user'"),
        ([], "Invalid request format"),
    ],
)
def test_messages_that_cannot_be_answered(http, index, messages, says):
    answer = chat(http, *messages)
    assert answer.status_code == 400
    assert says in answer.json()["detail"]


def test_several_choices(http, index):
    assert (chat(http, QUESTION, n=2).status_code, chat(http, QUESTION, n=2).json()["detail"]) == (400, "n > 1 is not supported.")


COUNTED = {
    "chat": ("POST", "/v1/chat/completions", {"index_name": "facts", "messages": [QUESTION]}),
    "index": ("POST", "/index", {"index_name": "facts", "documents": []}),
    "indexes": ("GET", "/indexes", None),
    "indexes_document": ("GET", "/indexes/facts/documents", None),
    "indexes_update_document": ("POST", "/indexes/facts/documents", {"documents": []}),
    "indexes_delete_document": ("POST", "/indexes/facts/documents/delete", {"doc_ids": []}),
    "indexes_retrieve": ("POST", "/retrieve", {"index_name": "facts", "query": "PLA"}),
    "persist": ("POST", "/persist/facts", None),
    "load": ("POST", "/load/facts?overwrite=true", None),
    "delete_index": ("DELETE", "/indexes/gone", None),
}


@pytest.mark.parametrize("name", COUNTED)
def test_each_route_is_counted_and_timed(http, index, name):
    if name == "load":
        http.post("/persist/facts")
    method, path, body = COUNTED[name]
    text = http.get("/metrics").text
    assert f"# TYPE rag_{name}_latency_seconds histogram" in text
    assert f"# TYPE rag_{name}_requests_total counter" in text
    status = "failure" if name == "delete_index" else "success"
    names = [f"rag_{name}_requests_total", f"rag_{name}_latency_seconds_count", "e2e_request_total", "e2e_request_latency_seconds_count"]
    before = [metric(http, each, status=status) for each in names]
    assert (http.request(method, path, json=body).status_code < 400) is (status == "success")
    assert [metric(http, each, status=status) for each in names] == [each + 1 for each in before]
    assert metric(http, f"rag_{name}_latency_seconds_sum", status=status) > 0
    assert metric(http, "num_requests_running") == 0


def test_a_stream_is_timed_to_its_end(http, index):
    before = (
        metric(http, "rag_chat_latency_seconds_sum", status="success"),
        metric(http, "rag_chat_latency_seconds_count", status="success"),
    )
    with http.stream("POST", "/v1/chat/completions", json={"messages": [QUESTION], "stream": True}) as stream:
        assert metric(http, "num_requests_running") in (0, 1)
        assert stream.read().endswith(b"data: [DONE]\n\n")
    until = time.monotonic() + 60
    while metric(http, "rag_chat_latency_seconds_count", status="success") == before[1] and time.monotonic() < until:
        time.sleep(0.05)  # a stream is counted after its last byte was sent
    assert metric(http, "rag_chat_latency_seconds_count", status="success") == before[1] + 1
    assert metric(http, "rag_chat_latency_seconds_sum", status="success") > before[0]


def test_an_updated_document_is_found_by_its_new_text_and_not_by_its_old_one(http):
    """How many of the documents are sources is for their relevance to say: tests/model/test_indexes_real.py has the difference to KAITO."""
    documents = [{"text": "This is a test document"}, {"text": "Another test document"}]
    made = http.post("/index", json={"index_name": "updated", "documents": documents}).json()
    made[1]["text"] = "This is an updated test document"
    stranger = {"doc_id": "nonexistingdoc", "text": "This is a new test document"}
    answer = http.post("/indexes/updated/documents", json={"documents": [made[1], stranger, made[0]]}).json()
    assert [each["text"] for each in answer["updated_documents"]] == ["This is an updated test document"]
    assert [each["text"] for each in answer["unchanged_documents"]] == ["This is a test document"]
    assert [each["doc_id"] for each in answer["not_found_documents"]] == ["nonexistingdoc"]
    body = {"index_name": "updated", "messages": [{"role": "user", "content": "Another test document, updated"}], "max_tokens": 50}
    nodes = http.post("/v1/chat/completions", json=body).json()["source_nodes"]
    assert {each["text"] for each in nodes} == {"This is a test document", "This is an updated test document"}
    assert len(nodes) == 2
