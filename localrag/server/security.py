"""Access control for every request: Host, Origin, user, token, rate limits, body size and timeouts.

A web page in a browser can send requests to a server on this machine. Therefore the Host header must name this server, which defeats DNS
rebinding; the Origin must be allowed (CORS); and a body must have the content type JSON, which HTML forms cannot send.

On loopback, every user of the machine can connect, so the address does not identify the user. Linux lists each TCP socket with its owner in
/proc/net. The client's socket is the row with the client's address as local address and the server's as remote address.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from localrag.errors import UsageError
from localrag.files import lock_open_file, make_private_folder, open_private
from localrag.server.errors import Problem

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
MAX_BODY_BYTES = 16 << 20
MAX_DEPTH = 64
BODY_S = 30.0
MAX_REQUESTS = 128
MAX_REQUESTS_OF_ONE = 64
"""Maximum number of running and waiting requests, in total and per client."""
RETRY_AFTER_S = 5
TOKEN_FILE = "server-token"  # noqa: S105  # a file name
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
OPEN = frozenset({("GET", "/health"), ("GET", "/")})
"""Routes that need no token: the health check, and the web page, which asks for a token itself."""
OPEN_TO_ALL_USERS = frozenset({("GET", "/health")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The rules of the gate. `hosts` are the permitted Host names, without a port (None: any).

    `users` are the uids on this machine that need no token. `api_key` is the token that everyone else needs. If both are None, every client
    is served.
    """

    hosts: frozenset[str] | None = LOOPBACK
    origins: frozenset[str] = frozenset()
    api_key: str | None = None
    users: frozenset[int] | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    body_s: float = BODY_S


def home_token(home: Path) -> str:
    """Return the token for all servers of this home. The first call creates it. OSError if it cannot be stored.

    The token is in a file that only the user can read, so it proves that a request comes from that user.
    """
    make_private_folder(home)
    with open_private(home / TOKEN_FILE, "a+b") as file:
        lock_open_file(file.fileno(), wait=True)  # another server may be writing the token at this moment
        file.seek(0)
        token: str = file.read(64).decode("ascii", "replace").strip()
        if not _TOKEN.fullmatch(token):  # the file is new, or its writer was killed
            token = secrets.token_urlsafe(32)
            file.truncate(0)
            file.write(token.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return token


class Gate:
    """ASGI middleware that refuses a request, or passes it on after reading its body."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, guard: Guard) -> None:
        self._app = app
        self._guard = guard
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check_place(headers)
            send = _allowing(send, headers.get("origin"))  # an allowed page may also read the error responses below
            if _is_preflight(scope, headers):
                await _permit(send, headers)
                return
            self._check(scope, headers)
        except Problem as problem:
            await _refuse(send, problem)
            return
        if (scope["method"], scope["path"]) in OPEN:  # not counted against the limits, so that clients without a token cannot use them up
            await self._app(scope, _replayed(b"", receive), send)
            return
        client = client_key(scope.get("client"))
        self._running[client] += 1
        try:
            try:
                self._check_load(client)
                body = await self._body(receive, headers)
            except Problem as problem:
                await _refuse(send, problem)
                return
            await self._app(scope, _replayed(body, receive), send)
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]

    def _check_place(self, headers: Mapping[str, str]) -> None:
        """Check the Host and Origin headers."""
        guard, origin = self._guard, headers.get("origin")
        if guard.hosts is not None and host_of(headers.get("host", "")) not in guard.hosts:
            raise Problem(421, "The Host header does not name this server.")
        if origin is not None and origin not in guard.origins and not _is_own(origin, headers.get("host", "")):
            raise Problem(403, "Requests from this Origin are not allowed.")

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        self._check_user(scope, headers)
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "The body must be application/json.")

    def _check_user(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Refuse other users of this machine, who can connect to the loopback address as well, unless they have the token."""
        guard, route = self._guard, (scope["method"], scope["path"])
        is_open = guard.api_key is None and guard.users is None
        if is_open or route in OPEN_TO_ALL_USERS or (guard.api_key is not None and _has_token(headers, guard.api_key)):
            return
        uid = None if guard.users is None else _user_of(scope)
        if uid is not None and guard.users is not None and uid not in guard.users:
            raise Problem(403, "This server serves only the user who runs it. To serve others, run `localrag serve --any-local-user`.")
        if uid is None and route not in OPEN:
            raise Problem(401, _NO_TOKEN if guard.users is None else _USER_UNKNOWN, headers={"WWW-Authenticate": "Bearer"})

    def _check_load(self, client: str) -> None:
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        if self._running[client] > MAX_REQUESTS_OF_ONE:
            raise Problem(429, f"Rate limit: more than {MAX_REQUESTS_OF_ONE} concurrent requests from this client.", headers=retry)
        if self._running.total() > MAX_REQUESTS:
            raise Problem(503, f"Overloaded: more than {MAX_REQUESTS} concurrent requests.", headers=retry)

    async def _body(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        limit, length = self._guard.max_body_bytes, headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20 and int(length) > limit:
            raise Problem(413, f"The body is longer than {limit} bytes.")
        body = bytearray()
        try:
            async with asyncio.timeout(self._guard.body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise Problem(400, "The body is incomplete.")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise Problem(413, f"The body is longer than {limit} bytes.")
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise Problem(408, f"The body did not arrive within {self._guard.body_s:g} s.") from None
        if depth_of(body) > MAX_DEPTH:
            raise Problem(400, f"The body is nested deeper than {MAX_DEPTH} levels.")
        return bytes(body)


_NO_TOKEN = "A bearer token is required."  # noqa: S105  # an error message
_USER_UNKNOWN = "The server cannot identify the user. Send the token in the file server-token of its home as a bearer token."


def _user_of(scope: Scope) -> int | None:
    """Return the uid of the client, from the peer that TimedProtocol stores for each connection."""
    peer: Peer | None = scope.get("state", {}).get("peer")
    return None if peer is None else peer.user


def host_of(header: str) -> str:
    """Return the name in a Host header in lower case, without the port; "" for an invalid header."""
    match = _HOST.fullmatch(header.strip(" \t").lower())
    return match[1] if match else ""


def depth_of(body: bytes | bytearray) -> int:
    """Return the nesting depth of a JSON text's brackets, ignoring brackets in strings."""
    depth = deepest = 0
    for byte in _STRING.sub(b"", body).translate(None, _PLAIN):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:\[\]@/?#\\,]+)(?::[0-9]{0,5})?")
"""RFC 9110: an IPv6 address in brackets or a name, with an optional port. The whole header must match."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_PLAIN = bytes(set(range(256)) - set(b"[]{}"))


def _is_own(origin: str, host: str) -> bool:
    """Return whether the request comes from this server's own page."""
    return bool(host) and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _is_preflight(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Return whether this is a CORS preflight. Browsers send one, without body or token, before requests with JSON or a token."""
    return "origin" in headers and "access-control-request-method" in headers and scope["method"] == "OPTIONS"


def _has_token(headers: Mapping[str, str], api_key: str) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.encode("latin-1").strip(), api_key.encode())


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns the body, then the real messages, such as the client's disconnect."""
    is_replayed = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _allowing(send: Send, origin: str | None) -> Send:
    """Add security headers to the response, and the CORS header that lets an allowed origin read it."""

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), (b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
            if origin is not None:
                headers += [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_headers


async def _permit(send: Send, headers: Mapping[str, str]) -> None:
    """Answer a CORS preflight: pages from an allowed origin may use all methods and headers."""
    names = headers.get("access-control-request-headers", "")
    allowed = [(b"access-control-allow-methods", b"GET, POST, DELETE"), (b"access-control-allow-headers", names.encode("latin-1"))]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(send: Send, problem: Problem) -> None:
    body = json.dumps(problem.body, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    headers += [(name.lower().encode(), value.encode()) for name, value in problem.headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# --- identifying the local user ---

Address = tuple[str, int]
PROC = Path("/proc")

_HELD = frozenset({b"01", b"04", b"05", b"08"})
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT: states in which a program owns the connection. A socket that is still connecting may
belong to another user who has just received the same port."""
_LOOKS = 3
"""Number of attempts. The table is read in pieces, so a row can be missed while others appear and disappear."""


class Peer:
    """The client of one connection."""

    def __init__(self, client: Address | None, server: tuple[str, int | None] | None) -> None:
        self.key = client_key(client)
        self._client, self._server = client, server

    @cached_property
    def user(self) -> int | None:
        """The client's uid on this machine, looked up once; None if unknown."""
        if self._client is None or self._server is None or self._server[1] is None:
            return None
        return user_of(self._client, (self._server[0], self._server[1]))


def client_key(client: Sequence[Any] | None) -> str:
    """Return the client for rate limits: the IPv4 address, or the IPv6 /64 network, which usually belongs to one customer."""
    host = str(client[0]) if client else ""
    try:
        address = _plain(host)
    except ValueError:
        return host
    return str(address) if isinstance(address, IPv4Address) else address.exploded[:19]


def can_tell_users(proc: Path = PROC) -> bool:
    """Return whether `user_of` can identify users, tested with a connection of this process. True on Linux, unless a container or policy
    hides the socket tables.
    """
    if not hasattr(os, "geteuid"):
        return False
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
            accepted, client = listening.accept()
            with accepted:
                return user_of(client, accepted.getsockname(), proc) == os.geteuid()
    except OSError:
        return False


def user_of(client: Address, server: Address, proc: Path = PROC) -> int | None:
    """Return the uid that owns the client's end of an open local TCP connection; None if unknown.

    It is unknown for a client on another machine, for a closed socket, and for a user without a uid in this user namespace: the kernel maps
    all such users to one uid, which may be that of the server's own user.
    """
    try:
        rows = _rows(client, server)
        nobody = _unmapped(proc)
        for _ in range(_LOOKS):
            for table, ends in rows:
                if (uid := _uid_in(proc / "net" / table, ends)) is not None:
                    return None if uid == nobody else uid
    except (OSError, ValueError):
        pass
    return None


def _uid_in(table: Path, ends: bytes) -> int | None:
    for line in table.read_bytes().splitlines():
        if ends in line:
            cells = line.split()
            # The kernel lists a closed socket that it still handles with uid 0 and inode 0.
            if b" ".join(cells[1:3]) == ends and cells[3] in _HELD and cells[9] != b"0":
                return int(cells[7])
    return None


def _rows(client: Address, server: Address) -> list[tuple[str, bytes]]:
    """Return the tables that can list the client's socket, each with the address columns to look for.

    An IPv6 socket connected to an IPv4 address is in the IPv6 table, with mapped addresses.
    """
    ends = [(_plain(host), port) for host, port in (client, server)]
    if all(isinstance(address, IPv4Address) for address, _ in ends):
        mapped = [(IPv6Address(f"::ffff:{address}"), port) for address, port in ends]
        return [("tcp", b" ".join(_cells(ends))), ("tcp6", b" ".join(_cells(mapped)))]
    return [("tcp6", b" ".join(_cells(ends)))]


def _plain(host: str) -> IPv4Address | IPv6Address:
    address = ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _cells(ends: Sequence[tuple[IPv4Address | IPv6Address, int]]) -> Iterator[bytes]:
    """Format addresses like the kernel: each four bytes as a hexadecimal number in native byte order, then the port."""
    for address, port in ends:
        packed = address.packed
        words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
        yield b"%s:%04X" % (b"".join(b"%08X" % word for word in words), port)


def _unmapped(proc: Path) -> int | None:
    """Return the uid to which users outside this user namespace are mapped; None if there is no such mapping."""
    with suppress(OSError, ValueError):
        if (proc / "self/uid_map").read_bytes().split() == [b"0", b"0", b"4294967295"]:
            return None
        return int((proc / "sys/kernel/overflowuid").read_bytes())
    return 65534


HEADERS_S = 10.0
MAX_CONNECTIONS = 256
MAX_CONNECTIONS_OF_ONE = 64
"""Maximum number of open connections, in total and per client. Beyond it, an idle connection is closed."""
KEEP_ALIVE_S = 15
STOP_S = 15


class TimedProtocol(H11Protocol):
    """Limits the time for request headers and the number of connections.

    A connection is closed if the headers take longer than `headers_s`, counted from the connection or from their first byte. A connection
    beyond the limit closes an idle one: of the same client if that client is at its own limit, otherwise of the client with the most idle
    connections. Connections that never had a request are closed first, then those idle the longest. A connection with a running request is
    never closed.
    """

    headers_s = HEADERS_S
    max_connections = MAX_CONNECTIONS
    max_connections_of_one = MAX_CONNECTIONS_OF_ONE
    waits_since = 0.0
    """Start of the idle time, on the event loop's clock."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401  # asyncio's
        super().connection_made(transport)
        self.peer = Peer(self.client, self.server)
        self.app_state = {**self.app_state, "peer": self.peer}  # available to the gate in each request
        self._start_timer()
        self._make_room()

    def _make_room(self) -> None:
        connections = [each for each in self.connections if isinstance(each, TimedProtocol) and not each.transport.is_closing()]
        waiting = [each for each in connections if each is not self and each.is_between_requests]
        if sum(each.peer.key == self.peer.key for each in connections) > self.max_connections_of_one:
            waiting = [each for each in waiting if each.peer.key == self.peer.key]
        elif len(connections) > self.max_connections:
            most = Counter(each.peer.key for each in waiting).most_common(1)
            waiting = [each for each in waiting if each.peer.key == most[0][0]]
        else:
            return
        if waiting:
            min(waiting, key=lambda each: (each.cycle is not None, each.waits_since)).transport.close()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.is_between_requests:
            self._start_timer()  # uvicorn's keep-alive timer ends with the first byte
        super().data_received(data)
        if not self.is_between_requests:
            self._stop_timer()

    @property
    def is_between_requests(self) -> bool:
        """Whether no response is pending: the connection is new, has an incomplete request, or is kept alive."""
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
    """Open a listening socket. UsageError if the address or port cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror  # name resolution errors have their own numbers
        raise UsageError(f"Cannot listen on {host}, port {port}: {reason}.", hint="Use another --port or --host.") from None


def make_server(app: FastAPI, *, host: str, port: int) -> uvicorn.Server:
    """Make a uvicorn server for the app. It logs no paths or contents, and sends no Server header."""
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
