"""A disk that is full, read-only or closed to the user, and a busy file: said as such, with the numbers, and never with the advice to
remove what was kept.
"""

import errno
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from localrag.cli import main
from localrag.errors import ConfigError
from localrag.files import disk_error, file_error
from localrag.journal import FILE_NAME, Journal
from localrag.journal.database import transaction
from tests.homes import know_attention
from tests.journal.asks import made_up
from tests.kb.crashes import CannotMountError, fill_disk, small_disk


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own."""
    folder = tmp_path / "disk"
    try:
        with small_disk(folder, 4 << 20):
            yield folder
    except CannotMountError as error:
        pytest.skip(f"no small disk can be made here: {error}")


@pytest.fixture
def run(disk, tiny_catalogue, monkeypatch, capsys):
    """Runs a command line whose home is on the small disk; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("LOCALRAG_HOME", str(disk / "home"))
    monkeypatch.setenv("LOCALRAG_MODELS", str(tiny_catalogue))
    know_attention(disk / "home")

    def call(*args):
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert "move " not in (out + err).lower()  # nor remove
        return code, out, err

    return call


def test_a_full_disk_is_said_to_be_full_and_nothing_is_lost(disk, run):
    assert run("memory", "add", "The cat is called Mia.")[0] == 0
    ballast = fill_disk(disk, 100_000)

    def record_many():
        with Journal.open(disk / "home") as journal:
            for number in range(1000):
                journal.record(made_up(number=number))

    with pytest.raises(ConfigError) as caught:
        record_many()
    assert f"The journal {disk / 'home' / FILE_NAME} cannot be used: the disk of {disk / 'home'} is full" in caught.value.message
    assert caught.value.hint.startswith("Free some space.")
    assert caught.value.numbers["free_bytes"] < 1 << 20
    ballast.unlink()
    code, out, _ = run("memory", "list")
    assert code == 0
    assert "Mia" in out


def test_a_home_that_cannot_be_begun_on_a_full_disk(disk, run):
    fill_disk(disk, 0)
    code, out, _ = run("memory", "add", "The cat is called Mia.", "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (3, "ConfigError")
    assert "is full" in error["message"]
    assert isinstance(error["free_bytes"], int)


def test_an_answer_comes_all_the_same_and_says_what_was_not_kept(disk, run):
    fill_disk(disk, 0)
    code, out, _ = run("ask", "hello", "--model", "echo", "--json")
    warnings = json.loads(out)["warnings"]
    assert code == 0
    assert any("not recorded in the journal" in each and "is full" in each for each in warnings)


@pytest.mark.parametrize("num_free_bytes", [0, 60_000])
def test_a_knowledge_base_on_a_full_disk(disk, run, tmp_path, num_free_bytes):
    (tmp_path / "a.md").write_text("A cat hunts at dusk. " * 20_000)
    fill_disk(disk, num_free_bytes)
    code, out, _ = run("index", tmp_path / "a.md", "--kb", "pets", "--json")
    error = json.loads(out)["error"]
    assert (code, error["hint"].startswith("Free some space.")) == (6, True)
    assert "is full" in error["message"]


def test_results_that_do_not_fit_name_their_file(disk, run, tmp_path, monkeypatch):
    assert run("memory", "add", "The cat is called Mia.")[0] == 0
    batch, kept = tmp_path / "in.jsonl", tmp_path / "home"
    batch.write_text("".join(json.dumps({"id": number, "question": "hello " * 50}) + "\n" for number in range(5)))
    (tmp_path / "a.md").write_text("A cat hunts at dusk.")
    monkeypatch.setenv("LOCALRAG_HOME", str(kept))  # the home itself has room
    know_attention(kept)
    assert run("index", tmp_path / "a.md", "--kb", "pets")[0] == 0
    fill_disk(disk, 4096)
    for args, name in (
        (("ask", "--batch", batch, "--out", disk / "out.jsonl", "--model", "echo"), "out.jsonl"),
        (("report", "--html", disk / "report.html"), "report.html"),
        (("kb", "export", "pets", disk / "pets.kb"), "pets.kb"),
    ):
        code, _, err = run(*args)
        assert code in (2, 3, 6), err
        assert f"the disk of {disk} is full" in err, (name, err)
        assert "Free some space." in err


def test_a_disk_that_is_mounted_read_only(disk, run):
    assert run("memory", "add", "The cat is called Mia.")[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    code, _, err = run("memory", "add", "The dog is called Rex.")
    assert code == 3
    assert "mounted read-only" in err


def test_a_limit_on_file_sizes_is_named(tmp_path):
    code = (
        "import json, resource, sys; from pathlib import Path; from localrag.journal import Journal\n"
        "from tests.journal.asks import made_up; from localrag.errors import ConfigError\n"
        "journal = Journal.open(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try:\n    for number in range(1000): journal.record(made_up(number=number, question='x' * 9000))\n"
        "except ConfigError as error: print(json.dumps(error.to_dict()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    error = json.loads(done.stdout)
    assert "would be larger than this system allows (200,000 bytes)" in error["message"]
    assert ("ulimit -f" in error["hint"], error["max_bytes"]) == (True, 200_000)


def test_a_file_that_another_program_holds_is_busy_and_not_damaged(tmp_path):
    with Journal.open(tmp_path), closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None, timeout=0)) as db, pytest.raises(ConfigError) as caught:  # noqa: SIM117
            with transaction(db, tmp_path / FILE_NAME):
                pass
    assert "another localrag is writing to it" in caught.value.message
    assert caught.value.hint == "Wait for that one to end, then run the same command again."


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "larger than this system allows"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "the disk reports an error"),
    ],
)
def test_what_the_file_system_refuses(tmp_path, number, reason):
    error = OSError(number, os.strerror(number), str(tmp_path / "file"))
    for path in (tmp_path / "file", tmp_path / "none" / "file", None):
        found = disk_error(error, path)
        assert found is not None
        assert reason in found.reason
        assert found.hint
        assert json.dumps(found.numbers)
    assert file_error(error, None, hint="Another way.").hint != "Another way."


def test_what_is_not_the_disk_has_the_words_of_its_caller(tmp_path):
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(tmp_path / "none"))
    assert disk_error(error, tmp_path / "none") is None
    assert file_error(error, tmp_path / "none", hint="Name another.").hint == "Name another."
    assert disk_error(ValueError("x"), tmp_path) is None
    damaged = sqlite3.DatabaseError("file is not a database")
    assert disk_error(damaged, tmp_path / "x") is None
