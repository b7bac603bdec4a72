"""A bundle that nobody vouches for: whatever is wrong with it is one error, and nothing lands."""

import hashlib
import json
import zipfile
from contextlib import suppress
from pathlib import PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.bundle.install import unbundle
from localrag.bundle.manifest import is_safe_name, open_bundle
from localrag.errors import BundleError, LocalragError
from localrag.settings import Settings
from tests.bundle.conftest import no_progress, tree

TINY = "home/models/local/tiny/tiny.gguf"


def members(file):
    with zipfile.ZipFile(file) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


def write(file, entries, manifest=None):
    """A zip of these (name or ZipInfo, data), with this manifest."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries:
            archive.writestr(name, data)
        if manifest is not None:
            archive.writestr("manifest.json", manifest if isinstance(manifest, bytes) else json.dumps(manifest))


def content(data):
    return {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}


@pytest.fixture
def parts(bundled):
    """The manifest of a bundle as plain values, and its files."""
    found = members(bundled.file)
    return json.loads(found.pop("manifest.json")), found


@pytest.fixture
def refused(tmp_path, parts):
    """Writes a bundle of changed parts, and gives the error by which it is refused; nothing may have landed."""
    manifest, files = parts

    def run(entries=None, *, home=tmp_path / "home", raw=None):
        file = tmp_path / "bad.zip"
        write(file, [*files.items()] if entries is None else entries, manifest if raw is None else raw)
        with pytest.raises(BundleError) as caught:
            unbundle(file, Settings(home=home), no_progress, force=True)
        assert not home.exists() or tree(home) == {}
        assert not list(home.glob(".unbundle-*"))
        assert "\n" not in caught.value.message
        return caught.value.message

    return run


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/etc/evil",
        "home/../../evil",
        "home\\evil",
        "C:evil",
        "home//evil",
        "home/./evil",
        "home/evil ",
        "a\x1b[2J",
        "con:",
        "x" * 600,
    ],
)
def test_a_name_that_leaves_the_folder(parts, refused, name):
    manifest, files = parts
    manifest["files"][name] = content(b"evil")
    assert "unsafe name" in refused([*files.items(), (name, b"evil")])


@pytest.mark.parametrize("mode", [0o120777, 0o040755, 0o010644, 0o020644])
def test_a_link_a_folder_a_pipe_and_a_device(parts, refused, mode):
    _, files = parts
    link = zipfile.ZipInfo(TINY)
    link.external_attr = mode << 16
    assert "not a regular file" in refused([*((name, data) for name, data in files.items() if name != TINY), (link, b"/etc/passwd")])


def test_what_is_missing_too_much_or_twice(parts, refused):
    _, files = parts
    assert "it lacks 'home/models/local/tiny/tiny.gguf'" in refused([each for each in files.items() if each[0] != TINY])
    assert "not in its manifest" in refused([*files.items(), ("home/models/more.gguf", b"x")])
    with pytest.warns(UserWarning, match="Duplicate name"):
        assert "twice" in refused([*files.items(), (TINY, files[TINY])])
    assert "only in case" in refused([*files.items(), (TINY.upper(), b"")])


def test_what_is_damaged(parts, refused):
    _, files = parts
    data = files[TINY]
    assert "is damaged" in refused([*(files | {TINY: bytes([data[0] ^ 1]) + data[1:]}).items()])
    assert "another size" in refused([*(files | {TINY: data[:-1]}).items()])


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("model", "home/verified.json"),
        ("model", "home/kb/notes/kb.sqlite"),
        ("embedder", "home/models"),
        ("models_file", "home/models/models.toml"),
        ("copy", "home/embedders/x.gguf"),
        ("copy", "home/embedders/../models.toml"),
        ("template", "home/models/templates/../../x.jinja"),
        ("kb", "kb/../notes.kb"),
        ("starter", "home/models/__main__.py"),
        ("wheels", "home/models/wheels"),
    ],
)
def test_a_thing_where_none_of_its_kind_may_be(parts, refused, kind, path):
    manifest, files = parts
    manifest["things"].append({"kind": kind, "name": "evil", "path": path})
    manifest["files"][path] = content(b"evil")
    message = refused([*files.items(), (path, b"evil")])
    assert "where none is allowed" in message or "unsafe name" in message or "inside something else" in message


def test_things_that_do_not_agree(parts, refused):
    manifest, _ = parts
    model = next(thing for thing in manifest["things"] if thing["kind"] == "model")
    things = list(manifest["things"])
    for extra, reason in (
        ({**model}, "twice"),
        ({**model, "path": "home/models/local"}, "inside something else"),
        ({**model, "path": "home/models/none"}, "has no files for"),
        ({"kind": "kb", "name": "other", "path": "kb/notes2.kb"}, "knowledge base 'other'"),
    ):
        manifest["things"] = [*things, extra]
        assert reason in refused()
    manifest["things"] = [thing for thing in things if thing is not model]
    assert "belongs to nothing in it" in refused()


def test_a_models_toml_that_leads_elsewhere(parts, refused):
    manifest, files = parts
    good = files["home/models.toml"].decode()
    for bad, reason in (
        (good.replace("models/local/tiny/tiny.gguf", "/etc/passwd"), "in another place"),
        (good.replace("models/local/tiny/tiny.gguf", "models/local/tiny/../../../x"), "in another place"),
        (good.replace("models.tiny]", "models.other]").replace('"tiny"', '"other"'), "has no model 'tiny'"),
        (good.replace('default_model = "tiny"', 'default_model = "elsewhere"'), "default model 'elsewhere' is not in it"),
        (good + "[nonsense]\n", "models.toml is invalid"),
        ("[models\n", "models.toml is invalid"),
    ):
        files["home/models.toml"] = bad.encode()
        manifest["files"]["home/models.toml"] = content(bad.encode())
        assert reason in refused()


def test_a_bomb(parts, refused, tmp_path):
    manifest, files = parts
    zeros = b"\0" * 4_000_000
    packed = zipfile.ZipInfo(TINY)
    packed.compress_type = zipfile.ZIP_DEFLATED
    others = [each for each in files.items() if each[0] != TINY]
    assert "another size" in refused([*others, (packed, zeros)])  # more than its manifest says
    manifest["files"][TINY] = content(zeros) | {"num_bytes": 2**60}
    assert "another size" in refused([*others, (packed, zeros)])
    file = tmp_path / "bad.zip"
    manifest["files"][TINY] = content(files[TINY])
    write(file, [*others, (packed, zeros)], manifest)
    data = file.read_bytes()
    size = len(zeros).to_bytes(4, "little")
    assert data.count(size) >= 2
    file.write_bytes(data.replace(size, len(files[TINY]).to_bytes(4, "little")))  # the archive lies as well
    with pytest.raises(BundleError, match="damaged"):
        unbundle(file, Settings(home=tmp_path / "home"), no_progress)
    assert tree(tmp_path / "home") == {}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'"x"',
        b"\xff",
        b"[" * 100_000,
        b'{"format": "localrag bundle", "version": 2}',
        b'{"format": "localrag bundle", "version": 1}',
        b'{"format": "x", "version": 1}',
        b" " * (9 << 20),
    ],
)
def test_a_manifest_that_is_none(refused, raw):
    assert "cannot be unbundled" in refused(raw=raw)


def test_no_zip_at_all(tmp_path):
    for data in (b"", b"PK\x03\x04", b"text" * 100, b"PK\x05\x06" + b"\0" * 18):
        (tmp_path / "x.zip").write_bytes(data)
        with pytest.raises(BundleError, match="cannot be unbundled"):
            unbundle(tmp_path / "x.zip", Settings(home=tmp_path / "home"), no_progress)


@given(name=st.text(min_size=0, max_size=30) | st.from_regex(r"[a./\\: ]{1,12}", fullmatch=True))
def test_a_harmless_name_stays_where_it_begins(name):
    if is_safe_name(name):
        path = PurePosixPath("/root") / name
        assert path.is_relative_to("/root/")
        assert ".." not in path.parts
        assert not PurePosixPath(name).is_absolute()
        assert str(PurePosixPath(name)) == name


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_byte_is_found_or_says_nothing(bundled, tmp_path, data):
    """Read as far as unbundle reads it; what lands is the same, or nothing does."""
    whole, files = bundled.file.read_bytes(), members(bundled.file)
    at = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.integers(1, 255))
    bad = tmp_path / "flipped.zip"
    bad.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
    with suppress(LocalragError), open_bundle(bad) as bundle:
        for name in bundle.manifest.files:
            assert b"".join(bundle.blocks(name)) == files[name]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_manifest_is_read_or_refused(parts, tmp_path, data):
    """A value somewhere in it is replaced by another one."""
    manifest, files = parts
    manifest = json.loads(json.dumps(manifest))
    node, key = manifest, data.draw(st.sampled_from(sorted(manifest)))
    while isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    node[key] = data.draw(JSON)
    write(tmp_path / "odd.zip", files.items(), manifest)
    with suppress(LocalragError), open_bundle(tmp_path / "odd.zip") as bundle:
        for name in bundle.manifest.files:
            b"".join(bundle.blocks(name))
