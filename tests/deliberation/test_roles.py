"""Who can sit on a council."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest

from localrag.budget import Flex, Profile
from localrag.deliberation import JUDGE, PLANNER, Council, Judge, Member
from localrag.deliberation.roles import MAX_NAME_CHARS, TOOLS
from localrag.errors import ConfigError
from localrag.types import SamplingParams

FLEXES = {"plan": Flex(cut="drop"), "cited": Flex(cut="truncate")}
PROFILE = Profile(name="own", gap=7, sections=FLEXES, limits={"question": 90, "system": 80})


def member(name, **options):
    return Member(name=name, persona="p", **options)


def full_council():
    sampling = SamplingParams(temperature=0.5, stop=("x",), json_schema={"type": "object", "properties": {}})
    members = (member("a", tags=("x", "y"), profile=PROFILE), member("b", n_ctx=512, sampling=sampling))
    return Council(name="c", members=members, judge=Judge(tools=TOOLS, rounds=8, profile=PROFILE), plan=True, top_k="fit")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"members": ()}, "1 to 8 members, not 0"),
        ({"members": tuple(member(f"m{number}") for number in range(9))}, "1 to 8 members, not 9"),
        ({"members": (member("a"), member("A"))}, "two members have the name 'a'"),
        ({"members": (member("judge"),)}, "no member can have the name 'judge'"),
        ({"members": (member("Planner"),)}, "no member can have the name 'Planner'"),
        *(({"members": (member(name),)}, "a member's name") for name in ("", " a", "a\nb", "a\x1b[2J", "x" * (MAX_NAME_CHARS + 1), None)),
        ({"name": ""}, "a council's name"),
        ({"name": "a\nb"}, "a council's name"),
        ({"judge": Judge(tools=("shell",))}, "there is no tool 'shell'"),
        ({"judge": Judge(tools=("calculate", "calculate"))}, "a tool twice"),
        *(({"judge": Judge(rounds=rounds)}, "rounds must") for rounds in (-1, 9, 1.0, True, "1")),
        *(({"top_k": top_k}, "top_k must") for top_k in (0, -1, 1.5, True, "all", None)),
        ({"judge": Judge(n_ctx=0)}, "n_ctx of judge"),
        ({"members": (member("a", n_ctx=-1),)}, "n_ctx of a"),
    ],
)
def test_what_no_council_can_be(options, fault):
    with pytest.raises(ConfigError) as refused:
        Council(**{"name": "c", "members": (member("a"),)} | options)
    assert fault in refused.value.message
    assert len(refused.value.message.splitlines()) == len(refused.value.hint.splitlines()) == 1
    assert len(refused.value.message) < 300


def test_the_largest_and_the_smallest():
    Council(name="c", members=(member("化学 é-2 (x)"),), top_k=1)
    Council(name="x" * MAX_NAME_CHARS, members=tuple(member(str(number)) for number in range(8)), judge=Judge(tools=TOOLS, rounds=8))


def test_a_role_by_its_name():
    who = full_council()
    assert who.role("b") is who.members[1]
    assert who.role(JUDGE) is who.role(PLANNER) is who.judge
    with pytest.raises(KeyError):
        who.role("nobody")


def test_the_judge_calls_only_with_tools_and_rounds():
    assert [Judge(tools=tools, rounds=rounds).max_calls for tools in ((), TOOLS) for rounds in (0, 3)] == [0, 0, 0, 3]


def test_changed_for_all_roles():
    who = full_council()
    assert who.changed() == who
    changed = who.changed(model="m", n_ctx=999, seed=2**32 + 5, max_tokens=17)
    for role, before in zip((*changed.members, changed.judge), (*who.members, who.judge), strict=True):
        assert (role.model, role.n_ctx) == ("m", 999)
        assert role.sampling == replace(before.sampling, seed=5, repeatable=True, max_tokens=17)
        assert (role.persona, role.profile) == (before.persona, before.profile)
    assert who.members[1].n_ctx == 512


def test_another_council_has_another_digest():
    who = full_council()
    others = [
        replace(who, name="d"),
        replace(who, system="other"),
        replace(who, plan=False),
        replace(who, review=True),
        replace(who, top_k=6),
        replace(who, members=who.members[::-1]),
        replace(who, members=who.members[:1]),
        replace(who, judge=replace(who.judge, rounds=7)),
        replace(who, judge=replace(who.judge, profile=Profile())),
        replace(who, judge=replace(who.judge, profile=replace(PROFILE, limits={}))),
        replace(who, judge=replace(who.judge, profile=PROFILE.with_overflow("truncate", "plan"))),
        who.changed(seed=1),
        who.changed(model="m"),
    ]
    assert {each.name for each in fields(Council)} == {"name", "members", "judge", "system", "plan", "review", "top_k"}  # all of them above
    assert len({each.digest for each in [who, *others]}) == len(others) + 1
    assert full_council().digest == who.digest


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_digest_is_the_same_in_another_process(hash_seed):
    code = "from tests.deliberation.test_roles import full_council; print(full_council().digest)"
    env = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == full_council().digest
