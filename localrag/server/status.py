"""The web page at GET /, and the routes for health, models, tokens, budgets and metrics.

The page (page.html) contacts only this server. The colours and descriptions of sections are filled in from budget/sections.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from localrag.budget.sections import SPECS, colour_of
from localrag.server.chat_request import ChatRequest, read
from localrag.server.errors import Problem
from localrag.server.openapi import ENGINE_FAILS, route_docs, shown
from localrag.server.routing import Engine, ServerState, State, body_of, client_of, last_reply, opened
from localrag.server.schemas import LEDGER, SLOT, Evidence, LedgerInfo, SlotInfo, example, parse

page_router = APIRouter(include_in_schema=False)

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@page_router.get("/")
async def page() -> HTMLResponse:
    """Serve the page. It contains no secrets, so it needs no token; it asks the user for one when necessary."""
    text = page_text()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy_of(text), "Referrer-Policy": "no-referrer"})


@cache
def page_text() -> str:
    """Return the page with the colours and descriptions of sections filled in."""
    text = files("localrag.server").joinpath("page.html").read_text(encoding="utf-8")
    rules = [
        f"[data-section] {{ --c: {colour_of('')}; }}",
        *(f'[data-section="{name}"] {{ --c: {spec.colour}; }}' for name, spec in SPECS.items()),
    ]
    text = text.replace("/* sections */", "\n".join(rules), 1)
    text = text.replace("const HELP = {};", f"const HELP = {json.dumps({name: spec.help for name, spec in SPECS.items()})};", 1)
    for name, spec in SPECS.items():  # in the icon
        text = text.replace(f"%23{{{name}}}", f"%23{spec.colour[1:]}")
    return text


@cache
def policy_of(text: str) -> str:
    """Return a Content-Security-Policy that allows only the scripts and styles in this text, and requests only to this server."""
    digests = {kind: hashlib.sha256(content.encode()).digest() for kind, content in _INLINE.findall(text)}
    hashes = {kind: f"'sha256-{base64.b64encode(digest).decode()}'" for kind, digest in digests.items()}
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes['script']}",
            f"style-src {hashes['style']}",
            "connect-src 'self'",
            "img-src data:",  # its icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",  # even the page itself cannot turn text into markup or code
            "trusted-types 'none'",
        )
    )


router = APIRouter(tags=["state"])
_STARTED = int(time.time())
_EXAMPLE = """# HELP localrag_requests_running Requests running in the engine.
# TYPE localrag_requests_running gauge
localrag_requests_running 1.0
"""


class Health(BaseModel):
    """The server responds. For the state of the model, see /v1/models."""

    model_config = example({"status": "Healthy", "detail": None})

    status: Literal["Healthy"]
    detail: str | None


ModelName = Annotated[str, Path(min_length=1, max_length=200, description="A model id from /v1/models.", examples=["echo"])]


class ModelCard(BaseModel):
    """A model and its context window."""

    model_config = example({"id": "echo", "object": "model", "created": 1795395674, "owned_by": "localrag", "slot": SLOT})

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    slot: SlotInfo


class ModelList(BaseModel):
    """The server's model. The list always has one item."""

    model_config = example(
        {
            "object": "list",
            "data": [{"id": "echo", "object": "model", "created": 1795395674, "owned_by": "localrag", "slot": SLOT}],
        }
    )

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeRequest(BaseModel):
    """A plain text. Special tokens in it are treated as text."""

    model_config = example({"text": "PLA"})

    text: str


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    model_config = example({"num_tokens": 3, "token_ids": [80, 76, 65]})

    num_tokens: int
    token_ids: list[int]


class BudgetResponse(BaseModel):
    """The tokens and the content of a prompt."""

    model_config = example({"prompt_tokens": 31, "slot": SLOT, "ledger": LEDGER, "evidence": []})

    prompt_tokens: int
    slot: SlotInfo
    sections: list[dict[str, Any]] = Field(
        default_factory=list, description="Each section of the ledger as a CSS flex item. `allotted` is the same as in the ledger."
    )
    ledger: LedgerInfo
    evidence: list[Evidence]
    warnings: list[str] = Field(default_factory=list, description="Notes if the window or the answer is smaller than requested.")


# --- the routes ---


@router.get("/health", operation_id="health", **route_docs(Health))
async def health() -> dict[str, Any]:
    """Check whether the server responds."""
    return {"status": "Healthy", "detail": None}


@router.get("/v1/models", operation_id="list_models", **route_docs(ModelList, fails=(503,)))
async def list_models(state: State) -> dict[str, Any]:
    """List the server's model. Waits until it is loaded."""
    return {"object": "list", "data": [await _model(state)]}


@router.get("/v1/models/{model}", operation_id="get_model", **route_docs(ModelCard, fails=(404, 422, 503)))
async def get_model(model: ModelName, state: State) -> dict[str, Any]:
    """Get the model with this name. Waits until it is loaded."""
    card = await _model(state)
    if card["id"] != model:
        raise Problem(404, f"The model {model[:80]!r} does not exist. This server has {card['id']!r}.", "model_not_found", "model")
    return card


async def _model(state: ServerState) -> dict[str, Any]:
    about = (await opened(state)).about
    return {"id": about["model"], "object": "model", "created": _STARTED, "owned_by": "localrag", "slot": about["slot"]}


@router.post("/tokenize", operation_id="tokenize", **route_docs(TokenizeResponse, body=TokenizeRequest, fails=ENGINE_FAILS))
async def tokenize(request: Request, engine: Engine) -> dict[str, Any]:
    """Tokenize a plain text with the model's own tokenizer, without a BOS token."""
    body = parse(TokenizeRequest, await body_of(request))
    reply = await last_reply(request, engine.run(client_of(request), {"op": "tokenize", "text": body.text}))
    return {"num_tokens": len(reply["token_ids"]), "token_ids": reply["token_ids"]}


@router.post("/budget", operation_id="budget", **route_docs(BudgetResponse, body=ChatRequest, fails=(*ENGINE_FAILS, 404, 409)))
async def budget(request: Request, state: State, engine: Engine) -> dict[str, Any]:
    """Return the token ledger of a chat completion without generating an answer."""
    question = read(await body_of(request), has_index=state.has_index, rejects_tools=state.rejects_tools)
    message = {**question.to_message(), "op": "budget"}
    return await last_reply(request, engine.run(client_of(request), message))


@router.get("/metrics", operation_id="metrics", response_class=Response, responses=shown(_EXAMPLE, "All counters."))
async def metrics(state: State) -> Response:
    """Return metrics of requests and tokens in the Prometheus text format."""
    return Response(state.metrics.text(state.engine), media_type=CONTENT_TYPE_LATEST)
