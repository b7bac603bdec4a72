"""What is not a success, as OpenAI's clients read it: each error's type, code and param."""

import json

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from localrag.server.app import make_app
from localrag.server.routing import ServerState
from localrag.server.security import Guard
from localrag.settings import Settings
from tests.kb.hash_embedder import HashEmbedder
from tests.server.live import served

QUESTION = [{"role": "user", "content": "What is PLA?"}]
KINDS = {400: openai.BadRequestError, 404: openai.NotFoundError, 422: openai.UnprocessableEntityError}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with served(tmp_path_factory.mktemp("home"), "--no-keep", "--ctx", "2048") as running:
        yield running


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def told(error):
    return error.status_code, error.type, error.code, error.param


INVALID = "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_cannot_fit(client, stream):
    long = "x" * 9000
    for ask, param in (
        (lambda: client.chat.completions.create(model="echo", messages=[{"role": "user", "content": long}], stream=stream), "messages"),
        (lambda: client.completions.create(model="echo", prompt=long, stream=stream), "prompt"),
        (lambda: client.responses.create(model="echo", input=long, stream=stream), "input"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            ask()
        assert told(raised.value) == (400, INVALID, "context_length_exceeded", param)
        assert "but the window holds 2048" in raised.value.message


def test_a_model_that_is_not_there(client):
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-4o")
    assert told(raised.value) == (404, INVALID, "model_not_found", "model")
    assert "gpt-4o" in raised.value.message


@pytest.mark.parametrize(
    ("given", "status", "code", "param"),
    [
        ({"n": 2}, 400, "invalid_request", "n"),
        ({"temperature": 200}, 400, "invalid_request", "temperature"),
        ({"temperature": "hot"}, 400, "invalid_request", "temperature"),
        ({"stop": 7}, 400, "invalid_request", "stop"),
        ({"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
        ({"messages": []}, 400, "invalid_request", "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "invalid_request", "messages"),
        ({"logit_bias": {"1": 2}}, 400, "unsupported_parameter", "logit_bias"),
        ({"index_name": "nowhere"}, 404, "index_not_found", "index_name"),
        ({"index_name": "nowhere", "context_token_ratio": 9}, 404, "index_not_found", "index_name"),
        ({"context_token_ratio": 9}, 400, "invalid_request", "context_token_ratio"),
        ({"response_format": {"type": "x"}}, 400, "invalid_request", "response_format"),
    ],
)
def test_a_request_that_is_wrong(client, given, status, code, param):
    with pytest.raises(KINDS[status]) as raised:
        client.chat.completions.create(model="echo", messages=QUESTION, extra_body=given)
    assert told(raised.value) == (status, INVALID, code, param)
    assert raised.value.body["message"] == raised.value.response.json()["detail"]


def test_an_address_and_a_method_that_are_none(live):
    for answer, code in ((httpx.get(f"{live.url}/v1/nowhere"), "not_found"), (httpx.get(f"{live.url}/index"), "method_not_allowed")):
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"], error["message"]) == (INVALID, code, None, answer.json()["detail"])


def test_an_engine_that_ends_in_the_middle_of_a_stream(live):
    """It is the last event, and a client of OpenAI raises it with its code."""
    asked = {"messages": [{"role": "user", "content": "Say it 300 times: over and over"}], "stream": True}
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=asked, timeout=60) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if '"content":"' in line)
        live.engine.kill()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    if "error" in events[-1]:  # the whole answer may have been on its way
        error = events[-1]["error"]
        assert (error["type"], error["code"], error["param"], error["status"]) == ("server_error", "service_unavailable", None, 503)


@pytest.mark.parametrize(
    ("headers", "status", "kind", "code"),
    [
        ({"Authorization": ""}, 401, "authentication_error", "invalid_api_key"),
        ({"Origin": "http://evil.example"}, 403, "permission_error", "forbidden"),
        ({"Host": "evil.example"}, 421, INVALID, "misdirected_request"),
        ({"Content-Type": "text/plain"}, 415, INVALID, "unsupported_media_type"),
    ],
)
def test_what_the_gate_refuses(tmp_path, headers, status, kind, code):
    app = make_app(ServerState(settings=Settings(home=tmp_path), embedder=HashEmbedder(), guard=Guard(api_key="key")))
    answer = TestClient(app, base_url="http://127.0.0.1").post(
        "/v1/embeddings", content=b'{"input": "x"}', headers={"Authorization": "Bearer key", "Content-Type": "application/json", **headers}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"], error["param"]) == (status, kind, code, None)
    assert error["message"] == answer.json()["detail"]


def test_a_text_that_is_longer_than_the_embedder_reads(tmp_path):
    client = TestClient(make_app(ServerState(settings=Settings(home=tmp_path), embedder=HashEmbedder())), base_url="http://127.0.0.1")
    for given, code, param in (
        ({"input": "word " * 50_000}, "context_length_exceeded", "input"),
        ({"input": "x", "dimensions": 7}, "invalid_request", "dimensions"),
    ):
        error = client.post("/v1/embeddings", json=given).json()["error"]
        assert (error["type"], error["code"], error["param"]) == (INVALID, code, param)
    error = client.post("/v1/embeddings", json={"input": "x", "encoding_format": 7}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "encoding_format")
