"""Runs of councils in the journal: what was told is there, whoever is killed; nothing that is told can break it."""

import json
import math
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.errors import ConfigError
from localrag.files import version
from localrag.journal import FILE_NAME, Journal
from localrag.journal.database import MIGRATIONS, create_tables, migrate
from tests.journal.asks import made_up

ROOT = Path(__file__).parents[2]
CHILD = """
import os, signal, sys
from itertools import count
from pathlib import Path
from localrag.journal import Journal

home, num, last_statement = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
statements = count(1)

def die_at_the_last(_):
    if next(statements) == last_statement:
        os.kill(os.getpid(), signal.SIGKILL)

with Journal.open(home) as journal:
    council_id = journal.councils.begin("board", "A task?", {"digest": "x"})
    print(council_id, flush=True)
    if last_statement:
        journal._db.set_trace_callback(die_at_the_last)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(num):
        journal.councils.add(council_id, {"event": "said", "number": number, "text": "x" * 5000})
        print(number, flush=True)
    journal.councils.end(council_id, "decided")
"""


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path) as opened:
        yield opened


def start(home, num=50, last_statement=0):
    """A process that has begun a run and waits to be let go, and the id of the run."""
    command = [sys.executable, "-c", CHILD, str(home), str(num), str(last_statement)]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    council_id = int(child.stdout.readline())
    assert child.stdout.readline() == "ready\n"
    return child, council_id


def go(child):
    child.stdin.write("\n")
    child.stdin.flush()


def check(home, council_id, acknowledged):
    """Every event that was acknowledged is there, whole and in order; the one that was being written may be."""
    with Journal.open(home) as journal:
        run = journal.councils.get(council_id)
        assert [line for (line,) in journal._db.execute("PRAGMA integrity_check")] == ["ok"]
    numbers = [event["number"] for event in run.events]
    assert numbers == list(range(len(numbers)))
    assert len(acknowledged) <= len(numbers) <= len(acknowledged) + 1
    assert all(event == {"event": "said", "number": event["number"], "text": "x" * 5000} for event in run.events)
    return run


def test_a_run_comes_back_whole(journal, tmp_path):
    before = time.time()
    council_id = journal.councils.begin("board", "Which one?", {"kbs": ["notes"], "seed": 7})
    events = [{"event": "start", "roles": [{"role": "judge"}]}, {"event": "verdict", "decision": "Ärger 🧢"}, {"event": "end"}]
    for event in events:
        journal.councils.add(council_id, event)
    assert journal.councils.get(council_id).state == "running"
    journal.councils.end(council_id, "decided")
    with Journal.open(tmp_path) as again:
        run = again.councils.get(council_id)
    assert (run.id, run.name, run.task, run.about, run.state) == (
        council_id,
        "board",
        "Which one?",
        {"kbs": ["notes"], "seed": 7},
        "decided",
    )
    assert run.events == tuple(events)
    assert before <= run.started_at <= run.ended_at <= time.time()
    assert json.loads(json.dumps(run.to_dict())) == {
        "id": council_id, "name": "board", "task": "Which one?", "about": {"kbs": ["notes"], "seed": 7}, "state": "decided",
        "started_at": run.started_at, "ended_at": run.ended_at, "events": events,
    }  # fmt: skip


def test_the_newest_runs_the_newest_last(journal):
    assert journal.councils.last(5) == []
    ids = [journal.councils.begin(f"board {number}", "A task?", {}) for number in range(4)]
    journal.councils.end(ids[1], "failed")
    assert [(row.id, row.name, row.state) for row in journal.councils.last(3)] == [
        (ids[1], "board 1", "failed"),
        (ids[2], "board 2", "running"),
        (ids[3], "board 3", "running"),
    ]
    assert journal.councils.last(0) == []
    assert [row.id for row in journal.councils.last(100)] == ids
    assert journal.councils.get(ids[-1] + 1) is None


def test_a_run_ends_once_and_in_one_of_three_ways(journal):
    council_id = journal.councils.begin("board", "A task?", {})
    for bad in ("running", "interrupted", "", "DECIDED"):
        with pytest.raises(ValueError, match="does not end"):
            journal.councils.end(council_id, bad)
    journal.councils.end(council_id, "cancelled")
    ended = journal.councils.get(council_id)
    journal.councils.end(council_id, "decided")
    assert journal.councils.get(council_id) == ended
    assert ended.state == "cancelled"


def test_events_of_no_run_are_refused(journal):
    with pytest.raises(ConfigError, match="FOREIGN KEY"):
        journal.councils.add(99, {"event": "said"})
    assert journal.councils.last(5) == []


def test_what_is_no_json_cannot_break_it(journal):
    half = b"caf\xe9".decode("utf-8", "surrogateescape")
    council_id = journal.councils.begin(half, half + "x" * 20_000, {"top": math.inf, half: half})
    told = {"event": "said", "nan": math.nan, "deep": [{"x": -math.inf}], half: half, "path": Path("a"), "np": np.float32(0.5), 7: (1, 2)}
    journal.councils.add(council_id, told)
    run = journal.councils.get(council_id)
    assert (run.name, run.task[:6], len(run.task), run.about) == ("caf?", "caf?xx", 10_000, {"top": None, "caf?": "caf?"})
    assert run.events == ({"event": "said", "nan": None, "deep": [{"x": None}], "caf?": "caf?", "path": "a", "np": 0.5, "7": [1, 2]},)


TOLD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec=None)), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(st.characters(codec=None)), TOLD, max_size=4), max_size=4))
def test_whatever_is_told_is_kept_as_near_as_json_comes(tmp_path_factory, events):
    with Journal.open(tmp_path_factory.getbasetemp() / "told") as journal:
        council_id = journal.councils.begin("board", "A task?", {})
        for event in events:
            journal.councils.add(council_id, event)
        assert list(journal.councils.get(council_id).events) == [as_kept(event) for event in events]


def as_kept(value):
    match value:
        case str():
            return "".join("?" if "\ud800" <= char <= "\udfff" else char for char in value)
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {as_kept(key): as_kept(each) for key, each in value.items()}
        case list():
            return [as_kept(each) for each in value]
    return value


def test_killed_at_any_statement(tmp_path):
    for last_statement in (1, 2, 3, 4, random.Random(3).randrange(5, 100)):  # each event: begin, insert, commit
        child, council_id = start(tmp_path, last_statement=last_statement)
        with child:
            go(child)
            acknowledged = child.stdout.readlines()
        assert child.returncode == -signal.SIGKILL
        assert len(acknowledged) == (last_statement - 1) // 3
        run = check(tmp_path, council_id, acknowledged)
        assert (run.state, run.ended_at) == ("interrupted", None)


def test_killed_at_any_instant(tmp_path):
    rng, num_told = random.Random(4), 0
    for number in range(4):
        child, council_id = start(tmp_path, num=100_000)
        with child:
            go(child)
            acknowledged = [child.stdout.readline()] if number % 2 else []  # the others may be killed before their first event
            time.sleep(rng.uniform(0, 0.1))
            child.kill()
            acknowledged += [line for line in child.stdout if line.endswith("\n")]
        assert child.returncode == -signal.SIGKILL
        assert check(tmp_path, council_id, acknowledged).state == "interrupted"
        num_told += len(acknowledged)
    assert num_told


def test_runs_of_several_processes_at_once(tmp_path):
    Journal.open(tmp_path).close()
    children = [start(tmp_path) for _ in range(3)]
    with Journal.open(tmp_path) as journal:
        assert [row.state for row in journal.councils.last(9)] == ["running"] * 3  # seen from another process
    for child, _ in children:
        go(child)
    for child, council_id in children:
        acknowledged = child.communicate()[0].split()
        assert (child.returncode, len(acknowledged)) == (0, 50)
        assert check(tmp_path, council_id, acknowledged).state == "decided"


def test_a_number_that_another_process_has_now_is_no_sign_of_life(journal):
    council_id = journal.councils.begin("board", "A task?", {})
    journal._db.execute("UPDATE councils SET pid_started_at = pid_started_at - 3600")
    assert journal.councils.get(council_id).state == "interrupted"
    journal._db.execute("UPDATE councils SET pid = 0, pid_started_at = 0")
    assert journal.councils.last(1)[0].state == "interrupted"


def test_a_journal_of_asks_learns_to_keep_councils(tmp_path):
    path = tmp_path / FILE_NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        migrate(db, path, (create_tables,))
        assert version(db) == 1
    with Journal.open(tmp_path) as journal:
        journal.record(made_up())
        council_id = journal.councils.begin("board", "A task?", {})
        assert journal.councils.get(council_id).task == "A task?"
        assert len(journal.asks()) == 1
        assert version(journal._db) == len(MIGRATIONS)


def test_ledgers_of_the_first_edition_have_the_section_s_new_name(tmp_path):
    with Journal.open(tmp_path) as journal:
        journal.record(made_up())
        council_id = journal.councils.begin("board", "A task?", {})
        journal.councils.add(council_id, {"event": "budget", "ledger": {"entries": [{"name": "scaffold"}]}})
        journal._db.execute("UPDATE asks SET ledger = replace(ledger, 'question', 'scaffold')")
        journal._db.execute("PRAGMA user_version = 3")
    with Journal.open(tmp_path) as journal:
        assert [entry.name for entry in journal.asks()[0].ledger.entries] == ["template", "answer"]
        assert journal.councils.get(council_id).events[0]["ledger"] == {"entries": [{"name": "template"}]}


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE council_events SET event = 'garbage'",
        "UPDATE council_events SET event = '[]'",
        "UPDATE council_events SET event = x'ff00'",
        "UPDATE councils SET about = '7'",
        "UPDATE councils SET name = x'ff'",
        "UPDATE councils SET started_at = 'never'",
        "UPDATE councils SET pid = 'x'",
    ],
)
def test_damage_is_one_clear_error(journal, damage):
    council_id = journal.councils.begin("board", "A task?", {})
    journal.councils.add(council_id, {"event": "start"})
    journal._db.execute(damage)
    with pytest.raises(ConfigError, match="has a row that cannot be read"):
        journal.councils.get(council_id)
