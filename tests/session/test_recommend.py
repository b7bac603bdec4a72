"""Which model is recommended, on machines of several sizes."""

import json

import pytest

from localrag.catalog import Catalog
from localrag.cli import main
from localrag.journal import Journal
from localrag.session.recommend import Limits, choose, recommend, typical_workload, usable
from localrag.settings import Settings, shipped_file
from tests.homes import know_machine
from tests.journal.asks import made_up, passage

GB = 10**9


@pytest.fixture
def settings(home):
    know_machine(home)
    return Settings(home=home, models_file=shipped_file())


def test_on_machines_of_several_sizes_the_largest_that_fits_and_is_fast_enough(settings):
    chosen = {}
    for size in (4, 8, 16, 32, 64):
        found = recommend(settings, memory_bytes=size * GB)
        chosen[size] = found.best.name
        assert found.best.problem is None
        assert found.best.needed_bytes < usable(size * GB)
        for each in found.candidates:
            assert each.problem or each.size_bytes <= found.best.size_bytes
            assert (each.first_token_s is None) == ("needs" in (each.problem or ""))
    assert chosen == {4: "qwen3.5-2b", 8: "qwen3.5-4b", 16: "qwen3.5-4b", 32: "qwen3.6-35b-a3b", 64: "qwen3.6-35b-a3b"}


def test_reasons_have_the_numbers(settings):
    problems = {each.name: each.problem for each in recommend(settings, memory_bytes=16 * GB).candidates}
    assert problems["gpt-oss-120b"].startswith("needs 65.")
    assert problems["gpt-oss-120b"].endswith("; 11.7 GB are free")
    assert problems["qwen3.5-9b"] == "62 s to the first token, more than 30 s; 3.5 tokens/s, fewer than 5"
    assert problems["qwen3.5-2b"] is None


def test_a_fast_machine_runs_a_large_model_and_a_slow_one_the_fastest(settings, home):
    know_machine(home, prefill_weights_per_s=40e12, decode_bytes_per_s=900e9)
    assert recommend(settings, memory_bytes=128 * GB).best.name == "gpt-oss-120b"
    know_machine(home, prefill_weights_per_s=1e9, decode_bytes_per_s=0.2e9)
    found = recommend(settings, memory_bytes=16 * GB)
    assert found.best.name == "smollm2-135m"
    assert found.why.startswith("no model is fast enough here; this one is the fastest: ")
    assert choose([]) == (None, "no model of the catalogue fits into the memory")


def test_limits_move_the_choice(settings):
    names = [recommend(settings, memory_bytes=32 * GB, limits=Limits(first_token_s=s)).best.name for s in (5, 12, 1000)]
    assert names == ["smollm2-135m", "llama-3.2-1b", "qwen3.6-35b-a3b"]


def test_the_typical_question_is_the_median_of_those_recorded(settings, home):
    assert typical_workload(settings).evidence_tokens == 800
    with Journal.open(home) as journal:
        for number in range(5):
            journal.record(made_up(evidence=[passage(1, tokens=100 * number), passage(2, tokens=7), passage(3, state="omitted")]))
        journal.record(made_up())  # without evidence
    found = typical_workload(settings)
    assert (found.evidence_tokens, found.prompt_tokens) == (207, 357)
    assert found.origin == "the median of the last 5 questions"
    assert typical_workload(settings, "notes").evidence_tokens == 207
    assert typical_workload(settings, "another").evidence_tokens == 800


def test_every_model_that_ships_has_a_card_and_a_license(settings):
    for spec in Catalog.load(settings).models.values():
        assert spec.card is not None, spec.name
        assert spec.card.license
        assert spec.card.active <= spec.card.weights


def test_the_command_prints_a_table_or_an_object(settings, home, monkeypatch, capsys):
    monkeypatch.setenv("LOCALRAG_HOME", str(home))
    assert main(["models", "recommend", "--memory", "8 GB", "--models", str(shipped_file())]) == 0
    out, err = capsys.readouterr()
    assert "Recommended: qwen3.5-4b" in err
    assert "localrag models pull qwen3.5-4b" in err
    row = next(line for line in out.splitlines() if line.startswith("qwen3.5-4b"))
    assert "2.7 GB" in row
    assert "32,768" in row
    assert "apache-2.0 ?" in row
    assert row.rstrip().endswith("recommended")

    assert main(["models", "recommend", "--memory", "8gib", "--models", str(shipped_file()), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["recommended"], facts["command"]) == ("qwen3.5-4b", "localrag models pull qwen3.5-4b")
    assert facts["available_bytes"] == usable(8 << 30)
    assert facts["busy_cores"] == 0  # nothing was measured
    assert facts["prompt"]["prompt_tokens"] == 950
    assert {"name", "window", "first_token_s", "tokens_per_s", "license", "problem"} <= facts["models"][0].keys()
    assert main(["models", "recommend", "--kb", "none"]) == 6
    for wrong in ("0", "8 pounds", "-1GB", "nan"):
        assert main(["models", "recommend", "--memory", wrong]) == 2
