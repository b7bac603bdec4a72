"""Connections that never come to a whole request."""

import socket
import threading
import time

import pytest
import uvicorn

from localrag.server.listening import TimedProtocol

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Impatient(TimedProtocol):
    headers_s = 0.5


async def app(scope, receive, send):
    """A page without a word."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def address():
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=Impatient, ws="none", lifespan="off", log_level="critical", timeout_keep_alive=30))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()
    server.should_exit = True
    thread.join()


def answer_of(connection):
    text = b""
    while not text.endswith(b"ok"):
        text += connection.recv(4096)
    return text


@pytest.mark.parametrize("num_whole", [0, 1, 3])
@pytest.mark.parametrize("half", [b"GET / HTTP/1.1\r\nHo", b"G"])
def test_half_a_request_does_not_hold_a_connection(address, num_whole, half):
    with socket.create_connection(address, timeout=5) as connection:
        for _ in range(num_whole):
            connection.sendall(REQUEST)
            assert answer_of(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(half)
        started = time.perf_counter()
        assert connection.recv(4096) == b""
        assert time.perf_counter() - started < 4


def test_a_connection_that_waits_between_requests_is_kept(address):
    with socket.create_connection(address, timeout=5) as connection:
        for _ in range(2):
            connection.sendall(REQUEST)
            assert answer_of(connection).startswith(b"HTTP/1.1 200")
            time.sleep(0.8)
