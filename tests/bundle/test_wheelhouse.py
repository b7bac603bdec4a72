"""An installed distribution packed again is the wheel that it was installed from."""

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import localrag
from localrag.bundle.pack import Wheels
from localrag.bundle.requirements import installed_extras, needed
from localrag.bundle.wheelhouse import Wheel
from localrag.errors import BundleError

WHEEL = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def sha256(data):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def install(prefix, files, *, name="Some.Thing", version="1.0+cpu", wheel=WHEEL, unhashed=()):
    """An environment with one distribution in it, as pip would have left it: {path from the folder of packages: bytes}."""
    site = prefix / "lib" / "python3" / "site-packages"
    info = f"{name.replace('.', '_').lower()}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": wheel.encode(),
        f"{info}/INSTALLER": b"pip\n",
        f"{info}/direct_url.json": b"{}",
    }
    lines = []
    for path, data in files.items():
        file = (site / path).resolve() if ".." in path else site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        lines.append(f"{path},," if path in unhashed else f"{path},{sha256(data)},{len(data)}")
    (site / info / "RECORD").write_text("\n".join([*lines, f"{info}/RECORD,,"]) + "\n")
    return metadata.Distribution.at(site / info)


def packed(distribution):
    """The wheel's name and members, by name."""
    out = io.BytesIO()
    wheel = Wheel.of(distribution)
    wheel.write(out, lambda _: None)
    with zipfile.ZipFile(out) as archive:
        return wheel.filename, {name: archive.read(name) for name in archive.namelist()}, archive.infolist()


def test_what_an_installer_makes_anew_is_left_out_and_the_rest_is_put_back(tmp_path):
    distribution = install(
        tmp_path,
        {
            "some_thing/__init__.py": b"x = 1\n",
            "some_thing/__pycache__/__init__.cpython-311.pyc": b"code",
            "some_thing-1.0+cpu.dist-info/entry_points.txt": b"[console_scripts]\nthing = some_thing:main\n",
            "some_thing-1.0+cpu.dist-info/licenses/LICENSE": b"free",
            "../../../bin/thing": b"#!/venv/bin/python\nmade by pip\n",
            "../../../bin/own": b"#!/venv/bin/python3.11\nprint(1)\n",
            "../../../bin/tool": b"\x7fELF",
            "../../../share/man/man1/thing.1": b".TH",
        },
        unhashed=["some_thing/__pycache__/__init__.cpython-311.pyc"],
    )
    name, members, _ = packed(distribution)
    assert name == "some_thing-1.0+cpu-py3-none-any.whl"
    assert {key: value for key, value in members.items() if ".dist-info" not in key} == {
        "some_thing/__init__.py": b"x = 1\n",
        "some_thing-1.0+cpu.data/scripts/own": b"#!python\nprint(1)\n",
        "some_thing-1.0+cpu.data/scripts/tool": b"\x7fELF",
        "some_thing-1.0+cpu.data/data/share/man/man1/thing.1": b".TH",
    }
    info = "some_thing-1.0+cpu.dist-info"
    assert {key for key in members if ".dist-info" in key} == {
        f"{info}/{each}" for each in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    rows = {path: (noted, size) for path, noted, size in csv.reader(members.pop(f"{info}/RECORD").decode().splitlines())}
    assert rows.pop(f"{info}/RECORD") == ("", "")
    assert rows == {path: (sha256(data), str(len(data))) for path, data in members.items()}


def test_the_same_installation_packs_to_the_same_bytes(tmp_path):
    wheels = []
    for number in (1, 2):
        out = io.BytesIO()
        Wheel.of(install(tmp_path / str(number), {"a.py": b"1", "b/c.txt": b"2"})).write(out, lambda _: None)
        wheels.append(out.getvalue())
    assert wheels[0] == wheels[1]


def test_what_may_be_run_stays_so(tmp_path):
    distribution = install(tmp_path, {"some_thing/bin/protoc": b"\x7fELF", "some_thing/x.py": b"1"})
    Path(distribution.locate_file("some_thing/bin/protoc")).chmod(0o755)
    _, _, infos = packed(distribution)
    modes = {info.filename: info.external_attr >> 16 & 0o777 for info in infos}
    assert modes["some_thing/bin/protoc"] == 0o755
    assert modes["some_thing/x.py"] == 0o644


def test_tags_are_those_of_the_wheel(tmp_path):
    lines = "Tag: cp311-cp311-manylinux_2_17_x86_64\nTag: cp311-cp311-manylinux2014_x86_64\n"
    name, _, _ = packed(install(tmp_path / "1", {}, wheel=WHEEL.replace("Tag: py3-none-any\n", lines)))
    assert name.endswith("-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl")
    name, _, _ = packed(install(tmp_path / "2", {}, wheel=WHEEL.replace("py3-none-any", "py2.py3-none-any")))
    assert name.endswith("-py2.py3-none-any.whl")


@pytest.mark.parametrize("path", ["some_thing/x.py", "../../../bin/own"])
def test_a_file_that_was_changed_since_is_told(tmp_path, path):
    distribution = install(tmp_path, {path: b"as installed"})
    file = Path(distribution.locate_file(path))
    file.write_bytes(b"edited since")
    with pytest.raises(BundleError, match=r"is not as Some\.Thing==1\.0") as caught:
        packed(distribution)
    assert "--force-reinstall" in caught.value.hint
    file.unlink()
    with pytest.raises(BundleError, match="lacks"):
        packed(distribution)


def test_what_did_not_come_from_a_wheel_is_told(tmp_path):
    egg = tmp_path / "old-1.0.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: old\nVersion: 1.0\n")
    with pytest.raises(BundleError, match="not installed from a wheel"):
        Wheel.of(metadata.Distribution.at(egg))
    with pytest.raises(BundleError, match="does not say which Python"):
        Wheel.of(install(tmp_path / "b", {}, wheel="Wheel-Version: 1.0\n"))
    editable = install(tmp_path / "c", {"x.pth": b"/src"})
    (Path(editable.locate_file("")) / "some_thing-1.0+cpu.dist-info" / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    with pytest.raises(BundleError, match="editable"):
        Wheel.of(editable)


def test_localrag_itself_is_packed_as_it_runs():
    name, members, _ = packed(metadata.distribution("localrag"))
    assert name == f"localrag-{metadata.version('localrag')}-py3-none-any.whl"
    package = Path(localrag.__file__).parent
    sources = {f"localrag/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    assert sources <= members.keys()
    assert {"localrag/py.typed", "localrag/models.toml", "localrag/server/page.html", "localrag/engine/data/reading.txt"} <= members.keys()
    assert not [each for each in members if each.endswith((".pyc", ".pth"))]
    assert members["localrag/errors.py"] == (package / "errors.py").read_bytes()


def test_all_that_localrag_needs_and_no_tool_of_developers():
    names = {distribution.name.lower().replace("_", "-") for distribution in needed(installed_extras())}
    assert {"localrag", "llama-cpp-python", "torch", "click", "cryptography", "safetensors"} <= names
    assert not {"pytest", "mypy", "ruff", "hypothesis", "pip", "mkdocs"} & names


def test_of_ready_wheels_those_extras_go_along_that_they_are_enough_for(tmp_path):
    needs = {"server": "fast-api>=1", "mcp": "mcp>=2", "eval": "matplotlib", "dev": "pytest"}
    lines = [line for extra, need in needs.items() for line in (f"Provides-Extra: {extra}", f'Requires-Dist: {need}; extra == "{extra}"')]
    said = "\n".join(["Metadata-Version: 2.1", "Name: localrag", "Version: 9", "Requires-Dist: click", *lines, ""])
    for name in ("click-8", "fast_api-1.5", "mcp-1.9", "pytest-9"):
        (tmp_path / f"{name}-py3-none-any.whl").touch()
    for version, text in (("8", said.replace("mcp>=2", "mcp")), ("9", said)):
        with zipfile.ZipFile(tmp_path / f"localrag-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"localrag-{version}.dist-info/METADATA", text)
    assert Wheels.of_folder(tmp_path).extras == ("server",)
    (tmp_path / "localrag-9-py3-none-any.whl").write_bytes(b"x")
    with pytest.raises(BundleError, match="is damaged"):
        Wheels.of_folder(tmp_path)


@pytest.mark.parametrize(("requirement", "says"), [("not-there-1>=1", "needs not-there-1"), ("click<1", "needs click<1, and")])
def test_what_is_needed_and_not_there_is_told(tmp_path, requirement, says):
    distribution = install(tmp_path, {}, name="localrag", version="9")
    info = Path(distribution.locate_file("")) / "localrag-9.dist-info"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: localrag\nVersion: 9\nRequires-Dist: {requirement}\n")
    code = (
        f"import sys; sys.path.insert(0, {str(distribution.locate_file(''))!r})\n"
        "from localrag.bundle.requirements import needed\nfrom localrag.errors import BundleError\n"
        "try: needed([])\nexcept BundleError as error: print(error.message, '|', error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert says in done.stdout
    assert "--wheelhouse" in done.stdout


def test_pip_installs_what_was_packed_as_it_was(tmp_path):
    """Wheels of several kinds: pure, with scripts, with data files, with an extension module."""
    wheels, names = [], ("click", "idna", "markdown-it-py", "markupsafe", "fonttools")
    for name in names:
        wheel = Wheel.of(metadata.distribution(name))
        wheels.append(tmp_path / wheel.filename)
        with wheels[-1].open("wb") as out:
            wheel.write(out, lambda _: None)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        tmp_path / "to",
    ]
    done = subprocess.run([*command, *wheels], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in names:
        distribution = metadata.distribution(name)
        for path in distribution.files:
            if (
                path.suffix != ".pyc"
                and ".." not in path.parts
                and path.name not in {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
            ):
                assert (tmp_path / "to" / path).read_bytes() == path.locate().read_bytes(), path
    assert (tmp_path / "to" / "share" / "man" / "man1" / "ttx.1").is_file()
