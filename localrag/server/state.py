"""How the server is: health, the model, and what a prompt would take without one being answered."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from localrag.server.asking import body_of, client_of, heard_out, opened
from localrag.server.chat_schemas import ChatRequest
from localrag.server.documenting import ENGINE_FAILS, described
from localrag.server.problems import Problem
from localrag.server.questions import read
from localrag.server.schemas import BudgetResponse, Health, ModelCard, ModelList, ModelName, TokenizeRequest, TokenizeResponse

if TYPE_CHECKING:
    from localrag.server.app import Shared

router = APIRouter(tags=["state"])
_STARTED = int(time.time())


@router.get("/health", operation_id="health", **described(Health))
async def health() -> dict[str, Any]:
    """Whether the server answers."""
    return {"status": "Healthy", "detail": None}


@router.get("/v1/models", operation_id="list_models", **described(ModelList, fails=(503,)))
async def list_models(request: Request) -> dict[str, Any]:
    """The one model, once it is open."""
    return {"object": "list", "data": [await _model(request)]}


@router.get("/v1/models/{model}", operation_id="get_model", **described(ModelCard, fails=(404, 422, 503)))
async def get_model(model: ModelName, request: Request) -> dict[str, Any]:
    """The model of that name, once it is open."""
    found = await _model(request)
    if found["id"] != model:
        raise Problem(404, "There is no such model.")
    return found


async def _model(request: Request) -> dict[str, Any]:
    shared: Shared = request.app.state.shared
    about = (await opened(shared)).about
    return {"id": about["model"], "object": "model", "created": _STARTED, "owned_by": "localrag", "slot": about["slot"]}


@router.post("/tokenize", operation_id="tokenize", **described(TokenizeResponse, body=TokenizeRequest, fails=ENGINE_FAILS))
async def tokenize(request: Request) -> dict[str, Any]:
    """The tokens of a plain text, by the model's own tokenizer, without a BOS."""
    shared: Shared = request.app.state.shared
    engine = await opened(shared)
    body = await body_of(request)
    text = body.get("text") if isinstance(body, dict) else None
    if not isinstance(text, str):
        raise Problem(400, "text is a text.")
    done = await heard_out(request, engine.run(client_of(request), {"op": "tokenize", "text": text}))
    return {"num_tokens": len(done["token_ids"]), "token_ids": done["token_ids"]}


@router.post("/budget", operation_id="budget", **described(BudgetResponse, body=ChatRequest, fails=(*ENGINE_FAILS, 404, 409)))
async def budget(request: Request) -> dict[str, Any]:
    """The ledger that a chat completion of this body would have. Nothing is generated."""
    shared: Shared = request.app.state.shared
    engine = await opened(shared)
    asked = read(await body_of(request), has_index=shared.has_index, rejects_tools=shared.rejects_tools)
    message = {**asked.to_message(engine.about["slot"]["n_ctx"]), "op": "budget"}
    return await heard_out(request, engine.run(client_of(request), message))
