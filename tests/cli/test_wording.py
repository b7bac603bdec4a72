"""What commands print, as people read it: plurals, no marks of Python, and nothing twice."""

import json
import re

import pytest

from localrag.cli.models import _readable
from localrag.errors import counted
from tests.gguf_files import write_model


@pytest.mark.parametrize(("num", "said"), [(0, "0 turns"), (1, "1 turn"), (2, "2 turns"), (1234, "1,234 turns")])
def test_a_number_and_its_noun(num, said):
    assert counted(num, "turn") == said
    assert counted(num, "query", "queries").endswith("query" if num == 1 else "queries")


def test_no_plural_is_wrong_where_there_is_one_of_each(localrag, tmp_path):
    (tmp_path / "zebra.md").write_text("# Zebra\n\nA zebra has stripes.\n")
    said = [localrag("index", tmp_path / "zebra.md", "--kb", "zoo")]
    said += [localrag("kb", *args) for args in (("show", "zoo"), ("list",), ("verify", "zoo"), ("export", "zoo", tmp_path / "zoo.kb"))]
    said += [localrag("kb", "import", tmp_path / "zoo.kb", "--name", "again"), localrag("search", "zebra", "--kb", "zoo")]
    (tmp_path / "one.jsonl").write_text('{"id": 1, "question": "What has stripes?"}\n')
    said += [localrag("ask", "--batch", tmp_path / "one.jsonl", "--out", tmp_path / "out.jsonl", "--model", "echo", "--kb", "zoo")]
    said += [
        localrag("ask", "What has stripes?", "--model", "echo", "--max-tokens", "1"),
        localrag("tokens", "x", "--model", "echo", "--show"),
    ]
    said += [localrag("budget", "x", "--model", "echo", "--max-tokens", "1"), localrag("ask", "x", "--model", "echo", "--explain")]
    said += [localrag("report"), localrag("score", tmp_path / "zebra.md", "--task", "zebra")]
    said += [localrag("council", "What has stripes?", "--kb", "zoo", "--model", "echo"), localrag("tokens", "x", "--model", "echo")]
    assert [code for code, _, _ in said] == [0] * len(said)
    text = "\n".join(out + err for _, out, err in said)
    assert re.findall(r"(?<![\d,.])1 (?:chunks|documents|passages|turns|questions|bytes|lines|characters|sentences|tokens)\b", text) == []
    assert "Answered 1 of 1 question at" in text


def test_a_model_is_shown_without_the_marks_of_python(localrag, tmp_path):
    model = write_model(tmp_path / "tiny.gguf")
    _, out, _ = localrag("models", "show", model)
    assert not re.search(r"[{}()\[\]'\"]|\bNone\b|\bTrue\b|\bFalse\b", re.sub(r"\(2 times\)|example \{.*\}", "", out)), out
    assert "bound training" in out
    assert json.loads(localrag("models", "show", model, "--json")[1])["slot"]["bound"] == "training"
    _, out, _ = localrag("models", "show", "tiny")
    assert re.search(r"is_default +yes", out)
    assert "True" not in out


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, ""),
        (True, "yes"),
        (10000.0, "10000"),
        ((4, 4, 4, 0, 4), "4 (3 times), 0, 4"),
        ({"n_ctx": 8, "requested": None, "bound": "memory"}, "n_ctx 8, bound memory"),
        ([], ""),
    ],
)
def test_values_as_people_read_them(value, said):
    assert _readable(value) == said


def test_an_unknown_command_names_the_help_once(localrag):
    _, _, err = localrag("zzzz")
    assert err.count("See localrag --help.") == 1


def test_a_budget_that_is_used_again_is_not_shown_twice(localrag):
    code, _, err = localrag("council", "How is it?", "--model", "echo", "--max-tokens", "30")
    assert code == 0
    assert err.count("=== judge: verdict, ") == 1
    assert err.count("=== judge: verdict again, with the same budget ===") == 1
    _, out, _ = localrag("report", "--council", "last")
    assert out.count("=== judge: verdict, ") == 1
    assert localrag("council", "How is it?", "--model", "echo")[2].count("again, in the same budget") == 0
