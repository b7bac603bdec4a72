"""cut_middle: a text in so many tokens, with its beginning and its end."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localrag.citation import TAG
from localrag.summary import cut_middle
from tests.summary.test_summary import COUNTERS, TEXTS, Counted, in_bytes, in_words

MARK = " […] "


def halves(cut, text):
    """Every way to see a cut text as a beginning and an end of the whole."""
    places = [match.start() for match in re.finditer(re.escape(MARK), cut)]
    pairs = [(cut[:place], cut[place + len(MARK) :]) for place in places]
    return [(head, tail) for head, tail in pairs if head and tail and text.startswith(head) and text.endswith(tail)]


@given(TEXTS, st.integers(-1, 120), st.sampled_from(COUNTERS))
@settings(max_examples=400, deadline=None)
@example("word " * 200, 10, in_words)
@example("a" * 500, 30, in_bytes)
@example("🔥" * 99, 20, in_bytes)
@example("\n" * 300 + "a", 3, in_bytes)
@example("a. " * 60, 40, in_bytes)
def test_it_keeps_its_limit_and_both_ends(text, limit, count):
    cut = cut_middle(text, limit, count)
    assert count(cut) <= max(0, limit)
    assert cut_middle(cut, limit, count) == cut
    if count(text) <= limit:
        assert cut == text
    elif count(text.strip()) <= limit:
        assert cut == text.strip()
    elif limit >= 32:
        assert halves(cut, text.strip())
        assert len(cut) - len(MARK) < len(text)
    elif cut:
        assert halves(cut, text.strip()) or text.strip().startswith(cut.removesuffix(MARK.rstrip()))


def test_by_hand():
    text = "One is here. Two is here. Three is here. Four is here. Five is here. Six is here."
    assert cut_middle(text, 11, in_words) == "One is here. […] Five is here. Six is here."
    assert cut_middle(text, 5, in_words) == "One is […] is here."  # no sentence is so short
    assert cut_middle(text, 2, in_words) == "One […]"
    assert cut_middle(text, 1, in_words) == ""
    assert cut_middle("a" * 30 + "b" * 30, 27, in_bytes) == "a" * 8 + MARK + "b" * 12


def test_lines_are_borders_too():
    text = "\n".join(f"- line {n}" for n in range(100))
    cut = cut_middle(text, 100, in_bytes)
    [(head, tail)] = halves(cut, text)
    assert head.splitlines() == text.splitlines()[: len(head.splitlines())]
    assert tail.splitlines() == text.splitlines()[-len(tail.splitlines()) :]


@pytest.mark.parametrize("limit", [40, 200, 1000, 4000])
def test_prose_is_cut_at_sentences_and_most_of_the_room_is_used(limit):
    prose = " ".join(f"Part number {n} cools slowly on the plate of glass." for n in range(2000))
    cut = cut_middle(prose, limit, in_words)
    [(head, tail)] = halves(cut, prose)
    assert re.search(r"[.!?]$", head)
    assert re.search(r"[.!?] $", prose[: len(prose) - len(tail)])
    assert in_words(tail) > in_words(head)
    assert in_words(cut) > limit // 2


def test_what_is_whole_stays_whole():
    text = "材料" * 30 + "[KB#123456]" * 40 + "温度" * 30
    labels = {"KB#123456"}
    for limit in range(20, 700):
        cut = cut_middle(text, limit, in_bytes, whole=TAG)
        assert in_bytes(cut) <= limit
        assert set(TAG.findall(cut)) <= labels
        assert "KB#" not in TAG.sub("", cut)
        assert not re.search(r"#\d|\d", TAG.sub("", cut))


@pytest.mark.parametrize("piece", ["Some words. ", "x", "\n", "a\n", " ", "文", ". ", ".)"])
def test_five_megabytes_take_few_counts(piece):
    text = "Begin here. " + piece * (5_000_000 // len(piece)) + " The end."
    count = Counted(in_bytes)
    cut = cut_middle(text, 3000, count)
    assert cut.startswith("Begin here.")
    assert cut.endswith("The end.")
    assert count.calls < 80
    assert count.chars < 4 * len(text)
