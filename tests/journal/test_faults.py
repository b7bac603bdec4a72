"""Killed at any instant, written to by several at once, damaged in any way: whole records or one clear error."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from localrag.errors import ConfigError
from localrag.files import version
from localrag.journal import FILE_NAME, Journal
from localrag.journal.database import MIGRATIONS, migrate
from tests.journal.asks import fields, made_up, passage

ROOT = Path(__file__).parents[2]
CHILD = """
import os, signal, sys
from itertools import count
from pathlib import Path
from localrag.journal import Journal
from tests.journal.asks import made_up, passage

home, name, num, last_statement = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
statements = count(1)

def die_at_the_last(_):
    if next(statements) == last_statement:
        os.kill(os.getpid(), signal.SIGKILL)

print("ready", flush=True)
sys.stdin.readline()
with Journal.open(home) as journal:
    if last_statement:
        journal._db.set_trace_callback(die_at_the_last)
    for number in range(num):
        evidence = [passage(chunk_id) for chunk_id in range(1, 21)]
        print(journal.record(made_up(number=number, session=name, evidence=evidence)), flush=True)
        journal.summaries.put(f"{name} {number}", "x" * 1000)
"""


def start(home, name="a", num=40, last_statement=0):
    command = [sys.executable, "-c", CHILD, str(home), name, str(num), str(last_statement)]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


def go(child):
    child.stdin.write("\n")
    child.stdin.flush()


def check(home, acknowledged):
    """Every record is whole, and every one that was acknowledged is there."""
    with Journal.open(home) as journal:
        asks = journal.asks()
        assert [line for (line,) in journal._db.execute("PRAGMA integrity_check")] == ["ok"]
    assert {ask.id for ask in asks} >= set(acknowledged)
    for ask in asks:
        number = int(ask.started_at - made_up().started_at)
        whole = made_up(number=number, session=ask.session, evidence=[passage(chunk_id) for chunk_id in range(1, 21)])
        assert fields(ask) == fields(whole)
    return asks


def test_killed_at_any_statement(tmp_path):
    acknowledged, rng = [], random.Random(6)
    for last_statement in (1, 2, 3, 22, 23, *rng.sample(range(24, 150), 4)):  # 1 begins, 2 is the ask, 23 commits
        with start(tmp_path, last_statement=last_statement) as child:
            go(child)
            acknowledged += [int(line) for line in child.stdout]
        assert child.returncode == -signal.SIGKILL
        check(tmp_path, acknowledged)
    assert len(acknowledged) > 10


def test_killed_at_any_instant(tmp_path):
    acknowledged, rng, num_killed = [], random.Random(7), 0
    for number in range(8):
        with start(tmp_path, num=100_000) as child:
            go(child)
            if number % 2:  # the others may be killed before their first record, on a busy machine even all of them
                acknowledged.append(int(child.stdout.readline()))
            time.sleep(rng.uniform(0, 0.05))
            child.kill()
            acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
        num_killed += child.returncode == -signal.SIGKILL
        check(tmp_path, acknowledged)
    assert num_killed == 8
    assert len(acknowledged) >= 4


def test_several_make_the_journal_and_record_at_once(tmp_path):
    for home in (tmp_path / str(number) for number in range(2)):
        children = [start(home, name) for name in "abc"]
        for child in children:
            go(child)
        acknowledged = [int(line) for child in children for line in child.communicate()[0].split()]
        assert [child.returncode for child in children] == [0, 0, 0]
        assert len(set(acknowledged)) == len(acknowledged) == 120
        assert len(check(home, acknowledged)) == 120
        with Journal.open(home) as journal:
            assert {(each.name, each.num_asks) for each in journal.sessions()} == {("a", 40), ("b", 40), ("c", 40)}
            assert all(journal.summaries.get(f"{name} {number}") for name in "abc" for number in range(40))


@pytest.mark.parametrize("last_statement", [3, 5, 6, 7])
def test_killed_while_it_is_made_it_is_made_by_the_next(tmp_path, last_statement):
    code = (
        "import os, signal, sqlite3, sys; from itertools import count; from pathlib import Path\n"
        "from localrag.journal.database import migrate\n"
        "db, at = sqlite3.connect(sys.argv[1], isolation_level=None), count(1)\n"
        "db.set_trace_callback(lambda _: next(at) == int(sys.argv[2]) and os.kill(os.getpid(), signal.SIGKILL))\n"
        "migrate(db, Path(sys.argv[1]))"
    )
    path = tmp_path / FILE_NAME
    done = subprocess.run([sys.executable, "-c", code, str(path), str(last_statement)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    with closing(sqlite3.connect(path)) as db:
        assert version(db) == 0
    with Journal.open(tmp_path) as journal:
        journal.record(made_up())
        assert len(journal.asks()) == 1


def test_each_migration_is_applied_once(tmp_path):
    applied = []
    steps = tuple(lambda db, n=n: (applied.append(n), db.execute(f"CREATE TABLE t{n} (x)")) for n in range(3))
    with closing(sqlite3.connect(tmp_path / "x.sqlite", isolation_level=None)) as db:
        migrate(db, tmp_path, steps[:1])
        migrate(db, tmp_path, steps)
        migrate(db, tmp_path, steps)
        assert version(db) == 3
    assert applied == [0, 1, 2]


def test_a_newer_schema_is_refused_and_left_as_it_is(tmp_path):
    Journal.open(tmp_path).close()
    path = tmp_path / FILE_NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    error = refusal(tmp_path)
    assert (error.numbers["schema"], error.numbers["known_schema"]) == (99, len(MIGRATIONS))
    assert "newer localrag" in error.message
    assert path.read_bytes() == before


def use(home):
    """All that is done with a journal."""
    with Journal.open(home) as journal:
        for ask in journal.asks():
            assert ask.to_dict()
        journal.sessions()
        journal.record(made_up())
        journal.summaries.put("a", "b")
        journal.summaries.get("a")


def refusal(home) -> ConfigError:
    """The error of a journal that cannot be used: it names the file, and the hint says what to do with it."""
    with pytest.raises(ConfigError) as caught:
        use(home)
    error = caught.value
    assert str(home / FILE_NAME) in error.message
    assert f"move {home / FILE_NAME} away" in error.hint
    assert "\n" not in error.message + error.hint
    return error


def test_garbage_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / FILE_NAME
    for garbage in (b"garbage" * 1000, b"SQLite format 3\x00" + b"\xff" * 5000, b"x" * 50):
        path.write_bytes(garbage)
        refusal(tmp_path)
        assert path.read_bytes() == garbage


def filled(home) -> bytes:
    """A closed journal of thirty asks, as one file."""
    with Journal.open(home) as journal:
        for number in range(30):
            journal.record(made_up(number=number, evidence=[passage(chunk_id) for chunk_id in range(1, 9)]))
    assert [file.name for file in home.iterdir()] == [FILE_NAME]
    return (home / FILE_NAME).read_bytes()


def test_a_truncated_file_is_refused(tmp_path):
    whole, path = filled(tmp_path), tmp_path / FILE_NAME
    for size in (50, 4096, len(whole) // 2, len(whole) - 4096):
        path.write_bytes(whole[:size])
        refusal(tmp_path)


def test_an_empty_file_is_a_new_journal(tmp_path):
    (tmp_path / FILE_NAME).touch()
    with Journal.open(tmp_path) as journal:
        assert journal.asks() == []
        assert journal.record(made_up()) == 1


def test_a_folder_in_its_place_is_refused(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ConfigError) as caught:
        use(tmp_path)
    assert "is a file in a folder" in caught.value.hint


def test_a_home_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ConfigError) as caught:
        use(tmp_path / "home")
    assert "is a file in a folder" in caught.value.hint


def test_a_file_that_cannot_be_written_to_is_refused(tmp_path):
    filled(tmp_path)
    (tmp_path / FILE_NAME).chmod(0o444)
    tmp_path.chmod(0o555)
    code = (
        "import os, sys; from pathlib import Path; from localrag.errors import ConfigError; from localrag.journal import Journal\n"
        "from tests.journal.asks import made_up\n"
        "folder = os.open(sys.argv[1], os.O_RDONLY); os.fchdir(folder)\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try:\n    with Journal.open(Path()) as journal:\n        journal.record(made_up())\n"
        "except ConfigError as error:\n    print(error.message, error.hint)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    tmp_path.chmod(0o755)
    assert "The journal journal.sqlite cannot be used" in done.stdout, done.stderr
    assert "permission denied" in done.stdout
    assert "away" not in done.stdout  # nothing is wrong with the file


def test_any_damage_is_read_or_refused(tmp_path):
    whole, path, rng = filled(tmp_path), tmp_path / FILE_NAME, random.Random(8)
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 10, 200])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            use(tmp_path)
        except ConfigError as error:
            num_refused += 1
            assert str(path) in error.message
        for beside in tmp_path.glob(f"{FILE_NAME}-*"):
            beside.unlink()
    assert 20 < num_refused < 150
