"""The figures of a report, on asks that can be reckoned by hand."""

import json
from dataclasses import asdict

from localrag.budget import Entry, Shortened
from localrag.journal import AskRecord, StoredAsk
from localrag.report import Chunk, Cut, Item, Trend, report
from tests.journal.asks import made_up, passage


def stored(*records: AskRecord) -> list[StoredAsk]:
    fields = AskRecord.__dataclass_fields__
    return [StoredAsk(id=number, **{name: getattr(each, name) for name in fields}) for number, each in enumerate(records, 1)]


def ask_using(answer: int, **changes):
    """An ask that uses 100 tokens and these of a window of 1000."""
    return made_up(entries=(Entry("question", 100, 100, 100), Entry("answer", 900, 900, answer)), **changes)


def test_a_session_by_hand():
    cited, uncited = passage(1, cited=True), passage(2, tokens=300)
    records = [
        ask_using(0),
        ask_using(100, evidence=[cited]),
        ask_using(300),
        ask_using(500, evidence=[cited, uncited]),
        ask_using(0, session="b"),
    ]
    found, other = report(stored(*records)).sessions
    assert (found.name, found.num_asks, found.prompt_tokens, found.completion_tokens) == ("default", 4, 400, 900)
    assert found.utilizations == (0.1, 0.2, 0.4, 0.6)
    assert (found.mean_utilization, found.lowest_utilization, found.highest_utilization) == (0.325, 0.1, 0.6)
    assert found.mean_efficiency == (1 + 0.25) / 2
    assert [round(each, 9) for each in asdict(found.utilization_trend).values()] == [0.15, 0.5]
    assert found.efficiency_trend == Trend(1.0, 0.25)
    assert (other.num_asks, other.mean_efficiency, other.utilization_trend) == (1, None, Trend(None, None))


def test_the_middle_of_an_odd_series_is_in_no_half():
    assert Trend.of([1, 2, 9, 3, 5]) == Trend(1.5, 4)
    assert Trend.of([]) == Trend.of([1]) == Trend(None, None)


def test_cut_sections_by_hand():
    evidence = Entry("evidence", 900, 300, 250, ("KB#1", "KB#2"), (Shortened("KB#3", "stub", 20, 400),))
    history = Entry("history", 200, 150, 100, ("message 1",))
    question, answer = Entry("question", 100, 100, 100), Entry("answer", 100, 100, 10)
    records = [
        made_up(entries=(evidence, question, answer), sections=()),
        made_up(entries=(history, evidence, question, answer), sections=()),
        made_up(entries=(question, answer)),
    ]
    assert report(stored(*records)).cut_sections == [Cut("evidence", 2, 4, 2, 1200), Cut("history", 1, 1, 0, 50)]


def test_a_section_is_cut_also_where_only_a_piece_of_it_did_not_fit():
    entries = (Entry("evidence", 100, 100, 90, ("KB#1",)), Entry("answer", 10, 10, 1))
    assert report(stored(made_up(entries=entries, sections=()))).cut_sections == [Cut("evidence", 1, 1, 0, 0)]


def omitting(*labels, section="evidence", **changes):
    return made_up(entries=(Entry(section, 100, 50, 0, labels), Entry("answer", 10, 10, 1)), sections=(), **changes)


def test_omitted_passages_are_one_in_all_sessions_and_messages_are_not():
    records = [
        omitting("KB#1", session="a", evidence=[passage(1, state="omitted")]),
        omitting("KB#notes/1", session="b", evidence=[passage(1, label="KB#notes/1", state="omitted")]),
        omitting("KB#1", session="b", evidence=[passage(1, kb="other", source="b.md", state="omitted")]),
        *(omitting("message 1", section="history", session=name) for name in "aab"),
    ]
    assert report(stored(*records)).omitted_items == [
        Item("KB#notes/1", "evidence", "notes/a.md", "", 2),
        Item("message 1", "history", "", "a", 2),
        Item("KB#1", "evidence", "b.md", "", 1),
        Item("message 1", "history", "", "b", 1),
    ]


def test_passages_that_are_never_cited_by_hand():
    records = [
        made_up(evidence=[passage(1), passage(2, cited=True), passage(3, state="omitted"), passage(4)]),
        made_up(evidence=[passage(1, tokens=120), passage(2), passage(3, state="omitted")]),
        made_up(evidence=[passage(1, state="omitted"), passage(1, kb="other"), passage(9, kb="", source="standard input")]),
        made_up(evidence=[passage(9, kb="", source="standard input")]),
    ]
    assert report(stored(*records)).uncited_chunks == [
        Chunk("KB#1", "notes/a.md", "notes", 1, 3, 2, 220),
        Chunk("KB#3", "notes/a.md", "notes", 3, 2, 0, 0),
    ]


def test_nothing_is_a_report_too():
    assert report([]).to_dict() == {
        "num_asks": 0, "sessions": [], "cut_sections": [], "omitted_items": [], "uncited_chunks": [], "asks": [],
    }  # fmt: skip


def test_a_report_is_json():
    data = json.loads(json.dumps(report(stored(ask_using(100), ask_using(200))).to_dict(), allow_nan=False))
    assert data["num_asks"] == len(data["asks"]) == 2
    assert data["sessions"][0]["utilization_trend"] == {"first": 0.2, "second": 0.3}
    assert data["asks"][1]["ledger"]["window"] == 1000
