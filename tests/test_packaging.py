"""The wheel and the source distribution: built without a network, whole, and running in a fresh environment."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STEM = f"localrag-{PROJECT['version']}"


def run(*command, **options):
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=kept | options.pop("env", {}),
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the source distribution, and the wheel that was built of that and nothing else."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    with tarfile.open(folder / f"{STEM}.tar.gz") as sources:
        sources.extractall(folder / "sources", filter="data")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=folder / "sources" / STEM)
    return folder


def test_the_sources_are_whole_and_nothing_else_is_in_them(built):
    with tarfile.open(built / f"{STEM}.tar.gz") as sources:
        names = {member.name.removeprefix(f"{STEM}/") for member in sources.getmembers()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "models.toml", "tests/conftest.py", "scripts/demo"} <= names
    assert {"examples/handbook/README.md", "docs/explanation/budget.md", "localrag/py.typed"} <= names
    tops = {name.split("/")[0] for name in names}
    assert not {each for each in tops if each.startswith((".", "results"))} - {".gitignore"}
    assert not [name for name in names if name.endswith((".pyc", ".gguf")) or "__pycache__" in name or "/results/" in name]
    tracked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "localrag").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert tracked <= names


def test_the_wheel_has_the_package_and_what_it_reads(built):
    with zipfile.ZipFile(built / f"{STEM}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        metadata = Parser().parsestr(wheel.read(f"{STEM}.dist-info/METADATA").decode())
        models = wheel.read("localrag/models.toml")
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "localrag").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    info = {f"{STEM}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names == ours | info | {"localrag/models.toml"}
    assert models == (ROOT / "models.toml").read_bytes()
    assert (metadata["Name"], metadata["Version"]) == ("localrag", PROJECT["version"])
    assert (metadata["License-Expression"], metadata["License-File"]) == ("MIT", "LICENSE")
    assert (metadata["Requires-Python"], metadata["Description-Content-Type"]) == (">=3.11", "text/markdown")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata.get_payload().startswith("# localrag")
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    assert {"click", "tomlkit", "packaging"} <= {each.name for each in needed if each.marker is None}
    assert not [each for each in needed if each.url]


def test_the_wheel_runs_in_a_fresh_environment(built, tmp_path):
    """One that has nothing of localrag; what localrag needs is borrowed from the environment of the tests."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    scripts = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", asked).stdout.strip())
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = built / f"{STEM}-py3-none-any.whl"
    run(
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "--python",
        python,
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--ignore-installed",
        wheel,
    )
    where = run(python, "-c", "import localrag; print(localrag.__file__)", cwd=tmp_path).stdout
    assert Path(where.strip()).is_relative_to(packages)
    home = {"LOCALRAG_HOME": str(tmp_path / "home")}
    command = scripts / "localrag"
    assert run(command, "--version", cwd=tmp_path).stdout.strip() == f"localrag {PROJECT['version']}"
    assert run(command, "tokens", "x", "--model", "echo", cwd=tmp_path, env=home).stdout.strip() == "1"
    assert run(command, "ask", "Why?", "--model", "echo", cwd=tmp_path, env=home).stdout.strip() == "You asked: Why?"
    assert "smollm2-135m" in run(command, "models", "list", cwd=tmp_path, env=home).stdout


def test_the_changelog_tells_of_this_version():
    versions = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert versions[1] == PROJECT["version"]


def test_what_is_said_of_versions_of_python_agrees():
    said = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if each.startswith("Programming Language :: Python :: 3.")]
    least = PROJECT["requires-python"].removeprefix(">=")
    assert said[0] == least
