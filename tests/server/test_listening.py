"""Connections that never come to a whole request."""

import asyncio
import socket
import threading
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
import uvicorn

from localrag.server.security import MAX_REQUESTS_OF_ONE, Gate, Guard, TimedProtocol, make_server
from tests.server.live import served

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


KEPT_ALIVE_S = 1_000_000


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time a test moves on, so that no deadline depends on how fast the machine is."""

    ahead_s = 0.0

    def time(self):
        return super().time() + self.ahead_s

    def advance(self, seconds):
        """Let so many seconds pass; called by another thread. What is due by then is done when it returns."""
        self.ahead_s += seconds
        for _ in range(3):
            passed = threading.Event()
            self.call_soon_threadsafe(passed.set)
            assert passed.wait(60)


class Patient(TimedProtocol):
    headers_s = 600


class Narrow(TimedProtocol):
    """Few connections are many here."""

    headers_s = KEPT_ALIVE_S
    max_connections = 8
    max_connections_of_one = 4


async def app(scope, receive, send):
    """A page without a word."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def running(app, protocol):
    """The address and the clock of a server of this app."""
    listening, clock = socket.create_server(("127.0.0.1", 0)), Clock()
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_level="critical", timeout_keep_alive=KEPT_ALIVE_S)
    server = uvicorn.Server(config)

    def serve():
        with asyncio.Runner(loop_factory=lambda: clock) as runner:
            runner.run(server.serve(sockets=[listening]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listening.getsockname(), clock
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def server():
    with running(app, Patient) as found:
        yield found


def answer_of(connection):
    text = b""
    while not text.endswith(b"ok") and (piece := connection.recv(4096)):
        text += piece
    return text


@pytest.mark.parametrize("num_whole", [0, 1, 3])
@pytest.mark.parametrize("half", [b"GET / HTTP/1.1\r\nHo", b"G"])
def test_half_a_request_does_not_hold_a_connection(server, num_whole, half):
    address, clock = server
    with socket.create_connection(address, timeout=60) as connection:
        for _ in range(num_whole):
            connection.sendall(REQUEST)
            assert answer_of(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(half)
        assert get(address).startswith(b"HTTP/1.1 200")  # by now the server has read the half
        clock.advance(Patient.headers_s + 1)
        assert connection.recv(4096) == b""


def test_a_connection_that_sends_nothing_is_closed_too(server):
    address, clock = server
    with socket.create_connection(address, timeout=30) as connection:
        assert get(address).startswith(b"HTTP/1.1 200")  # by now the server has taken the first one
        clock.advance(Patient.headers_s - 60)
        assert not is_closed(connection)
        clock.advance(61)
        assert connection.recv(4096) == b""


def test_a_connection_that_waits_between_requests_is_kept(server):
    address, clock = server
    with socket.create_connection(address, timeout=60) as connection:
        for _ in range(3):
            connection.sendall(REQUEST)
            assert answer_of(connection).startswith(b"HTTP/1.1 200")
            clock.advance(10 * Patient.headers_s)


HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


def get(address, source="127.0.0.1"):
    """The first line that a client on this address is answered."""
    with socket.create_connection(address, timeout=30, source_address=(source, 0)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return connection.makefile("rb").readline()


def is_closed(connection):
    """Whether it is known by now that the server closed it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.settimeout(30)


def test_half_sent_headers_keep_nobody_out(tmp_path):
    with served(tmp_path) as live, ExitStack() as held:
        address = ("127.0.0.1", live.port)
        for _ in range(70):
            held.enter_context(socket.create_connection(address)).sendall(HALF)
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as other:
            assert other.get(f"{live.url}/health").status_code == 200
        assert httpx.get(f"{live.url}/v1/models").status_code == 200  # on the address that holds the 70
        for _ in range(200):
            held.enter_context(socket.create_connection(address)).sendall(HALF)
        assert httpx.get(f"{live.url}/v1/models").status_code == 200


def test_a_slow_body_without_a_token_takes_no_place(tmp_path):
    """What is told to everybody is told at once, whatever body is announced."""
    with served(tmp_path, api_key="s3cret") as live, ExitStack() as held:
        for _ in range(MAX_REQUESTS_OF_ONE - 1):
            slow = held.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=30))
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{")
            assert slow.recv(4096).startswith(b"HTTP/1.1 200")
        assert httpx.get(f"{live.url}/v1/models", headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_the_longest_half_request_gives_way_and_one_that_is_kept_open_stays():
    with running(app, Narrow) as (address, _), ExitStack() as held:
        kept = held.enter_context(socket.create_connection(address, timeout=30))
        kept.sendall(REQUEST)
        assert answer_of(kept).startswith(b"HTTP/1.1 200")
        slow = []
        for _ in range(5):
            slow.append(held.enter_context(socket.create_connection(address, timeout=30)))
            slow[-1].sendall(HALF)
            assert get(address).startswith(b"HTTP/1.1 200")  # and the server has seen the half
        for each in slow[:3]:
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""  # it waits for that
        assert not any(map(is_closed, slow[3:]))
        kept.sendall(REQUEST)
        assert answer_of(kept).startswith(b"HTTP/1.1 200")


def test_many_addresses_together_leave_room_for_another():
    with running(app, Narrow) as (address, _), ExitStack() as held:
        for source in ("127.0.0.3", "127.0.0.4", "127.0.0.5"):
            for _ in range(4):
                held.enter_context(socket.create_connection(address, source_address=(source, 0))).sendall(HALF)
        assert get(address, "127.0.0.2").startswith(b"HTTP/1.1 200")
        for source in ("127.0.0.3", "127.0.0.4", "127.0.0.5"):
            assert get(address, source).startswith(b"HTTP/1.1 200")


def test_an_answer_that_is_being_written_is_never_closed():
    begun, may_end = threading.Semaphore(0), threading.Event()

    async def slow(scope, receive, send):
        if scope["path"] == "/slow":
            begun.release()
            await asyncio.get_running_loop().run_in_executor(None, may_end.wait)
        await app(scope, receive, send)

    with running(slow, Narrow) as (address, _), ExitStack() as held:
        answering = [held.enter_context(socket.create_connection(address, timeout=30)) for _ in range(4)]
        for each in answering:
            each.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            begun.acquire(timeout=30)
        for _ in range(10):
            assert get(address).startswith(b"HTTP/1.1 200")
            held.enter_context(socket.create_connection(address)).sendall(HALF)
        may_end.set()
        for each in answering:
            assert answer_of(each).startswith(b"HTTP/1.1 200")


def test_requests_at_once_are_limited_for_each_client():
    """Not by connections, of which a stranger can hold many without any right to be answered."""
    begun, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def slow(scope, receive, send):
        begun.release()
        await may_end.wait()
        await app(scope, receive, send)

    async def main():
        gate = Gate(slow, guard=Guard())

        async def ask(path, client):
            sent, headers = [], [(b"host", b"127.0.0.1")]
            scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "client": (client, 1)}

            async def receive():
                return {"type": "http.request"}

            async def send(message):
                sent.append(message)

            await gate(scope, receive, send)
            return sent[0]

        tasks = [asyncio.create_task(ask("/v1/models", "192.0.2.1")) for _ in range(MAX_REQUESTS_OF_ONE)]
        for _ in tasks:
            await begun.acquire()
        refused = await ask("/v1/models", "192.0.2.1")
        assert (refused["status"], dict(refused["headers"])[b"retry-after"]) == (429, b"5")
        tasks += [asyncio.create_task(ask("/v1/models", "192.0.2.2")), asyncio.create_task(ask("/health", "192.0.2.1"))]
        for _ in range(2):
            await begun.acquire()
        may_end.set()
        assert {(await task)["status"] for task in tasks} == {200}
        assert (await ask("/v1/models", "192.0.2.1"))["status"] == 200  # each place is given back

    asyncio.run(main())


def test_the_server_has_these_limits_and_not_one_for_all():
    config = make_server(app, host="127.0.0.1", port=0).config
    assert (config.http, config.limit_concurrency) == (TimedProtocol, None)
    assert TimedProtocol.max_connections_of_one * 2 <= TimedProtocol.max_connections
