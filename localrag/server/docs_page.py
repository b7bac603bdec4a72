"""GET /docs: the OpenAPI document as one page, made here. It has no script and names nothing of another server, so it needs no network,
it can be kept as a file, and it stands behind the gate and its token like all else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from localrag.report.markup import plain, table
from localrag.report.style import STYLE
from localrag.server.documenting import operations
from localrag.server.page import hash_of

router = APIRouter()

_STYLE = (
    STYLE
    + """
pre { overflow-x: auto; background: var(--spare); border-radius: 6px; padding: .7rem .9rem; font-size: .85rem; }
code, pre { font-family: ui-monospace, monospace; }
nav ul { columns: 20rem; padding-left: 1.1rem; overflow-wrap: anywhere; }
a { color: inherit; }
h4 { margin: 1rem 0 .3rem; }
"""
)
_POLICY = f"default-src 'none'; style-src {hash_of(_STYLE)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The page."""
    return HTMLResponse(page(request.app.openapi()), headers={"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"})


def page(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as HTML."""
    info = document["info"]
    title = f"{plain(info['title'])} {plain(info['version'])}"
    listed = "".join(f'<li><a href="#{each}">{plain(method.upper())} {plain(path)}</a></li>' for path, method, each in _ids(document))
    body = [
        f"<header><h1>{title}</h1>{_text(info['description'])}{_token(document)}</header>",
        f"<nav><h2>Routes</h2><ul>{listed}</ul></nav>",
        *_groups(document),
        "<h2>What any route may answer</h2>",
        _answers(document, document["components"]["responses"]),
        "<h2>Forms</h2>",
        *(_form(name, schema) for name, schema in document["components"]["schemas"].items()),
    ]
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{chr(10).join(body)}\n</main>\n</body>\n</html>\n"
    )


def example_of(document: Mapping[str, Any], media: Mapping[str, Any]) -> Any:  # noqa: ANN401  # JSON
    """What shows a body: an example of its own, else that of its form. KeyError if there is none."""
    return media["example"] if "example" in media else _resolved(document, media["schema"])["examples"][0]


def _resolved(document: Mapping[str, Any], value: Mapping[str, Any]) -> Any:  # noqa: ANN401  # JSON
    found: Any = value
    while "$ref" in found:
        kind, name = found["$ref"].split("/")[-2:]
        found = document["components"][kind][name]
    return found


def _ids(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for path, method, operation in operations(document):
        yield path, method, plain(operation["operationId"])


def _token(document: Mapping[str, Any]) -> str:
    return "<p>Requests need a bearer token.</p>" if document.get("security") else ""


def _groups(document: Mapping[str, Any]) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"<h2>{plain(tag['name'])}</h2>{_text(tag['description'])}"
        for path, method, operation in operations(document):
            if tag["name"] in operation["tags"]:
                yield _operation(document, path, method, operation)


def _operation(document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> str:
    parts = [f"<h3><code>{plain(method.upper())} {plain(path)}</code></h3>{_text(operation['description'])}"]
    if "parameters" in operation:
        parts.append("<h4>Parameters</h4>" + table(("Name", "In", "Type", ""), map(_parameter, operation["parameters"])))
    if "requestBody" in operation:
        parts.append(f"<h4>Body</h4>{_media(document, operation['requestBody']['content'])}")
    own = {status: answer for status, answer in operation["responses"].items() if "$ref" not in answer}
    parts.append(f"<h4>Answers</h4>{_answers(document, own)}")
    return f'<article id="{plain(operation["operationId"])}">{"".join(parts)}</article>'


def _parameter(parameter: Mapping[str, Any]) -> list[str]:
    name = f"<code>{plain(parameter['name'])}</code>"
    shown = f" Such as <code>{plain(str(parameter['schema']['examples'][0]))}</code>." if "examples" in parameter["schema"] else ""
    return _cells(name, plain(parameter["in"]), _type(parameter["schema"]), _marked(parameter["description"]) + shown)


def _answers(document: Mapping[str, Any], answers: Mapping[str, Any]) -> str:
    parts = []
    for status, answer in answers.items():
        success = _media(document, answer["content"]) if status.startswith("2") else ""
        parts.append(f"<p><b>{plain(status)}</b> {_marked(answer['description'])}</p>{success}")
    return "".join(parts)


def _media(document: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    parts = []
    for media_type, media in content.items():
        example = example_of(document, media)
        text = example if isinstance(example, str) else json.dumps(example, ensure_ascii=False, indent=2)
        parts.append(f'<p class="soft"><code>{plain(media_type)}</code> {_type(media["schema"])}</p>')
        parts.append(f'<pre tabindex="0">{plain(text)}</pre>')
    return "".join(parts)


def _form(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        _cells(f"<code>{plain(field)}</code>{' *' if field in required else ''}", _type(inner), _marked(inner.get("description", "")))
        for field, inner in schema.get("properties", {}).items()
    ]
    head = f'<article id="form-{plain(name)}"><h3>{plain(name)}</h3>{_text(schema.get("description", ""))}'
    return f"{head}{table(('Field (* needed)', 'Type', ''), rows)}</article>"


def _type(schema: Mapping[str, Any]) -> str:
    """What a value may be, in a few words."""
    if "$ref" in schema:
        name = plain(schema["$ref"].rpartition("/")[2])
        return f'<a href="#form-{name}">{name}</a>'
    schema = schema.get("contentSchema", schema)
    if "data" in schema.get("properties", {}):
        return f"events of {_type(schema['properties']['data'])}"
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"<code>{plain(json.dumps(each))}</code>" for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    limits = [f"{said} {schema[name]}" for name, said in _LIMITS.items() if name in schema]
    return plain(" ".join([schema.get("type", "anything"), *limits]))


_LIMITS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below", "pattern": "like"}


def _cells(*cells: str) -> list[str]:
    return [f"<td>{each}</td>" for each in cells]


def _text(text: str) -> str:
    return f"<p>{_marked(text)}</p>" if text else ""


def _marked(text: str) -> str:
    """Escaped, with code in backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", plain(text))
