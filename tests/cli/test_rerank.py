"""ask with the best passages read again, and what needs a knowledge base."""

import json

import pytest

from localrag.engine.convert import convert
from tests.bert_folders import BROKEN, SOUND, write_cross_encoder


@pytest.fixture
def notes(localrag, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, text in {"pla": "PLA is annealed at 90 degrees.", "abs": "ABS is smoothed with acetone.", "nylon": "Nylon is dried."}.items():
        (folder / f"{name}.md").write_text(f"# {name}\n\n{text}\n")
    assert localrag("index", folder, "--kb", "notes")[0] == 0


def test_the_model_reads_the_best_passages_again(localrag, notes):
    code, out, err = localrag("ask", "How is PLA annealed?", "--kb", "notes", "--model", "echo", "--rerank", "llm", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["evidence"]
    assert all("rerank" in each["contributions"] for each in answer["evidence"])
    assert all(each["score"] == pytest.approx(sum(each["contributions"].values())) for each in answer["evidence"])


def test_a_gguf_cross_encoder_reads_the_best_passages_again(localrag, refused, notes, tmp_path):
    for name, seed in (("sound", SOUND), ("broken", BROKEN)):
        convert(write_cross_encoder(tmp_path / name, seed=seed), tmp_path / f"{name}.gguf", ranks=True)
    code, out, err = localrag("search", "How is PLA annealed?", "--kb", "notes", "--rerank", tmp_path / "sound.gguf", "--json")
    assert code == 0, err
    assert all("rerank" in hit["contributions"] for hit in json.loads(out)["hits"])
    error = refused(4, "search", "PLA?", "--kb", "notes", "--rerank", tmp_path / "broken.gguf")
    assert "broken.gguf cannot rerank" in error


@pytest.mark.parametrize("command", [("ask", "--dry-run"), ("budget",)])
def test_where_nothing_is_evaluated_no_model_reads(refused, notes, command):
    assert "needs the model, which this command does not run" in refused(
        2, *command, "What is PLA?", "--kb", "notes", "--model", "echo", "--rerank", "llm"
    )


@pytest.mark.parametrize("option", [("--rerank", "llm"), ("--where", "tag=price")])
@pytest.mark.parametrize("command", ["ask", "budget"])
def test_what_is_about_passages_needs_a_knowledge_base(refused, command, option):
    assert "Name one with --kb." in refused(2, command, "What is PLA?", "--model", "echo", *option)


@pytest.mark.parametrize("depth", ["fat", "0", "-3", "1001", "²"])
def test_a_depth_that_is_none(refused, depth):
    assert "--top-k" in refused(2, "ask", "What is PLA?", "--model", "echo", "--top-k", depth)
