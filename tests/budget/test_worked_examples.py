"""docs/explanation/budget.md holds what the code of examples/worked gives, and the documents' own numbers come out."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from localrag.budget import Percent, Profile, Section, negotiate
from localrag.catalog import Catalog
from localrag.settings import Settings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "explanation" / "budget.md").read_text(encoding="utf-8")


def _page():
    spec = importlib.util.spec_from_file_location("worked_page", ROOT / "examples" / "worked" / "page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = _page()
budgets = page.load(page.FOLDER / "budgets.py")
PLACES = page.places(TEXT)


def _marks(path):
    return pytest.mark.model if "NEEDS_MODEL = True" in path.read_text(encoding="utf-8") else ()


# --- the page


@pytest.mark.parametrize("path", [pytest.param(path, marks=_marks(path), id=name) for name, path in page.examples().items()])
def test_the_page_holds_the_tables_that_the_code_gives(path):
    tables = page.load(path).tables()
    assert tables
    for name, text in tables.items():
        assert PLACES[name] == text, f"{name} differs; run: python examples/worked/budgets.py --write"


def test_every_place_is_one_table_that_something_computes():
    named = re.findall(r"<!-- table: ([\w-]+) -->", TEXT)
    assert named == list(PLACES)
    assert TEXT.count("<!-- end -->") == len(named) == len(set(named))
    sources = "".join(path.read_text(encoding="utf-8") for path in page.FOLDER.glob("*.py"))
    assert [name for name in named if f'"{name}"' not in sources and name != "json-overhead"] == []


def test_filling_touches_nothing_but_the_places_that_are_offered():
    text = "a\n<!-- table: x -->\nold\n<!-- end -->\nb\n<!-- table: y -->\n<!-- end -->\nc\n"
    assert page.filled(text, {"x": r"new \1"}) == text.replace("old", r"new \1")
    assert page.filled(text, {"y": "in"}) == text.replace("y -->\n", "y -->\nin\n")
    assert page.filled(text, {"z": "in"}) == text
    assert page.places(page.filled(text, {"x": "new", "y": "in"})) == {"x": "new", "y": "in"}


def test_the_program_prints_the_tables():
    run = subprocess.run(
        [sys.executable, page.FOLDER / "budgets.py"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert all(text in run.stdout for text in budgets.tables().values())


def test_the_tables_of_models_toml_in_the_page_are_taken(tmp_path):
    file = tmp_path / "models.toml"
    file.write_text("\n".join(re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)), encoding="utf-8")
    catalog = Catalog.load(Settings(home=tmp_path, models_file=file))
    assert catalog.budgets()[:4] == ["default", "long-chats", "negotiation", "tiered"]
    thresholds = [tier.threshold for tier in catalog.budget("negotiation").tiers]
    assert thresholds == [0.8, 0.5, 0.3]  # of [relevance] in the page
    for profile in (budgets.NEGOTIATION, budgets.TIERED):
        made = catalog.budget(profile.name)
        assert (made.gap, made.sections) == (profile.gap, profile.sections)
    assert catalog.relevance()["half_life_days"] == 30


# --- the numbers


@pytest.mark.parametrize(("number", "answer", "history"), [(1, 3_000, 1_250), (2, 3_285, 12_500), (3, 500, 14_900)])
def test_the_answer_takes_what_the_input_leaves(number, answer, history):
    example = budgets.NEGOTIATIONS[number - 1]
    assert answer == example.document
    given = example.share(budgets.NEGOTIATION)
    assert given.allocations == {"system": 500, "gap": 100, "history": history, "answer": answer}
    assert sum(given.allocations.values()) <= example.window


def test_the_third_example_of_the_document_is_over_its_window_and_ours_fills_it():
    example = budgets.NEGOTIATIONS[2]
    assert (example.document_total, example.window, example.share(budgets.NEGOTIATION).spare) == (16_100, 16_000, 0)


@pytest.mark.parametrize("window", range(1_100, 16_500, 700))
def test_history_gives_way_only_once_the_answer_is_at_its_floor(window):
    given = budgets.Negotiation(window, 15_000, 3_000, 0, "").share(budgets.NEGOTIATION).allocations
    assert given["history"] == 15_000 or given["answer"] == 500
    assert given["answer"] >= 500


def test_the_chat_example():
    document, ours = budgets.chat_document(1000), budgets.chat_default(1000)
    assert (document["available"], document["evidence"], document["answer"]) == (1000, 600, 400)
    assert document["available"] + document["spare"] == 8192 - 500 - 150
    assert (ours["evidence"], ours["answer"], ours["conversation"]) == ((8192 - 150) * 6 // 10, 1000, 500)
    assert budgets.chat_default(200)["evidence"] == ours["evidence"]


def test_the_allocation_in_tiers():
    full = budgets.allocation(budgets.PLENTY)
    assert [full.allocations[name] for name in budgets.SHARES] == [45_000, 27_000, 13_500, 4_500]
    assert (full.allocations["output"], full.allocations["system"], full.spare) == (8_000, 2_000, 0)


def test_what_a_tier_does_not_use_goes_to_the_others_by_their_shares():
    given = budgets.allocation({**budgets.PLENTY, "primary": 8_700})
    left = 45_000 - 8_700
    more = {name: given.allocations[name] - share * 900 for name, share in budgets.SHARES.items() if name != "primary"}
    assert given.allocations["primary"] == 8_700
    assert more == {"supporting": left * 30 // 50, "reference": left * 15 // 50, "history": left * 5 // 50}
    assert given.spare == 0


def test_the_same_allocation_as_a_budget():
    outer = budgets.tiered()
    assert outer.allocations == {"system": 2_000, "history": 4_500, "evidence": 85_500, "answer": 8_000}
    tiers = [Section(name=tier.name, grow=tier.share) for tier in Profile().tiers]
    assert negotiate(85_500, tiers).allocations == {"primary": 45_000, "supporting": 27_000, "reference": 13_500}


def test_the_hundred_tokens_are_what_the_text_of_the_page_says():
    long, short = budgets.hundred(40), budgets.hundred(10)
    assert long.allocations == {"question": 20, "evidence": 40 - 9, "history": 40 - 9, "answer": 18}
    assert short.allocations == {"question": 20, "evidence": 40, "history": 10, "answer": 25}
    assert (long.spare, short.spare) == (0, 5)


def test_what_is_left_over_is_shared_by_grow_and_a_limit_hands_it_on():
    free, bound = budgets.grown(None).allocations, budgets.grown(25).allocations
    assert free == {"question": 20, "notes": 10 + 8, "evidence": 10 + 24, "answer": 20 + 8}
    assert bound == {"question": 20, "notes": 10 + 12, "evidence": 25, "answer": 20 + 12 + 1}


def test_a_percentage_is_of_what_the_fixed_sections_leave():
    """The example of the page: half of a window of 8,192 with 192 fixed."""
    given = negotiate(8192, [Section.fixed("question", 192), Section(name="evidence", basis=Percent(50))])
    assert given.allocations["evidence"] == 4000
