"""The process that is killed while it indexes: see crashes.py.

    python -m tests.kb.crash_child

Each line on its standard input is an order, a JSON object, which a fork of it carries out: a run does not wait for imports. The fork says
its process id, waits for one more line, indexes and asks one question; then its exit status is said. What it embeds and what it has
brought to an end is appended to a log of its own, in one write at a time, so that a kill takes none of it away.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from localrag.errors import KnowledgeBaseError
from localrag.kb import KnowledgeBase, Tagging
from localrag.kb.store import Store
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.support import write_notes

NAME = "crash"
DIM = 32
GIVEN = Tagging(("given",))


class LoggedEmbedder(HashEmbedder):
    """Writes down the sha256 of every text that it embedded, which is what a chunk is known by, then pauses."""

    def __init__(self, log: int, pause_s: float) -> None:
        super().__init__(dim=DIM)
        self._log = log
        self._pause_s = pause_s

    def embed(self, texts):
        vectors = super().embed(texts)
        lines = (f"embedded {hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}\n" for text in texts)
        os.write(self._log, "".join(lines).encode())
        time.sleep(self._pause_s)
        return vectors


def main() -> None:
    _warm_up()
    while line := sys.stdin.readline():
        order = json.loads(line)
        if not order:  # the go-ahead of a fork that was killed before it read it
            continue
        pid = os.fork()
        if pid == 0:
            _carry_out(order)
        _, status = os.waitpid(pid, 0)
        _say(status=os.waitstatus_to_exitcode(status))


def _warm_up() -> None:
    """Imports what is imported when it is needed."""
    with suppress(ImportError, KnowledgeBaseError):  # the libraries of an extra
        import_module("localrag.kb.postgres.search")
        import_module("localrag.kb.postgres.server")
    with TemporaryDirectory() as name, KnowledgeBase.open(Path(name), NAME, create=True) as kb:
        write_notes(Path(name, "docs"), 1)
        kb.ingest([Path(name, "docs")], HashEmbedder())
        kb.retrieve("zebra", HashEmbedder())
    while threading.active_count() > 1:  # that of the process that reads files; a fork has only the thread that made it
        time.sleep(0.01)


def _carry_out(order) -> None:
    status = 1
    try:
        _index(**order)
        status = 0
    except KnowledgeBaseError as error:
        _say(error=error.message, hint=error.hint)
        status = error.exit_code
    except BaseException:  # noqa: BLE001  # a fork must not go on as its parent
        traceback.print_exc()
    os._exit(status)


def _index(kb_dir, folder, log, *, name=NAME, pause_s=0.0, wait_s=30.0, last_statement=0) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    embedder, num_read = LoggedEmbedder(handle, pause_s), count(1)
    if last_statement:
        Store(Path(kb_dir, NAME, "kb.sqlite"), create=True).close()

    def on_progress(progress) -> None:
        if next(num_read) == progress.num_done:  # no file that was read waits for others
            os.write(handle, f"done {progress.num_done}\n".encode())

    _say(pid=os.getpid())
    os.read(0, 100)
    with KnowledgeBase.open(Path(kb_dir), name, create=True) as kb:
        if last_statement:
            statements = count(1)
            kb._store._db.set_trace_callback(lambda _: next(statements) == last_statement and os.kill(os.getpid(), signal.SIGKILL))
        kb.ingest([Path(folder)], embedder, on_progress, tagging=GIVEN, wait_s=wait_s, on_wait=lambda: os.write(handle, b"waited 1\n"))
        kb.retrieve("zebra", HashEmbedder(dim=DIM))  # writes the file of vectors


def _say(**words) -> None:
    os.write(1, f"{json.dumps(words)}\n".encode())


if __name__ == "__main__":
    main()
