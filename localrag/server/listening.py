"""uvicorn, with two limits that it lacks: a deadline for the headers of a request, and a share of the connections for each client.

Without them a few connections that never finish a request keep everybody out, before any token is checked.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from localrag.errors import UsageError
from localrag.server.security import Peer

HEADERS_S = 10.0
MAX_CONNECTIONS = 256
MAX_CONNECTIONS_OF_ONE = 64
"""Open connections, in all and of one client. Above, one that waits for a request is closed."""
KEEP_ALIVE_S = 15
STOP_S = 15


class TimedProtocol(H11Protocol):
    """Closes a connection on which a request's headers take longer than `headers_s`: from the connection on, or from their first byte.

    A new connection that is one too many closes another that waits for a request: of the same client if that has its share already, else
    of the client with the most that wait. One on which no request ever came goes first, then the one that waits longest. A connection that
    has its answer to come is never closed.
    """

    headers_s = HEADERS_S
    max_connections = MAX_CONNECTIONS
    max_connections_of_one = MAX_CONNECTIONS_OF_ONE
    waits_since = 0.0
    """On the clock of the loop."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401  # asyncio's
        super().connection_made(transport)
        self.peer = Peer(self.client, self.server)
        self.app_state = {**self.app_state, "peer": self.peer}  # for the gate, with each request of this connection
        self._start_timer()
        self._make_room()

    def _make_room(self) -> None:
        opened = [each for each in self.connections if isinstance(each, TimedProtocol) and not each.transport.is_closing()]
        waiting = [each for each in opened if each is not self and each.is_between_requests]
        if sum(each.peer.key == self.peer.key for each in opened) > self.max_connections_of_one:
            waiting = [each for each in waiting if each.peer.key == self.peer.key]
        elif len(opened) > self.max_connections:
            most = Counter(each.peer.key for each in waiting).most_common(1)
            waiting = [each for each in waiting if each.peer.key == most[0][0]]
        else:
            return
        if waiting:
            min(waiting, key=lambda each: (each.cycle is not None, each.waits_since)).transport.close()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.is_between_requests:
            self._start_timer()  # uvicorn's own, for connections that are kept alive, ends with the first byte
        super().data_received(data)
        if not self.is_between_requests:
            self._stop_timer()

    @property
    def is_between_requests(self) -> bool:
        """Whether no answer is to come on it: it is new, has half a request, or is kept open for the next one."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self.waits_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self.waits_since = self.loop.time()
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
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
    )
    return uvicorn.Server(config)
