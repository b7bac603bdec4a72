"""Members rank what the others propose, without their names."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.deliberation import proposals
from localrag.deliberation.proposals import Checked
from tests.json_schemas import says

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
