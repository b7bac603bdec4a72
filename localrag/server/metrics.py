"""What Prometheus reads of a server: counters of its requests and tokens, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from localrag.server.engine_process import EngineProcess
from localrag.server.security import Receive, Scope, Send

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
_COUNTED = ("/index", "/persist/", "/load/", "/retrieve", "/v1/chat/completions")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Metrics:
    """Counts what was asked and what it took."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = {
            route: Counter(f"rag_{name}_requests", " ".join(route), ["status"], registry=self.registry) for route, name in _ROUTES.items()
        }
        self._latency = {
            route: Histogram(f"rag_{name}_latency_seconds", " ".join(route), ["status"], buckets=_SECONDS, registry=self.registry)
            for route, name in _ROUTES.items()
        }
        self._all = Counter("e2e_request", "Requests of all these routes.", ["status"], registry=self.registry)
        self._all_latency = Histogram(
            "e2e_request_latency_seconds", "Requests of all these routes.", ["status"], buckets=_SECONDS, registry=self.registry
        )
        self._num_running = Gauge("num_requests_running", "Requests of all these routes that are being answered.", registry=self.registry)
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

    def begun(self, *, ended: bool = False) -> None:
        """A request was let in, or has `ended`."""
        self._num_running.inc(-1 if ended else 1)

    def requested(self, method: str, path: str, status: int) -> None:
        """A request to a route, by the pattern of its path, is being answered."""
        if (method, path) in self._requests:
            told = _status(status)
            self._requests[method, path].labels(status=told).inc()
            self._all.labels(status=told).inc()

    def took(self, method: str, path: str, status: int, seconds: float) -> None:
        """It was answered to the end of its last event."""
        if (method, path) in self._latency:
            told = _status(status)
            self._latency[method, path].labels(status=told).observe(seconds)
            self._all_latency.labels(status=told).observe(seconds)

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
        started, status = time.perf_counter(), 500

        async def told(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            route = scope.get("route")
            if message["type"] == "http.response.start":
                status = message["status"]
                if isinstance(route, APIRoute):
                    self._counts.requested(scope["method"], route.path, status)
            await send(message)

        is_counted = scope["type"] == "http" and str(scope.get("path", "")).startswith(_COUNTED)
        try:
            if is_counted:
                self._counts.begun()
            await self._app(scope, receive, told)
        finally:
            if is_counted:
                self._counts.begun(ended=True)
            route = scope.get("route")
            if isinstance(route, APIRoute):
                self._counts.took(scope["method"], route.path, status, time.perf_counter() - started)


def _status(status: int) -> str:
    return "success" if status < 400 else "failure"
