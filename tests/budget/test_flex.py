"""The sharing of a window: examples that a reader can check by hand, and properties."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.budget import Percent, Section, negotiate, settle
from localrag.errors import BudgetExceededError, ConfigError, UsageError
from tests.budget.reckoning import limits


def share(window: int, *sections: Section) -> dict[str, int]:
    return dict(negotiate(window, sections).allocations)


# Examples. The arithmetic stands beside each.


def test_growing_shares_the_room_in_the_ratio_of_grow():
    # 110 - 10 - 20 = 80 to give, 1 : 3, so 20 and 60
    assert share(110, Section(name="a", basis=10, grow=1), Section(name="b", basis=20, grow=3)) == {"a": 30, "b": 80}


def test_shrinking_takes_in_the_ratio_of_shrink_times_basis():
    # 50 too many; weights 1 x 100 and 2 x 50, so 25 from each
    assert share(100, Section(name="a", basis=100), Section(name="b", basis=50, shrink=2)) == {"a": 75, "b": 25}


def test_what_hits_its_min_is_frozen_and_the_others_give_the_rest():
    # 100 too many; weights 100 : 60 : 40 would leave 50, 30, 20. a stops at 90. Now b and c hold 100 and may have 10: 6 and 4.
    a, b, c = Section(name="a", basis=100, min=90), Section(name="b", basis=60), Section(name="c", basis=40)
    assert share(100, a, b, c) == {"a": 90, "b": 6, "c": 4}


def test_what_hits_its_max_is_frozen_and_the_others_take_the_rest():
    # 100 to give, 1 : 1 : 2, would be 25, 25, 50. a stops at 10. The other 90 go 1 : 2.
    a, b, c = Section(name="a", max=10, grow=1), Section(name="b", grow=1), Section(name="c", grow=2)
    assert share(100, a, b, c) == {"a": 10, "b": 30, "c": 60}


def test_where_both_kinds_of_limit_break_the_larger_breach_is_settled_first():
    # 100 to give, 33 1/3 each: a lacks 26 2/3 of its min, b is 8 1/3 over its max. So a is frozen at 60 and b is not. The
    # other 40 are 20 each, and b's max is not in the way. Freezing both at once would have given b 25 and c 15.
    a, b, c = Section(name="a", min=60, grow=1), Section(name="b", max=25, grow=1), Section(name="c", grow=1)
    assert share(100, a, b, c) == {"a": 60, "b": 20, "c": 20}


def test_percentages_are_of_what_the_fixed_sections_leave():
    # 1100 - 100 = 1000. a starts at 30 % = 300; 700 to give, 350 each, but b stops at 10 % = 100.
    a, b, c = Section(name="a", basis=Percent(30)), Section(name="b", max=Percent(10), grow=1), Section(name="c", grow=1)
    assert share(1100, Section.fixed("fixed", 100), a, b, c) == {"fixed": 100, "a": 300, "b": 100, "c": 600}


@pytest.mark.parametrize(("percent", "tokens"), [(0, 0), (33, 329), (0.3, 2), (99.99, 998), (100, 999)])
def test_a_percentage_is_rounded_down(percent, tokens):
    assert share(999, Section(name="a", basis=Percent(percent))) == {"a": tokens}


def test_a_percentage_is_the_decimal_number_that_was_written():
    # The float 0.3 is a little under 0.3; taken as it is, 0.3 % of 1000 would round down to 2.
    assert share(1000, Section(name="a", basis=Percent(0.3))) == {"a": 3}


def test_grow_factors_under_one_give_out_only_that_fraction():
    # CSS too: 0.25 and 0.5 of 100, and a quarter is left.
    budget = negotiate(100, [Section(name="a", grow=0.25), Section(name="b", grow=0.5)])
    assert budget.allocations == {"a": 25, "b": 50}
    assert budget.spare == 25


def test_decimal_factors_that_add_up_to_one_leave_nothing():
    # As binary floats 0.1 + 0.2 + 0.7 is under 1, which would cost a token.
    budget = negotiate(10, [Section(name="a", grow=0.1), Section(name="b", grow=0.2), Section(name="c", grow=0.7)])
    assert budget.allocations == {"a": 1, "b": 2, "c": 7}
    assert budget.spare == 0


def test_shrink_factors_under_one_still_remove_all_of_the_excess():
    # CSS would take 0.5 of the 50 too many, and overflow by 25.
    assert share(50, Section(name="a", basis=100, shrink=0.5)) == {"a": 50}


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (100, {"a": 34, "b": 33, "c": 33}),  # 33 1/3 each: equal remainders, the one token left goes by name
        (101, {"a": 34, "b": 34, "c": 33}),  # 33 2/3 each: two left
        (102, {"a": 34, "b": 34, "c": 34}),
    ],
)
def test_equal_remainders_go_by_name(window, expected):
    assert share(window, *(Section(name=name, grow=1) for name in "cab")) == expected


def test_the_largest_remainder_gets_the_token_left_over():
    # 10 in the ratio 1 : 2 : 4 is 1 3/7, 2 6/7, 5 5/7: whole parts 1 + 2 + 5, two left, for b and c.
    assert share(10, *(Section(name=name, grow=grow) for name, grow in (("a", 1), ("b", 2), ("c", 4)))) == {"a": 1, "b": 3, "c": 6}


def test_the_sum_is_the_exact_sum_rounded_down():
    assert share(7, Section(name="a", grow=0.5)) == {"a": 3}  # 3 1/2
    assert share(10, Section(name="b", grow=0.25), Section(name="a", grow=0.25)) == {"a": 3, "b": 2}  # 2 1/2 each: 5 in all


@pytest.mark.parametrize(
    ("window", "prompt", "answer", "expected"),
    [
        (16385, 13000, Section(name="answer", basis=5000), 3385),
        (16000, 15500, Section(name="answer", basis=3000, min=500), 500),
        (8192, 1000, Section(name="answer", basis=512, max=2048, grow=1), 2048),
    ],
)
def test_the_answer_gives_way_to_a_fixed_prompt(window, prompt, answer, expected):
    assert share(window, Section.fixed("prompt", prompt), answer) == {"prompt": prompt, "answer": expected}


def test_floors_that_do_not_fit_are_an_error_with_every_number():
    fixed, answer, kept = Section.fixed("prompt", 15600), Section(name="answer", basis=3000, min=500), Section(name="kept")
    with pytest.raises(BudgetExceededError) as caught:
        negotiate(16000, [fixed, answer, kept])
    assert caught.value.numbers == {
        "window": 16000,
        "needed": 16100,
        "over": 100,
        "sections": {"prompt": 15600, "answer": 500, "kept": 0},
    }
    assert negotiate(16100, [fixed, answer, kept]).spare == 0


def test_shrink_zero_makes_the_basis_a_floor_within_the_limits():
    stiff = Section(name="stiff", basis=80, max=60, shrink=0)
    assert share(70, stiff, Section(name="soft", basis=100)) == {"stiff": 60, "soft": 10}
    with pytest.raises(BudgetExceededError) as caught:
        negotiate(59, [stiff, Section(name="soft", basis=100)])
    assert caught.value.numbers["sections"] == {"stiff": 60, "soft": 0}


def test_a_min_goes_before_a_max_that_a_small_window_pushes_under_it():
    assert share(100, Section(name="a", min=50, max=Percent(10), grow=1)) == {"a": 50}


def test_a_percentage_of_nothing_is_nothing():
    assert share(100, Section.fixed("fixed", 100), Section(name="a", basis=Percent(50))) == {"fixed": 100, "a": 0}
    with pytest.raises(BudgetExceededError):
        negotiate(99, [Section.fixed("fixed", 100), Section(name="a", min=Percent(50))])


def test_the_smallest_windows():
    assert share(0) == {}
    assert negotiate(7, []).spare == 7
    assert share(0, Section(name="a", basis=10, grow=1), Section(name="b")) == {"a": 0, "b": 0}
    assert share(1, Section(name="b", grow=1), Section(name="a", grow=1)) == {"a": 1, "b": 0}


# What would stay spare.


def test_spare_tokens_go_beyond_a_max_and_take_nothing_from_others():
    # 100: evidence may have half, history grows to all of its 30, the answer has 10. Of the 10 that are left evidence takes its 10.
    evidence = Section(name="evidence", basis=Percent(50), max=Percent(50), spare=1, content=80)
    history, answer = Section(name="history", grow=1, content=30), Section(name="answer", basis=10, max=10)
    assert share(100, evidence, history, answer) == {"evidence": 60, "history": 30, "answer": 10}
    # With a history of 90 nothing is spare: it grows by all that the others leave, and evidence stays at its max.
    assert share(100, evidence, dataclasses.replace(history, content=90), answer) == {"evidence": 50, "history": 40, "answer": 10}
    # With as much as there is to place, the rest stays spare.
    assert negotiate(200, [evidence, history, answer]).spare == 200 - 80 - 30 - 10


def test_spare_tokens_are_shared_in_the_ratio_of_spare():
    # 40 are left when both have their max of 30; 1 : 3 of them are 10 and 30.
    a, b = (Section(name=name, basis=30, max=30, spare=spare) for name, spare in (("a", 1), ("b", 3)))
    assert share(100, a, b) == {"a": 40, "b": 60}


def test_without_spare_tokens_nothing_goes_beyond_its_max():
    a, b = Section(name="a", basis=60, max=60, spare=1), Section(name="b", basis=80)
    assert share(100, a, b) == {"a": 43, "b": 57}  # 40 too many, in the ratio 60 : 80


# Input that is refused.


@pytest.mark.parametrize("window", [-1, 1.0, True, "8192", None])
def test_a_window_is_a_whole_number_of_tokens(window):
    with pytest.raises(UsageError, match="window"):
        negotiate(window, [])


def test_two_sections_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="'a'"):
        negotiate(10, [Section(name="b"), Section(name="a"), Section(name="a")])


def test_a_budget_does_not_change():
    budget = negotiate(10, [Section(name="a", grow=1)])
    with pytest.raises(TypeError):
        budget.allocations["a"] = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.window = 3


# Properties.

TOKENS = st.integers(0, 20_000)
PERCENTS = st.builds(Percent, st.floats(0, 100))
FACTORS = st.sampled_from([0, 0.1, 0.3, 0.7, 1, 2, 3.5]) | st.floats(0, allow_infinity=False)
ALWAYS_THE_SAME = settings(derandomize=True, deadline=None)


@st.composite
def section_lists(draw, percents=PERCENTS) -> list[Section]:
    sections = []
    for name in draw(st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=8)):
        if draw(st.integers(0, 4)) == 0:
            sections.append(Section.fixed(name, draw(TOKENS)))
            continue
        low, high = draw(st.integers(0, 500) | percents), draw(st.none() | TOKENS | percents)
        if isinstance(low, int) and isinstance(high, int):
            low, high = min(low, high), max(low, high)
        elif isinstance(low, Percent) and isinstance(high, Percent):
            low, high = sorted((low, high), key=lambda percent: percent.value)
        basis = draw(TOKENS | percents)
        sections.append(Section(name=name, basis=basis, min=low, max=high, grow=draw(FACTORS), shrink=draw(FACTORS)))
    return sections


def least(section: Section, basis: int, low: int, high: int) -> int:
    return low if section.shrink else max(low, min(basis, high))


@ALWAYS_THE_SAME
@given(st.integers(0, 60_000), section_lists(), st.randoms(use_true_random=False))
def test_a_budget_keeps_its_word(window, sections, random):
    """Never over the window, always within the limits, whatever the order; an error if and only if the floors do not fit."""
    sizes = limits(window, sections)
    floors = {section.name: least(section, *sizes[section.name]) for section in sections}
    shuffled = random.sample(sections, len(sections))
    if sum(floors.values()) > window:
        for order in (sections, shuffled):
            with pytest.raises(BudgetExceededError) as caught:
                negotiate(window, order)
            assert caught.value.numbers["sections"] == floors
            assert caught.value.numbers["over"] == sum(floors.values()) - window
        return
    budget = negotiate(window, sections)
    assert list(budget.allocations) == [section.name for section in sections]
    assert budget.spare >= 0
    assert all(low <= budget.allocations[name] <= high for name, (_, low, high) in sizes.items())
    assert negotiate(window, shuffled) == budget == negotiate(window, sections)


@ALWAYS_THE_SAME
@given(st.integers(0, 60_000), section_lists(), st.lists(FACTORS, min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_what_takes_spare_tokens_takes_them_from_nobody(window, sections, factors, random):
    given_factors = zip(sections, factors, strict=False)
    asking = [section if section.is_fixed else dataclasses.replace(section, spare=each) for section, each in given_factors]
    try:
        before = negotiate(window, sections)
    except BudgetExceededError:
        return
    budget = negotiate(window, asking)
    assert budget.spare >= 0
    assert budget == negotiate(window, random.sample(asking, len(asking)))
    for section in asking:
        had, has = before.allocations[section.name], budget.allocations[section.name]
        assert has == had or (has > had and section.spare)
    if sum(section.spare for section in asking) >= 1:
        assert budget.spare == 0


@ALWAYS_THE_SAME
@given(st.integers(0, 60_000), section_lists())
def test_nothing_is_left_while_a_section_could_still_take_it(window, sections):
    """Too much wanted: all of the window is used. Room left: all of it is given, or all that grow at full strength are full."""
    try:
        budget = negotiate(window, sections)
    except BudgetExceededError:
        return
    sizes = limits(window, sections)
    if sum(max(low, min(basis, high)) for basis, low, high in sizes.values()) >= window:
        assert budget.spare == 0
    elif budget.spare:
        hungry = [section for section in sections if section.grow and budget.allocations[section.name] < sizes[section.name][2]]
        assert sum(Fraction(str(section.grow)) for section in hungry) < 1


@ALWAYS_THE_SAME
@given(st.integers(0, 20_000), st.integers(0, 2_000), st.integers(0, 300), st.integers(0, 5_000), FACTORS, FACTORS)
def test_a_larger_window_never_gives_a_growing_section_less(window, step, low, basis, grow, shrink):
    """For one growing section. Among several, whole tokens by largest remainder may move one token (the Alabama paradox)."""
    fixed, growing = Section.fixed("fixed", 100), Section(name="a", basis=basis, min=low, grow=grow, shrink=shrink)
    smaller = 100 + (low if shrink else max(low, basis)) + window
    assert share(smaller, fixed, growing)["a"] <= share(smaller + step, fixed, growing)["a"]


@ALWAYS_THE_SAME
@given(st.integers(0, 60_000), st.integers(0, 2_000), section_lists(percents=st.nothing()))
def test_a_larger_window_takes_at_most_the_token_of_rounding(window, step, sections):
    """Without percentages: in a larger window they are larger themselves, and may take from another section."""
    try:
        smaller = negotiate(window, sections).allocations
    except BudgetExceededError:
        return
    larger = negotiate(window + step, sections).allocations
    assert all(larger[name] >= smaller[name] - 1 for name in smaller)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.integers(0, 9000), more=st.integers(0, 500))
def test_settled_sizes_are_the_outcome_of_their_own_numbers(seed, window, more):
    rng = random.Random(seed)
    sections = [
        Section(
            name=name,
            basis=rng.choice([0, 700, 3000, Percent(50)]),
            max=rng.choice([None, Percent(60), 4000]),
            grow=rng.choice([0.0, 0.3, 1.0]),
            shrink=rng.choice([0.0, 0.25, 1.0]),
        )
        for name in ("history", "evidence", "thinking", "answer")
    ]
    try:
        budget = negotiate(window, sections)
    except BudgetExceededError:
        return
    allotted = {name: max(0, tokens - rng.choice([0, 0, 7, 5000])) for name, tokens in budget.allocations.items() if rng.random() < 0.9}
    allotted["question"] = rng.randint(0, max(0, window - sum(allotted.values())))
    settled = settle(budget, window + more, allotted)
    assert settled.allocations == allotted
    again = [Section(name=i.name, basis=i.basis, min=i.min, max=i.max, grow=i.grow, shrink=i.shrink) for i in settled.items]
    assert negotiate(window + more, again).allocations == allotted


def test_a_settled_negotiation_keeps_the_numbers_that_lead_to_its_sizes():
    budget = negotiate(1000, [Section(name="history", basis=100, grow=1.0), Section(name="answer", basis=64, max=900, grow=1.0)])
    assert budget.allocations == {"history": 518, "answer": 482}
    settled = {item.name: item for item in settle(budget, 1000, {"history": 500, "answer": 500}).items}
    assert (settled["history"].basis, settled["history"].max, settled["history"].grow) == (100, 500, 1.0)
    assert (settled["answer"].basis, settled["answer"].max, settled["answer"].grow) == (64, 900, 1.0)
    with pytest.raises(UsageError, match="1001 tokens are allotted"):
        settle(budget, 1000, {"answer": 1001})
