"""uvicorn, with a deadline for the headers of a request, which it has none for itself."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from localrag.errors import UsageError

HEADERS_S = 10.0
MAX_CONNECTIONS = 64
KEEP_ALIVE_S = 15
STOP_S = 15


class TimedProtocol(H11Protocol):
    """Closes a connection on which a request's headers take longer than `headers_s`: from the connection on, or from their first byte."""

    headers_s = HEADERS_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401  # asyncio's
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self._is_between_requests:
            self._start_timer()  # uvicorn's own, for connections that are kept alive, ends with the first byte
        super().data_received(data)
        if not self._is_between_requests:
            self._stop_timer()

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.headers_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens there. UsageError if none can."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror  # what resolves names has numbers of its own
        raise UsageError(f"Nothing can listen on {host}, port {port}: {reason}.", hint="Use another --port, or another --host.") from None


def make_server(app: FastAPI, *, host: str, port: int) -> uvicorn.Server:
    """A server of this app. Its log has neither paths nor contents, and nothing tells which server it is."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=TimedProtocol,
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
    )
    return uvicorn.Server(config)
