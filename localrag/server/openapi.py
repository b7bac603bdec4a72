"""Generate the OpenAPI document, with descriptions of the responses that all routes share.

A route whose body FastAPI parses needs only `failures`. A route that parses its body itself, to control the order of checks, names its
models: `@router.post(path, operation_id=…, **route_docs(Answer, body=Body, fails=…))`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from localrag.server.schemas import Failure, Invalid, StreamFailure, example_of
from localrag.server.security import OPEN

Responses = dict[int | str, dict[str, Any]]

ENGINE_FAILS = (400, 429, 503)
"""Error statuses of routes that use the engine."""
INDEX_FAILS = (404, 409, 422, 503)
"""Error statuses of routes that use an index."""

_SAID = {
    400: "The request cannot be fulfilled; `detail` says why.",
    404: "There is no index or model with this name.",
    409: "The index cannot be used: it is damaged, was made with another embedder, or already exists.",
    422: "The request is invalid; `detail` says where.",
    429: "Rate limit: too many requests are waiting.",
    503: "The model or embedder is missing or failed, or another program is indexing.",
}
_HEADERS = {429: {"Retry-After": {"description": "Seconds to wait before a retry.", "required": True, "schema": {"type": "integer"}}}}
_REFUSALS: Mapping[int, tuple[str, str]] = {
    400: ("BadBody", "The body is incomplete or nested too deeply."),
    403: ("ForeignOrigin", "The request comes from a web page whose `Origin` is not allowed (CORS)."),
    408: ("SlowBody", "The body did not arrive in time."),
    413: ("LongBody", "The body is too long."),
    415: ("NoJsonBody", "The body must be application/json."),
    421: ("ForeignHost", "The `Host` header does not name this server (protection against DNS rebinding)."),
}
"""Error responses of the gate, common to all routes."""
_NO_TOKEN = (401, "NoToken", "A bearer token is required.")


def route_docs(
    answer: type[BaseModel], *, body: type[BaseModel] | None = None, stream: type[BaseModel] | None = None, fails: Iterable[int] = ()
) -> dict[str, Any]:
    """Return the arguments of a route's decorator that document its body and responses. `stream` is the model of an event's data."""
    success: dict[str, Any] = {"model": answer, "description": str(answer.__doc__)}
    if stream is not None:
        success["content"] = {"text/event-stream": _events(stream)}
    arguments: dict[str, Any] = {"response_model": None, "responses": {200: success, **failures(*fails)}}
    if body is not None:
        content = {"application/json": {"schema": _ref(body)}}
        arguments["openapi_extra"] = {"requestBody": {"description": body.__doc__, "required": True, "content": content}}
    return arguments


def failures(*statuses: int) -> Responses:
    """Return the documentation of a route's error responses, by status."""
    return {
        status: {
            "model": Invalid if status == 422 else Failure,
            "description": _SAID[status],
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
        for status in sorted(statuses)
    }


def shown(value: list[Any] | str, description: str) -> Responses:
    """Return the documentation of a successful response that has no model: a list or plain text."""
    content = (
        {"text/plain": {"schema": {"type": "string"}, "example": value}}
        if isinstance(value, str)
        else {"application/json": {"example": value}}
    )
    return {200: {"description": description, "content": content}}


def _events(model: type[BaseModel]) -> dict[str, Any]:
    """Return the documentation of a stream. Before OpenAPI 3.2, the schema describes a single event."""
    item = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": [_ref(model), _ref(StreamFailure)]}}
    end = {"const": "[DONE]", "description": "The last event of completions, as in OpenAI's API."}
    schema = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [item, end]}}}
    value = json.dumps(example_of(model), separators=(",", ":"))
    return {"schema": schema, "example": f"data: {value}\n\ndata: [DONE]\n\n"}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def forms_of(modules: Iterable[ModuleType]) -> list[type[BaseModel]]:
    """Return the pydantic models in these modules."""
    values = [value for module in modules for value in vars(module).values()]
    return [value for value in values if isinstance(value, type) and issubclass(value, BaseModel)]


class DocumentedApi(FastAPI):
    """A FastAPI application whose OpenAPI document includes the gate's responses. `forms` are the models of its routes."""

    def __init__(self, *, forms: Iterable[type[BaseModel]], asks_for_token: bool = False, **options: Any) -> None:  # noqa: ANN401  # FastAPI's
        super().__init__(**options)
        self._forms = {form.__name__: form for form in forms}
        self._asks_for_token = asks_for_token

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            _describe_gate(document, asks_for_token=self._asks_for_token)
            _add_forms(document, self._forms)
            _describe_bodies(document)
        assert self.openapi_schema is not None
        return self.openapi_schema


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (path, method, operation) for all operations."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _describe_gate(document: dict[str, Any], *, asks_for_token: bool) -> None:
    refusals = [(status, *refusal) for status, refusal in _REFUSALS.items()] + ([_NO_TOKEN] if asks_for_token else [])
    components = document.setdefault("components", {})
    components["responses"] = {
        name: {"description": text, "content": {"application/json": {"schema": _ref(Failure)}}} for _, name, text in refusals
    }
    if asks_for_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    for path, method, operation in operations(document):
        responses = operation["responses"]
        is_open = (method.upper(), path) in OPEN
        if is_open and asks_for_token:
            operation["security"] = []
        for status, name, _ in refusals:
            if status != _NO_TOKEN[0] or not is_open:
                responses.setdefault(str(status), {"$ref": f"#/components/responses/{name}"})
        operation["responses"] = dict(sorted(responses.items()))


def _add_forms(document: dict[str, Any], forms: Mapping[str, type[BaseModel]]) -> None:
    """Add the missing models of bodies and events to the document, and restore all examples as written."""
    schemas = document["components"].setdefault("schemas", {})
    while missing := set(_names(document)) - set(schemas):
        for name in missing:
            schema = forms[name].model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs", {}), name: schema}
    for name in set(schemas) & set(forms):
        value = example_of(forms[name])
        schemas[name] |= {"examples": [value]} if value else {}  # FastAPI drops nulls, and pydantic sorts the keys
    document["components"]["schemas"] = dict(sorted(schemas.items()))


def _describe_bodies(document: dict[str, Any]) -> None:
    """Use the model's description for bodies without their own."""
    for _, _, operation in operations(document):
        for body in (operation.get("requestBody", {}), operation["responses"]["200"]):
            name = body.get("content", {}).get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
            if name and body.get("description", _UNSAID) == _UNSAID:
                body["description"] = document["components"]["schemas"][name]["description"]


_UNSAID = "Successful Response"


def _names(value: object) -> Iterator[str]:
    """Yield the names of the models that a value refers to."""
    if isinstance(value, dict):
        ref = value.get("$ref")
        if isinstance(ref, str) and ref.startswith("#/components/schemas/"):
            yield ref.rpartition("/")[2]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _names(each)
