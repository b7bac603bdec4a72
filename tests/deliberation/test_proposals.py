"""Proposals: invented citations and repeated sentences are removed, and members rank what the others propose without their names."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.citation import cite
from localrag.deliberation import proposals
from localrag.deliberation.proposals import Checked, check, without_repeats
from tests.deliberation.driving import hit
from tests.growth import check_linear
from tests.json_schemas import says

GIVEN = (hit(1), hit(2), hit(7, scope="pets"))
LABELS = {each.label for each in GIVEN}


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("It lasts [KB#9].", "It lasts."),
        ("It lasts [KB#1, KB#9].", "It lasts [KB#1]."),
        ("It lasts [KB#9, KB#1].", "It lasts [KB#1]."),
        ("It lasts [KB#1, KB#9, KB#2].", "It lasts [KB#1, KB#2]."),
        ("It lasts [KB#8, KB#9]; so", "It lasts; so"),
        ("It lasts (KB#9; KB#2), so", "It lasts (KB#2), so"),
        ("It lasts (KB#9), so", "It lasts, so"),
        ("It lasts ([KB#9]) so", "It lasts so"),
        ("It lasts [[KB#9]].", "It lasts."),
        ("It lasts [ KB#9 ] so", "It lasts so"),
        ("It lasts [KB#8] [KB#9] so", "It lasts so"),
        ("It lasts [KB#8], [KB#9], so", "It lasts, so"),
        ("It lasts (see KB#9).", "It lasts (see)."),
        ("It lasts [KB#9, p. 3].", "It lasts [p. 3]."),
        ("KB#9 says so", "says so"),
        ("[KB#9] It lasts", "It lasts"),
        ("As KB#9 says", "As says"),
        ("A, KB#9, B", "A, B"),
        ("Sources: KB#9, KB#1", "Sources: KB#1"),
        ("- a [KB#9]\n- [KB#9] b\n    c [KB#9]  \nd", "- a\n- b\n    c\nd"),
        ("a[KB#9]b", "a b"),
        ("KB#pets/7, KB#pets/8 and KB#cars/7", "KB#pets/7, and"),
        ("KB#[KB#9]1", "KB# 1"),
        ("KB\0#1 [KB#9]", "KB #1"),
        ("It costs 5  dollars [KB#9],  or  so [KB#1] .", "It costs 5  dollars, or  so [KB#1] ."),
    ],
)
def test_what_is_invented_is_struck_out_and_the_text_closed_up(said, kept):
    checked = check("m", said, "stop", GIVEN)
    assert checked.text == kept
    assert checked.invented
    assert LABELS.isdisjoint(checked.invented)


@pytest.mark.parametrize(
    "form", ["[kb#99]", "[KB#1, 99]", "KB #99", "[KB#98-99]", "[KB#mem_99]", "[KB#99a]", "[99]", "[^99]", "[KB:99]", "【KB#99】", "[kb-99]"]
)
@pytest.mark.parametrize("finish_reason", ["stop", "length", "time", "cancelled"])
def test_no_spelling_of_an_invented_label_reaches_the_judge(form, finish_reason):
    checked = check("m", f"It lasts {form} long.", finish_reason, GIVEN)
    assert checked.invented
    assert "99" not in checked.proposal.text


@pytest.mark.parametrize("said", ["[KB#1]", "a[KB#1]b , ( KB#2 )  ;[KB#pets/7,KB#1]\n\n  [[KB#2]]", "KB#1", "64 KB KB#x XKB#9"])
def test_what_was_given_is_not_touched(said):
    checked = check("m", said, "stop", GIVEN)
    assert (checked.text, checked.invented, checked.num_repeated) == (said, (), 0)


def test_labels_come_in_order_of_first_mention():
    checked = check("m", "B [KB#2], x [KB#9], A KB#1, again [KB#2], y (KB#8).", "stop", GIVEN)
    assert checked.cited == ("KB#2", "KB#1")
    assert checked.invented == ("KB#9", "KB#8")
    assert proposals.union([checked, check("n", "KB#pets/7", "stop", GIVEN)]) == {"KB#1", "KB#2", "KB#pets/7"}


PIECES = st.sampled_from(["KB#1", "KB#9", "KB#pets/7", "KB#pets/9", "KB#", *"[](),;.:/*- 19x\n\0", "  "])
TEXTS = st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=60)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(TEXTS)
def test_no_label_is_left_that_was_not_given(said):
    checked = check("m", said, "stop", GIVEN)
    assert all(each.supplied for each in cite(checked.text, GIVEN))
    if not checked.num_repeated and not checked.invented:
        assert checked.text == said.strip()


def _letters(text):
    return [char for char in text if char.isalnum()]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("It lasts [KB#1", "It lasts"),
        ("It lasts KB#1", "It lasts"),
        ("It lasts [KB#9", "It lasts"),
        ("It lasts [kb:9", "It lasts"),
        ("See [KB#2, KB#pets/", "See [KB#2,"),
    ],
)
def test_a_tag_that_was_cut_off_is_none(said, kept):
    for finish_reason in ("length", "time", "cancelled"):
        checked = check("m", said, finish_reason, GIVEN)
        assert (checked.text, checked.invented) == (kept, ())
    assert check("m", "It lasts [KB#1]", "length", GIVEN).cited == ("KB#1",)


def test_reasoning_is_no_proposal():
    checked = check("m", "<think>Perhaps [KB#2]?</think>\n\nIt lasts [KB#1].", "stop", GIVEN)
    assert (checked.text, checked.cited) == ("It lasts [KB#1].", ("KB#1",))
    assert check("m", "<think>Perhaps [KB#2]?</think>", "stop", GIVEN).is_silent


@pytest.mark.parametrize(
    "sentence",
    [
        "ASA lasts in the sun [KB#1]. ",
        "Yes! ",
        "Take it.\n",
        "I choose option B. ",
        "阿斯阿可以在阳光下使用很久。",
        "a line without a stop\n",
    ],
)
@pytest.mark.parametrize("end", ["", "cut"])
def test_a_sentence_that_is_said_for_ever_is_said_once(sentence, end):
    said = sentence * 1000 + (sentence[: len(sentence) // 2] if end else "")
    checked = check("m", said, "length", GIVEN)
    assert checked.text == sentence.strip()
    assert checked.num_repeated >= 999


@pytest.mark.parametrize(
    ("said", "kept", "num_repeated"),
    [
        ("ASA lasts long. PETG is cheap. ASA   lasts long. asa lasts long. End.", "ASA lasts long. PETG is cheap. End.", 2),
        ("A loop of two. And its other half. A loop of two. And its other half.", "A loop of two. And its other half.", 2),
        ("Yes. No. Yes. No.", "Yes. No. Yes. No.", 0),
        ("The price is 3.5 dollars. The price is 3.7 dollars.", "The price is 3.5 dollars. The price is 3.7 dollars.", 0),
        ("According to Dr. Smith yes. According to Dr. Jones no.", "According to Dr. Smith yes. According to Dr. Jones no.", 0),
        ("It takes approx. five. It takes approx. six.", "It takes approx. five. It takes approx. six.", 0),
        ("| --- | --- | --- |\na\n| --- | --- | --- |\n", "| --- | --- | --- |\na\n| --- | --- | --- |", 0),
        ("```\nreturn None now\nreturn None now\n```\nreturn None now\nEnd", "```\nreturn None now\nreturn None now\n```\nEnd", 1),
        ('We take ASA (it lasts). "We take ASA." We take ASA (it lasts).', 'We take ASA (it lasts). "We take ASA."', 1),
    ],
)
def test_what_was_said_before_goes(said, kept, num_repeated):
    assert check("m", said, "stop", GIVEN).text == kept
    assert without_repeats(said)[1] == num_repeated


SENTENCES = st.sampled_from(["ASA lasts long. ", "PETG is cheap!\n", "Yes. ", "Dr. ", "so it is… ", "\n", "```\n", "x\n", "好的，这样吧。"])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(SENTENCES, max_size=30))
def test_nothing_is_added_and_no_sentence_is_left_twice(pieces):
    said = "".join(pieces).strip()
    once, num_repeated = without_repeats(said)
    assert (once == said) == (num_repeated == 0)
    if "```" not in said:
        assert once.count("PETG is cheap!") <= 1
        assert once.count("。") <= 1
    kept = iter(_letters(said))
    assert all(char in kept for char in _letters(once))  # in order, nothing added


HOSTILE = (
    "[",
    " ",
    "\n",
    ".",
    "。",
    "x",
    "</think>",
    "KB#",
    "KB#9 ",
    "[KB#9,",
    "[ \0",
    '.")',
    " ,;",
    "KB#9 ,; ",
    "(((KB#9)))",
    "A. ",
    "Dr. a ",
)


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_long_text_takes_as_long_as_its_length_says(piece):
    check_linear(lambda num: check("m", f"KB#99 {piece * num} KB#99", "length", GIVEN), 200_000 // len(piece))


def test_the_end_of_a_cut_text_goes_where_it_begins_what_was_said_before():
    assert without_repeats("Parts cool on the glass. Parts cool", is_cut=True) == ("Parts cool on the glass.", 1)
    assert without_repeats("Parts cool on the glass. Glass cools", is_cut=True) == ("Parts cool on the glass. Glass cools", 0)


NAMES = [f"m{number}" for number in range(8)]


def proposed(*names, silent=()):
    return [Checked(member=name, text="" if name in silent else f"says {name}", finish_reason="stop") for name in names]


def test_nobody_sees_a_name_or_its_own():
    shown, names = proposals.anonymous("m1", proposed("m0", "m1", "m2", "m3", silent=["m2"]))
    assert [(each.label, each.text) for each in shown] == [("Proposal A", "says m0"), ("Proposal B", "says m3")]
    assert names == {"A": "m0", "B": "m3"}


@pytest.mark.parametrize("num_letters", range(2, 8))
def test_the_form_of_a_ranking(num_letters):
    letters = list("ABCDEFG")[:num_letters]
    schema = proposals.schema(letters)
    longest = json.dumps({"ranking": letters})
    assert says(schema, longest)
    assert not says(schema, json.dumps({"ranking": [*letters, "A"]}))
    assert len(longest) <= proposals.MAX_TOKENS  # even with a token for each character
    assert proposals.parse(json.dumps({"ranking": letters[::-1]}), {letter: letter.lower() for letter in letters}) == tuple(
        letter.lower() for letter in letters[::-1]
    )


@pytest.mark.parametrize(
    ("reply", "ranked"),
    [
        ('{"ranking":["B","A","B","Z"]}', ("m1", "m0")),
        ('{"ranking":["B",["A"],{"A":1},null,7,"A"]}', ("m1", "m0")),
        ('{"ranking":["B","A', ("m1",)),
        ('{"ranking":"BA"}', ()),
        ('{"ranking":{"A":1}}', ()),
        ("[" * 100_000, ()),
        ("B, A", ()),
    ],
)
def test_what_can_be_read_of_a_ranking(reply, ranked):
    assert proposals.parse(reply, {"A": "m0", "B": "m1"}) == ranked


def test_points_by_hand():
    rankings = {"a": ("b", "c", "d"), "b": ("a", "c", "d"), "c": ("a", "b", "d"), "d": ("a", "b", "c")}
    assert proposals.points(rankings, ["a", "b", "c", "d"]) == pytest.approx({"a": 1.0, "b": (1 + 0.5 + 0.5) / 3, "c": 1 / 3, "d": 0.0})
    assert list(proposals.points(rankings, ["a", "b", "c", "d"])) == ["a", "b", "c", "d"]


def test_whom_a_reviewer_leaves_out_share_the_places_that_are_left():
    assert proposals.points({"x": ("c",)}, ["a", "b", "c"]) == {"c": 1.0, "a": 0.25, "b": 0.25}


def test_equals_stand_by_name():
    assert list(proposals.points({"x": ("b", "a"), "y": ("a", "b")}, ["b", "a"]).items()) == [("a", 0.5), ("b", 0.5)]


def test_of_one_reviewer_nothing_is_said_of_itself():
    assert proposals.points({"a": ("c", "b")}, ["a", "b", "c"]) == {"c": 1.0, "b": 0.0}
    assert proposals.points({}, ["a", "b"]) == {}
    assert proposals.points({"a": ("b",)}, ["a", "b"]) == {"b": 1.0}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(3, 8), st.data())
def test_each_reviewer_gives_half_a_point_for_each_of_the_others(num_members, data):
    members = NAMES[:num_members]
    reviewer = data.draw(st.sampled_from(members))
    others = [name for name in members if name != reviewer]
    ranking = data.draw(st.permutations(others))[: data.draw(st.integers(1, len(others)))]
    points = proposals.points({reviewer: tuple(ranking)}, members)
    assert sum(points.values()) == pytest.approx(len(others) / 2)
    assert all(0 <= each <= 1 for each in points.values())
    assert [name for name in points if name in ranking] == list(ranking) or len(ranking) == len(others)
    assert all(points[better] > points[worse] for better, worse in itertools.pairwise(ranking))
