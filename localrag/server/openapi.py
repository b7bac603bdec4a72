"""The OpenAPI document: what a route says of itself, and what holds for all of them.

A route whose body FastAPI reads needs no more than `failures`. One that reads its body itself, because the order of its checks matters,
names the forms of both: `@router.post(path, operation_id=…, **described(Answer, body=Body, fails=…))`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from localrag.server.schemas import Failure, Invalid, StreamFailure, shown_by
from localrag.server.security import OPEN

Responses = dict[int | str, dict[str, Any]]

ENGINE_FAILS = (400, 429, 503)
"""What an engine may answer."""
INDEX_FAILS = (404, 409, 422, 503)
"""What an index may answer."""

_SAID = {
    400: "What was asked cannot be done; `detail` says why.",
    404: "There is none of that name.",
    409: "The index cannot be used: it is damaged, of another embedder, or in the way.",
    422: "The request is not of its form; `detail` says where.",
    429: "Too many requests wait.",
    503: "There is no model or no embedder, it could not answer, or another program is indexing.",
}
_HEADERS = {429: {"Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer"}}}}
_REFUSALS: Mapping[int, tuple[str, str]] = {
    400: ("BadBody", "The body did not come whole, or is nested too deep."),
    403: ("ForeignOrigin", "A page of an origin that is not allowed asks."),
    408: ("SlowBody", "The body did not come in time."),
    413: ("LongBody", "The body is too long."),
    415: ("NoJsonBody", "The body must be application/json."),
    421: ("ForeignHost", "The request names another `Host` than this server."),
}
"""What the gate answers, whatever the route."""
_NO_TOKEN = (401, "NoToken", "A bearer token is needed.")


def described(
    answer: type[BaseModel], *, body: type[BaseModel] | None = None, stream: type[BaseModel] | None = None, fails: Iterable[int] = ()
) -> dict[str, Any]:
    """The arguments of a route's decorator that tell what it takes and gives; `stream` is the data of an event, where it can stream."""
    success: dict[str, Any] = {"model": answer, "description": str(answer.__doc__)}
    if stream is not None:
        success["content"] = {"text/event-stream": _events(stream)}
    found: dict[str, Any] = {"response_model": None, "responses": {200: success, **failures(*fails)}}
    if body is not None:
        content = {"application/json": {"schema": _ref(body)}}
        found["openapi_extra"] = {"requestBody": {"description": body.__doc__, "required": True, "content": content}}
    return found


def failures(*statuses: int) -> Responses:
    """The answers of a route that are no success, by their statuses."""
    return {
        status: {
            "model": Invalid if status == 422 else Failure,
            "description": _SAID[status],
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
        for status in sorted(statuses)
    }


def shown(value: list[Any] | str, description: str) -> Responses:
    """The success of a route whose answer no model shows: a list, or a plain text."""
    content = (
        {"text/plain": {"schema": {"type": "string"}, "example": value}}
        if isinstance(value, str)
        else {"application/json": {"example": value}}
    )
    return {200: {"description": description, "content": content}}


def _events(model: type[BaseModel]) -> dict[str, Any]:
    """A stream: before OpenAPI 3.2 the schema is that of each event."""
    item = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": [_ref(model), _ref(StreamFailure)]}}
    end = {"const": "[DONE]", "description": "The last event, where OpenAI has it."}
    schema = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [item, end]}}}
    value = json.dumps(shown_by(model), separators=(",", ":"))
    return {"schema": schema, "example": f"data: {value}\n\ndata: [DONE]\n\n"}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def forms_of(modules: Iterable[ModuleType]) -> list[type[BaseModel]]:
    """The pydantic models that these modules name."""
    values = [value for module in modules for value in vars(module).values()]
    return [value for value in values if isinstance(value, type) and issubclass(value, BaseModel)]


class DocumentedApi(FastAPI):
    """An app whose OpenAPI document also has what its gate does. `forms` are all that its routes take and give."""

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
    """(path, method, operation) of all."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _describe_gate(document: dict[str, Any], *, asks_for_token: bool) -> None:
    refusals = [(status, *said) for status, said in _REFUSALS.items()] + ([_NO_TOKEN] if asks_for_token else [])
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
    """Add each form that is named and not there: of bodies that a route reads itself, and of events. All examples, as they were written."""
    schemas = document["components"].setdefault("schemas", {})
    while missing := set(_names(document)) - set(schemas):
        for name in missing:
            schema = forms[name].model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs", {}), name: schema}
    for name in set(schemas) & set(forms):
        value = shown_by(forms[name])
        schemas[name] |= {"examples": [value]} if value else {}  # FastAPI drops what is null in it, and pydantic sorts it
    document["components"]["schemas"] = dict(sorted(schemas.items()))


def _describe_bodies(document: dict[str, Any]) -> None:
    """A body that says nothing of itself is what its form says."""
    for _, _, operation in operations(document):
        for body in (operation.get("requestBody", {}), operation["responses"]["200"]):
            name = body.get("content", {}).get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
            if name and body.get("description", _UNSAID) == _UNSAID:
                body["description"] = document["components"]["schemas"][name]["description"]


_UNSAID = "Successful Response"


def _names(value: object) -> Iterator[str]:
    """The forms that are referred to."""
    if isinstance(value, dict):
        named = value.get("$ref")
        if isinstance(named, str) and named.startswith("#/components/schemas/"):
            yield named.rpartition("/")[2]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _names(each)
