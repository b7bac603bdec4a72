"""Prometheus metrics of a server: requests, tokens and times. Each server has its own registry."""

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
"""The names that KAITO's RAG engine uses for its route metrics."""
_COUNTED = ("/index", "/persist/", "/load/", "/retrieve", "/v1/chat/completions")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Metrics:
    """Prometheus metrics of requests, tokens and times."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = {
            route: Counter(f"rag_{name}_requests", " ".join(route), ["status"], registry=self.registry) for route, name in _ROUTES.items()
        }
        self._latency = {
            route: Histogram(f"rag_{name}_latency_seconds", " ".join(route), ["status"], buckets=_SECONDS, registry=self.registry)
            for route, name in _ROUTES.items()
        }
        self._all = Counter("e2e_request", "Requests to all these routes.", ["status"], registry=self.registry)
        self._all_latency = Histogram(
            "e2e_request_latency_seconds", "Latency of requests to all these routes.", ["status"], buckets=_SECONDS, registry=self.registry
        )
        self._num_running = Gauge("num_requests_running", "Requests to all these routes in progress.", registry=self.registry)
        counter, gauge = self._counter, self._gauge
        self._evaluated = counter("tokens_evaluated", "Prompt tokens evaluated.")
        self._cached = counter("tokens_cached", "Prompt tokens reused from the KV cache.")
        self._decoded = counter("tokens_decoded", "Tokens generated.")
        self._starts = gauge("engine_starts", "Number of starts of the engine process.")
        self._running = gauge("requests_running", "Requests running in the engine.")
        self._waiting = gauge("requests_waiting", "Requests waiting for the engine.")
        self._cells = gauge("engine_cells", "Size of the engine's KV cache, in tokens.")
        self._utilization = Histogram(
            "localrag_ledger_utilization", "Share of the window used by a prompt and its answer.", buckets=_SHARES, registry=self.registry
        )
        self._first = Histogram(
            "localrag_first_token_seconds", "Time from the call to the first token.", buckets=_SECONDS, registry=self.registry
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"localrag_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"localrag_{name}", text, registry=self.registry)

    def begun(self, *, ended: bool = False) -> None:
        """Record that a request was admitted, or has `ended`."""
        self._num_running.inc(-1 if ended else 1)

    def requested(self, method: str, path: str, status: int) -> None:
        """Record that a response has started. `path` is the route's path pattern."""
        if (method, path) in self._requests:
            label = _status(status)
            self._requests[method, path].labels(status=label).inc()
            self._all.labels(status=label).inc()

    def took(self, method: str, path: str, status: int, seconds: float) -> None:
        """Record the duration of a complete response, streaming included."""
        if (method, path) in self._latency:
            label = _status(status)
            self._latency[method, path].labels(status=label).observe(seconds)
            self._all_latency.labels(status=label).observe(seconds)

    def record_answer(self, result: Mapping[str, Any]) -> None:
        """Record the tokens and times of a complete answer object."""
        usage, ledger = result["usage"], result["ledger"]
        self._evaluated.inc(usage["prompt_tokens"] - usage["cached_tokens"])
        self._cached.inc(usage["cached_tokens"])
        self._decoded.inc(usage["completion_tokens"])
        self._utilization.observe(sum(each["used"] for each in ledger["entries"]) / max(1, ledger["window"]))
        self._first.observe(result["timings"]["first_token_s"])

    def text(self, engine: EngineProcess | None) -> bytes:
        """Return all metrics in the Prometheus text format."""
        if engine is not None:
            self._starts.set(engine.num_starts)
            self._running.set(engine.num_running)
            self._waiting.set(engine.num_waiting)
            self._cells.set(engine.about.get("num_cells", 0))
        return generate_latest(self.registry)


class CountingMiddleware:
    """ASGI middleware that records metrics of requests.

    Starlette's BaseHTTPMiddleware is not used because it hides client disconnects from the routes.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), 500

        async def send_counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            route = scope.get("route")
            if message["type"] == "http.response.start":
                status = message["status"]
                if isinstance(route, APIRoute):
                    self._metrics.requested(scope["method"], route.path, status)
            await send(message)

        is_counted = scope["type"] == "http" and str(scope.get("path", "")).startswith(_COUNTED)
        try:
            if is_counted:
                self._metrics.begun()
            await self._app(scope, receive, send_counted)
        finally:
            if is_counted:
                self._metrics.begun(ended=True)
            route = scope.get("route")
            if isinstance(route, APIRoute):
                self._metrics.took(scope["method"], route.path, status, time.perf_counter() - started)


def _status(status: int) -> str:
    return "success" if status < 400 else "failure"
