import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from localrag.errors import KnowledgeBaseError
from localrag.files import version
from localrag.kb.database import MIGRATIONS, migrate
from localrag.kb.store import Store
from tests.kb.support import problems


def _open(path):
    return closing(sqlite3.connect(path, isolation_level=None))


def test_each_migration_is_applied_once(tmp_path):
    applied = []
    steps = tuple(lambda db, n=n: (applied.append(n), db.execute(f"CREATE TABLE t{n} (x)")) for n in range(3))
    with _open(tmp_path / "x.sqlite") as db:
        migrate(db, steps[:1])
        migrate(db, steps)
        migrate(db, steps)
        assert version(db) == 3
    assert applied == [0, 1, 2]


def test_a_migration_that_fails_leaves_nothing_behind(tmp_path):
    def half(db):
        db.execute("CREATE TABLE half (x)")
        db.execute("CREATE TABLE state (x)")  # is there already

    with _open(tmp_path / "x.sqlite") as db:
        migrate(db)
        with pytest.raises(sqlite3.OperationalError):
            migrate(db, (*MIGRATIONS, half))
        assert version(db) == len(MIGRATIONS)
        assert not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'half'").fetchall()


@pytest.mark.parametrize("last_statement", [3, 9, 19, 21, 22])
def test_killed_while_it_is_made_it_is_made_by_the_next(tmp_path, last_statement):
    code = (
        "import os, signal, sqlite3, sys; from itertools import count; from localrag.kb.database import migrate\n"
        "db, at = sqlite3.connect(sys.argv[1], isolation_level=None), count(1)\n"
        "db.set_trace_callback(lambda _: next(at) == int(sys.argv[2]) and os.kill(os.getpid(), signal.SIGKILL))\n"
        "migrate(db)"
    )
    path = tmp_path / "kb.sqlite"
    done = subprocess.run([sys.executable, "-c", code, str(path), str(last_statement)], check=False)
    assert done.returncode == -signal.SIGKILL
    with _open(path) as db:
        assert version(db) == 0
    Store(path, create=True).close()
    assert problems(path) == []


def test_a_newer_schema_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "kb.sqlite"
    Store(path, create=True).close()
    with _open(path) as db:
        db.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(KnowledgeBaseError, match="schema 99") as caught:
        Store(path)
    assert caught.value.numbers["schema"] == 99
    assert "Upgrade" in caught.value.hint
    assert path.read_bytes() == before
