"""The OpenAPI document says all that there is to say, and the page that is made of it needs nobody else."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import jsonschema
import pytest
from fastapi import Response
from fastapi.testclient import TestClient
from openapi_spec_validator import validate
from pydantic import BaseModel

from localrag.server import chat_answer_schemas, chat_schemas, index_schemas, openai_schemas, schemas
from localrag.server.app import Shared, make_app
from localrag.server.docs_page import example_of, page
from localrag.server.documenting import ENGINE_FAILS, DocumentedApi, described, operations
from localrag.server.gate import OPEN, Guard
from localrag.settings import Settings


def app(**guard):
    return make_app(Shared(settings=Settings(home="nowhere"), guard=Guard(**guard)))


DOCUMENT = app().openapi()
OPERATIONS = [pytest.param(operation, id=f"{method.upper()} {path}") for path, method, operation in operations(DOCUMENT)]
MODELS = [
    pytest.param(model, id=name)
    for module in (schemas, index_schemas, chat_schemas, chat_answer_schemas, openai_schemas)
    for name, model in vars(module).items()
    if isinstance(model, type) and issubclass(model, BaseModel) and model.model_config.get("json_schema_extra")
]


def resolved(value):
    if "$ref" in value:
        *_, kind, name = value["$ref"].split("/")
        return DOCUMENT["components"][kind][name]
    return value


def test_it_is_valid():
    validate(DOCUMENT)
    validate(app(api_key="s3cret").openapi())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_told_whole(operation):
    assert operation["summary"]
    assert operation["description"]
    assert re.fullmatch(r"[a-z_]+", operation["operationId"])
    assert [tag["name"] for tag in DOCUMENT["tags"] if tag["name"] in operation["tags"]]
    for parameter in operation.get("parameters", ()):
        assert parameter["description"]
        assert parameter["schema"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_its_body_and_its_answers_have_a_form_and_an_example_that_fits(operation):
    assert {"200", "400", "403", "408", "413", "415", "421"} <= set(operation["responses"])
    bodies = [operation["requestBody"]] if "requestBody" in operation else []
    for body in [*bodies, *map(resolved, operation["responses"].values())]:
        assert body["description"]
        assert body["content"]
        for media_type, media in body["content"].items():
            shown = example_of(DOCUMENT, media)
            form, value = media["schema"], shown
            if media_type == "text/event-stream":
                form = form["properties"]["data"]["anyOf"][0]["contentSchema"]
                value = json.loads(shown.split("\n")[0].removeprefix("data: "))
            jsonschema.validate(value, {**form, "components": DOCUMENT["components"]}, jsonschema.Draft202012Validator)
            assert isinstance(shown, str) == media_type.startswith("text/")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_no_success_is_a_detail_and_an_error(operation):
    for status, answer in operation["responses"].items():
        if status != "200":
            form = resolved(resolved(answer)["content"]["application/json"]["schema"])
            assert list(form["properties"]) == ["detail", "error"]


def test_a_mistake_of_the_server_is_a_detail_and_an_error_too():
    broken = app()

    @broken.get("/broken")
    async def fail() -> None:
        raise ZeroDivisionError

    answer = TestClient(broken, base_url="http://127.0.0.1:8642", raise_server_exceptions=False).get("/broken")
    said = "The server failed; its log has more."
    assert (answer.status_code, answer.json()) == (500, {"detail": said, "error": {"message": said, "code": 500}})


@pytest.mark.parametrize("model", MODELS)
def test_the_example_of_a_model_is_one(model):
    (shown,) = model.model_json_schema()["examples"]
    assert json.loads(model.model_validate(shown).model_dump_json(exclude_unset=True, by_alias=True)) == shown


def test_the_statuses_that_a_route_has_of_its_own():
    found = {operation["operationId"]: set(operation["responses"]) for _, _, operation in operations(DOCUMENT)}
    assert {"404", "409", "429", "503"} <= found["create_chat_completion"]
    assert {"409", "422", "503"} <= found["create_index"]
    assert "401" not in found["create_index"]


def test_a_token_that_is_needed_is_told():
    document = app(api_key="s3cret").openapi()
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"token": []}]
    for path, method, operation in operations(document):
        assert (operation.get("security") == []) == ((method.upper(), path) in OPEN)
        assert ("401" in operation["responses"]) == ((method.upper(), path) not in OPEN)
    assert "securitySchemes" not in DOCUMENT["components"]


def test_a_route_that_reads_its_body_by_hand_is_told_like_the_others():
    async def answered() -> Response:
        return Response()

    api = DocumentedApi(title="x", openapi_tags=[{"name": "x", "description": "x"}], description="x")
    api.state.shared = SimpleNamespace(guard=Guard())
    for path, answer, body, stream in (
        ("/v1/completions", openai_schemas.TextCompletion, openai_schemas.CompletionRequest, openai_schemas.TextCompletion),
        ("/v1/embeddings", openai_schemas.EmbeddingList, openai_schemas.EmbeddingRequest, None),
        ("/v1/responses", openai_schemas.ResponsesAnswer, openai_schemas.ResponsesRequest, openai_schemas.ResponsesEvent),
    ):
        told = described(answer, body=body, stream=stream, fails=ENGINE_FAILS)
        api.post(path, operation_id=path.rpartition("/")[2], tags=["x"], description="x", **told)(answered)
    document = api.openapi()
    validate(document)
    assert {"CompletionRequest", "EmbeddingRequest", "ResponsesRequest", "ResponsesEvent"} <= set(document["components"]["schemas"])
    assert "ResponsesRequest" in page(document)


# --- the page ---


def client(**guard) -> TestClient:
    return TestClient(app(**guard), base_url="http://127.0.0.1:8642")


def test_the_page_tells_every_operation_and_every_form():
    text = client().get("/docs").text
    for path, method, operation in operations(DOCUMENT):
        assert f"{method.upper()} {path}" in text
        assert f'<article id="{operation["operationId"]}">' in text
    for name in DOCUMENT["components"]["schemas"]:
        assert f'id="form-{name}"' in text


def test_the_page_needs_no_network():
    answer = client().get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert re.findall(r"(?:src|href|action|data|url|@import)\s*[=(]?\s*[\"'(]?(?!#)[^\"'\s>]*//", answer.text) == []
    assert set(re.findall(r'(?:src|href)="(.)', answer.text)) == {"#"}
    assert re.findall(r"https?://", answer.text) == []
    assert "<script" not in answer.text
    assert "<link" not in answer.text


def test_its_links_lead_somewhere():
    text = client().get("/docs").text
    ids = re.findall(r'id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_its_policy_lets_nothing_in_but_its_style():
    policy = client().get("/docs").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert " style=" not in client().get("/docs").text


def test_no_other_page_is_there():
    for path in ("/redoc", "/docs/oauth2-redirect", "/docs/"):
        assert client().get(path).status_code == 404


def test_the_page_and_the_document_stand_behind_the_token():
    for path in ("/docs", "/openapi.json"):
        assert client(api_key="s3cret").get(path).status_code == 401
        assert client(api_key="s3cret").get(path, headers={"Authorization": "Bearer s3cret"}).status_code == 200
