"""The application: its routes behind their gate, and its answers to errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from localrag.errors import LocalragError
from localrag.server import chat_request, completions, embeddings, indexes, openai_responses, schemas, status
from localrag.server.errors import LOG, Problem, failure, problem_of
from localrag.server.metrics import Counting
from localrag.server.openapi import DocumentedApi, forms_of
from localrag.server.routing import CompactResponse, ServerState
from localrag.server.security import Gate

_DESCRIPTION = (
    "Answers from your own documents, by a model of this machine: OpenAI's API, and the routes of the KAITO RAG engine for indexes. "
    'Every answer that is not a success is `{"detail": …, "error": {"message", "type", "param", "code"}}`.'
)
_TAGS = [
    {"name": "completions", "description": "Conversations are answered, from an index or by the model alone."},
    {"name": "Index", "description": "Knowledge bases that other programs fill with texts, and search."},
    {"name": "state", "description": "How the server is, and what a prompt would take."},
]


def make_app(state: ServerState) -> FastAPI:
    """The whole API behind its gate."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if state.engine is not None:
            state.engine.start()
        yield
        if state.engine is not None:
            await state.engine.close()

    routes = (completions, openai_responses, embeddings, indexes, status)
    app = DocumentedApi(
        forms=forms_of((schemas, chat_request, *routes)),
        asks_for_token=state.guard.api_key is not None,
        title="localrag",
        version=version("localrag"),
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        default_response_class=CompactResponse,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,  # an address is right or it is none
    )
    app.state.server = state
    for router in (status.page_router, *(module.router for module in routes)):
        app.include_router(router)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(LocalragError, _error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(Counting, counts=state.metrics)
    app.add_middleware(Gate, guard=state.guard)
    return app


def _problem(_request: Request, error: Exception) -> CompactResponse:
    assert isinstance(error, Problem)
    return CompactResponse(error.body, error.status, error.headers)


def _no_route(_request: Request, error: Exception) -> CompactResponse:
    """Answer requests that match no route: an unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    return CompactResponse(failure(error.status_code, str(error.detail)), error.status_code, error.headers)


def _invalid(_request: Request, error: Exception) -> CompactResponse:
    """What was sent is not repeated: it may be long, and no JSON."""
    assert isinstance(error, RequestValidationError)
    return CompactResponse(failure(422, [{key: each[key] for key in ("type", "loc", "msg")} for each in error.errors()]), 422)


def _bug(_request: Request, _error: Exception) -> CompactResponse:
    """Our own mistake. It is raised again behind this, so that the log has it."""
    return CompactResponse(failure(500, "The server failed; its log has more."), 500)


def _error(request: Request, error: Exception) -> CompactResponse:
    assert isinstance(error, LocalragError)
    LOG.info("%s %s: %s", request.method, request.url.path, type(error).__name__)
    return _problem(request, problem_of(error))
