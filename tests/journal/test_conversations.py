"""Conversations in the journal: what was asked and written is there, whoever is killed."""

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.errors import ConfigError, UsageError
from localrag.journal import FILE_NAME, Journal
from localrag.journal.database import add_councils, create_tables, migrate

ROOT = Path(__file__).parents[2]
CHILD = """
import sys
from pathlib import Path
from localrag.journal import Journal

with Journal.open(Path(sys.argv[1])) as journal:
    kept = journal.conversations
    made = kept.create("killed", {})
    turn = kept.begin_turn(made, "A question?", {"model": "echo"})
    kept.write(turn, "The beginning of")
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def kept(tmp_path):
    with Journal.open(tmp_path) as journal:
        yield journal.conversations


def talk(kept, name, *pairs):
    """A conversation with these questions and answers."""
    made = kept.create(name, {"model": "echo"})
    for question, answer in pairs:
        turn = kept.begin_turn(made, question, {})
        kept.end_turn(turn, "done", answer, {"seed": 1})
    return made


def said(kept, conversation_id):
    return [(turn.question, turn.answer) for turn in kept.turns(conversation_id)]


def test_turns_come_back_as_they_were(kept):
    made = talk(kept, "garden", ("Which soil?", "Loam."), ("And water?", "Weekly."))
    row = kept.named("garden")
    assert (row.id, row.num_turns, row.first_question, row.about) == (made, 2, "Which soil?", {"model": "echo"})
    assert [(turn.state, turn.about, turn.is_pinned) for turn in kept.turns(made)] == [("done", {"seed": 1}, False)] * 2
    assert said(kept, made) == [("Which soil?", "Loam."), ("And water?", "Weekly.")]


def test_the_latest_is_the_one_that_was_used_last(kept):
    first = talk(kept, "first", ("a", "b"))
    talk(kept, "second", ("a", "b"))
    kept.begin_turn(first, "again", {})
    assert kept.latest().name == "first"
    assert [row.name for row in kept.all()] == ["second", "first"]


def test_a_name_is_taken_once(kept):
    made = talk(kept, "garden")
    with pytest.raises(UsageError, match="already"):
        kept.create(" garden ", {})
    other = kept.create("kitchen", {})
    with pytest.raises(UsageError, match="already"):
        kept.rename(other, "garden")
    kept.rename(made, "garden")  # its own name
    kept.rename(other, "cellar")
    assert {row.name for row in kept.all()} == {"garden", "cellar"}


@pytest.mark.parametrize("name", ["", "  ", "x" * 81, "two\nlines", "bell\x07"])
def test_a_name_is_a_line(kept, name):
    with pytest.raises(UsageError, match="one line of 1 to 80"):
        kept.create(name, {})


def test_what_is_taken_back_is_not_shown_and_not_found(kept):
    made = talk(kept, "garden", ("Which soil?", "Loam."), ("And water?", "Weekly."))
    kept.undo([kept.turns(made)[-1].id])
    assert said(kept, made) == [("Which soil?", "Loam.")]
    assert kept.search("weekly") == []
    assert kept.named("garden").num_turns == 1


def test_a_fork_has_the_turns_up_to_there_and_goes_its_own_way(kept):
    made = talk(kept, "garden", ("one", "1"), ("two", "2"), ("three", "3"))
    turns = kept.turns(made)
    kept.pin(turns[0].id, is_pinned=True)
    kept.undo([turns[1].id])
    forked = kept.fork(made, turns[2].id, "fork")
    kept.undo([kept.turns(forked)[0].id])
    assert said(kept, forked) == [("three", "3")]
    assert said(kept, made) == [("one", "1"), ("three", "3")]
    assert [each.conversation for each in kept.search("three")] == ["fork", "garden"]
    kept.delete(made)
    assert said(kept, forked) == [("three", "3")]


def test_deleting_leaves_nothing(kept, tmp_path):
    kept.delete(talk(kept, "garden", ("Which soil?", "Loam.")))
    talk(kept, "other", ("soil?", "no"))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        assert [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("conversations", "turns", "turns_fts")] == [1, 1, 1]


def test_search_finds_word_forms_beginnings_and_accents(kept):
    talk(kept, "garden", ("Which plants are watered?", "The roses in the café."), ("Else?", "No."))
    for words in ("plant", "watering", "caf", "Cafe roses"):
        assert [(each.conversation, each.number) for each in kept.search(words)] == [("garden", 1)], words
    assert kept.search("roses tulips") == []
    assert kept.search("  ") == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40))
def test_no_search_is_syntax(kept, words):
    made = talk(kept, "garden", (words or "x", words))
    kept.search(words)
    kept.delete(made)


def test_an_answer_that_was_being_written_when_its_process_was_killed_is_interrupted(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    with Journal.open(tmp_path) as journal:
        (turn,) = journal.conversations.turns(1)
        assert turn.state == "running"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    with Journal.open(tmp_path) as journal:
        (turn,) = journal.conversations.turns(1)
        assert (turn.state, turn.answer) == ("interrupted", "The beginning of")


def test_a_turn_that_has_ended_stays_as_it_ended(kept):
    made = talk(kept, "garden", ("q", "a"))
    turn = kept.turns(made)[0]
    kept.write(turn.id, "other")
    kept.end_turn(turn.id, "failed", "other", {})
    assert (kept.turns(made)[0].state, kept.turns(made)[0].answer) == ("done", "a")
    assert kept.search("other") == []


def test_a_journal_from_before_there_were_conversations_gets_them(tmp_path):
    path = tmp_path / FILE_NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        migrate(db, path, (create_tables, add_councils))
    with Journal.open(tmp_path) as journal:
        talk(journal.conversations, "new", ("q", "a"))
        assert journal.conversations.latest().name == "new"


@pytest.mark.parametrize("damage", ["about = '[1]'", "about = '{'", "question = x'00ff'"])
def test_a_damaged_row_is_named(tmp_path, damage):
    with Journal.open(tmp_path) as journal:
        made = talk(journal.conversations, "garden", ("q", "a"))
        journal._db.execute(f"UPDATE turns SET {damage}")
        with pytest.raises(ConfigError, match="cannot be read"):
            journal.conversations.turns(made)
