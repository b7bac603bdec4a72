"""models.toml files in layers: the one that ships, the home's, the project's, and one that is named."""

import json
import os
from pathlib import Path

import pytest

from localrag.catalog import Catalog
from localrag.cli import main
from localrag.errors import ConfigError, ModelNotFoundError
from localrag.settings import Settings, shipped_file


@pytest.fixture
def layers(home, tmp_path, monkeypatch):
    """Writes the models.toml of each layer; gives the catalogue that they make together."""
    project, named = tmp_path / "project", tmp_path / "named" / "own.toml"
    home.mkdir()
    project.mkdir()
    named.parent.mkdir()
    monkeypatch.chdir(project)

    def load(*, in_home=None, in_project=None, in_named=None):
        for file, text in ((home / "models.toml", in_home), (project / "models.toml", in_project), (named, in_named)):
            if text is not None:
                file.write_text(text)
        return Catalog.load(Settings(home=home, models_file=None if in_named is None else named))

    return load


def test_two_lines_suffice_for_a_model_of_ones_own(layers, tmp_path):
    catalog = layers(in_project='[models.mine]\npath = "mine.gguf"\n')
    assert catalog.model("mine").source == str(tmp_path / "project" / "mine.gguf")
    assert (catalog.model().name, catalog.embedder().name) == ("smollm2-135m", "minilm")
    assert catalog.names()[:2] == ("mine", "smollm2-135m")
    assert catalog.council().name == "default"
    assert catalog.files == (Path("models.toml"), shipped_file())


def test_the_highest_layer_wins_and_paths_start_at_their_own_file(layers, home, tmp_path):
    catalog = layers(
        in_home='default_model = "a"\n[models.a]\npath = "a.gguf"\nn_ctx = 64\n[models.b]\npath = "b.gguf"\n',
        in_project='[models.a]\npath = "a.gguf"\n[models.c]\npath = "c.gguf"\n',
        in_named='default_model = "b"\n[models.c]\npath = "c.gguf"\n',
    )
    assert catalog.model().name == "b"
    assert catalog.model("a").source == str(tmp_path / "project" / "a.gguf")
    assert catalog.model("a").n_ctx is None  # an entry is replaced whole
    assert catalog.model("b").source == str(home / "b.gguf")
    assert catalog.model("c").source == str(tmp_path / "named" / "c.gguf")
    assert catalog.files == (tmp_path / "named" / "own.toml", Path("models.toml"), home / "models.toml", shipped_file())
    assert catalog.origins["c"] == tmp_path / "named" / "own.toml"
    assert catalog.origins["minilm"] == shipped_file()


def test_the_sha256_of_an_entry_that_ships_does_not_hold_for_ones_own_of_that_name(layers, tmp_path):
    (tmp_path / "project" / "mine.gguf").write_bytes(b"other weights")
    catalog = layers(in_project='[models.smollm2-135m]\npath = "mine.gguf"\n')
    spec = catalog.model()
    assert (spec.sha256, spec.file) == (None, "")
    assert catalog.open(spec) == tmp_path / "project" / "mine.gguf"


def test_every_kind_of_table_is_layered(layers):
    catalog = layers(
        in_home='[rerankers.r]\npath = "r"\n[budgets.tight]\ngap = 9\n[budgets.wide]\ngap = 1\n[tags]\n"a/*" = ["a"]\n"b/*" = ["b"]\n'
        "[memories]\nmin_importance = 0.5\nmax_age_days = 3\n[relevance]\nrecency = 0.7\n[relevance.file_types]\nconfig = 0.3\n"
        "[server]\ntools_with_index = 'reject'\n",
        in_project='[budgets.tight]\ngap = 5\n[tags]\n"a/*" = ["other"]\n[memories]\nmax_age_days = 4\n'
        '[relevance.file_types]\nother = 0.9\n[councils.duo]\nbudget = "wide"\n'
        '[[councils.duo.specialists]]\nname = "one"\npersona = "You."\nmodel = "qwen3-4b"\n',
    )
    assert catalog.reranker("r").name == "r"
    assert (catalog.budget("tight").gap, catalog.budget("wide").gap) == (5, 1)
    assert catalog.budget("council").sections["answer"].shrink == 0  # from the file that ships
    assert dict(catalog.tags) == {"a/*": ("other",), "b/*": ("b",)}
    assert dict(catalog.memories) == {"min_importance": 0.5, "max_age_days": 4}
    assert catalog.relevance()["recency"] == 0.7
    assert catalog.relevance()["file_types"] == {"config": 0.3, "other": 0.9}
    assert catalog.rejects_tools
    assert catalog.council("duo").members[0].profile.gap == 1
    assert catalog.councils() == ["duo", "default", "athene-judge"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[models.x]\npaht = 'a'", "key paht"),
        ("default_model = 'qwen3-4'", "did you mean qwen3-4b"),
        ("[[councils.c.specialists]]\nname = 'a'\npersona = 'b'\nmodel = 'none'", "[councils.c.specialists.1], key model"),
        ("[councils.c]\nbudget = 'none'", "[councils.c], key budget"),
        ("[relevance.thresholds]\nprimary = 0.1\nsupporting = 0.9", "[relevance.thresholds]"),
        ("a = !", "not valid TOML"),
    ],
)
@pytest.mark.parametrize("layer", ["in_home", "in_project", "in_named"])
def test_a_fault_names_the_file_in_which_it_stands(layers, home, tmp_path, layer, text, what):
    places = {
        "in_home": home / "models.toml",
        "in_project": Path("models.toml"),
        "in_named": tmp_path / "named" / "own.toml",
    }
    with pytest.raises(ConfigError) as caught:
        layers(**{each: "[tags]\n'x/*' = ['x']\n" for each in places if each != layer}, **{layer: text})
    assert what in caught.value.message
    assert caught.value.message.startswith(f"{places[layer]}: ")
    assert caught.value.numbers["file"] == str(places[layer])


def test_a_name_of_ones_own_goes_before_another_kind_of_entry_below(layers):
    catalog = layers(in_project='[models.minilm]\npath = "m.gguf"\n')
    assert catalog.model("minilm").kind == "path"
    assert "minilm" not in catalog.embedders
    with pytest.raises(ModelNotFoundError, match="no default embedder"):
        catalog.embedder()


def test_the_same_file_is_one_layer(home, tmp_path, monkeypatch):
    home.mkdir()
    (home / "models.toml").write_text('[models.mine]\npath = "m.gguf"\n')
    monkeypatch.chdir(home)
    (home / "link.toml").symlink_to(home / "models.toml")
    assert Settings(home=home).models_files() == (Path("models.toml"),)
    assert Settings(home=home, models_file=Path("link.toml")).models_files() == (Path("link.toml"),)
    monkeypatch.chdir(shipped_file().parent)  # in a checkout, ./models.toml is the file that ships
    assert Settings(home=home).models_files() == (home / "models.toml",)
    assert Catalog.load(Settings(home=home, models_file=shipped_file())).files == (shipped_file(), home / "models.toml")


def test_the_files_in_force_are_named(layers, home, tmp_path, capsys):
    def run(*args):
        assert main([*args]) == 0
        return capsys.readouterr()

    layers(in_home='[models.theirs]\npath = "t.gguf"\n', in_project='[models.mine]\npath = "m.gguf"\n')
    files = [str(tmp_path / "project" / "models.toml"), str(home / "models.toml"), str(shipped_file())]
    said = run("models", "list")
    listed = json.loads(run("models", "list", "--json").out)
    assert [file for file in files if file not in said.err] == []
    assert "models pull mine" not in said.err  # a path is not fetched
    assert (listed["file"], listed["files"]) == (files[0], files)
    assert {row["name"]: row["models_file"] for row in listed["models"]}["theirs"] == files[1]
    doctor = json.loads(run("doctor", "--json").out)
    assert doctor["catalogue"]["files"] == files
    assert [file for file in files if file not in run("doctor").out] == []
    ask = ["ask", "Why?", "--model", "echo", "--no-keep"]
    explained = run(*ask, "--explain")
    assert [file for file in files if file not in explained.err] == []
    assert json.loads(run(*ask, "--json").out)["models_files"] == files
    assert json.loads(run(*ask, "--json", "--dry-run").out)["models_files"] == files


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_models_file_of_another_user_in_the_current_folder_is_refused(layers, tmp_path):
    layers(in_project='[models.mine]\npath = "m.gguf"\n')
    file = tmp_path / "project" / "models.toml"
    os.chown(file, 12345, 12345)
    assert Settings(home=tmp_path).models_files() == (Path("models.toml"),)  # root is not asked
    os.seteuid(12346)
    try:
        with pytest.raises(ConfigError, match="belongs to another user") as caught:
            Settings(home=tmp_path).models_files()
    finally:
        os.seteuid(0)
    assert "--models ./models.toml" in caught.value.hint
    assert "mine" in Catalog.load(Settings(home=tmp_path, models_file=file)).models
