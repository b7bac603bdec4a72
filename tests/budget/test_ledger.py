"""The account of a window: what it adds up to, what it refuses, and its JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.budget import Entry, Ledger

ENTRIES = (
    Entry("template", wanted=17, allotted=17, used=17),
    Entry("evidence", wanted=9120, allotted=1400, used=1391, omitted=("KB#88", "KB#3")),
    Entry("answer", wanted=512, allotted=512, used=64),
)
LEDGER = Ledger(8192, ENTRIES)


def test_it_adds_up():
    assert LEDGER.spare == 6263  # 8192 - 17 - 1400 - 512
    assert LEDGER.prompt_tokens == 1408  # 17 + 1391; the answer is no part of the prompt


def test_an_entry_is_found_by_name():
    assert LEDGER.entry("evidence") is ENTRIES[1]
    with pytest.raises(KeyError, match="tools"):
        LEDGER.entry("tools")


def test_using_more_gives_a_new_ledger():
    done = LEDGER.with_used("answer", 500)
    assert done.entry("answer") == Entry("answer", wanted=512, allotted=512, used=500)
    assert done.entries[:2] == ENTRIES[:2]
    assert LEDGER.entry("answer").used == 64
    with pytest.raises(ValueError, match="more tokens are used"):
        LEDGER.with_used("answer", 513)
    with pytest.raises(KeyError, match="tools"):
        LEDGER.with_used("tools", 0)


def test_the_json_is_the_one_that_is_documented():
    assert json.loads(json.dumps(LEDGER.to_dict())) == {
        "window": 8192,
        "entries": [
            {"name": "template", "wanted": 17, "allotted": 17, "used": 17, "omitted": []},
            {"name": "evidence", "wanted": 9120, "allotted": 1400, "used": 1391, "omitted": ["KB#88", "KB#3"]},
            {"name": "answer", "wanted": 512, "allotted": 512, "used": 64, "omitted": []},
        ],
        "spare": 6263,
    }
    assert [list(LEDGER.to_dict()), list(LEDGER.to_dict()["entries"][0])] == [
        ["window", "entries", "spare"],
        ["name", "wanted", "allotted", "used", "omitted"],
    ]


def test_a_spare_that_does_not_follow_is_refused():
    with pytest.raises(ValueError, match="spare is 1, but the entries leave 6263"):
        Ledger.from_dict(LEDGER.to_dict() | {"spare": 1})


@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        ({"wanted": -1, "allotted": 0, "used": 0}, "negative"),
        ({"wanted": 0, "allotted": -1, "used": -1}, "negative"),
        ({"wanted": 0, "allotted": 0, "used": -1}, "negative"),
        ({"wanted": 9, "allotted": 3, "used": 4}, "more tokens are used than were allotted"),
    ],
)
def test_an_entry_that_cannot_be_true_is_refused(counts, fault):
    with pytest.raises(ValueError, match=fault):
        Entry("a", **counts)


def test_a_ledger_that_cannot_be_true_is_refused():
    entry = Entry("a", wanted=5, allotted=5, used=5)
    assert Ledger(5, (entry,)).spare == 0
    with pytest.raises(ValueError, match="5 tokens are allotted in a window of 4"):
        Ledger(4, (entry,))
    with pytest.raises(ValueError, match="window of -1"):
        Ledger(-1, ())
    with pytest.raises(ValueError, match="one name"):
        Ledger(10, (entry, entry))


def test_it_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LEDGER.window = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        ENTRIES[0].used = 1


@st.composite
def ledgers(draw) -> Ledger:
    entries = []
    for name in draw(st.lists(st.text(), unique=True, max_size=6)):
        allotted = draw(st.integers(0, 9999))
        used, wanted = draw(st.integers(0, allotted)), draw(st.integers(0, 99_999))
        entries.append(Entry(name, wanted, allotted, used, tuple(draw(st.lists(st.text(), max_size=3)))))
    return Ledger(sum(entry.allotted for entry in entries) + draw(st.integers(0, 9999)), tuple(entries))


@settings(derandomize=True, deadline=None)
@given(ledgers())
def test_json_and_back(ledger):
    assert Ledger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger
