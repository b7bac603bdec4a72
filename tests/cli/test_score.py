"""score as people and scripts meet it."""

import json
import os
import subprocess
import sys

import click
import pytest

from localrag.cli.score import score_command
from localrag.errors import LocalragError, ModelNotFoundError, UsageError
from localrag.relevance import FACTORS, MAX_TASK_CHARS
from tests.kb.readers.office_files import docx, p

FILES = {
    "app/budget.py": "from app import limits\n\ndef negotiate(window): ...\n",
    "app/limits.py": "LIMIT = 1\n",
    "app/__init__.py": "",
    "notes.md": "# Holidays\n\nWhere to go.\n",
}


@pytest.fixture
def project(tmp_path, monkeypatch, home):
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(project, capsys):
    def _run(*args, task="negotiate the budget", method="keyword"):
        chosen = () if method is None else ("--method", method)
        score_command.main([*map(str, args), "--task", task, *chosen], standalone_mode=False)
        return capsys.readouterr()

    return _run


def refused(run, *args, **options):
    with pytest.raises((LocalragError, click.ClickException)) as caught:
        run(*args, **options)
    error = caught.value
    assert error.exit_code == 2
    message = error.message if isinstance(error, LocalragError) else error.format_message()
    assert "\n" not in message
    return message


def test_a_person_gets_a_table_best_first(run):
    out, err = run("app", "notes.md")
    lines = out.splitlines()
    assert lines[0].split() == ["File", "Score", "Alignment", "Recency", "Mentions", "Depth", "Type", "Tier"]
    assert [lines[1].split()[0], lines[-1].split()[0]] == ["app/budget.py", "notes.md"]
    assert len(lines) == 5
    for line in lines[1:]:
        _, total, *parts, _ = line.split()
        assert float(total) == pytest.approx(sum(map(float, parts)), abs=0.003)
    assert err == "A score is the sum of its columns. Their maximums: Alignment 0.40, Recency 0.20, Mentions 0.20, Depth 0.10, Type 0.10.\n"


def test_json_says_what_each_score_is_made_of(run):
    out, err = run("app", "notes.md", "--json", "--weight", "recency=0", "--weight", "file_type=0.3", "--half-life", "2")
    data = json.loads(out)
    assert err == ""
    assert list(data) == ["task", "method", "weights", "half_life_days", "files", "skipped"]
    assert (data["task"], data["method"], data["half_life_days"]) == ("negotiate the budget", "keyword", 2.0)
    assert data["weights"] == pytest.approx(dict(zip(FACTORS, [0.4, 0, 0.2, 0.1, 0.3], strict=True)))
    assert data["files"][0]["path"] == "app/budget.py"
    for file in data["files"]:
        assert list(file) == ["path", "score", "contributions", "details", "tier"]
        assert file["score"] == sum(file["contributions"].values())
        assert set(file["details"]) == set(FACTORS)


def test_each_file_once_by_the_path_that_was_given(run, project):
    (project / "link.py").symlink_to("app/limits.py")
    paths = [file["path"] for file in json.loads(run("notes.md", ".", "./notes.md", project / "app", "link.py", "--json")[0])["files"]]
    assert sorted(paths) == ["app/__init__.py", "app/budget.py", "app/limits.py", "notes.md"]
    assert [file["path"] for file in json.loads(run("link.py", "--json")[0])["files"]] == ["link.py"]


def test_tiers_follow_their_thresholds(run):
    best = json.loads(run("app/budget.py", "--json")[0])["files"][0]
    assert 0.7 < best["score"] < 0.95
    assert best["tier"] == "primary"
    assert json.loads(run("app/budget.py", "--json", "--primary", "0.95")[0])["files"][0]["tier"] == "supporting"
    assert "must fall" in refused(run, "app/budget.py", "--primary", "0.4")


def test_the_task_comes_from_a_file_too(run, project):
    (project / "task.txt").write_text("negotiate")
    assert json.loads(run("app", "--json", task="@task.txt")[0])["task"] == "negotiate"


def test_what_cannot_be_read_is_named_and_the_rest_scored(run, project):
    (project / "app" / "picture.bin").write_bytes(b"\0\1\2")
    with (project / "huge.txt").open("wb") as file:
        file.truncate(21 * 1024 * 1024)
    os.mkfifo(project / "pipe.py")
    out, err = run("app", "missing.py", "huge.txt", "pipe.py", "--json")
    skipped = {each["path"]: each["reason"] for each in json.loads(out)["skipped"]}
    assert skipped == {
        "app/picture.bin": "binary file",
        "missing.py": "No such file or directory",
        "huge.txt": "larger than 20 MB",
        "pipe.py": "not a regular file",
    }
    assert err.splitlines() == [f"skipped {path}: {reason}" for path, reason in skipped.items()]
    assert len(json.loads(out)["files"]) == 3


def test_a_document_is_scored_by_its_text(run, project):
    (project / "app" / "plan.docx").write_bytes(docx(p("How to negotiate the budget.")))
    out, err = run("app", "--json")
    assert err == ""
    assert {each["path"] for each in json.loads(out)["files"]} == {*(path for path in FILES if path != "notes.md"), "app/plan.docx"}


def test_names_and_texts_that_are_no_unicode_or_move_a_cursor(run, project):
    (project / "\x1b[2Jred.py").write_text("budget")
    (project / os.fsdecode(b"caf\xe9.py")).write_bytes(b"budget = 'caf\xe9'")
    out, _ = run("\x1b[2Jred.py", os.fsdecode(b"caf\xe9.py"))
    assert "\x1b" not in out
    assert "caf\\xe9.py" in out


@pytest.mark.parametrize(
    ("args", "task", "said"),
    [
        (["missing.py"], "x", "missing.py: No such file or directory"),
        (["empty"], "x", "the folder has no readable files"),
        (["picture.bin"], "x", "binary file"),
        (["missing.py", "picture.bin"], "x", "None of the files can be read"),
        (["notes.md"], " \n", "The task is empty"),
        (["notes.md"], "word " * 200_000, f"the limit is {MAX_TASK_CHARS}"),
        (["notes.md", "--weight", "charm=1"], "x", "'charm' is not a factor"),
        (["notes.md", "--weight", "recency"], "x", "needs a number"),
        (["notes.md", "--weight", "recency=-1"], "x", "recency is -1.0"),
        (["notes.md", "--weight", "recency=nan"], "x", "recency is nan"),
        (["notes.md", *(part for name in FACTORS for part in ("--weight", f"{name}=0"))], "x", "All weights of relevance are 0"),
        (["notes.md", "--half-life", "0"], "x", "half_life_days is 0"),
        (["notes.md", "--method", "magic"], "x", "magic"),
        ([], "x", "Missing argument"),
    ],
)
def test_bad_input_is_one_clear_line(run, project, args, task, said):
    (project / "empty").mkdir()
    (project / "picture.bin").write_bytes(b"\0")
    assert said in refused(run, *args, task=task, method=None if "--method" in args else "keyword")


def test_models_toml_weighs_and_the_command_line_has_the_last_word(run, project):
    models = project / "models.toml"
    models.write_text('[relevance]\nrecency = 0\nmethod = "keyword"\nhalf_life_days = 3\n[relevance.thresholds]\nprimary = 0.99\n')
    data = json.loads(run("app/budget.py", "--json", method=None)[0])
    assert (data["method"], data["half_life_days"], data["weights"]["recency"]) == ("keyword", 3.0, 0)
    assert data["files"][0]["tier"] == "supporting"
    data = json.loads(run("app/budget.py", "--json", "--weight", "recency=0.2", "--half-life", "5", "--primary", "0.7", method=None)[0])
    assert (data["half_life_days"], data["weights"]["recency"]) == (5.0, pytest.approx(0.2))
    assert data["files"][0]["tier"] == "primary"


def test_without_an_embedder_words_decide_unless_meaning_was_asked_for(run, project):
    models = project / "models.toml"
    models.write_text('default_embedder = "gone"\n[embedders.gone]\npath = "/nowhere/embedder"\n')
    out, err = run("app", "--json", "--models", models, method=None)
    assert json.loads(out)["method"] == "keyword"
    assert err.startswith("Scoring by keywords only: ")
    for method in ("hybrid", "semantic"):
        with pytest.raises(ModelNotFoundError):
            run("app", "--models", models, method=method)


def test_words_alone_load_nothing_heavy(project):
    code = """if True:
        import sys
        from localrag.cli.score import score_command
        score_command.main(["app", "--task", "budget", "--method", "keyword"], standalone_mode=False)
        assert not {"torch", "sentence_transformers", "faiss", "llama_cpp"} & set(sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_a_file_that_vanishes_while_the_folder_is_read_is_named(project, capsys):
    """The folder is a real one that another program empties; whatever it catches, the command ends well or says why."""
    code = "import os, sys; [os.unlink(entry.path) for entry in os.scandir('many')]"
    (project / "many").mkdir()
    for number in range(300):
        (project / "many" / f"{number}.txt").write_text("budget")
    with subprocess.Popen([sys.executable, "-c", code]):
        try:
            score_command.main(["many", "--task", "budget", "--method", "keyword", "--json"], standalone_mode=False)
        except UsageError as error:
            assert "read" in error.message
            return
    data = json.loads(capsys.readouterr().out)
    assert all(each["reason"] == "No such file or directory" for each in data["skipped"])
    assert 0 < len(data["files"]) <= 300
