"""bundle and unbundle as a person and a script meet them."""

import json

import pytest

from localrag.cli import main
from tests.bundle.conftest import bundled, machine, other, pack  # noqa: F401  # fixtures


@pytest.fixture
def run(machine, monkeypatch, capsys):  # noqa: F811
    """A command line on the machine of tests/bundle, or on one with another home."""

    def _run(*args, home=machine.home, models=machine.models_file):
        monkeypatch.setenv("LOCALRAG_HOME", str(home))
        monkeypatch.setenv("LOCALRAG_MODELS", str(models or ""))
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return _run


def test_there_and_back(run, tmp_path):
    code, out, err = run("bundle", tmp_path / "out.zip", "--no-wheelhouse")
    assert code == 0, err
    assert "tiny" in out
    assert "knowledge base" in out
    assert "sha256" in err
    assert "localrag unbundle out.zip" in err
    assert "keyword only" in err
    code, out, err = run("unbundle", tmp_path / "out.zip", home=tmp_path / "bob", models=None)
    assert code == 0, err
    assert out.count("added") == 5
    code, out, _ = run("kb", "list", "--json", home=tmp_path / "bob", models=None)
    (notes,) = json.loads(out)["knowledge_bases"]
    assert (notes["name"], notes["num_documents"], notes["num_chunks"]) == ("notes", 4, 12)


def test_json_is_one_object(run, tmp_path):
    code, out, _ = run("bundle", tmp_path / "out.zip", "--no-wheelhouse", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["num_bytes"] == (tmp_path / "out.zip").stat().st_size
    code, out, _ = run("unbundle", tmp_path / "out.zip", "--json", home=tmp_path / "bob", models=None)
    done = json.loads(out)
    assert (code, done["default_model"]) == (0, "tiny")
    assert {(each["kind"], each["state"]) for each in done["contents"]} >= {("model", "added"), ("kb", "added"), ("models_file", "added")}


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["bundle", "{tmp}/none/out.zip"], 2, "no folder"),
        (["bundle", "{tmp}/out.zip", "--wheelhouse", "{tmp}", "--no-wheelhouse"], 2, "exclude each other"),
        (["bundle", "{tmp}/out.zip", "--wheelhouse", "{tmp}"], 3, "none of localrag"),
        (["bundle", "{tmp}/out.zip", "--wheelhouse", "{tmp}/none"], 2, "does not exist"),
        (["bundle", "{tmp}"], 2, "is a directory"),
        (["bundle", "{tmp}/out.zip", "--kb", "none", "--no-wheelhouse"], 6, "no knowledge base"),
        (["bundle", "{tmp}/out.zip", "--model", "none", "--no-wheelhouse"], 4, "No model"),
        (["unbundle", "{tmp}/none.zip"], 2, "does not exist"),
        (["unbundle", "{tmp}/ann/models.toml"], 3, "cannot be unbundled"),
    ],
)
def test_bad_input_gets_one_line_and_a_way_out(run, tmp_path, args, code, says):
    got, out, err = run(*(arg.replace("{tmp}", str(tmp_path)) for arg in args))
    assert (got, out) == (code, "")
    assert says in err
    assert "Traceback" not in err
    got, out, _ = run(*(arg.replace("{tmp}", str(tmp_path)) for arg in args), "--json")
    assert got == code
    assert set(json.loads(out)["error"]) >= {"type", "message", "hint"}
    assert not list(tmp_path.glob("*.zip"))
