"""Random requests by the OpenAPI document, on the wire: none is a fault of the server, and no answer is outside of what is told of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from localrag.server.app import make_app
from localrag.server.engine_process import EngineOptions, EngineProcess
from localrag.server.openapi import operations
from localrag.server.routing import ServerState
from localrag.settings import Settings
from tests.kb.hash_embedder import HashEmbedder
from tests.server.in_thread import served_in_thread
from tests.server.openapi_forms import closed

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
)


def narrowed(document):
    """The document of requests that mostly succeed: to an index that is there, with a question, for what any model can do."""
    document = closed(document)
    forms = document["components"]["schemas"]
    there = {"const": "example_index"}
    forms["RetrieveRequest"]["properties"]["index_name"] = there
    message = {"properties": {"role": {"enum": ["system", "user"]}, "content": {"type": "string", "minLength": 1}}}
    question = {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "object", "required": ["role", "content"], **message}}
    asked = forms["ChatRequest"]["properties"]
    forms["ChatRequest"]["properties"] = {name: asked[name] for name in PLAIN} | {"messages": question}
    for _, _, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            if parameter["name"] == "index_name":
                parameter["schema"] = there
    return document


PLAIN = ("model", "n", "context_token_ratio", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "stop", "user")
DOCUMENT = make_app(ServerState(settings=Settings(home=Path("nowhere")))).openapi()
APIS = [
    ("as told", GenerationMode.POSITIVE, schemathesis.openapi.from_dict(closed(DOCUMENT))),
    ("with success", GenerationMode.POSITIVE, schemathesis.openapi.from_dict(narrowed(DOCUMENT))),
    ("otherwise", GenerationMode.NEGATIVE, schemathesis.openapi.from_dict(closed(DOCUMENT))),
]
OPERATIONS = [
    pytest.param(each.ok(), mode, id=f"{each.ok().label} {kind}") for kind, mode, api in APIS for each in api.get_all_operations()
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server with the echo engine."""
    home = Settings(home=tmp_path_factory.mktemp("home"))
    engine = EngineProcess(EngineOptions(settings=home, model="echo", n_ctx=8192, keep=False))
    app = make_app(ServerState(settings=home, engine=engine, embedder=HashEmbedder()))
    with served_in_thread(app) as address:
        yield address


@pytest.fixture
def book(url):
    """The index of the examples."""
    example = DOCUMENT["components"]["schemas"]["IndexRequest"]["examples"][0]
    assert httpx.post(f"{url}/index", json=example).status_code == 200


@pytest.mark.parametrize(("operation", "mode"), OPERATIONS)
def test_no_request_is_a_fault_and_no_answer_is_outside_its_form(operation, mode, url, book):
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=10,
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case):
        case.call_and_validate(base_url=url, checks=CHECKS)

    with suppress(Unsatisfiable):  # some operations take nothing that could be wrong
        check()
