"""What roles are asked fits wherever the first turns fit: a council that begins is not refused on its way."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag import prompt
from localrag.budget import Profile
from localrag.deliberation import Judge, Member, first_turns, turns
from localrag.deliberation.roles import TOOLS, Council
from localrag.engine.echo import EchoTokenizer
from localrag.errors import BudgetExceededError
from localrag.prompt import PromptInputs
from localrag.prompt.measure import MIN_PROPOSAL_TOKENS
from localrag.text.tokens import TokenCounter
from localrag.types import Message, SamplingParams
from tests import material
from tests.deliberation.driving import TASK, council, plain, sit, with_tools
from tests.prompt.building import TEMPLATE, build_offer

COUNTER = TokenCounter(EchoTokenizer())


def offer(who, turn):
    role = who.role(turn.role)
    return PromptInputs(
        messages=[Message("system", who.system), Message("user", TASK)],
        hits=turn.hits,
        tools=turn.tools,
        cite="",
        cited=turn.cited,
        tells_omitted=True,
        proposals=turn.proposals,
        plan=turn.plan,
        instructions=turn.instructions,
        max_tokens=turn.sampling.max_tokens,
        profile=role.profile,
    )


def floor(who, turn):
    """The smallest window that holds a turn."""
    with pytest.raises(BudgetExceededError) as refused:
        prompt.measure(offer(who, turn), counter=COUNTER, template=TEMPLATE).share(1)
    return refused.value.numbers["needed"]


def floors(who):
    least = {}
    for turn in first_turns(who):
        least[turn.role] = max(floor(who, turn), least.get(turn.role, 0))
    return least


def random_council(rng):
    def sampling():
        return SamplingParams(max_tokens=rng.choice([1, 20, 100, 512]))

    def profile():
        return Profile(gap=rng.choice([0, 30]))

    names = [f"{rng.choice(['m', 'chemist ', '化学 '])}{number}" for number in range(rng.randint(1, 8))]
    members = tuple(Member(name=name, persona=material.text(rng, rng.randint(0, 30)), sampling=sampling()) for name in names)
    judge = Judge(
        persona=material.text(rng, rng.randint(0, 10)),
        tools=tuple(rng.sample(TOOLS, rng.randint(0, 4))),
        rounds=rng.randint(0, 3),
        sampling=sampling(),
        profile=profile(),
    )
    return Council(name="any", members=members, judge=judge, plan=rng.random() < 0.5, review=rng.random() < 0.7)


def says(rng, turn):
    """Anything, of any length, now and then what was asked for."""
    if rng.random() < 0.3:
        return plain(turn)
    return rng.choice(["", "Yes.", "[KB#1] " * 50, material.text(rng, rng.randint(1, 400)), '{"text":"x'])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_every_turn_fits_where_the_first_turns_fit(seed):
    rng = random.Random(seed)
    who = random_council(rng)
    least = floors(who)

    def check(turn):
        if not turn.rounds:
            composed = build_offer(offer(who, turn), least[turn.role], counter=COUNTER)
            assert composed.ledger.window == least[turn.role]

    hits = material.hits(rng, rng.randint(0, 6))
    run = sit(who, lambda turn: says(rng, turn) + (" x" if turn.kind == "verdict" else ""), hits=tuple(hits), on_turn=check)
    assert {turn.role for turn in run.turns} <= least.keys()


@pytest.mark.parametrize("num_members", range(1, 9))
def test_proposals_count_in_the_first_turns(num_members):
    who = council(num_members, review=True, judge=with_tools())
    kinds = {kind: [turn for turn in first_turns(who) if turn.kind == kind] for kind in ("proposal", "review", "call", "verdict")}
    assert [turn.role for turn in kinds["proposal"]] == [member.name for member in who.members]
    assert len(kinds["review"]) == (num_members if num_members > 2 else 0)
    assert all(len(turn.proposals) == num_members - 1 for turn in kinds["review"])
    assert [len(turn.proposals) for turn in kinds["call"] + kinds["verdict"]] == [num_members, num_members]
    bare = floor(who, turns.judge(who, []))
    assert floor(who, kinds["verdict"][0]) >= bare + num_members * MIN_PROPOSAL_TOKENS


def test_a_window_that_is_too_small_is_refused_before_anything_is_said():
    who = council(3)
    least = floors(who)["judge"]
    with pytest.raises(BudgetExceededError, match="proposals"):
        build_offer(offer(who, first_turns(who)[-1]), least - 1, counter=COUNTER)


def test_the_form_of_a_verdict_follows_the_room_that_is_left():
    judged = turns.judge(council(2), [])
    make = turns.to_decide(judged, {}, 1).make_schema
    lengths = [make(["KB#1"], max_tokens)["properties"]["text"]["maxLength"] for max_tokens in (100, 400, 1600)]
    assert lengths == sorted(set(lengths))
