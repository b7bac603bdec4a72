"""[budgets.NAME] and [relevance] of a models.toml: what arrives, and what is refused in one line."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.budget import CUTS, OVERFLOWS, SECTIONS, TIERS, Percent, Profile, Tier
from localrag.budget.sections import LIMITED
from localrag.catalog import Catalog
from localrag.catalog.budgets import BudgetTable, FileTypesTable, LimitsTable, RelevanceTable, TiersTable
from localrag.errors import ConfigError
from localrag.relevance.scoring import DEFAULT_FILE_TYPES, FACTORS, MAX_DEPTH_LIMIT, METHODS, Weights
from localrag.settings import Settings
from tests.catalog.test_catalog import load

LONG_CHATS = """
[budgets.long-chats]
gap = "2%"
overflow = "summarize"
max_messages = 40
context_ratio = 0.6
[budgets.long-chats.tiers.primary]
share = 55
[budgets.long-chats.tiers.reference]
threshold = 0.25
[budgets.long-chats.history]
basis = "20%"
min = 100
cut = "oldest"
[budgets.long-chats.attachments]
basis = "content"
max = "33.5 %"
grow = 2
shrink = 1e-6
[budgets.long-chats.answer]
basis = 1000
[budgets.short]
history.max_messages = 4
"""


# --- what a table says


def test_every_key_arrives_and_the_rest_is_as_in_the_default(tmp_path):
    catalog = load(tmp_path, LONG_CHATS)
    made = catalog.budget("long-chats")
    assert (made.name, made.gap, made.max_messages) == ("long-chats", Percent(2), 40)
    assert made.tiers == (Tier("primary", 55, 0.7), Tier("supporting", 30, 0.5), Tier("reference", 15, 0.25))
    history, attachments, evidence = (made.sections[name] for name in ("history", "attachments", "evidence"))
    assert (history.basis, history.min, history.grow, history.cut) == (Percent(20), 100, SECTIONS["history"].grow, "oldest")
    assert (attachments.basis, attachments.max, attachments.grow, attachments.shrink) == (None, Percent(33.5), 2, 1e-6)
    assert (evidence.basis, evidence.max) == (Percent(60), Percent(60))
    assert attachments.cut == evidence.cut == "summarize"  # the budget's overflow; history says its own
    assert (made.sections["answer"].basis, made.sections["answer"].min) == (1000, SECTIONS["answer"].min)
    for name in ("tools", "memories", "summary"):
        assert made.sections[name] == SECTIONS[name]
    assert catalog.budget("short").max_messages == 4


def test_a_budget_that_sets_nothing_is_the_one_that_is_built_in(tmp_path):
    catalog = load(tmp_path, "[budgets.plain]")
    assert catalog.budget("plain") == Profile(name="plain")
    assert load(tmp_path, "").budget() == Profile()


def test_the_sections_of_a_council_and_the_limits_arrive(tmp_path):
    text = """
        [budgets.judge]
        limits = { system = 4000, question = 0 }
        cited = { max = 15000, cut = "truncate" }
        proposals = { max = 25000, shrink = 1 }
        plan.max = "5%"
    """
    made = load(tmp_path, text).budget("judge")
    assert made.limits == {"system": 4000, "question": 0}
    assert (made.sections["cited"].max, made.sections["cited"].cut) == (15000, "truncate")
    assert made.sections["cited"].grow == SECTIONS["cited"].grow
    assert (made.sections["proposals"].max, made.sections["proposals"].shrink) == (25000, 1)
    assert made.sections["plan"].max == Percent(5)


def test_a_section_that_is_always_sent_whole_is_told_its_limit(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "[budgets.x.question]\nmax = 5")
    assert "limits.question" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "[budgets.x.template]")
    assert "limits.template" not in caught.value.hint


def test_the_default_is_the_table_of_that_name(tmp_path):
    catalog = load(tmp_path, f"{LONG_CHATS}\n[budgets.default]\ngap = 7")
    assert catalog.budget() == catalog.budget(None) == catalog.budget("default") == Profile(gap=7)
    assert catalog.budgets()[:3] == ["default", "long-chats", "short"]


def test_the_catalogue_that_ships_leaves_the_default_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    catalog = Catalog.load(Settings(home=tmp_path / "home"))
    assert catalog.budget() == Profile()
    assert Weights(**catalog.relevance()) == Weights()


def test_the_commented_example_of_the_catalogue_that_ships_is_a_budget(tmp_path):
    text = (Path(__file__).parents[2] / "models.toml").read_text(encoding="utf-8")
    example = text[text.index("# [budgets.") :].splitlines()
    catalog = load(tmp_path, "\n".join(line.removeprefix("# ") for line in example if line.startswith("# ")))
    assert catalog.budgets()[1] == "long-chats"
    assert catalog.budget("long-chats").sections != SECTIONS


def test_an_unknown_budget_is_answered_with_the_nearest_and_with_all(tmp_path):
    catalog = load(tmp_path, LONG_CHATS)
    with pytest.raises(ConfigError) as caught:
        catalog.budget("long-chat")
    assert caught.value.exit_code == 3
    assert caught.value.message == f"No budget is named 'long-chat' in {tmp_path / 'models.toml'} or the models.toml that ships."
    assert caught.value.hint == f"Did you mean long-chats? There are: {', '.join(catalog.budgets())}."
    assert caught.value.numbers["nearest"] == ["long-chats"]
    with pytest.raises(ConfigError, match="No budget is named ''"):
        catalog.budget("")


def test_relevance_holds_what_is_set_and_fits_the_weights(tmp_path):
    assert load(tmp_path, "").relevance() == {}
    text = """
        [relevance]
        recency = 0.5
        half_life_days = 30
        max_depth = 0
        method = "keyword"
        file_types.config = 0.1
        thresholds.primary = 0.9
        [budgets.x]
        [budgets.y]
        tiers.primary.threshold = 0.6
    """
    catalog = load(tmp_path, text)
    assert catalog.relevance() == {
        "recency": 0.5,
        "half_life_days": 30,
        "max_depth": 0,
        "method": "keyword",
        "file_types": {"config": 0.1},
    }
    weights = Weights(**catalog.relevance())
    assert (weights.recency, weights.task_alignment, weights.file_types["config"], weights.file_types["other"]) == (0.5, 0.4, 0.1, 0.5)
    thresholds = {name: [tier.threshold for tier in catalog.budget(name).tiers] for name in ("default", "x", "y")}
    assert thresholds == {"default": [0.9, 0.5, 0.3], "x": [0.9, 0.5, 0.3], "y": [0.6, 0.5, 0.3]}


def test_the_tables_know_what_the_code_knows():
    other = {"gap", "overflow", "max_messages", "context_ratio", "tiers", "limits"}
    assert set(BudgetTable.model_fields) - other == set(SECTIONS)
    assert tuple(LimitsTable.model_fields) == LIMITED
    assert tuple(TiersTable.model_fields) == tuple(tier.name for tier in TIERS)
    assert set(FileTypesTable.model_fields) == set(DEFAULT_FILE_TYPES)
    assert set(RelevanceTable.model_fields) - {"thresholds"} == {*FACTORS, "half_life_days", "max_depth", "method", "file_types"}


@pytest.mark.parametrize("text", [f"max_depth = {MAX_DEPTH_LIMIT}", *(f"method = '{method}'" for method in METHODS)])
def test_what_the_weights_take_the_file_takes(tmp_path, text):
    assert Weights(**load(tmp_path, f"[relevance]\n{text}").relevance())


# --- what is refused


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("budgets = 3", ["top level", "key budgets", "must be a table"]),
        ("[budgets]\nx = 3", ["[budgets.x]", "must be a table, not a whole number"]),
        ("[budgets.'a b']", ['[budgets."a b"]', "a name must be"]),
        ("[budgets.x]\nhistory = 3", ["[budgets.x], key history", "must be a table, not a whole number"]),
        ("[budgets.x]\ntiers.primary = 'a'", ["[budgets.x.tiers], key primary", "must be a table, not a text"]),
        ("[budgets.x]\noverflw = 'error'", ["[budgets.x], key overflw", "unknown key; did you mean overflow?"]),
        ("[budgets.x.histroy]", ["[budgets.x], key histroy", "did you mean history?"]),
        ("[budgets.x.history]\nbases = 1", ["[budgets.x.history], key bases", "did you mean basis?"]),
        ("[budgets.x.evidence]\nmax_messages = 1", ["[budgets.x.evidence], key max_messages", "unknown key"]),
        ("[budgets.x.tiers.primry]", ["[budgets.x.tiers], key primry", "did you mean primary?"]),
        ("[budgets.x.tiers.primary]\nshares = 1", ["[budgets.x.tiers.primary], key shares", "did you mean share?"]),
        ("[budgets.x.system]\nmin = 1", ["[budgets.x], key system", "always sent whole"]),
        ("[budgets.x.proposals]\ncut = 'drop'", ["[budgets.x.proposals], key cut: must be one of middle, error, not 'drop'"]),
        ("[budgets.x]\nlimits.evidence = 1", ["[budgets.x.limits], key evidence", "unknown key"]),
        ("[budgets.x]\nlimits.system = -1", ["[budgets.x.limits], key system", "greater than or equal to 0"]),
        ("[budgets.x]\nlimits.system = '5%'", ["[budgets.x.limits], key system", "must be a whole number, not a text"]),
        ("[budgets.x.question]", ["[budgets.x], key question", "always sent whole"]),
        ("[budgets.x]\ngap = -1", ["[budgets.x], key gap", "not -1"]),
        ("[budgets.x]\ngap = 1.5", ["[budgets.x], key gap", "whole number of tokens", "not 1.5"]),
        ("[budgets.x]\ngap = nan", ["[budgets.x], key gap", "not nan"]),
        ("[budgets.x]\ngap = true", ["[budgets.x], key gap", "not true or false"]),
        ("[budgets.x]\ngap = [1]", ["[budgets.x], key gap", "not a list"]),
        ("[budgets.x]\ngap = '30'", ["[budgets.x], key gap", 'percentage from "0%" to "100%", not "30"']),
        ("[budgets.x]\ngap = '{x}'", ["[budgets.x], key gap", 'not "{x}"']),
        ("[budgets.x]\ngap = 'content'", ["[budgets.x], key gap", 'not "content"']),
        (f"[budgets.x]\ngap = {10**20}", ["[budgets.x], key gap"]),
        (f"[budgets.x]\ngap = {'9' * 4000}", ["[budgets.x], key gap", "999…"]),
        ("[budgets.x]\noverflow = 'sumarize'", ["[budgets.x], key overflow", "must be 'prioritize', 'truncate', 'summarize' or 'error'"]),
        ("[budgets.x]\nmax_messages = -1", ["[budgets.x], key max_messages", "greater than or equal to 0"]),
        ("[budgets.x]\nmax_messages = 2.0", ["[budgets.x], key max_messages", "must be a whole number, not a number"]),
        ("[budgets.x]\nmax_messages = 1\nhistory.max_messages = 2", ["[budgets.x.history], key max_messages", "set in [budgets.x]"]),
        ("[budgets.x]\ncontext_ratio = 1.1", ["[budgets.x], key context_ratio", "less than or equal to 1"]),
        ("[budgets.x]\ncontext_ratio = nan", ["[budgets.x], key context_ratio", "must be a finite number, not nan"]),
        ("[budgets.x]\ncontext_ratio = '0.5'", ["[budgets.x], key context_ratio", "must be a number, not a text"]),
        ("[budgets.x]\ncontext_ratio = 0.5\nevidence.max = '60%'", ["[budgets.x.evidence], key max", "already set by context_ratio"]),
        ("[budgets.x]\ncontext_ratio = 0.5\nevidence.min = '60%'", ["[budgets.x.evidence], key min", '"60%" is greater than max "50%"']),
        ("[budgets.x.history]\nbasis = '105%'", ["[budgets.x.history], key basis", 'not "105%"', 'or "content"']),
        ("[budgets.x.history]\nbasis = '-5%'", ["[budgets.x.history], key basis", 'not "-5%"']),
        ("[budgets.x.history]\nbasis = '٣%'", ["[budgets.x.history], key basis"]),
        ("[budgets.x.history]\nmin = 9\nmax = 8", ["[budgets.x.history], key min", "min 9 is greater than max 8"]),
        ("[budgets.x.tools]\nmin = '50%'", ["[budgets.x.tools], key min", '"50%" is greater than max "30%" (not set in this table)']),
        ("[budgets.x.answer]\nmax = 10", ["[budgets.x.answer], key max", "min 32 (not set in this table) is greater than max 10"]),
        ("[budgets.x.evidence]\nbasis = '70%'", ["[budgets.x.evidence], key basis", '"70%" is greater than max "50%"']),
        ("[budgets.x.history]\ngrow = -1", ["[budgets.x.history], key grow", "greater than or equal to 0"]),
        ("[budgets.x.history]\nshrink = inf", ["[budgets.x.history], key shrink", "must be a finite number, not inf"]),
        (f"[budgets.x.history]\nshrink = {'9' * 400}", ["[budgets.x.history], key shrink", "too large"]),
        ("[budgets.x.history]\ncut = 'always'", ["[budgets.x.history], key cut", "must be 'never', 'drop'"]),
        ("[budgets.x.history]\ncut = 'drop'", ["[budgets.x.history], key cut: must be one of oldest, truncate, summarize, error, not"]),
        ("[budgets.x.answer]\ncut = 'error'", ["[budgets.x.answer], key cut: must be one of never"]),
        ("[budgets.x.tiers.primary]\nshare = 101", ["[budgets.x.tiers.primary], key share", "less than or equal to 100"]),
        ("[budgets.x.tiers.primary]\nshare = 80", ["[budgets.x.tiers]: the shares of the tiers add up to 125.0 %"]),
        ("[budgets.x.tiers.supporting]\nthreshold = 0.8", ["[budgets.x.tiers]: the thresholds of the tiers must fall"]),
        ("[budgets.x.tiers.primary]\nthreshold = 70", ["[budgets.x.tiers.primary], key threshold", "less than or equal to 1"]),
        ("[budgets.x]\nhistory.basis = '60%'\nattachments.basis = '50%'", ["[budgets.x]: the bases of the sections add up to 110.0 %"]),
        ("[budgets.x]\ncontext_ratio = 0.8\nhistory.basis = '30%'", ["[budgets.x]: the bases of the sections add up to 110.0 %"]),
        ("relevance = 1", ["top level", "key relevance", "must be a table"]),
        ("[relevance]\nrecensy = 1", ["[relevance], key recensy", "did you mean recency?"]),
        ("[relevance]\nrecency = -0.1", ["[relevance], key recency", "greater than or equal to 0"]),
        ("[relevance]\nrecency = inf", ["[relevance], key recency", "finite"]),
        ("[relevance]\nhalf_life_days = 0", ["[relevance], key half_life_days", "greater than 0"]),
        ("[relevance]\nmax_depth = 101", ["[relevance], key max_depth", "less than or equal to 100"]),
        ("[relevance]\nmethod = 'magic'", ["[relevance], key method", "must be 'keyword', 'semantic' or 'hybrid'"]),
        ("[relevance]\nfile_types.source_kode = 1", ["[relevance.file_types], key source_kode", "did you mean source_code?"]),
        ("[relevance]\nfile_types.config = 2", ["[relevance.file_types], key config", "less than or equal to 1"]),
        ("[relevance]\nthresholds.primary = 0.1", ["[relevance.thresholds]: the thresholds of the tiers must fall"]),
        (f"[relevance]\n{''.join(f'{factor} = 0{chr(10)}' for factor in FACTORS)}", ["[relevance]: all weights are 0"]),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_naming_file_table_and_key(tmp_path, text, parts):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = caught.value.message
    assert message.startswith(f"{tmp_path / 'models.toml'}: ")
    assert [part for part in parts if part not in message] == [], message
    assert message.isprintable()
    assert len(message) < 1000
    assert caught.value.exit_code == 3
    json.dumps(caught.value.to_dict())


def test_percentages_that_a_person_did_not_write_do_not_count(tmp_path):
    """80 % of evidence beside the built-in 5 of history and 30 of attachments: those shrink, and nobody wrote 115."""
    made = load(tmp_path, "[budgets.x]\ncontext_ratio = 0.8\nhistory.basis = '20%'").budget("x")
    assert (made.sections["evidence"].basis, made.sections["attachments"].basis) == (Percent(80), SECTIONS["attachments"].basis)


def test_what_adds_up_to_more_is_said_with_its_parts(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "[budgets.x]\ncontext_ratio = 0.8\nhistory.basis = '30%'")
    assert caught.value.hint == 'Set here: history "30%", evidence "80%".'


# --- any table at all

NUMBERS = st.one_of(st.integers(-3, 5000), st.floats(), st.just(10**400))
SCALARS = st.one_of(st.sampled_from(["30%", "105%", "content", "never", *CUTS, *OVERFLOWS, "keyword", ""]), NUMBERS, st.booleans())
FLEX_KEYS = st.sampled_from(["basis", "min", "max", "grow", "shrink", "cut", "max_messages"])
LEAVES = st.dictionaries(FLEX_KEYS, SCALARS, max_size=3)
TIERS_TABLES = st.dictionaries(
    st.sampled_from(["primary", "supporting", "reference", "fourth"]), st.dictionaries(st.sampled_from(["share", "threshold"]), SCALARS)
)
TOP_KEYS = ["gap", "overflow", "max_messages", "context_ratio", "tiers", "limits", "system", *SECTIONS]
BUDGETS = st.dictionaries(st.sampled_from(TOP_KEYS), st.one_of(SCALARS, LEAVES, TIERS_TABLES), max_size=4)
SOUND_SECTION = st.fixed_dictionaries(
    {},
    optional={
        "basis": st.sampled_from([0, 10, "2%", "4.5 %", "content"]),
        "min": st.sampled_from([0, 10, "0%", "2%"]),
        "max": st.sampled_from([4000, "90%", "100%"]),
        "grow": st.sampled_from([0, 0.5, 3]),
        "shrink": st.sampled_from([0, 1e-6, 1]),
        "cut": st.sampled_from(["error", "truncate"]),
    },
)
SOUND_BUDGET = st.fixed_dictionaries(
    {},
    optional={
        "gap": st.sampled_from([0, 100, "1%"]),
        "overflow": st.sampled_from(OVERFLOWS),
        "max_messages": st.integers(0, 100),
        "tiers": st.just({"primary": {"share": 20}, "reference": {"threshold": 0}}),
        "history": SOUND_SECTION,
        "attachments": SOUND_SECTION,
        "evidence": SOUND_SECTION,
        "cited": SOUND_SECTION,
        "plan": SOUND_SECTION,
        "limits": st.just({"system": 100}),
    },
)
SOUND_RELEVANCE = st.fixed_dictionaries(
    {}, optional={"recency": st.floats(0, 9), "max_depth": st.integers(0, 100), "file_types": st.just({"config": 0})}
)
RELEVANCE = st.dictionaries(
    st.sampled_from([*FACTORS, "half_life_days", "max_depth", "method", "file_types", "thresholds"]),
    st.one_of(SCALARS, st.dictionaries(st.sampled_from(["primary", "reference", "config"]), SCALARS)),
    max_size=3,
)


def toml_value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value) if isinstance(value, float) else json.dumps(value)


@settings(max_examples=150, deadline=None)
@given(SOUND_BUDGET, SOUND_RELEVANCE)
def test_a_sound_table_is_the_budget_that_it_says(budget, relevance):
    with tempfile.TemporaryDirectory() as folder:
        catalog = load(Path(folder), f"budgets.x = {toml_value(budget)}\nrelevance = {toml_value(relevance)}")
    made = catalog.budget("x")
    assert made.max_messages == budget.get("max_messages")
    for name, flex in made.sections.items():
        table = budget.get(name, {})
        for key in ("grow", "shrink"):
            assert getattr(flex, key) == table.get(key, getattr(SECTIONS[name], key))
        assert table.get("cut", flex.cut) == flex.cut
        for key in ("basis", "min", "max"):
            spelled = table.get(key, getattr(SECTIONS[name], key))
            length = Percent(float(spelled.rstrip("% "))) if isinstance(spelled, str) and spelled != "content" else spelled
            assert getattr(flex, key) == (None if length == "content" else length)
    assert Weights(**catalog.relevance()).max_depth == relevance.get("max_depth", 3)


@settings(max_examples=200, deadline=None)
@given(BUDGETS, RELEVANCE)
def test_any_table_is_a_budget_or_a_configuration_error_of_one_line(budget, relevance):
    with tempfile.TemporaryDirectory() as folder:
        try:
            catalog = load(Path(folder), f"budgets.x = {toml_value(budget)}\nrelevance = {toml_value(relevance)}")
        except ConfigError as error:
            assert f"{Path(folder) / 'models.toml'}: [" in error.message
            assert error.message.isprintable()
            assert json.dumps(error.to_dict())
            return
    assert isinstance(catalog.budget("x"), Profile)
    assert Weights(**catalog.relevance())
