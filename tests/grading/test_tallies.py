"""Grades added up, against sums by hand and against scipy."""

import pytest

from localrag.grading import Comparison, Grade, Outcome, Passage, Question, Share, compare, grade, sign_test, tally
from localrag.types import Citation

QUESTIONS = [Question(id=f"q{n}", question="?", answers=((str(n),),), sources=("a.md",)) for n in range(3)]
NOBODY = [Question(id=f"u{n}", question="?") for n in range(2)]
HOLDS = tuple(Passage(f"KB#{n}", "a.md", str(n)) for n in range(3))


def graded(texts, questions=(*QUESTIONS, *NOBODY), **fields):
    outcomes = [Outcome(text=text, passages=HOLDS, seconds=2.0, evaluated_tokens=100, completion_tokens=10, **fields) for text in texts]
    return [(question, outcome, grade(question, outcome)) for question, outcome in zip(questions, outcomes, strict=True)]


def test_each_number_by_hand():
    row = tally(
        "ask",
        graded(
            ["0", "I do not know.", "1", "The sources do not say.", "Yes."], citations=(Citation("KB#1", True), Citation("KB#9", False))
        ),
    )
    assert row.num_questions == 5
    assert (row.in_evidence, row.is_right, row.cites_holder) == (Share(3, 3), Share(1, 3), Share(3, 3))
    assert (row.is_refused, row.is_refused_wrongly, row.num_invented) == (Share(1, 2), Share(1, 3), 5)
    assert (row.mean_s, row.mean_evaluated_tokens, row.mean_completion_tokens, row.errors) == (2.0, 100.0, 10.0, {})
    assert row.to_dict()["is_right"] == {"num": 1, "of": 3, "low": 0.0615, "high": 0.7923}


def test_what_failed_counts_as_not_answered_and_is_named():
    failed = Outcome(error="EngineError", error_text="no", seconds=90.0)
    row = tally("ask", [*graded(["0"], QUESTIONS[:1]), (QUESTIONS[1], failed, grade(QUESTIONS[1], failed))])
    assert (row.is_right, row.in_evidence, row.mean_s, row.errors) == (Share(1, 2), Share(1, 2), 2.0, {"EngineError": 1})


def test_nothing_at_all_is_a_row_of_nothing():
    row = tally("ask", [])
    assert (row.is_right, row.is_right.value, row.is_right.interval, row.mean_s) == (Share(0, 0), 0.0, (0.0, 1.0), 0.0)


def test_two_ways_are_compared_on_what_both_were_asked():
    one = graded(["0", "1", "2", "", ""])
    two = graded(["0", "5", "5"], QUESTIONS)
    assert compare("one", one, "two", two) == Comparison("one", "two", 2, 0)
    assert compare("two", two, "one", one) == Comparison("two", "one", 0, 2)
    assert compare("one", one, "two", two).p_value == 0.5
    assert compare("one", one, "one", one).p_value == 1.0


def test_an_interval_holds_its_share():
    for of in (1, 7, 100):
        for num in range(of + 1):
            low, high = Share(num, of).interval
            assert 0 <= low <= high <= 1
            assert low - 1e-12 <= num / of <= high + 1e-12


@pytest.mark.parametrize(("num", "of"), [(0, 5), (3, 3), (15, 100), (99, 100), (1, 2)])
def test_intervals_are_those_of_scipy(num, of):
    stats = pytest.importorskip("scipy.stats")
    found = stats.binomtest(num, of).proportion_ci(0.95, method="wilson")
    assert Share(num, of).interval == pytest.approx((found.low, found.high))


@pytest.mark.parametrize(("num", "other"), [(0, 0), (1, 0), (14, 1), (5, 5), (3, 9), (40, 61), (3000, 2900)])
def test_the_sign_test_is_that_of_scipy(num, other):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(num, num + other).pvalue if num + other else 1.0
    assert sign_test(num, other) == sign_test(other, num) == pytest.approx(expected)


def test_an_outcome_is_the_same_read_back():
    outcome = Outcome(
        text="a", citations=(Citation("KB#1", True),), passages=HOLDS, prompt="ab", seconds=1.5, evaluated_tokens=3, support=0.5,
        unsupported_claims=("80 °C",),
    )  # fmt: skip
    assert Outcome.from_dict(outcome.to_dict()) == outcome
    failed = Outcome(error="EngineError", error_text="no")
    assert Outcome.from_dict(failed.to_dict()) == failed
    assert "error" not in outcome.to_dict()


@pytest.mark.parametrize(
    "row", [{"text": 1}, {"seconds": "1"}, {"citations": {}}, {"citations": [1]}, {"passages": [{"label": "KB#1"}]}, {"prompt_tokens": 1.5}]
)
def test_what_is_no_outcome(row):
    with pytest.raises((TypeError, KeyError)):
        Outcome.from_dict(row)


def test_a_grade_is_fit_for_json():
    assert Grade(in_evidence=True, is_right=False, cites_holder=False, num_invented=2, is_refused=False).to_dict()["num_invented"] == 2


def test_support_is_the_mean_over_answers_that_cite():
    supports = [(0.5, ()), (1.0, ("80 °C",)), (None, ())]
    outcomes = [Outcome(text="a", support=support, unsupported_claims=claims) for support, claims in supports]
    question = Question(id="q", question="Why?")
    row = tally("ask", [(question, outcome, grade(question, outcome)) for outcome in outcomes])
    assert (row.mean_support, row.is_supported) == (0.75, Share(1, 2))
    assert tally("ask", []).mean_support is None
