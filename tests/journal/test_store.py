"""The journal gives back what was recorded, and only what is listed is in it."""

import json
import sqlite3
import time
from contextlib import closing
from dataclasses import asdict

import numpy as np
import pytest

from localrag.journal import FILE_NAME, Journal, SessionRow, StoredAsk
from localrag.journal.store import MAX_QUESTION_CHARS, Summaries
from tests.journal.asks import START, fields, made_up, passage
from tests.journal.real_asks import real_asks


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / "new" / "home") as opened:
        yield opened


def test_real_asks_come_back_whole(journal, tmp_path):
    records = real_asks(tmp_path, 12, sessions=("one", "two"))
    ids = [journal.record(each) for each in records]
    with Journal.open(journal.path.parent) as again:
        stored = again.asks()
    assert [each.id for each in stored] == ids == sorted(set(ids))
    assert [fields(each) for each in stored] == [fields(each) for each in records]
    assert {each.state for ask in stored for each in ask.evidence} == {"used", "omitted"}
    assert any(each.cited for ask in stored for each in ask.evidence)


def test_neither_prompt_nor_answer_is_kept(journal, tmp_path):
    for each in real_asks(tmp_path, 6):
        journal.record(each)
    kept = b"".join(file.read_bytes() for file in journal.path.parent.iterdir())
    assert b"What is the word of note" in kept  # the questions
    assert b"It stands among others" not in kept  # the documents
    assert b"You asked" not in kept  # the answers


def test_utilization_and_efficiency_by_hand():
    evidence = (passage(1, tokens=100, cited=True), passage(2, tokens=300), passage(3, tokens=5000, state="omitted"))
    entry = made_up(window=1000, evidence=evidence)
    assert entry.utilization == (100 + 50) / 1000
    assert entry.efficiency == 100 / 400
    assert made_up().efficiency is None
    assert made_up(evidence=[passage(state="omitted")]).efficiency is None
    assert made_up(evidence=[passage(state="shortened", cited=True)]).efficiency == 1


def test_the_newest_of_a_session(journal):
    for number in range(6):
        journal.record(made_up(number=number, session="even" if number % 2 == 0 else "odd"))
    assert [ask.question for ask in journal.asks("even")] == ["Question 0?", "Question 2?", "Question 4?"]
    assert [ask.question for ask in journal.asks("even", 2)] == ["Question 2?", "Question 4?"]
    assert [ask.question for ask in journal.asks(last=2)] == ["Question 4?", "Question 5?"]
    assert journal.asks("none") == journal.asks(last=0) == []
    assert journal.sessions() == [SessionRow("even", 3, START, START + 4), SessionRow("odd", 3, START + 1, START + 5)]


def test_evidence_stays_with_its_ask_and_in_its_order(journal):
    for number in range(3):
        journal.record(made_up(number=number, evidence=[passage(chunk_id) for chunk_id in (9 - number, 3, 5)]))
    assert [[each.chunk_id for each in ask.evidence] for ask in journal.asks(last=2)] == [[8, 3, 5], [7, 3, 5]]


@pytest.mark.parametrize(
    "text",
    [
        "'; DROP TABLE asks; --",
        "?1 :session %s",
        "<script>alert(1)</script>",
        "a\x00b\x1b[31m\u202e",
        "\U0001f9e2 \u05e9\u05dc\u05d5\u05dd",
        "",
    ],
)
def test_text_is_data(journal, text):
    ask = made_up(session=text, question=text, model=text, evidence=[passage(source=text, label=text, kb=text, tier=text)])
    journal.record(ask)
    assert fields(journal.asks(text)[0]) == fields(ask)
    assert journal.sessions()[0].name == text
    journal.summaries.put(text, text)
    assert journal.summaries.get(text) == text


def test_half_characters_and_long_questions(journal):
    name = b"caf\xe9.md".decode("utf-8", "surrogateescape")
    journal.record(made_up(session=name, question=name + "x" * 20_000, evidence=[passage(source=name)]))
    (stored,) = journal.asks(name)
    assert stored.question == "caf?.md" + "x" * (MAX_QUESTION_CHARS - 7)
    assert stored.evidence[0].source == stored.session == "caf?.md"
    journal.summaries.put(name, name)
    assert journal.summaries.get(name) == "caf?.md"


def test_numbers_of_numpy(journal):
    given = passage(np.int64(7), tokens=np.int32(30), relevance=np.float32(0.5), cited=np.bool_(True), source="a.md")
    journal.record(made_up(evidence=[given], started_at=np.float64(9), prompt_tokens=np.int64(5), timings={"total_s": np.float32(2)}))
    (stored,) = journal.asks()
    assert json.loads(json.dumps(stored.to_dict()))["evidence"][0] == {
        **asdict(passage(7, tokens=30, relevance=0.5, cited=True)),
        "source": "a.md",
        "label": "KB#7",
    }
    assert (stored.started_at, stored.prompt_tokens, stored.timings) == (9.0, 5, {"total_s": 2.0})


def test_what_json_cannot_say_is_refused_before_anything_is_written(journal):
    with pytest.raises(ValueError):
        journal.record(made_up(timings={"total_s": float("nan")}))
    with pytest.raises(ValueError):
        passage(relevance=float("inf"))
    assert journal.asks() == []


def test_an_ask_as_json(journal):
    journal.record(made_up(evidence=[passage(cited=True, relevance=0.5)]))
    data = json.loads(json.dumps(journal.asks()[0].to_dict()))
    assert data["usage"] == {"prompt_tokens": 100, "completion_tokens": 50, "cached_tokens": 0}
    assert (data["utilization"], data["efficiency"]) == (0.15, 1.0)
    assert data["ledger"]["entries"][0]["name"] == "question"
    assert data["sections"][0]["allotted"] == 100
    assert data["evidence"][0]["relevance"] == 0.5
    assert data.keys() >= {name for name in StoredAsk.__dataclass_fields__ if not name.endswith("tokens")}


def test_summaries_are_kept_until_they_are_too_old(journal):
    cache = journal.summaries
    assert cache.get("a") is None
    cache.put("a", "first")
    cache.put("a", "second")
    assert cache.get("a", None) == cache.get("a", 60.0) == "second"
    with closing(sqlite3.connect(journal.path)) as db:
        db.execute("UPDATE summaries SET created_at = ?", (time.time() - 100,))
        db.commit()
    assert cache.get("a", 60.0) is None
    assert cache.get("a", 1000.0) == cache.get("a") == "second"


def test_the_oldest_summaries_make_room(journal):
    cache = Summaries(journal._db, journal.path, max_bytes=100)
    for number in range(10):
        cache.put(str(number), "é" * 15)  # 30 bytes
    assert [number for number in range(10) if cache.get(str(number))] == [7, 8, 9]
    cache.put("7", "x" * 41)  # now the newest
    assert [number for number in range(10) if cache.get(str(number))] == [7, 9]
    cache.put("large", "x" * 101)
    assert cache.get("large") is None


def test_the_file_stands_in_the_home(tmp_path):
    Journal.open(tmp_path / "home").close()
    assert (tmp_path / "home" / FILE_NAME).is_file()
