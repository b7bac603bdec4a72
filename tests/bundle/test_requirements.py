"""pip fetches exactly the versions installed here, from its own settings; whatever it cannot fetch is one error, and nothing is left."""

import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

import localrag
from localrag.bundle.pack import bundle
from localrag.bundle.requirements import Wheels, fetch, fetched_wheels, installed_extras, lock, pin, ready_wheels, required
from localrag.bundle.select import select
from localrag.errors import BundleError
from tests.bundle.conftest import make_wheel, metadata_text, no_progress

BACKEND = """import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(folder + "/built-3.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("built-3.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: built\\nVersion: 3.0\\n")
        wheel.writestr("built-3.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("built-3.0.dist-info/RECORD", "")
    return "built-3.0-py3-none-any.whl"
"""


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder in which pip looks for wheels instead of an index; pip's own settings say so."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def installed(tmp_path):
    """Makes a distribution as pip leaves it, with only what a bundle reads of it."""

    def run(name, version, *lines, **files):
        info = tmp_path / "site" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(metadata_text(name, version, *lines))
        for file, text in files.items():
            (info / file).with_suffix(".json").write_text(text)
        return metadata.Distribution.at(info)

    return run


def sources(folder):
    """A folder that pip can build without any other package."""
    folder.mkdir()
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
    return folder


def test_pip_fetches_and_builds_the_installed_versions(index, installed, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    direct = make_wheel(tmp_path / "elsewhere", "direct", "1.0", {})
    for version in ("1.9", "2.0+cpu", "2.1"):
        make_wheel(index, "Some_Thing", version, {})
    folder = tmp_path / "to"
    folder.mkdir()
    distributions = [
        installed("Some.Thing", "2.0+cpu", "Requires-Dist: not-there"),
        installed("direct", "1.0", direct_url=json.dumps({"url": direct.as_uri(), "archive_info": {}})),
        installed("built", "3.0", direct_url=json.dumps({"url": sources(tmp_path / "a b").as_uri(), "dir_info": {"editable": True}})),
    ]
    stages = set()
    wheels = fetch(distributions, folder, lambda stage, *_: stages.add(stage))
    assert [wheel.name for wheel in wheels] == [f"{stem}-py3-none-any.whl" for stem in ("Some_Thing-2.0+cpu", "built-3.0", "direct-1.0")]
    assert stages >= {"fetching wheels", "building built"}
    lines = lock(distributions, wheels).splitlines()
    assert [re.sub("[0-9a-f]{64}", "…", line) for line in lines] == [
        f"{name} --hash=sha256:…" for name in ("Some.Thing==2.0+cpu", "direct==1.0", "built==3.0")
    ]


def test_what_pip_cannot_fetch_is_one_error_and_nothing_is_left(index, installed, tmp_path):
    make_wheel(index, "other", "1.0", {})
    with pytest.raises(BundleError, match=r"^pip could not fetch the wheels: .*absent==1\.0") as caught:
        fetch([installed("absent", "1.0"), installed("other", "1.0")], tmp_path, no_progress)
    assert "--wheelhouse DIR" in caught.value.hint
    assert "\n" not in caught.value.message
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.usefixtures("index")
def test_a_bundle_that_pip_fails_leaves_no_file(machine, temporary, tmp_path):
    with pytest.raises(BundleError, match="pip could not fetch"):
        bundle(tmp_path / "out.zip", select(machine), fetched_wheels(no_progress), machine, no_progress)
    assert not list(tmp_path.glob("*out.zip*"))
    assert not [path for path in temporary.iterdir() if path.name.startswith("localrag")]


@pytest.mark.usefixtures("index")
def test_an_interrupted_pip_leaves_no_file(machine, temporary, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundle(tmp_path / "out.zip", select(machine), fetched_wheels(interrupt), machine, no_progress)
    assert not list(tmp_path.glob("*out.zip*"))
    assert not [path for path in temporary.iterdir() if path.name.startswith("localrag")]


def test_wheels_are_packed_with_their_lock(pack, index):
    wheel = make_wheel(index, "localrag", "9.9", {"localrag/__init__.py": "x = 1\n"})
    made = pack(wheels=Wheels((wheel,), ("server",), "localrag==9.9\n")).manifest
    assert [name for name in made.files if name.startswith("wheels/")] == [f"wheels/{wheel.name}", "wheels/requirements.lock"]
    assert (made.python, made.extras) == (f"{sys.version_info[0]}.{sys.version_info[1]}", ["server"])
    assert made.installed_bytes > len("x = 1\n")
    assert pack(wheels=Wheels((wheel,))).manifest.python is None


def test_a_wheel_of_another_version_is_refused(index, installed):
    old = make_wheel(index, "thing", "1.0", {})
    distribution = installed("thing", "1.1")
    for wheels, says in (([old], "pip returned thing-1.0"), ([], "no wheel of it")):
        with pytest.raises(BundleError, match=says) as caught:
            lock([distribution], wheels)
        assert "--wheelhouse" in caught.value.hint


def test_a_pin_leads_to_where_a_distribution_came_from(installed, tmp_path):
    root = Path(localrag.__file__).parents[1]
    assert pin(metadata.distribution("localrag")) == f"localrag @ {root.as_uri()}"
    assert pin(installed("a", "1.0")) == "a==1.0"
    assert pin(installed("b", "1.0", direct_url="not JSON")) == "b==1.0"
    git = {"url": "https://example.org/c", "vcs_info": {"vcs": "git", "commit_id": "f" * 40}, "subdirectory": "python"}
    assert pin(installed("c", "1.0", direct_url=json.dumps(git))) == f"c @ git+https://example.org/c@{'f' * 40}#subdirectory=python"
    gone = {"url": (tmp_path / "gone.whl").as_uri(), "archive_info": {}}
    with pytest.raises(BundleError, match=r"gone\.whl, which no longer exists") as caught:
        pin(installed("d", "1.0", direct_url=json.dumps(gone)))
    assert "--wheelhouse DIR" in caught.value.hint


def test_all_that_localrag_needs_and_no_tool_of_developers():
    names = {distribution.name.lower().replace("_", "-") for distribution in required(installed_extras())}
    assert {"localrag", "llama-cpp-python", "torch", "click", "cryptography", "safetensors"} <= names
    assert not {"pytest", "mypy", "ruff", "hypothesis", "pip", "mkdocs"} & names


def test_ready_wheels_offer_the_extras_that_they_satisfy(tmp_path):
    needs = {"server": "fast-api>=1", "mcp": "mcp>=2", "eval": "matplotlib", "dev": "pytest"}
    lines = [line for extra, need in needs.items() for line in (f"Provides-Extra: {extra}", f'Requires-Dist: {need}; extra == "{extra}"')]
    for name in ("click-8", "fast_api-1.5", "mcp-1.9", "pytest-9"):
        (tmp_path / f"{name}-py3-none-any.whl").touch()
    make_wheel(tmp_path, "localrag", "8", {}, *(line.replace("mcp>=2", "mcp") for line in lines))
    newest = make_wheel(tmp_path, "localrag", "9", {}, *lines)
    assert ready_wheels(tmp_path).extras == ("server",)
    newest.write_bytes(b"x")
    with pytest.raises(BundleError, match="is not a valid wheel"):
        ready_wheels(tmp_path)


LOCALRAG = """
import sys
from importlib import metadata
from pathlib import Path
site, wheel = map(Path, sys.argv[1:])
sys.path.insert(0, str(site))
from localrag.bundle import requirements
from localrag.errors import BundleError
requirements._CHECKOUT = site
try:
    requirements.required([])
    requirements.lock([metadata.distribution("localrag")], [wheel])
except BundleError as error:
    print(error.message, "|", error.hint)
"""
"""Runs beside an installed localrag that is not the one of a clone."""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("Requires-Dist: not-there-1>=1", "needs not-there-1, which is not installed"),
        ("Requires-Dist: click<1", "needs click<1, but"),
        ("Summary: the one of the index", ""),
        ("Summary: another program", "has another program named localrag"),
    ],
)
def test_an_installed_localrag_that_cannot_be_packed_is_told(installed, index, line, says):
    distribution = installed("localrag", "9", line)
    wheel = make_wheel(index, "localrag", "9", {}, line.replace("another program", "the one of the index"))
    site = Path(str(distribution.locate_file("")))
    done = subprocess.run([sys.executable, "-c", LOCALRAG, site, wheel], capture_output=True, text=True, check=True)
    assert says in done.stdout
    assert ("--wheelhouse" in done.stdout) == bool(says)
