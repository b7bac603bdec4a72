"""What the gate lets through, on the wire."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from localrag.server.security import MAX_DEPTH, Gate, Guard, depth_of, host_of


def client(guard: Guard | None = None, **options) -> TestClient:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "Healthy"}

    app.add_middleware(Gate, guard=guard or Guard(**options))
    return TestClient(app, base_url="http://127.0.0.1:8642")


def test_a_foreign_host():
    answer = client().post("/echo", json={}, headers={"Host": "attacker.example"})
    assert (answer.status_code, answer.json()["detail"]) == (421, "The Host header does not name this server.")


def test_hosts_of_this_machine():
    for host in ("127.0.0.1:8642", "localhost", "LOCALHOST:1", "[::1]:8642"):
        assert client().post("/echo", json={}, headers={"Host": host}).status_code == 200
    assert host_of("[::1]:8642") == "[::1]"


@pytest.mark.parametrize(
    "host",
    [
        "[::1]evil.com", "[::1].evil.com", "[::1]:80evil", "[::1]@evil.com", "[::1]]", "[[::1]", "127.0.0.1:80:evil", "127.0.0.1:evil",
        "127.0.0.1:80@evil.com", "localhost:80 evil", "localhost, evil.com", "localhost:80/evil", "localhost:٣", ":80", "[]:80", "",
    ],
)  # fmt: skip
def test_a_host_that_only_begins_like_this_machine(host):
    assert client().post("/echo", json={}, headers={"Host": host.encode()}).status_code == 421


@given(st.sampled_from(["127.0.0.1", "localhost", "[::1]"]), st.text(alphabet=".:@[]/?#,\\ \t\x0b0123456789abc-_\xa0\x85"))
def test_nothing_but_a_port_may_follow_a_host(host, rest):
    is_port = re.fullmatch(r"(:[0-9]{0,5})?[ \t]*", rest) is not None
    assert (host_of(host + rest) == host) == is_port


def test_a_foreign_origin():
    answer = client().post("/echo", json={}, headers={"Origin": "http://attacker.example"})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_an_origin_that_was_allowed_may_read_the_answer():
    answer = client(origins=frozenset({"http://localhost:3000"})).post("/echo", json={}, headers={"Origin": "http://localhost:3000"})
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"


def test_a_browser_may_ask_first_what_a_page_may_send():
    kept = client(origins=frozenset({"http://localhost:3000"}), api_key="s3cret")
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    answer = kept.options("/echo", headers={"Origin": "http://localhost:3000", **asked})
    assert answer.status_code == 204
    allowed = {name: answer.headers[f"access-control-allow-{name}"] for name in ("origin", "methods", "headers")}
    assert allowed == {"origin": "http://localhost:3000", "methods": "GET, POST, DELETE", "headers": "authorization,content-type"}
    assert kept.options("/echo", headers={"Origin": "http://attacker.example", **asked}).status_code == 403
    assert kept.options("/echo", headers=asked).status_code == 401


def test_a_page_of_an_origin_that_was_allowed_may_read_what_is_wrong():
    kept = client(origins=frozenset({"http://localhost:3000"}), api_key="s3cret")
    answer = kept.post("/echo", json={}, headers={"Origin": "http://localhost:3000"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "http://localhost:3000")


def test_a_page_of_its_own():
    assert client().post("/echo", json={}, headers={"Origin": "http://127.0.0.1:8642"}).status_code == 200
    assert client().post("/echo", json={}, headers={"Origin": "null"}).status_code == 403


def test_a_missing_token():
    kept = client(api_key="s3cret")
    assert kept.post("/echo", json={}).status_code == 401
    assert kept.post("/echo", json={}, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert kept.post("/echo", json={}, headers={"Authorization": "Bearer s3cret"}).status_code == 200
    assert client(api_key="schlüssel à").post("/echo", json={}, headers={"Authorization": "Bearer schlüssel à".encode()}).status_code == 200
    assert kept.get("/health").status_code == 200
    assert kept.get("/").status_code == 404  # let through, to where this app has no page
    assert kept.post("/", json={}).status_code == 401


def test_a_form_of_a_page():
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert client().post("/echo", content=b"{}", headers={"Content-Type": kind}).status_code == 415


def test_a_body_that_is_too_long():
    kept = client(max_body_bytes=100)
    assert kept.post("/echo", json={"a": "x" * 200}).status_code == 413

    def pieces():
        yield b'{"a": "'
        yield b"x" * 200

    assert kept.post("/echo", content=pieces(), headers={"Content-Type": "application/json"}).status_code == 413
    assert kept.post("/echo", content=b"{}", headers={"Content-Type": "application/json", "Content-Length": "9" * 30}).status_code in (
        200,
        400,
    )


def test_a_body_that_is_nested_too_deep():
    deep = b"[" * 10_000 + b"]" * 10_000
    answer = client().post("/echo", content=deep, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["detail"]) == (400, f"The body is nested deeper than {MAX_DEPTH} levels.")


def test_a_body_that_does_not_come():
    sent: list[dict[str, object]] = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    gate = Gate(FastAPI(), guard=Guard(body_s=0.05))
    asyncio.run(gate({"type": "http", "method": "POST", "path": "/echo", "headers": headers}, receive, send))
    assert sent[0]["status"] == 408


JSON = st.recursive(
    st.none() | st.booleans() | st.text(alphabet='"\\[]{}a\n', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='"\\[]{}', max_size=3), inner, max_size=3),
    max_leaves=12,
)


def depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(JSON)
def test_the_depth_of_json_is_what_its_values_say(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert depth_of(text.encode()) == depth(value)
