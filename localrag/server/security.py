"""The one gate that every request passes: who may ask, from where, how much, and how fast it must come.

A page in a browser can send requests to a server of this machine. So Host must be one of ours, which defeats DNS rebinding; an Origin must
be allowed; and a body must say that it is JSON, which no form of a page can.

On loopback every user of the machine can connect, so the address says nothing. Linux lists each TCP socket in /proc/net with the user who
made it: the client's own socket is the row whose local address is that of the client and whose remote address is that of the server.
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
"""Requests that are being answered or wait for it, in all and of one client."""
RETRY_AFTER_S = 5
TOKEN_FILE = "server-token"  # noqa: S105  # its name
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
OPEN = frozenset({("GET", "/health"), ("GET", "/")})
"""What is told without a token: that the server is there, and the page, which then asks for one."""
OPEN_TO_ALL_USERS = frozenset({("GET", "/health")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What the gate lets through. `hosts` are names without a port (None for any).

    `users` are the uids of this machine that need no token (None for any), and `api_key` is the token that everybody else needs. With both
    None, whoever can connect is served.
    """

    hosts: frozenset[str] | None = LOOPBACK
    origins: frozenset[str] = frozenset()
    api_key: str | None = None
    users: frozenset[int] | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    body_s: float = BODY_S


def home_token(home: Path) -> str:
    """Return the token of the servers of this home, made by the first one and the same from then on. OSError where it cannot be kept.

    It is in a file that only the user can read, which is what proves that a request comes from that user where the system does not say.
    """
    make_private_folder(home)
    with open_private(home / TOKEN_FILE, "a+b") as file:
        lock_open_file(file.fileno(), wait=True)  # another server may be writing its 43 bytes just now
        file.seek(0)
        kept: str = file.read(64).decode("ascii", "replace").strip()
        if not _TOKEN.fullmatch(kept):  # new, or its writer was killed
            kept = secrets.token_urlsafe(32)
            file.truncate(0)
            file.write(kept.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return kept


class Gate:
    """ASGI middleware: refuses, or hands the request on with its body read."""

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
            send = _allowing(send, headers.get("origin"))  # its page may read what is refused from here on, too
            if _is_preflight(scope, headers):
                await _permit(send, headers)
                return
            self._check(scope, headers)
        except Problem as problem:
            await _refuse(send, problem)
            return
        if (scope["method"], scope["path"]) in OPEN:  # whoever needs no token takes no place from those who have one, nor time for a body
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
        """To whom it is addressed, and what page asks."""
        guard, origin = self._guard, headers.get("origin")
        if guard.hosts is not None and host_of(headers.get("host", "")) not in guard.hosts:
            raise Problem(421, "This server does not answer to that Host.")
        if origin is not None and origin not in guard.origins and not _is_own(origin, headers.get("host", "")):
            raise Problem(403, "Requests from that Origin are not allowed.")

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        self._check_user(scope, headers)
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "The body must be application/json.")

    def _check_user(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Close the loopback address to the other users of this machine, for whom it is as open as for the one who runs the server."""
        guard, route = self._guard, (scope["method"], scope["path"])
        is_open = guard.api_key is None and guard.users is None
        if is_open or route in OPEN_TO_ALL_USERS or (guard.api_key is not None and _has_token(headers, guard.api_key)):
            return
        uid = None if guard.users is None else _user_of(scope)
        if uid is not None and guard.users is not None and uid not in guard.users:
            raise Problem(403, "This server answers only the user who runs it. `localrag serve --any-local-user` admits others.")
        if uid is None and route not in OPEN:
            raise Problem(401, _NO_TOKEN if guard.users is None else _USER_UNKNOWN, headers={"WWW-Authenticate": "Bearer"})

    def _check_load(self, client: str) -> None:
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        if self._running[client] > MAX_REQUESTS_OF_ONE:
            raise Problem(429, f"More than {MAX_REQUESTS_OF_ONE} requests of this client at once.", headers=retry)
        if self._running.total() > MAX_REQUESTS:
            raise Problem(503, f"More than {MAX_REQUESTS} requests at once.", headers=retry)

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
                        raise Problem(400, "The body did not come whole.")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise Problem(413, f"The body is longer than {limit} bytes.")
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise Problem(408, f"The body did not come within {self._guard.body_s:g} s.") from None
        if depth_of(body) > MAX_DEPTH:
            raise Problem(400, f"The body is nested deeper than {MAX_DEPTH} levels.")
        return bytes(body)


_NO_TOKEN = "A bearer token is needed."  # noqa: S105  # says that there is none
_USER_UNKNOWN = "This server cannot tell which user asks. Send the token from the file server-token in its home as a bearer token."


def _user_of(scope: Scope) -> int | None:
    """The user at the other end. `listening.TimedProtocol` notes the peer of each connection."""
    peer: Peer | None = scope.get("state", {}).get("peer")
    return None if peer is None else peer.user


def host_of(header: str) -> str:
    """The name in a Host header, in lower case and without its port; "" for a header that is not a host and at most a port."""
    found = _HOST.fullmatch(header.strip(" \t").lower())
    return found[1] if found else ""


def depth_of(body: bytes | bytearray) -> int:
    """How deep the brackets of a JSON text are nested; those in its strings do not count."""
    depth = deepest = 0
    for byte in _STRING.sub(b"", body).translate(None, _PLAIN):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:\[\]@/?#\\,]+)(?::[0-9]{0,5})?")
"""RFC 9110: an IPv6 address in brackets or a name, and perhaps a port. What follows a valid beginning is not read past."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_PLAIN = bytes(set(range(256)) - set(b"[]{}"))


def _is_own(origin: str, host: str) -> bool:
    """Whether a page that this server gave asks."""
    return bool(host) and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _is_preflight(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether a browser asks what a page may ask: it does before each body of JSON and each token, and sends neither with it."""
    return "origin" in headers and "access-control-request-method" in headers and scope["method"] == "OPTIONS"


def _has_token(headers: Mapping[str, str], api_key: str) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.encode("latin-1").strip(), api_key.encode())


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once, then what really comes: that the client went away."""
    given = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _allowing(send: Send, origin: str | None) -> Send:
    """Tells the browser that an origin that was let through may read the answer."""

    async def told(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), (b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
            if origin is not None:
                headers += [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            message = {**message, "headers": headers}
        await send(message)

    return told


async def _permit(send: Send, headers: Mapping[str, str]) -> None:
    """The answer to a preflight: a page whose origin was allowed may send what any program may."""
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


# --- which user of this machine asks ---

Address = tuple[str, int]
PROC = Path("/proc")

_HELD = frozenset({b"01", b"04", b"05", b"08"})
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT: a program has the connection. A socket that is only connecting may be that of another user
who was given the same port just now."""
_LOOKS = 3
"""The table is read piece by piece, and a row can be missed while others come and go."""


class Peer:
    """The other end of one connection."""

    def __init__(self, client: Address | None, server: tuple[str, int | None] | None) -> None:
        self.key = client_key(client)
        self._client, self._server = client, server

    @cached_property
    def user(self) -> int | None:
        """Its uid on this machine, looked up once; None where that cannot be told."""
        if self._client is None or self._server is None or self._server[1] is None:
            return None
        return user_of(self._client, (self._server[0], self._server[1]))


def client_key(client: Sequence[Any] | None) -> str:
    """Whom limits count: an address, or of IPv6 the network of 2^64 addresses that one customer has."""
    host = str(client[0]) if client else ""
    try:
        address = _plain(host)
    except ValueError:
        return host
    return str(address) if isinstance(address, IPv4Address) else address.exploded[:19]


def can_tell_users(proc: Path = PROC) -> bool:
    """Whether `user_of` knows this very process at the end of a connection: on Linux, unless a container or a policy hides it."""
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
    """The uid that made the client's end of an open TCP connection of this machine; None where that cannot be told.

    It cannot be told of a client on another machine, of one that closed its socket, and of a user who has no number here: a user namespace
    shows all of those as one, which may be the number of the server's own user.
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
            # A closed socket that the kernel still works on is listed with the user 0 and without an inode.
            if b" ".join(cells[1:3]) == ends and cells[3] in _HELD and cells[9] != b"0":
                return int(cells[7])
    return None


def _rows(client: Address, server: Address) -> list[tuple[str, bytes]]:
    """The tables in which the client's socket can be, each with how it begins there.

    A program that opens an IPv6 socket for an IPv4 address is in the table of IPv6 with mapped addresses.
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
    """As the kernel prints an address: each four bytes as a number of this processor, the port as a number."""
    for address, port in ends:
        packed = address.packed
        words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
        yield b"%s:%04X" % (b"".join(b"%08X" % word for word in words), port)


def _unmapped(proc: Path) -> int | None:
    """The number that stands for every user without one here; None where each user has one."""
    with suppress(OSError, ValueError):
        if (proc / "self/uid_map").read_bytes().split() == [b"0", b"0", b"4294967295"]:
            return None
        return int((proc / "sys/kernel/overflowuid").read_bytes())
    return 65534


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
