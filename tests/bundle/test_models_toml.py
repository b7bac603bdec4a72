"""models.toml edited with its comments, and only where the result says what it should."""

import tomllib

import pytest

from localrag.bundle import models_toml
from localrag.bundle.models_toml import Relocated
from localrag.errors import ConfigError

TEXT = """# mine
default_model = "a"

[models.a]   # the first
repo = "x/y"
file = "a.gguf"
revision = "main"
n_ctx = 7

[embedders.e]
path = "e"

[models.b]
path = "b.gguf"
"""
RELOCATED = Relocated(table="models", name="a", path="models/local/a/a.gguf", sha256="0" * 64)


def rewritten(text, relocated=(), defaults=None, templates=None, tmp_path="models.toml"):
    return models_toml.rewrite(text, relocated, defaults=defaults or {}, templates=templates or {}, file=tmp_path)


def test_what_need_not_change_stays_to_the_byte():
    assert rewritten(TEXT, defaults={"default_model": "a"}) == TEXT


def test_a_source_becomes_a_path_and_the_rest_stays():
    made = rewritten(TEXT, [RELOCATED], defaults={"default_model": "a", "default_embedder": "e"})
    assert tomllib.loads(made) == {
        "default_model": "a",
        "default_embedder": "e",
        "models": {"a": {"n_ctx": 7, "path": "models/local/a/a.gguf", "sha256": "0" * 64}, "b": {"path": "b.gguf"}},
        "embedders": {"e": {"path": "e"}},
    }
    assert made.startswith("# mine\n")
    assert "# the first" in made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[models]\n",
        '[models.z]\npath = "z"\n',
        'models.z.path = "z"\n',
        'models = { z = { path = "z" } }\n',
        '[embedders.e]\npath = "e"\n',
        '[models.a]\nwheel = "w==1"\nfile = "f"\n',
        '[models]\n[models.a]\npath = """\n[models.a]"""\n',
    ],
)
def test_any_form_of_tables_is_edited_or_refused(text):
    wanted = tomllib.loads(text)
    wanted.setdefault("models", {})["a"] = {"path": RELOCATED.path, "sha256": RELOCATED.sha256}
    try:
        made = rewritten(text, [RELOCATED])
    except ConfigError as error:
        assert error.hint
    else:
        assert tomllib.loads(made) == wanted


def test_only_what_is_lacking_is_merged():
    own = '# his\n[models.b]\npath = "his.gguf"  # kept\n'
    made = models_toml.merge(own, TEXT, [("models", "a"), ("embedders", "e")], defaults=["default_model"], file="models.toml")
    said = tomllib.loads(made)
    assert said["models"]["b"] == {"path": "his.gguf"}
    assert said["models"]["a"]["repo"] == "x/y"
    assert said["embedders"] == {"e": {"path": "e"}}
    assert said["default_model"] == "a"
    assert "# kept" in made
    assert models_toml.merge(own, TEXT, [], defaults=[], file="models.toml") == own
