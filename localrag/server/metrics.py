"""GET /metrics: what Prometheus reads. Every server has a registry of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from localrag.server.documenting import shown
from localrag.server.gate import Receive, Scope, Send

if TYPE_CHECKING:
    from localrag.server.app import Shared
    from localrag.server.engine_process import EngineProcess

router = APIRouter(tags=["state"])
_ROUTES = {
    ("POST", "/index"): "index",
    ("GET", "/indexes"): "indexes",
    ("GET", "/indexes/{index_name}/documents"): "indexes_document",
    ("POST", "/indexes/{index_name}/documents"): "indexes_update_document",
    ("POST", "/indexes/{index_name}/documents/delete"): "indexes_delete_document",
    ("DELETE", "/indexes/{index_name}"): "delete_index",
    ("POST", "/persist/{index_name}"): "persist",
    ("POST", "/load/{index_name}"): "load",
    ("POST", "/retrieve"): "indexes_retrieve",
    ("POST", "/v1/chat/completions"): "chat",
}
"""The names by which KAITO's RAG engine counts its routes."""
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_EXAMPLE = """# HELP localrag_requests_running Requests that the engine works on.
# TYPE localrag_requests_running gauge
localrag_requests_running 1.0
"""


class Metrics:
    """Counts what was asked and what it took."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = {
            route: Counter(f"rag_{name}_requests", " ".join(route), ["status"], registry=self.registry) for route, name in _ROUTES.items()
        }
        counter, gauge = self._counter, self._gauge
        self._evaluated = counter("tokens_evaluated", "Prompt tokens that were evaluated.")
        self._cached = counter("tokens_cached", "Prompt tokens that were held already.")
        self._decoded = counter("tokens_decoded", "Tokens that were written.")
        self._starts = gauge("engine_starts", "How often the engine's process was started.")
        self._running = gauge("requests_running", "Requests that the engine works on.")
        self._waiting = gauge("requests_waiting", "Requests that wait for a place.")
        self._cells = gauge("engine_cells", "Cells of the engine's context, in tokens.")
        self._utilization = Histogram(
            "localrag_ledger_utilization", "Tokens of a window that a prompt with its answer used.", buckets=_SHARES, registry=self.registry
        )
        self._first = Histogram(
            "localrag_first_token_seconds", "From the call to the first token.", buckets=_SECONDS, registry=self.registry
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"localrag_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"localrag_{name}", text, registry=self.registry)

    def requested(self, method: str, path: str, status: int) -> None:
        """A request to a route, by the pattern of its path, was answered."""
        if (method, path) in self._requests:
            self._requests[method, path].labels(status="success" if status < 400 else "failure").inc()

    def answered(self, done: Mapping[str, Any]) -> None:
        """An answer object is complete."""
        usage, ledger = done["usage"], done["ledger"]
        self._evaluated.inc(usage["prompt_tokens"] - usage["cached_tokens"])
        self._cached.inc(usage["cached_tokens"])
        self._decoded.inc(usage["completion_tokens"])
        self._utilization.observe(sum(each["used"] for each in ledger["entries"]) / max(1, ledger["window"]))
        self._first.observe(done["timings"]["first_token_s"])

    def text(self, engine: EngineProcess | None) -> bytes:
        """All of it, as Prometheus reads it."""
        if engine is not None:
            self._starts.set(engine.num_starts)
            self._running.set(engine.num_running)
            self._waiting.set(engine.num_waiting)
            self._cells.set(engine.about.get("num_cells", 0))
        return generate_latest(self.registry)


class Counting:
    """ASGI middleware: counts what the routes answer. It is none of Starlette's BaseHTTPMiddleware, behind which no route can see that a
    client went away."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, counts: Metrics) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: MutableMapping[str, Any]) -> None:
            route = scope.get("route")
            if message["type"] == "http.response.start" and isinstance(route, APIRoute):
                self._counts.requested(scope["method"], route.path, message["status"])
            await send(message)

        await self._app(scope, receive, told)


@router.get("/metrics", operation_id="metrics", response_class=Response, responses=shown(_EXAMPLE, "All counters."))
async def metrics(request: Request) -> Response:
    """Counters of requests and tokens, in the format of Prometheus."""
    shared: Shared = request.app.state.shared
    return Response(shared.metrics.text(shared.engine), media_type=CONTENT_TYPE_LATEST)
