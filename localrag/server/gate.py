"""The one gate that every request passes: who may ask, from where, how much, and how fast it must come.

A page in a browser can send requests to a server of this machine: so the Host it names must be this server's (a name that a stranger
points here is none), an Origin must be one that was allowed, and a body must say that it is JSON, which no form of a page can.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from localrag.server.problems import Problem, failure

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
MAX_BODY_BYTES = 16 << 20
MAX_DEPTH = 64
BODY_S = 30.0
OPEN = frozenset({("GET", "/health"), ("GET", "/")})
"""What is told without a token: that the server is there, and the page, which then asks for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What the gate lets through. `hosts` are names without a port (None for any); `api_key` None asks for no token."""

    hosts: frozenset[str] | None = LOOPBACK
    origins: frozenset[str] = frozenset()
    api_key: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    body_s: float = BODY_S


class Gate:
    """ASGI middleware: refuses, or hands the request on with its body read."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, guard: Guard) -> None:
        self._app = app
        self._guard = guard

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
            body = await self._body(receive, headers)
        except Problem as problem:
            await _refuse(send, problem)
            return
        await self._app(scope, _replayed(body, receive), send)

    def _check_place(self, headers: Mapping[str, str]) -> None:
        """To whom it is addressed, and what page asks."""
        guard, origin = self._guard, headers.get("origin")
        if guard.hosts is not None and host_of(headers.get("host", "")) not in guard.hosts:
            raise Problem(421, "This server does not answer to that Host.")
        if origin is not None and origin not in guard.origins and not _is_own(origin, headers.get("host", "")):
            raise Problem(403, "Requests from that Origin are not allowed.")

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        guard = self._guard
        if guard.api_key is not None and (scope["method"], scope["path"]) not in OPEN and not _has_token(headers, guard.api_key):
            raise Problem(401, "A bearer token is needed.", headers={"WWW-Authenticate": "Bearer"})
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "The body must be application/json.")

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


def host_of(header: str) -> str:
    """A Host without its port, in lower case."""
    header = header.strip().lower()
    name, bracket, _ = header.partition("]")
    return name + bracket if bracket else header.partition(":")[0]


def depth_of(body: bytes | bytearray) -> int:
    """How deep the brackets of a JSON text are nested; those in its strings do not count."""
    depth = deepest = 0
    for byte in _STRING.sub(b"", body).translate(None, _PLAIN):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


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
    body = json.dumps(failure(problem.status, problem.detail), separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    headers += [(name.lower().encode(), value.encode()) for name, value in problem.headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
