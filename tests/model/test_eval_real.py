"""Two questions about the handbook with the real model, by a single ask and by the council that ships."""

import json
from pathlib import Path

import pytest

from localrag.cli import main
from localrag.grading import read_questions

pytestmark = pytest.mark.model

QUESTIONS = Path(__file__).parents[2] / "benchmarks" / "handbook_questions.jsonl"


@pytest.fixture
def asked(home_with_handbook, catalogue, monkeypatch, capsys):
    """Runs `eval --qa` on the handbook; returns the object that it prints."""
    monkeypatch.setenv("LOCALRAG_MODELS", str(catalogue))

    def run(*args):
        code = main(["eval", "--qa", str(QUESTIONS), "--kb", "handbook", "--queries", "2", "--json", *args])
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.mark.long
def test_two_questions_in_three_ways(asked, tmp_path):
    args = [
        "--context-ratio",
        "0.1",
        "--context-ratio",
        "0.5",
        "--council",
        "default",
        "--ctx",
        "2048",
        "--top-k",
        "2",
        "--max-tokens",
        "24",
    ]
    found = asked(*args, "--out", str(tmp_path / "out.jsonl"))
    assert [way["way"] for way in found["ways"]] == ["ask at 0.1", "ask at 0.5", "council default"]
    asks, council = found["ways"][:2], found["ways"][2]
    assert all(way["num_questions"] == 2 and not way["errors"] for way in asks)
    assert council["errors"].keys() <= {"EngineError"}  # so small a judge can fail to close its form
    assert asks[0]["mean_evaluated_tokens"] < asks[1]["mean_evaluated_tokens"]
    assert asks[1]["in_evidence"]["num"] >= 1  # the passages are found
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["id"] for row in rows} == {each.id for each in read_questions(QUESTIONS).questions[::60]}
    assert all(row["text"] and row["completion_tokens"] <= 24 for row in rows if row["way"] != "council default")
    again = asked(*args, "--out", str(tmp_path / "out.jsonl"))
    assert again["ways"][:2] == asks


def test_asked_again_the_model_says_the_same(asked):
    seconds = {"mean_s": 0, "mean_first_token_s": 0}
    first, second = (asked("--ctx", "2048", "--top-k", "1", "--max-tokens", "12")["ways"][0] for _ in range(2))
    assert {**first, **seconds} == {**second, **seconds}


def test_a_follow_up_is_answered_after_its_conversation(asked, tmp_path):
    turns = [("user", "At which temperature is PETG dried?"), ("assistant", "At 65 °C."), ("user", "And for how many hours?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    row = {"id": "hours", "messages": messages, "relevant": ["guides/drying-and-moisture.md", "materials/petg.md"]}
    (tmp_path / "talk.jsonl").write_text(json.dumps(row))
    [way] = asked("--qa", str(tmp_path / "talk.jsonl"), "--max-tokens", "16")["ways"]
    assert (way["in_evidence"]["num"], way["is_right"]["of"], way["errors"]) == (1, 0, {})
    assert 0 < way["mean_first_token_s"] < way["mean_s"]
    assert 0 < way["mean_evidence_tokens"] < way["mean_prompt_tokens"]
