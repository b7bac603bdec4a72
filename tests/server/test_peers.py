"""Which user of this machine sends a request: looked up in real connections, and served or not."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from localrag.server.app import make_app
from localrag.server.routing import ServerState
from localrag.server.security import Guard, can_tell_users, client_key, home_token, user_of
from localrag.settings import Settings
from tests.server.live import served
from tests.server.test_security import ROUTES

OTHER = 65534
REFUSED = "This server serves only the user who runs it. To serve others, run `localrag serve --any-local-user`."
needs_proc = pytest.mark.skipif(not can_tell_users(), reason="this system does not tell the users of connections in /proc/net")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as another user")

ASK = """
import json, os, sys, urllib.error, urllib.request
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
answers = []
for method, url, token in json.loads(sys.argv[2]):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, method=method, headers=headers, data=b"{}" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request) as answer:
            answers.append([answer.status, answer.read().decode()])
    except urllib.error.HTTPError as error:
        answers.append([error.code, error.read().decode()])
print(json.dumps(answers))
"""


def ask_as(uid, *requests):
    """(status, body) of requests, (method, url, token), that another user of this machine sends."""
    done = subprocess.run(
        [shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable, "-c", ASK, str(uid), json.dumps(requests)],
        cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(status, body) for status, body in json.loads(done.stdout)]


@contextmanager
def connected(family, listens_on, connects_to):
    """Both ends of a real connection, as the server sees them: its client's address and its own."""
    try:
        listening = socket.create_server((listens_on, 0), family=socket.AF_INET6 if ":" in listens_on else socket.AF_INET)
    except OSError as error:
        pytest.skip(f"nothing can listen on {listens_on} here: {error}")
    with listening, closing(socket.socket(family)) as client:
        client.connect((connects_to, listening.getsockname()[1]))
        accepted, _ = listening.accept()
        with accepted:
            yield client, accepted.getpeername()[:2], accepted.getsockname()[:2]


WAYS = [
    (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
    (socket.AF_INET6, "::1", "::1"),
    (socket.AF_INET6, "127.0.0.1", "::ffff:127.0.0.1"),  # as Java's programs connect
]


@needs_proc
@pytest.mark.parametrize(("family", "listens_on", "connects_to"), WAYS)
def test_the_user_of_a_connection_is_found(family, listens_on, connects_to):
    with connected(family, listens_on, connects_to) as (client, peer, server):
        assert user_of(peer, server) == os.geteuid()
        assert user_of((peer[0], peer[1]), (server[0], server[1] + 1)) is None  # the whole of the connection is compared
        client.shutdown(socket.SHUT_WR)  # as `nc -N` does once its request is sent
        assert user_of(peer, server) == os.geteuid()
        client.close()  # the kernel would list it with the user 0
        assert user_of(peer, server) is None


@needs_proc
@needs_root
@pytest.mark.parametrize(("family", "listens_on", "connects_to"), WAYS)
def test_another_user_is_not_taken_for_root(family, listens_on, connects_to):
    code = (
        "import os, socket, sys; os.setuid(int(sys.argv[1])); client = socket.socket(int(sys.argv[2]));"
        "client.connect((sys.argv[3], int(sys.argv[4]))); print('there', flush=True); sys.stdin.readline(); client.close();"
        "print('gone', flush=True); sys.stdin.readline()"
    )
    with socket.create_server((listens_on, 0), family=socket.AF_INET6 if ":" in listens_on else socket.AF_INET) as listening:
        args = [str(OTHER), str(int(family)), connects_to, str(listening.getsockname()[1])]
        with subprocess.Popen(
            [shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable, "-c", code, *args],
            cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as child:  # fmt: skip
            accepted, _ = listening.accept()
            with accepted:
                peer, server = accepted.getpeername()[:2], accepted.getsockname()[:2]
                assert child.stdout.readline() == "there\n"
                assert user_of(peer, server) == OTHER
                child.stdin.write("\n")
                child.stdin.flush()
                assert child.stdout.readline() == "gone\n"
                assert user_of(peer, server) is None
                child.stdin.write("\n")
                child.stdin.flush()


def kernel_table(tmp_path, *rows, uid_map="0 0 4294967295"):
    """A /proc with these rows of net/tcp, as a little-endian machine prints them."""
    (tmp_path / "net").mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "net/tcp").write_text("".join(["  sl  local_address rem_address   st ...\n", *rows]))
    (tmp_path / "net/tcp6").write_text("")
    (tmp_path / "self/uid_map").write_text(f"         {uid_map}\n")
    (tmp_path / "sys/kernel/overflowuid").write_text("65534\n")
    return tmp_path


def row(state="01", uid=1000, inode=77):
    return (
        f"   3: 0100007F:C350 0100007F:21C2 {state} 00000000:00000000 00:00000000 00000000 {uid:5d}        0 {inode} 1 0000 20 4 30 10 -1\n"
    )


little_endian = pytest.mark.skipif(sys.byteorder != "little", reason="the rows are those of a little-endian machine")
CLIENT, SERVER = ("127.0.0.1", 50000), ("127.0.0.1", 8642)


@little_endian
@pytest.mark.parametrize(
    ("rows", "uid_map", "uid"),
    [
        ([row()], "0 0 4294967295", 1000),
        ([row(state="06", uid=0, inode=0), row()], "0 0 4294967295", 1000),
        ([row(state="05", uid=0, inode=0)], "0 0 4294967295", None),  # closed, and listed with the user 0
        ([row(state="02", uid=0)], "0 0 4294967295", None),  # only connecting
        ([row(uid=65534)], "0 0 4294967295", 65534),  # nobody, who is a user like any other here
        ([row(uid=65534)], "0 1000 1", None),  # in a container's user namespace: any user without a number in it
        ([row(uid=0)], "0 1000 1", 0),
        (["   3: nonsense\n"], "0 0 4294967295", None),
        ([], "0 0 4294967295", None),
    ],
)
def test_what_the_table_of_the_kernel_says(tmp_path, rows, uid_map, uid):
    assert user_of(CLIENT, SERVER, kernel_table(tmp_path, *rows, uid_map=uid_map)) == uid


def test_a_system_without_such_a_table_tells_nobody(tmp_path):
    assert not can_tell_users(tmp_path)
    assert user_of(CLIENT, SERVER, tmp_path) is None
    assert user_of(("unix", 0), SERVER) is None


@given(st.ip_addresses(v=6))
def test_limits_count_a_network_of_ipv6_as_one_client(address):
    within = type(address)(int(address) ^ 1)
    if address.ipv4_mapped is None:
        assert client_key((str(address), 1)) == client_key((str(within), 2))
    else:
        assert client_key((str(address), 1)) == client_key((str(address.ipv4_mapped), 2)) != client_key((str(within), 1))
    assert client_key(None) == ""


def test_the_token_of_a_home_is_private_and_stays(tmp_path):
    token = home_token(tmp_path / "home")
    assert (home_token(tmp_path / "home"), len(token)) == (token, 43)
    assert stat.S_IMODE((tmp_path / "home" / "server-token").stat().st_mode) == 0o600
    (tmp_path / "home" / "server-token").write_text(token[:20])  # its writer was killed
    fresh = home_token(tmp_path / "home")
    assert len(fresh) == 43
    assert fresh != token
    assert home_token(tmp_path / "home") == fresh


def test_where_the_user_cannot_be_told_every_route_asks_for_the_token(tmp_path):
    """The test client has no socket."""
    shared = ServerState(settings=Settings(home=tmp_path), guard=Guard(users=frozenset({os.geteuid()}), api_key="s3cret"))
    client = TestClient(make_app(shared), base_url="http://127.0.0.1:8642")
    for method, path in ROUTES:
        answer = client.request(method, path)
        if (method, path) in {("GET", "/health"), ("GET", "/")}:
            assert answer.status_code == 200
        else:
            assert answer.status_code == 401
            assert method == "HEAD" or "server-token" in answer.json()["detail"]
            assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/indexes", headers={"Authorization": "Bearer s3cret"}).status_code == 200
    assert client.get("/indexes", headers={"Authorization": "Bearer s3cre"}).status_code == 401


@needs_proc
@needs_root
def test_another_user_of_the_machine_is_refused_on_every_route(tmp_path):
    with served(tmp_path / "home") as live:
        token = (tmp_path / "home" / "server-token").read_text().strip()
        assert httpx.get(f"{live.url}/indexes").status_code == 200  # whoever runs it goes on without a token
        answers = ask_as(OTHER, *((method, live.url + path, None) for method, path in ROUTES))
        for (method, path), (status, body) in zip(ROUTES, answers, strict=True):
            if (method, path) == ("GET", "/health"):
                assert status == 200
            else:
                assert status == 403
                assert method == "HEAD" or json.loads(body)["detail"] == REFUSED
        (status, _), (wrong, _) = ask_as(OTHER, ("GET", f"{live.url}/indexes", token), ("GET", f"{live.url}/indexes", "wrong"))
        assert (status, wrong) == (200, 403)


@needs_proc
@needs_root
def test_any_local_user_opens_it(tmp_path):
    with served(tmp_path / "home", "--any-local-user") as live:
        assert ask_as(OTHER, ("GET", f"{live.url}/indexes", None)) == [(200, "[]")]
        assert not (tmp_path / "home" / "server-token").exists()


@needs_proc
@needs_root
def test_a_token_of_its_own_is_all_that_counts(tmp_path):
    with served(tmp_path / "home", api_key="s3cret") as live:
        with_it, without = ("GET", f"{live.url}/indexes", "s3cret"), ("GET", f"{live.url}/indexes", None)
        assert [status for status, _ in ask_as(OTHER, with_it, without)] == [200, 401]


@needs_proc
@needs_root
def test_a_server_of_an_ordinary_user_serves_that_user_and_root(tmp_path):
    """The server itself is that of another user here, so root is the one who is not its owner."""
    app = (
        "import os; from pathlib import Path; import uvicorn.loops.asyncio, uvicorn.lifespan.on;"
        "from localrag.server.app import make_app; from localrag.server.security import Guard;"
        "from localrag.server.routing import ServerState;"
        "from localrag.server.security import listener, make_server; from localrag.settings import Settings;"
        f"app = make_app(ServerState(settings=Settings(home=Path('/nonexistent')), guard=Guard(users=frozenset({{{OTHER}, 0}}))));"
        "opened = listener('127.0.0.1', 0); server = make_server(app, host='127.0.0.1', port=0); server.config.load();"
        f"os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER});"  # only root may read the packages of some machines
        "print(opened.getsockname()[1], flush=True); server.run([opened])"
    )
    with ExitStack() as stack:
        child = stack.enter_context(subprocess.Popen([sys.executable, "-c", app], stdout=subprocess.PIPE, text=True))
        stack.callback(child.terminate)
        port = child.stdout.readline()
        url = f"http://127.0.0.1:{int(port)}/indexes"
        assert httpx.get(url).status_code == 200
        assert [ask_as(uid, ("GET", url, None))[0][0] for uid in (OTHER, 1)] == [200, 403]
