"""The application: its routes, its gate, and what they share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from localrag.errors import LocalragError
from localrag.kb import list_kbs
from localrag.server import completions, docs_page, embeddings, indexes, metrics, openai_responses, page, state, text_completions
from localrag.server.documenting import DocumentedApi
from localrag.server.embedders import Embedders
from localrag.server.engine_process import EngineProcess
from localrag.server.gate import Gate, Guard
from localrag.server.problems import LOG, Problem, failure, problem_of
from localrag.server.responses import CompactResponse
from localrag.settings import Settings
from localrag.tokens import Embedder


@dataclass(slots=True, kw_only=True)
class Shared:
    """What all routes work with, as `request.app.state.shared`."""

    settings: Settings
    engine: EngineProcess | None = None
    """None for a server of indexes alone."""
    guard: Guard = field(default_factory=Guard)
    rejects_tools: bool = False
    """Whether tools beside an index are refused, rather than answered without the index."""
    metrics: metrics.Metrics = field(default_factory=metrics.Metrics)
    embedder: InitVar[Embedder | None] = None
    """In place of the one of models.toml."""
    embedders: Embedders = field(init=False)

    def __post_init__(self, embedder: Embedder | None) -> None:
        self.embedders = Embedders(self.settings, embedder)

    def has_index(self, name: str) -> bool:
        return name in list_kbs(self.settings.kb_dir)


_DESCRIPTION = (
    "Answers from your own documents, by a model of this machine: OpenAI's API, and the routes of the KAITO RAG engine for indexes. "
    'Every answer that is not a success is `{"detail": …, "error": {"message", "code"}}`.'
)
_TAGS = [
    {"name": "completions", "description": "Conversations are answered, from an index or by the model alone."},
    {"name": "Index", "description": "Knowledge bases that other programs fill with texts, and search."},
    {"name": "state", "description": "How the server is, and what a prompt would take."},
]


def make_app(shared: Shared) -> FastAPI:
    """The whole API behind its gate."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if shared.engine is not None:
            shared.engine.start()
        yield
        if shared.engine is not None:
            await shared.engine.close()

    app = DocumentedApi(
        title="localrag",
        version=version("localrag"),
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        default_response_class=CompactResponse,
        lifespan=lifespan,
        docs_url=None,  # its pages are made of what other servers give: docs_page.py has ours
        redoc_url=None,
        redirect_slashes=False,  # an address is right or it is none
    )
    app.state.shared = shared
    for routes in (page, completions, text_completions, openai_responses, embeddings, indexes, state, metrics, docs_page):
        app.include_router(routes.router)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(LocalragError, _error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(metrics.Counting, counts=shared.metrics)
    app.add_middleware(Gate, guard=shared.guard)
    return app


def _problem(_request: Request, error: Exception) -> CompactResponse:
    assert isinstance(error, Problem)
    return CompactResponse(failure(error.status, error.detail), error.status, error.headers)


def _no_route(_request: Request, error: Exception) -> CompactResponse:
    """What no route takes: an address that is none, or a method that it does not have."""
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
