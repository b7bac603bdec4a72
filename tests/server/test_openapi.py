"""The OpenAPI document says all that there is to say."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from fastapi import Response
from fastapi.testclient import TestClient
from openapi_spec_validator import validate

from localrag.server import chat_request, completions, embeddings, indexes, openai_responses, schemas, status
from localrag.server.app import make_app
from localrag.server.openapi import ENGINE_FAILS, DocumentedApi, forms_of, operations, route_docs
from localrag.server.routing import ServerState
from localrag.server.security import OPEN, Guard
from localrag.settings import Settings


def app(**guard):
    return make_app(ServerState(settings=Settings(home="nowhere"), guard=Guard(**guard)))


FORMS = forms_of((schemas, chat_request, completions, openai_responses, embeddings, indexes, status))
DOCUMENT = app().openapi()
OPERATIONS = [pytest.param(operation, id=f"{method.upper()} {path}") for path, method, operation in operations(DOCUMENT)]
MODELS = [
    pytest.param(model, id=name)
    for name, model in {model.__name__: model for model in FORMS}.items()
    if model.model_config.get("json_schema_extra")
]


def resolved(value):
    while "$ref" in value:
        *_, kind, name = value["$ref"].split("/")
        value = DOCUMENT["components"][kind][name]
    return value


def example_of(media):
    """An example of its own, else that of its form."""
    return media["example"] if "example" in media else resolved(media["schema"])["examples"][0]


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
            shown = example_of(media)
            form, value = media["schema"], shown
            if media_type == "text/event-stream":
                form = form["properties"]["data"]["anyOf"][0]["contentSchema"]
                value = json.loads(shown.split("\n")[0].removeprefix("data: "))
            jsonschema.validate(value, {**form, "components": DOCUMENT["components"]}, jsonschema.Draft202012Validator)
            assert isinstance(shown, str) == media_type.startswith("text/")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_no_success_is_a_detail_and_an_error(operation):
    for code, answer in operation["responses"].items():
        if code != "200":
            form = resolved(resolved(answer)["content"]["application/json"]["schema"])
            assert list(form["properties"]) == ["detail", "error"]


def test_a_mistake_of_the_server_is_a_detail_and_an_error_too():
    broken = app()

    @broken.get("/broken")
    async def fail() -> None:
        raise ZeroDivisionError

    answer = TestClient(broken, base_url="http://127.0.0.1:8642", raise_server_exceptions=False).get("/broken")
    said = "Internal server error. See the server's log."
    assert (answer.status_code, answer.json()) == (
        500,
        {"detail": said, "error": {"message": said, "type": "server_error", "param": None, "code": "internal_error"}},
    )


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

    api = DocumentedApi(forms=FORMS, title="x", openapi_tags=[{"name": "x", "description": "x"}], description="x")
    for path, answer, body, stream in (
        ("/v1/completions", completions.TextCompletion, completions.CompletionRequest, completions.TextChunk),
        ("/v1/embeddings", embeddings.EmbeddingList, embeddings.EmbeddingRequest, None),
        ("/v1/responses", openai_responses.ResponsesAnswer, openai_responses.ResponsesRequest, openai_responses.ResponsesEvent),
    ):
        told = route_docs(answer, body=body, stream=stream, fails=ENGINE_FAILS)
        api.post(path, operation_id=path.rpartition("/")[2], tags=["x"], description="x", **told)(answered)
    document = api.openapi()
    validate(document)
    assert {"CompletionRequest", "EmbeddingRequest", "ResponsesRequest", "ResponsesEvent"} <= set(document["components"]["schemas"])


def client(**guard) -> TestClient:
    return TestClient(app(**guard), base_url="http://127.0.0.1:8642")


def test_no_page_loads_scripts_from_other_servers():
    for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
        assert client().get(path).status_code == 404


def test_the_document_stands_behind_the_token():
    assert client(api_key="s3cret").get("/openapi.json").status_code == 401
    assert client(api_key="s3cret").get("/openapi.json", headers={"Authorization": "Bearer s3cret"}).status_code == 200
