"""[councils.NAME] of a models.toml: what arrives, what ships, and what is refused in one line."""

import json
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.budget import Profile
from localrag.catalog import Catalog
from localrag.catalog.councils import DEFAULT_ROUNDS, JudgeTable, RoleTable, SpecialistTable
from localrag.deliberation.roles import MAX_MEMBERS, RESERVED_ROLES, SYSTEM, TOOLS, Council, Judge, Member
from localrag.errors import ConfigError
from localrag.settings import Settings
from localrag.types import SamplingParams
from tests.catalog.test_catalog import load

BENCH = """
[models.small]
path = "small.gguf"
[budgets.tight]
gap = 100
[councils.bench]
system = "Be brief."
plan = true
review = true
top_k = "fit"
budget = "tight"
max_tokens = 320
[[councils.bench.specialists]]
name = "materials engineer"
persona = "You know plastics."
model = "small"
n_ctx = 8192
tags = ["price", "guide*"]
temperature = 0.5
seed = 4294967295
[[councils.bench.specialists]]
name = "buyer"
persona = "You know prices."
model = "echo"
budget = "default"
max_tokens = 64
think_tokens = 48
temperature = 1
top_p = 0.9
top_k = 20
min_p = 0.1
repeat_penalty = 1.1
[councils.bench.judge]
persona = "Be fair."
model = "small"
n_ctx = 16384
tools = ["calculate", "kb_search"]
rounds = 2
budget = "tight"
max_tokens = 500
"""
ONE = '[[councils.x.specialists]]\nname = "one"\npersona = "p"\n'


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Catalog.load(Settings(home=tmp_path / "home"))


# --- what a table says


def test_every_key_arrives(tmp_path):
    catalog = load(tmp_path, BENCH)
    tight = catalog.budget("tight")
    assert catalog.council("bench") == Council(
        name="bench",
        members=(
            Member(
                name="materials engineer",
                persona="You know plastics.",
                model="small",
                n_ctx=8192,
                tags=("price", "guide*"),
                sampling=SamplingParams(max_tokens=320, temperature=0.5, seed=2**32 - 1, repeatable=True),
                profile=tight,
            ),
            Member(
                name="buyer",
                persona="You know prices.",
                model="echo",
                sampling=SamplingParams(max_tokens=64, think_tokens=48, temperature=1, top_p=0.9, top_k=20, min_p=0.1, repeat_penalty=1.1),
            ),
        ),
        judge=Judge(
            persona="Be fair.",
            model="small",
            n_ctx=16384,
            tools=("calculate", "kb_search"),
            rounds=2,
            sampling=SamplingParams(max_tokens=500),
            profile=tight,
        ),
        system="Be brief.",
        plan=True,
        review=True,
        top_k="fit",
    )


def test_what_is_not_set_is_as_the_roles_have_it(tmp_path):
    made = load(tmp_path, ONE).council("x")
    assert made == Council(name="x", members=(Member(name="one", persona="p"),), system=SYSTEM)
    assert load(tmp_path, f"[councils.x]\nsystem = ''\n{ONE}").council("x").system == ""


def test_the_budget_of_a_council_is_its_specialists_alone(tmp_path):
    made = load(tmp_path, f'[budgets.tight]\ngap = 9\n[councils.x]\nbudget = "tight"\nmax_tokens = 7\n{ONE}').council("x")
    assert (made.members[0].profile.name, made.members[0].sampling.max_tokens) == ("tight", 7)
    assert (made.judge.profile, made.judge.sampling) == (Profile(), SamplingParams())


def test_tools_come_with_rounds_unless_the_table_says_none(tmp_path):
    assert load(tmp_path, f'{ONE}[councils.x.judge]\ntools = ["calculate"]').council("x").judge.rounds == DEFAULT_ROUNDS
    assert load(tmp_path, f'{ONE}[councils.x.judge]\ntools = ["calculate"]\nrounds = 0').council("x").judge.rounds == 0


@pytest.mark.parametrize("size", range(1, MAX_MEMBERS + 1))
def test_so_many_sit_and_who_comes_again_has_another_seed(tmp_path, size):
    made = load(tmp_path, BENCH.replace("plan = true", f"size = {size}")).council("bench")
    assert len(made.members) == len({member.name for member in made.members}) == size
    for number, member in enumerate(made.members):
        first, again = made.members[number % 2], number // 2
        assert member.name == (f"{first.name} {again + 1}" if again else first.name)
        assert member.sampling.seed == (first.sampling.seed + again) % 2**32
        assert (member.persona, member.profile, member.tags) == (first.persona, first.profile, first.tags)


def test_the_tables_know_what_the_code_knows():
    sampling = {field.name for field in fields(SamplingParams)} - {
        "stop",
        "call_rules",
        "citations",
        "cites_first",
        "quotes",
        "json_schema",
        "or_text",
        "logprobs",
        "repeat_last_n",
        "repeatable",
    }
    common = {"persona", "model", "n_ctx", "budget"} | sampling
    assert set(RoleTable.model_fields) == common
    assert set(SpecialistTable.model_fields) - common == {"name", "tags"}
    assert set(JudgeTable.model_fields) - common == {"tools", "rounds"}


# --- what ships


def test_the_council_that_ships_needs_no_model_of_its_own(shipped):
    council = shipped.council()
    assert council == shipped.council("default")
    assert len(council.members) == 3
    assert (council.plan, council.review, council.judge.tools, council.judge.rounds) == (False, False, (), 0)
    assert {role.model for role in (*council.members, council.judge)} == {None}
    assert {member.sampling.max_tokens for member in council.members} == {160}
    assert council.judge.sampling.max_tokens == 320
    assert max(len(member.persona) for member in council.members) < 120  # a small model in a window of 2,048 has it in every prompt


def test_the_athene_judge_is_the_council_of_the_reference_document(shipped):
    council = shipped.council("athene-judge")
    assert [(member.model, member.n_ctx, member.profile.name) for member in council.members] == [
        ("athene-v2-agent", 32_768, "athene-specialist")
    ] * 3
    judge = council.judge
    assert (judge.model, judge.n_ctx, judge.profile.name, judge.rounds) == ("gpt-oss-120b", 131_072, "athene-judge", 3)
    assert set(judge.tools) == set(TOOLS)
    assert council.plan
    assert shipped.councils() == ["default", "athene-judge"]


def test_a_file_without_councils_has_those_that_ship_with_their_budgets(tmp_path, shipped):
    catalog = load(tmp_path, "[budgets.default]\ngap = 7")
    assert catalog.councils() == ["default", "athene-judge"]
    assert catalog.council() == shipped.council()
    assert catalog.council().judge.profile.sections["answer"].shrink == 0


def test_a_council_that_ships_takes_models_of_ones_own(tmp_path):
    catalog = load(tmp_path, '[models.gpt-oss-120b]\npath = "b.gguf"\n')
    judge = catalog.council("athene-judge").judge
    assert (catalog.model(judge.model).kind, judge.profile.limits["system"]) == ("path", 4000)


def test_a_council_of_the_file_goes_before_one_that_ships(tmp_path):
    catalog = load(tmp_path, f"{BENCH}{ONE}".replace("councils.x", "councils.default"))
    assert catalog.councils() == ["bench", "default", "athene-judge"]
    assert [member.name for member in catalog.council().members] == ["one"]


def test_an_unknown_council_is_answered_with_the_nearest_and_with_all(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, BENCH).council("bensh")
    assert caught.value.message == f"No council is named 'bensh' in {tmp_path / 'models.toml'} or the models.toml that ships."
    assert caught.value.hint == "Did you mean bench? There are: bench, default, athene-judge."
    assert (caught.value.exit_code, caught.value.numbers["nearest"]) == (3, ["bench"])


# --- what is refused


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("councils = 3", ["top level", "key councils", "must be a table"]),
        ("[councils]\nx = 3", ["[councils.x]", "must be a table, not a whole number"]),
        (f"{ONE}".replace(".x.", '."a b".'), ['[councils."a b"]', "a name must be"]),
        ("[councils.x]\nplan = true", ["[councils.x]: has no specialists", "[[councils.x.specialists]]"]),
        (f"[councils.x]\nplna = true\n{ONE}", ["[councils.x], key plna", "did you mean plan?"]),
        (f"[councils.x]\nplan = 1\n{ONE}", ["[councils.x], key plan", "must be true or false, not a whole number"]),
        (f"[councils.x]\ntop_k = 'all'\n{ONE}", ["[councils.x], key top_k", 'from 1 to 1000, or "fit", not "all"']),
        (f"[councils.x]\ntop_k = true\n{ONE}", ["[councils.x], key top_k", "not true or false"]),
        (f"[councils.x]\nsize = 9\n{ONE}", ["[councils.x], key size", "less than or equal to 8"]),
        (f"[councils.x]\nsize = 0\n{ONE}", ["[councils.x], key size", "greater than or equal to 1"]),
        (f"[councils.x]\nsize = 2\n{ONE}", ["[councils.x.specialists.1], key temperature", "one would repeat itself"]),
        (f"[councils.x]\nbudget = 'defualt'\n{ONE}", ["[councils.x], key budget", "did you mean default?"]),
        (f"[councils.x]\nmax_tokens = 0\n{ONE}", ["[councils.x], key max_tokens", "greater than or equal to 1"]),
        ("[councils.x]\nspecialists = 3", ["[councils.x], key specialists", "must be a list, not a whole number"]),
        ("[councils.x]\nspecialists = ['a']", ["[councils.x.specialists.1]", "must be a table, not a text"]),
        ("[councils.x]\nspecialists = [{}]", ["[councils.x.specialists.1], key name", "is missing"]),
        (f"{ONE}personna = ''", ["[councils.x.specialists.1], key personna", "did you mean persona?"]),
        (ONE.replace('"p"', "' '"), ["[councils.x.specialists.1], key persona", "is missing"]),
        (ONE + ONE.replace("one", "Judge"), ["[councils.x.specialists.2], key name", "judge and planner name other roles"]),
        (ONE + ONE.replace("one", "ONE"), ["[councils.x.specialists.2], key name", "is already the name of another specialist"]),
        (ONE.replace("one", "a\\nb"), ["[councils.x.specialists.1], key name", "one line"]),
        (ONE.replace("one", "a" * 65), ["[councils.x.specialists.1], key name", "at most 64 characters"]),
        (ONE * 9, ["[councils.x], key specialists", "are 9, but a council has at most 8"]),
        (f"{ONE}model = 'smal'\n[models.small]\npath = 'a'", ["[councils.x.specialists.1], key model", "did you mean small?"]),
        (f"{ONE}n_ctx = 0", ["[councils.x.specialists.1], key n_ctx", "greater than or equal to 1"]),
        (f"{ONE}budget = 'none'", ["[councils.x.specialists.1], key budget", "no budget is named none"]),
        (f"{ONE}tags = 'a'", ["[councils.x.specialists.1], key tags", "must be a list, not a text"]),
        (f"{ONE}tags = ['a', 3]", ["[councils.x.specialists.1.tags], key 2", "must be a text"]),
        (f"{ONE}tags = ['a,source=b']", ["[councils.x.specialists.1], key tags", 'without a comma, not "a,source=b"']),
        (f"{ONE}tags = ['']", ["[councils.x.specialists.1], key tags"]),
        (f"{ONE}tags = ['{'*a' * 7}']", ["[councils.x.specialists.1], key tags", "at most 6 wildcards"]),
        (f"{ONE}temperature = 101", ["[councils.x.specialists.1], key temperature", "must be 0 to 100"]),
        (f"{ONE}think_tokens = 31", ["[councils.x.specialists.1], key think_tokens", "must be 0, or 32 to"]),
        (f"{ONE}temperature = nan", ["[councils.x.specialists.1], key temperature", "finite"]),
        (f"{ONE}temperature = '1'", ["[councils.x.specialists.1], key temperature", "must be a number, not a text"]),
        (f"{ONE}seed = -1", ["[councils.x.specialists.1], key seed", "must be 0 to 4294967295"]),
        (f"{ONE}top_p = 0", ["[councils.x.specialists.1], key top_p", "above 0, up to 1"]),
        (f"{ONE}top_k = 'fit'", ["[councils.x.specialists.1], key top_k", "must be a whole number, not a text"]),
        (f"{ONE}max_tokens = 0", ["[councils.x.specialists.1], key max_tokens", "must be 1 to"]),
        (f"{ONE}tools = ['calculate']", ["[councils.x.specialists.1], key tools", "unknown key"]),
        (f"{ONE}[councils.x.judge]\nname = 'a'", ["[councils.x.judge], key name", "unknown key"]),
        (f"{ONE}[councils.x.judge]\ntools = ['calculator']", ["[councils.x.judge], key tools", "did you mean calculate?"]),
        (f"{ONE}[councils.x.judge]\nrounds = 9", ["[councils.x.judge], key rounds", "less than or equal to 8"]),
        (f"{ONE}[councils.x.judge]\nrounds = 1", ["[councils.x.judge], key rounds", "limits tool calls, but no tools are set"]),
        (f"{ONE}[councils.x.judge]\nmodel = 'default'", ["[councils.x.judge], key model", "no model is named default"]),
        (f"{ONE}[councils.x.judge]\nbudget = 'x'", ["[councils.x.judge], key budget", "no budget is named x"]),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_naming_file_table_and_key(tmp_path, text, parts):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = caught.value.message
    assert message.startswith(f"{tmp_path / 'models.toml'}: ")
    assert [part for part in parts if part not in message] == [], message
    assert message.isprintable()
    json.dumps(caught.value.to_dict())


# --- any table at all

SCALARS = st.one_of(
    st.sampled_from(["", "one", "fit", "echo", "judge", "default", "calculate"]), st.integers(-1, 9), st.floats(), st.booleans()
)
LISTS = st.lists(SCALARS, max_size=2)
ROLE_KEYS = st.sampled_from([*SpecialistTable.model_fields, *JudgeTable.model_fields, "else"])
ROLES = st.dictionaries(ROLE_KEYS, SCALARS | LISTS, max_size=3)
SOUND_ROLE = st.fixed_dictionaries(
    {"name": st.text(st.characters(categories=["L", "N"], max_codepoint=0xFFFF), min_size=1, max_size=9), "persona": st.just("p")},
    optional={"temperature": st.floats(0, 2), "seed": st.integers(0, 9), "tags": st.just(["a"]), "model": st.just("echo")},
)
COUNCILS = st.fixed_dictionaries(
    {"specialists": st.lists(SOUND_ROLE, min_size=1, max_size=4) | st.lists(ROLES, max_size=2)},
    optional={
        "judge": ROLES,
        "size": st.integers(0, 9),
        "top_k": SCALARS,
        "plan": st.booleans(),
        "review": SCALARS,
        "budget": SCALARS,
        "max_tokens": SCALARS,
    },
)


def toml_value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


@settings(max_examples=200, deadline=None)
@given(COUNCILS)
def test_any_table_is_a_council_or_a_configuration_error_of_one_line(table):
    with tempfile.TemporaryDirectory() as folder:
        try:
            catalog = load(Path(folder), f"councils.x = {toml_value(table)}")
        except ConfigError as error:
            assert f"{Path(folder) / 'models.toml'}: [councils.x" in error.message
            assert error.message.isprintable()
            assert json.dumps(error.to_dict())
            return
    council = catalog.council("x")
    names = [member.name.casefold() for member in council.members]
    assert 1 <= len(names) == len(set(names)) == table.get("size", len(table["specialists"])) <= MAX_MEMBERS
    assert not set(names) & set(RESERVED_ROLES)
    assert all(member.persona for member in council.members)
    said = {(member.persona, member.sampling, member.name.partition(" ")[0]) for member in council.members}
    assert len(said) == len(names)  # nobody only repeats another one
