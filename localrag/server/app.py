"""Build the FastAPI application: routes, middleware and error handlers."""

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
from localrag.server.metrics import CountingMiddleware
from localrag.server.openapi import DocumentedApi, forms_of
from localrag.server.routing import CompactResponse, ServerState
from localrag.server.security import Gate

_DESCRIPTION = (
    "Answers from your own documents with a local model: an OpenAI-compatible API, and the index routes of the KAITO RAG engine. "
    'Every error response has the body `{"detail": …, "error": {"message", "type", "param", "code"}}`.'
)
_TAGS = [
    {"name": "completions", "description": "Answer conversations, with or without an index."},
    {"name": "Index", "description": "Create, fill and search indexes (knowledge bases)."},
    {"name": "state", "description": "Health, models, metrics and prompt budgets."},
]


def make_app(state: ServerState) -> FastAPI:
    """Build the application for a server's state."""

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
        docs_url=None,  # FastAPI's documentation pages load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,  # a path with a stray slash is a 404, not a redirect
    )
    app.state.server = state
    for router in (status.page_router, *(module.router for module in routes)):
        app.include_router(router)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(LocalragError, _error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(CountingMiddleware, metrics=state.metrics)
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
    """Answer an invalid body with 422. The body is not repeated: it may be long, or not valid JSON."""
    assert isinstance(error, RequestValidationError)
    return CompactResponse(failure(422, [{key: each[key] for key in ("type", "loc", "msg")} for each in error.errors()]), 422)


def _bug(_request: Request, _error: Exception) -> CompactResponse:
    """Answer an unexpected exception with 500. Starlette raises it again afterwards, so it is logged."""
    return CompactResponse(failure(500, "Internal server error. See the server's log."), 500)


def _error(request: Request, error: Exception) -> CompactResponse:
    assert isinstance(error, LocalragError)
    LOG.info("%s %s: %s", request.method, request.url.path, type(error).__name__)
    return _problem(request, problem_of(error))
