"""crashes.py for a knowledge base on a server, which is stopped as well as those that index into it."""

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from signal import SIGKILL, SIGQUIT, Signals

from localrag.errors import KnowledgeBaseNotFoundError
from localrag.kb import KnowledgeBase
from localrag.kb.walk import walk
from tests.kb import crashes, servers
from tests.kb.crash_child import DIM, GIVEN, NAME
from tests.kb.crashes import FaultError, History, Indexer, Log, Outcome, Scene, State, Stop
from tests.kb.hash_embedder import HashEmbedder

IMMEDIATE, KILL = SIGQUIT, SIGKILL
"""An immediate shutdown, and a kill of the process that is the parent of all others."""

_QUERY = "zebra1x5"
_START_S = 60.0
_WAIT_S = 30.0
_SLOW = """CREATE FUNCTION {schema}.pause() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.01); RETURN new; END';
    CREATE TRIGGER paused AFTER INSERT ON {schema}.chunks FOR EACH ROW EXECUTE FUNCTION {schema}.pause()"""
_DISK_SAFETY = {"fsync", "full_page_writes"}


class DurableServer(servers.Server):
    """One with the safety of the disk, which can be stopped at any moment and started again. Each history has a database of its own."""

    num_databases = 0

    def _options(self):
        settings = super()._options()[1::2]
        return [part for each in settings if each.split("=")[0] not in _DISK_SAFETY for part in ("-c", each)]

    def _make(self, programs):
        super()._make(programs)
        self._programs = programs

    def die(self, how: Signals) -> None:
        self._process.send_signal(how)
        self._process.wait(_START_S)

    def stop(self) -> None:
        """At once: nobody needs its files."""
        self.die(IMMEDIATE)
        shutil.rmtree(self._folder)

    def start_again(self) -> None:
        """As soon as the last process of the one before is gone."""
        end = time.monotonic() + _START_S
        while True:
            self._process = self._run(self._programs / "postgres", "-D", self._data, *self._options())
            try:
                self._wait()
            except AssertionError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
            else:
                return

    def rows(self, statement: str, database: str = "postgres") -> list[tuple]:
        import psycopg  # noqa: PLC0415  # there is none where there is no server

        with closing(psycopg.connect(self.url(database=database), autocommit=True)) as db:
            cursor = db.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def wait_for_quiet(self) -> None:
        """What a killed process had asked for is carried out, or is not."""
        end = time.monotonic() + _WAIT_S
        while self.rows("SELECT pid FROM pg_stat_activity WHERE application_name = 'localrag'"):
            if time.monotonic() > end:
                raise FaultError("the server still works for a process that is gone")
            time.sleep(0.01)

    def wait_for_pause(self) -> None:
        """Until a process is in the middle of writing a document that is written slowly."""
        end = time.monotonic() + _WAIT_S
        while not self.rows("SELECT pid FROM pg_stat_activity WHERE application_name = 'localrag' AND wait_event = 'PgSleep'"):
            if time.monotonic() > end:
                raise FaultError("nothing is written")
            time.sleep(0.005)

    def new_database(self, template: str = "template1") -> str:
        self.num_databases += 1
        name = f"history{self.num_databases}"
        self.rows(f"CREATE DATABASE {name} TEMPLATE {template}")
        # Until then a copied sequence takes for logged what was logged of the one that it was copied from, and a crash sets it back.
        self.rows("CHECKPOINT")
        return name

    def address(self, database: str) -> str:
        return f"{self.url(database=database)}#{NAME}"


def make_scene(base: Path, server: DurableServer) -> Scene:
    folder = crashes.write_earlier(base)
    earlier, clean = server.new_database(), server.new_database()
    with KnowledgeBase.open(base, server.address(earlier), create=True) as kb:
        kb.ingest([folder], HashEmbedder(dim=DIM))
        before, ids_before = documents(kb), known_chunks(kb)
    renamed = crashes.change(base, folder)
    with KnowledgeBase.open(base, server.address(clean), create=True) as kb:
        kb.ingest([folder], HashEmbedder(dim=DIM), tagging=GIVEN)
        state = state_of(kb)
    server.wait_for_quiet()
    return Scene(folder, [file.path for file in walk([folder]).files], earlier, before, ids_before, renamed, state)


class ServerHistory(History):
    """A knowledge base in a database of its own, over several runs."""

    def __init__(self, scene: Scene, base: Path, server: DurableServer, *, from_earlier: bool) -> None:
        self.server = server
        super().__init__(scene, base, from_earlier=from_earlier)

    def drop(self) -> None:
        self.server.wait_for_quiet()
        self.server.rows(f"DROP DATABASE {self._database}")

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Each chunk that is added takes a while, so that a run is nearly always in the middle of a transaction."""
        from localrag.kb.postgres.server import schema_of  # noqa: PLC0415  # its library is an extra

        schema = schema_of(NAME)
        self.server.rows(_SLOW.format(schema=schema), self._database)
        yield
        self.server.rows(f"DROP FUNCTION {schema}.pause CASCADE", self._database)

    def order(self, **options):
        return super().order(name=self.server.address(self._database), **options)

    def _begin(self, kb_dir: Path) -> None:
        self.kb_dir = kb_dir
        self._database = self.server.new_database(str(self.scene.earlier) if self.from_earlier else "template1")

    def _opened(self) -> KnowledgeBase | None:
        self.server.wait_for_quiet()
        try:
            return KnowledgeBase.open(self.kb_dir, self.server.address(self._database))
        except KnowledgeBaseNotFoundError:
            return None

    def _documents(self, kb):
        return documents(kb)

    def _known_chunks(self, kb):
        return known_chunks(kb)

    def _state(self) -> State:
        with KnowledgeBase.open(self.kb_dir, self.server.address(self._database)) as kb:
            return state_of(kb)

    def _strays(self) -> list[str]:
        return []


def server_dies(server: DurableServer, seconds: float, how: Signals) -> Stop:
    """After so many seconds of a run the server is stopped; when the run has ended by it, it is started again."""

    def stop(indexer: Indexer) -> Outcome:
        indexer.go()
        time.sleep(seconds)
        return _server_died(server, indexer, how)

    return stop


def while_writing(server: DurableServer, seconds: float, how: Signals | None = None) -> Stop:
    """So many seconds after the first chunk of a slow run, the server is stopped like this, or the indexer is killed."""

    def stop(indexer: Indexer) -> Outcome:
        indexer.go()
        server.wait_for_pause()
        time.sleep(seconds)
        if how is not None:
            return _server_died(server, indexer, how)
        indexer.kill()
        return indexer.end()

    return stop


def when_done(history: ServerHistory, how: Signals) -> Stop:
    """As soon as a run says of a document that it was committed, the server is stopped like this."""

    def stop(indexer: Indexer) -> Outcome:
        indexer.go()
        log, end = history.base / f"log-{history.num_runs}", time.monotonic() + _WAIT_S
        while not Log.read(log).num_done:
            if time.monotonic() > end:
                raise FaultError("nothing is done")
            time.sleep(0.002)
        return _server_died(history.server, indexer, how)

    return stop


def _server_died(server: DurableServer, indexer: Indexer, how: Signals) -> Outcome:
    server.die(how)
    outcome = indexer.end()
    server.start_again()
    if outcome.status not in (0, 6) or (outcome.status and not outcome.hint):
        raise FaultError(f"it does not say why it ends: {outcome}")
    return outcome


def documents(kb: KnowledgeBase) -> dict[str, dict]:
    """All that is stored of each document, by its path, without ids."""
    rows = kb._store._db.rows
    found = {
        path: {"row": row, "chunks": [], "fields": set()}
        for path, *row in rows("SELECT path, machine, source, folded, sha256, num_bytes, title, mtime_ns, cutter FROM documents")
    }
    for path, *chunk in rows(
        'SELECT path, ordinal, "start", "end", place, heading, c.text, c.sha256, embedding::text FROM documents d '
        "JOIN chunks c ON document_id = d.id LEFT JOIN vectors ON chunk_id = c.id ORDER BY path, ordinal"
    ):
        found[path]["chunks"].append(chunk)
    for path, *field in rows("SELECT path, origin, key, value FROM documents d JOIN fields ON document_id = d.id"):
        found[path]["fields"].add(tuple(field))
    return found


def known_chunks(kb: KnowledgeBase) -> dict[tuple[str, str, str], int]:
    """The id of every chunk, by its document's path, the sha256 of what was embedded, and its heading path."""
    rows = kb._store._db.rows(
        "SELECT path, encode(c.sha256, 'hex'), heading, c.id FROM documents d JOIN chunks c ON document_id = d.id ORDER BY c.id"
    )
    return {(path, sha256, heading): chunk_id for path, sha256, heading, chunk_id in rows}


def state_of(kb: KnowledgeBase) -> State:
    rows = kb._store._db.rows
    words = {
        name: rows(f"SELECT word, ndoc, nentry FROM ts_stat('SELECT {name} FROM chunks') ORDER BY word COLLATE \"C\"")
        for name in kb._store.full_texts
    }
    unread = rows("SELECT path, machine, num_bytes, mtime_ns, cutter, reason FROM unread ORDER BY path")
    chunk = kb.retrieve(_QUERY, HashEmbedder(dim=DIM))[0].chunk
    return State(documents(kb), words, unread, (chunk.source, chunk.ordinal))
