"""python3 OUT.zip FOLDER with Python and nothing else, inside a network namespace without interfaces where one can be had.

The wheel installed here is a stand-in that prints its arguments. The real ones, 113 of 400 MB, take minutes to fetch and to install; that
was done by hand, as docs/how-to/air-gap.md tells.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from localrag.bundle.requirements import Wheels, ready_wheels
from tests.bundle.conftest import make_wheel
from tests.bundle.test_hostile import members, write
from tests.isolation import without_network

MAIN = """import os, sys

def main():
    print("CALLED", *sys.argv[1:], file=sys.stderr)
    return int(os.environ.get("STAND_IN_CODE", "0"))

sys.exit(main())
"""


@pytest.fixture
def wheels(tmp_path):
    """A folder with one wheel: a localrag of three lines."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    files = {
        "localrag/__init__.py": "",
        "localrag/__main__.py": MAIN,
        "localrag-9.9.dist-info/entry_points.txt": "[console_scripts]\nlocalrag = localrag.__main__:main\n",
    }
    make_wheel(folder, "localrag", "9.9", files, "Provides-Extra: server")
    return folder


@pytest.fixture
def bundle_file(pack, wheels):
    return pack(wheels=ready_wheels(wheels)).file


@pytest.fixture
def locked(pack, wheels):
    """Writes a bundle with a lock file that gives this sha256, or the wheel's own."""

    def run(name, sha256=None):
        [file] = wheels.iterdir()
        sha256 = sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
        return pack(name, wheels=Wheels((file,), lock=f"localrag==9.9 --hash=sha256:{sha256}\n")).file

    return run


def start(file, *args, python=sys.executable, prefix=(), **environment):
    """The zip started in a folder of its own, with as little of this environment as can be."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "SYSTEMROOT") if name in os.environ}
    return subprocess.run(
        [*prefix, python, file, *args],
        cwd=file.parent,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_installs_and_restores_without_a_network(bundle_file, locked, tmp_path):
    file = locked("locked.zip")
    done = start(file, tmp_path / "a folder", "--force", prefix=without_network())
    assert done.returncode == 0, done.stderr
    calls = [line for line in done.stderr.splitlines() if line.startswith("CALLED")]
    assert calls == [f"CALLED unbundle {file} --force"]
    assert f"{tmp_path / 'a folder' / 'bin' / 'localrag'} ask QUESTION --kb notes" in done.stderr
    assert (tmp_path / "a folder" / "bin" / "localrag").is_file()
    assert not list((tmp_path / "a folder").glob(".wheels-*"))
    again = start(bundle_file, tmp_path / "a folder", "--no-try", prefix=without_network())
    assert again.returncode == 0, again.stderr
    failed = start(bundle_file, tmp_path / "a folder", STAND_IN_CODE="6")
    assert failed.returncode == 6
    assert "could not install" in refusal(start(locked("other.zip", "0" * 64), tmp_path / "a folder"))
    assert (tmp_path / "a folder" / "pyvenv.cfg").is_file()


def repacked(file, name="bad.zip", **changes):
    """The same bundle with other values in its manifest."""
    found = members(file)
    manifest = json.loads(found.pop("manifest.json"))
    write(file.with_name(name), found.items(), manifest | changes)
    return file.with_name(name)


def refusal(done, code=3):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    first, hint = done.stderr.strip().splitlines()[-2:]
    assert first.startswith("Error: ")
    assert hint.startswith("  ")
    return first


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"python": "3.99", "python_tag": "cpython-399", "system": "Linux", "machine": "x86_64"}, "for Python cpython-399"),
        ({"python": f"3.{sys.version_info[1]}", "python_tag": "pypy", "system": "Linux", "machine": "x86_64"}, "for Python pypy"),
        (
            {"python": f"3.{sys.version_info[1]}", "python_tag": sys.implementation.cache_tag, "system": "Plan9", "machine": "vax"},
            "for Plan9 on vax",
        ),
        ({"version": 2}, "cannot read this bundle"),
        ({"files": {}}, "has no wheels"),
        ({"installed_bytes": 2**60}, "needs"),
        ({"files": None}, "damaged"),
    ],
)
def test_what_cannot_work_here_is_said_before_anything_is_made(bundle_file, tmp_path, changes, says):
    assert says in refusal(start(repacked(bundle_file, **changes), tmp_path / "to"))
    assert not (tmp_path / "to").exists()


def test_a_folder_of_something_else_is_left_alone(bundle_file, tmp_path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "letter.txt").write_text("dear")
    assert "not a virtual environment" in refusal(start(bundle_file, tmp_path / "to"))
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["letter.txt"]


def test_a_damaged_wheel_leaves_nothing_behind(bundle_file, tmp_path):
    found = members(bundle_file)
    name = next(each for each in found if each.startswith("wheels/"))
    manifest = found.pop("manifest.json")
    write(tmp_path / "bad.zip", (found | {name: found[name][:-1] + b"x"}).items(), manifest)
    assert "differs from what was packed" in refusal(start(tmp_path / "bad.zip", tmp_path / "to"))
    assert not (tmp_path / "to").exists()


def test_a_bundle_without_wheels_says_what_to_do(bundled, tmp_path):
    assert "has no wheels" in refusal(start(bundled.file, tmp_path / "to"))


@pytest.mark.parametrize("version", ["3.7", "3.8", "3.9", "3.10"])
def test_an_old_python_is_told_which_one_is_needed(bundle_file, tmp_path, version):
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip("old Pythons are tried where python3.7 to python3.10 are on the PATH")
    assert f"and this is cpython-{version.replace('.', '')}" in refusal(start(bundle_file, tmp_path / "to", python=python))
