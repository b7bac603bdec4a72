"""Two runs on the same questions, compared against sums by hand and against scipy."""

import json
import random

import pytest

from localrag.errors import UsageError
from localrag.grading import bootstrap, compare_runs, paired_test, read_run


def answer(one, *, right=False, refused=False, answerable=True, way="ask", **fields):
    grade = {"in_evidence": True, "is_right": right, "cites_holder": right, "is_refused": refused, "num_invented": 0}
    return {"id": one, "way": way, "question": f"{one}?", "answerable": answerable, "has_answers": answerable, "grade": grade} | fields


def run(tmp_path, name, rows):
    (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return read_run(tmp_path / name)


def test_yes_and_no_by_the_exact_test_of_mcnemar():
    test = paired_test("right", [(False, True)] * 9 + [(True, False)] * 2 + [(True, True)] * 9)
    assert (test.a, test.b, test.num_only_a, test.num_only_b) == (0.55, 0.9, 2, 9)
    assert test.p_value == pytest.approx(2 * (1 + 11 + 55) / 2**11)
    assert 0 < test.low < 0.35 < test.high < 0.7


def test_the_bootstrap_is_that_of_scipy_and_the_same_again():
    stats = pytest.importorskip("scipy.stats")
    rng = random.Random(3)
    values = [rng.gauss(0.2, 1) for _ in range(80)]
    found = stats.bootstrap((values,), lambda x, axis: x.mean(axis=axis), method="percentile", random_state=1).confidence_interval
    low, high, p_value = bootstrap(values)
    assert (low, high) == pytest.approx((found.low, found.high), abs=0.02)
    assert (low, high, p_value) == bootstrap(values)
    assert bootstrap([1.0] * 5)[2] < 0.001
    assert bootstrap([0.0] * 5) == (0.0, 0.0, 1.0)


def test_each_measure_counts_the_questions_that_it_is_about(tmp_path):
    a = [answer("q1", seconds=1.0), answer("q2", right=True, seconds=3), answer("u1", answerable=False, seconds=5.0)]
    b = [
        answer("u1", answerable=False, refused=True, seconds=1.0),
        answer("q1", right=True, seconds=1),
        answer("q2", error="X", seconds=9.0),
    ]
    [compared] = compare_runs(run(tmp_path, "a", a), run(tmp_path, "b", b))
    tests = {each.measure: each for each in compared.tests}
    assert {name: each.num_pairs for name, each in tests.items()} == {
        "in_evidence": 2, "is_right": 2, "cites_holder": 2, "is_refused": 1, "is_refused_wrongly": 2, "num_invented": 3, "seconds": 2,
    }  # fmt: skip
    assert (tests["is_right"].num_only_a, tests["is_right"].num_only_b, tests["is_refused"].num_only_b) == (1, 1, 1)
    assert (tests["seconds"].a, tests["seconds"].b, tests["seconds"].difference) == (3.0, 1.0, -2.0)


def test_support_is_compared_where_both_cite(tmp_path):
    a = [answer("q1", support=0.5, unsupported_claims=["7 kg"]), answer("q2", support=None, unsupported_claims=[])]
    b = [answer("q1", support=1, unsupported_claims=[]), answer("q2", support=0.9, unsupported_claims=[])]
    [compared] = compare_runs(run(tmp_path, "a", a), run(tmp_path, "b", b))
    tests = {each.measure: each for each in compared.tests}
    assert (tests["support"].num_pairs, tests["support"].difference) == (1, 0.5)
    assert (tests["has_unsupported_claims"].num_only_a, tests["has_unsupported_claims"].num_only_b) == (1, 0)


def test_each_way_is_compared_with_itself_or_the_only_one_with_the_only_one(tmp_path):
    two = [answer("q", way="ask at 0.2"), answer("q", way="ask at 0.5")]
    runs = [run(tmp_path, name, rows) for name, rows in (("a", two), ("b", [*two, answer("q")]), ("c", [answer("q")]), ("d", two[:1]))]
    assert [(each.way, each.other) for each in compare_runs(*runs[:2])] == [("ask at 0.2", "ask at 0.2"), ("ask at 0.5", "ask at 0.5")]
    assert [(each.way, each.other) for each in compare_runs(*runs[2:])] == [("ask", "ask at 0.2")]
    with pytest.raises(UsageError, match="no way in common"):
        compare_runs(runs[0], runs[2])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([answer("q1")], "lacks 1 of the questions of the other file, such as 'q2'"),
        ([answer("q1"), answer("q2"), answer("q3")], "lacks 1 of the questions of the other file, such as 'q3'"),
        ([answer("q1"), answer("q2") | {"question": "another"}], "different questions as 'q2'"),
        ([{"id": one, "way": "ask", "scores": {"RR": 1.0}} for one in ("q1", "q2")], "One file measures retrieval"),
        ([answer("q1"), answer("q1")], "Line 2 of .* repeats 'q1' by 'ask'"),
        ([answer("q1"), {"id": "q2", "text": "x"}], "Line 2 of .* was not written by an evaluation"),
        ([answer("q1") | {"seconds": "1"}], "Line 1 of .* was not written by an evaluation"),
        ([], "has no answers"),
    ],
)
def test_what_does_not_pair(tmp_path, rows, says):
    with pytest.raises(UsageError, match=says) as caught:
        compare_runs(run(tmp_path, "a", [answer("q1"), answer("q2")]), run(tmp_path, "b", rows))
    assert caught.value.hint
