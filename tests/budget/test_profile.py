"""A profile is a way of sharing any window, or a configuration error of one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localrag.budget import CUTS, OVERFLOWS, SECTIONS, TIERS, Flex, Length, Percent, Profile, Section, Tier, negotiate
from localrag.errors import BudgetExceededError, ConfigError

ALLOWED = {
    "tools": {"drop", "error"},
    "memories": {"drop", "truncate", "error"},
    "summary": {"truncate"},
    "history": {"oldest", "truncate", "summarize", "error"},
    "attachments": {"drop", "truncate", "summarize", "error"},
    "cited": {"drop", "truncate", "error"},
    "evidence": {"drop", "truncate", "summarize", "error"},
    "proposals": {"middle", "error"},
    "plan": {"truncate", "drop", "error"},
    "thinking": {"never"},
    "answer": {"never"},
}
"""What may become of what is too much, section by section."""

PERCENTS = st.decimals(0, 100, places=2).map(lambda value: Percent(float(value)))
LENGTHS = st.one_of(st.integers(0, 3000), PERCENTS)
FACTORS = st.sampled_from([0, 0.0, 1e-6, 0.1, 0.3, 1, 2.5, 1000])


def is_over(low: Length, high: Length | None) -> bool:
    if isinstance(low, Percent) and isinstance(high, Percent):
        return low.value > high.value
    return isinstance(low, int) and isinstance(high, int) and low > high


@st.composite
def flexes(draw, name: str) -> Flex:
    low, high = draw(LENGTHS), draw(st.none() | LENGTHS)
    if is_over(low, high):
        low, high = high, low
    basis = draw(st.none() | LENGTHS)
    return Flex(basis=basis, min=low, max=high, grow=draw(FACTORS), shrink=draw(FACTORS), cut=draw(st.sampled_from(sorted(ALLOWED[name]))))


@st.composite
def tiers(draw) -> tuple[Tier, ...]:
    thresholds = sorted(draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)), reverse=True)
    cuts = sorted(draw(st.lists(st.integers(0, 1000), min_size=3, max_size=3)))
    shares = [(high - low) / 10 for low, high in zip([0, *cuts], cuts, strict=False)]
    return tuple(Tier(tier.name, share, threshold) for tier, share, threshold in zip(TIERS, shares, thresholds, strict=True))


@st.composite
def profiles(draw) -> Profile:
    names = draw(st.lists(st.sampled_from(sorted(SECTIONS)), unique=True, max_size=3))
    sections = {name: draw(flexes(name)) for name in names}
    return Profile(gap=draw(LENGTHS), max_messages=draw(st.none() | st.integers(0, 50)), tiers=draw(tiers()), sections=sections)


def offered(profile: Profile, contents: dict[str, int]) -> list[Section]:
    """The sections of an ask with so much to place."""
    gap = Section(name="gap", basis=profile.gap, min=profile.gap, max=profile.gap, shrink=0)
    return [Section.fixed("question", 20), gap, *(profile.sections[name].section(name, tokens) for name, tokens in contents.items())]


CONTENTS = st.dictionaries(st.sampled_from(sorted(SECTIONS)), st.integers(0, 6000))


@settings(max_examples=150, deadline=None)
@given(profiles(), CONTENTS, st.integers(0, 9000))
def test_any_profile_shares_any_window_or_is_refused_with_the_numbers(profile, contents, window):
    sections = offered(profile, contents)
    try:
        budget = negotiate(window, sections)
    except BudgetExceededError as error:
        assert sum(error.numbers["sections"].values()) == error.numbers["needed"] > window
        return
    assert sum(budget.allocations.values()) + budget.spare == window
    assert budget.spare >= 0
    assert budget.allocations["question"] == 20
    for name, content in contents.items():
        given_tokens = budget.allocations[name]
        assert given_tokens <= content
        if profile.sections[name].cut == "error":
            assert given_tokens == content


@settings(max_examples=100, deadline=None)
@given(CONTENTS, st.integers(0, 9000))
def test_the_defaults_share_every_window_that_holds_the_question_and_the_least_that_is_written(contents, window):
    contents = contents | {"answer": 512}
    assume(window >= 20 + 32 + min(32, contents.get("thinking", 0)))
    budget = negotiate(window, offered(Profile(), contents))
    assert 32 <= budget.allocations["answer"] <= 512
    half = (window - 20) // 2
    assert budget.allocations.get("evidence", 0) <= half


@settings(max_examples=50, deadline=None)
@given(profiles(), st.sampled_from(OVERFLOWS))
def test_an_overflow_for_all_changes_the_cuts_that_can_be_so_and_nothing_else(profile, overflow):
    wanted = {"prioritize": {"drop", "oldest"}, "truncate": {"truncate", "middle"}, "summarize": {"summarize"}, "error": {"error"}}[
        overflow
    ]
    made = profile.with_overflow(overflow)
    assert replace(made, sections=profile.sections) == profile
    for name, flex in made.sections.items():
        before = profile.sections[name]
        assert replace(flex, cut=before.cut) == before
        if name in ("answer", "summary"):
            assert flex == before
        elif ALLOWED[name] & wanted:
            assert flex.cut in wanted
        else:
            assert flex.cut == before.cut
    assert made.with_overflow(overflow) == made


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("section", SECTIONS)
def test_an_overflow_for_one_section_is_taken_or_refused(section, overflow):
    wanted = {"prioritize": {"drop", "oldest"}, "truncate": {"truncate", "middle"}, "summarize": {"summarize"}, "error": {"error"}}[
        overflow
    ]
    if ALLOWED[section] & wanted:
        made = Profile().with_overflow(overflow, section)
        assert made.sections[section].cut in wanted
        assert {**made.sections, section: SECTIONS[section]} == SECTIONS
    else:
        with pytest.raises(ConfigError, match=f"'{section}' cannot {overflow}") as caught:
            Profile().with_overflow(overflow, section)
        assert {cut for cut in CUTS if cut in caught.value.hint} == ALLOWED[section]


@settings(max_examples=50, deadline=None)
@given(profiles(), st.floats(0, 1))
def test_a_context_ratio_is_the_most_and_the_basis_of_evidence(profile, ratio):
    made = profile.with_context_ratio(ratio)
    evidence = made.sections["evidence"]
    assert evidence.basis == evidence.max
    assert evidence.max.value == pytest.approx(100 * ratio, abs=1e-6)
    assert not is_over(evidence.min, evidence.max)
    assert evidence.spare == 0  # a ratio that was asked for is a limit
    assert made.with_spare_for_evidence() == made
    assert replace(evidence, basis=None, min=0, max=None, spare=None) == replace(
        profile.sections["evidence"], basis=None, min=0, max=None, spare=None
    )
    assert replace(made, sections=profile.sections) == profile
    assert made.with_context_ratio(ratio) == made


@pytest.mark.parametrize("ratio", [0.1, 0.29, 1 / 3, 0.57, 0.6])
def test_a_context_ratio_is_a_decimal_number(ratio):
    """0.57 is 57 %, although 100 * 0.57 is 56.99999999999999."""
    assert Profile().with_context_ratio(ratio).sections["evidence"].max == Percent(round(100 * ratio, 6))


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_context_ratio_outside_0_to_1_is_refused(ratio):
    with pytest.raises(ConfigError, match="from 0 to 100"):
        Profile().with_context_ratio(ratio)


def test_what_is_not_set_is_as_in_the_default_and_nothing_can_be_changed():
    made = Profile(sections={"history": Flex(cut="oldest")})
    assert made.sections == {**SECTIONS, "history": Flex(cut="oldest")}
    with pytest.raises(TypeError):
        made.sections["history"] = Flex()


REACHED = {None: "primary", 1: "primary", 0.7: "primary", 0.69: "supporting", 0.5: "supporting", 0.3: "reference", 0.29: None, 0: None}


@pytest.mark.parametrize(("relevance", "tier"), REACHED.items())
def test_a_hit_belongs_to_the_first_tier_that_it_reaches(relevance, tier):
    assert Profile().tier(relevance) == tier


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"sections": {"histroy": Flex()}}, ["'histroy'", "unknown"]),
        ({"sections": {"system": Flex()}}, ["'system'", "always sent whole"]),
        ({"sections": {"history": Flex(cut="drop")}}, ["'history'", "cut must be one of oldest, truncate, summarize, error, not 'drop'"]),
        ({"sections": {"answer": Flex(cut="error")}}, ["'answer'", "cut must be one of never"]),
        ({"sections": {"tools": Flex(min=2, max=1)}}, ["'tools'", "greater than its max"]),
        ({"sections": {"tools": Flex(grow=-1)}}, ["'tools'", "grow", "not -1"]),
        ({"sections": {"tools": Flex(basis=-1)}}, ["'tools'", "basis", "not -1"]),
        ({"gap": -1}, ["'gap'", "not -1"]),
        ({"gap": 1.5}, ["'gap'", "not 1.5"]),
        ({"gap": None}, ["'gap'"]),
        ({"max_messages": -1}, ["max_messages", "not -1"]),
        ({"max_messages": True}, ["max_messages", "not True"]),
        ({"max_messages": 2.0}, ["max_messages", "not 2.0"]),
        ({"tiers": (Tier("a", -1, 0.5),)}, ["tier 'a'", "not -1"]),
        ({"tiers": (Tier("a", float("nan"), 0.5),)}, ["tier 'a'", "nan"]),
        ({"tiers": (Tier("a", float("inf"), 0.5),)}, ["tier 'a'", "inf"]),
        ({"tiers": (Tier("a", 10, 1.5),)}, ["tier 'a'", "1.5"]),
        ({"tiers": (Tier("a", "10", 0.5),)}, ["tier 'a'", "'10'"]),
        ({"tiers": (Tier("a", 10, None),)}, ["tier 'a'", "None"]),
        ({"tiers": (Tier("a", 60, 0.5), Tier("b", 40.1, 0.5))}, ["shares of the tiers add up to 100.1 %"]),
        ({"tiers": (Tier("a", 10, 0.5), Tier("b", 10, 0.6))}, ["thresholds of the tiers must fall"]),
    ],
)
def test_a_bad_value_is_one_line(fields, parts):
    with pytest.raises(ConfigError) as caught:
        Profile(**fields)
    assert [part for part in parts if part not in caught.value.message] == [], caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(("overflow", "section"), [("sumarize", None), ("sumarize", "history"), ("error", "histroy"), ("error", "system")])
def test_an_overflow_or_a_section_that_is_not_known_is_refused(overflow, section):
    with pytest.raises(ConfigError, match=r"overflow must be one of|has no overflow"):
        Profile().with_overflow(overflow, section)


JUNK = st.sampled_from([None, "x", "30%", -1, -0.5, float("nan"), float("inf"), 1.5, True, 101, Percent(7), (), {}])


@settings(deadline=None)
@given(st.sampled_from(["gap", "max_messages"]), JUNK)
def test_any_value_of_a_profile_is_taken_or_a_configuration_error(field, value):
    try:
        made = Profile(**{field: value})
    except ConfigError as error:
        assert error.message.isprintable()
    else:
        assert getattr(made, field) == value


@settings(deadline=None)
@given(st.sampled_from(sorted(SECTIONS)), st.dictionaries(st.sampled_from(["basis", "min", "max", "grow", "shrink", "cut"]), JUNK))
def test_any_values_of_a_section_are_taken_or_a_configuration_error(name, values):
    try:
        made = Profile(sections={name: replace(SECTIONS[name], **values)})
    except ConfigError as error:
        assert error.message.isprintable()
        return
    assert negotiate(10**6, offered(made, {name: 500})).allocations[name] <= 500


@settings(deadline=None)
@given(JUNK, JUNK)
def test_any_values_of_a_tier_are_taken_or_a_configuration_error(share, threshold):
    try:
        Profile(tiers=(Tier("a", share, threshold),))
    except ConfigError as error:
        assert error.message.isprintable()
    else:
        assert 0 <= share <= 100
        assert 0 <= threshold <= 1


# --- sums of percentages


@pytest.mark.parametrize("shares", [[50, 30, 20], [33.3, 33.3, 33.4], [8.9, 19.6, 3.6, 67.9], [0, 0, 0]])
def test_shares_of_exactly_100_are_taken(shares):
    """As the decimal numbers that they are written as: in floating point, 8.9 + 19.6 + 3.6 + 67.9 is more than 100."""
    Profile(tiers=tuple(Tier(str(number), share, 0.5) for number, share in enumerate(shares)))


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_bases_of_more_than_100_percent_are_refused_when_asked(history, attachments, evidence):
    tenths = {"history": history, "attachments": attachments, "evidence": evidence}
    profile = Profile(sections={name: replace(flex, basis=Percent(tenths.get(name, 0) / 10)) for name, flex in SECTIONS.items()})
    if sum(tenths.values()) > 1000:
        with pytest.raises(ConfigError, match=r"bases of the sections add up to .* more than 100"):
            profile.check_bases()
    else:
        profile.check_bases()
