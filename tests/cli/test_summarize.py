"""summarize at the command line: what goes where, what is kept, and what every bad file says."""

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localrag.cli import main
from localrag.cli.summarize import read_source
from localrag.errors import UsageError

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "localrag/text/tokens.py"
NAMES = ["path", "level", "method", "tokens", "source_tokens", "limit", "cached", "text"]


@pytest.fixture
def run(home, capsys):
    """Runs `summarize … --model echo` in this process; returns (exit code, stdout, stderr)."""

    def _run(*args):
        code = main(["summarize", *map(str, args), "--model", "echo"])
        out, err = capsys.readouterr()
        return code, out, err

    return _run


@pytest.fixture
def as_json(run):
    def _as_json(*args):
        code, out, err = run(*args, "--json")
        assert (code, err) == (0, "")
        fields = json.loads(out)
        assert list(fields) == NAMES
        assert fields["tokens"] == len(fields["text"].encode())  # the echo engine's tokens are bytes
        assert fields["limit"] is None or fields["tokens"] <= fields["limit"]
        return fields

    return _as_json


def test_text_goes_to_stdout_and_one_line_of_talk_to_stderr(run):
    code, out, err = run(SOURCE, "--level", "stub")
    size = SOURCE.stat().st_size
    assert code == 0
    assert out.splitlines()[1].startswith("python, ")
    assert out.splitlines()[2].startswith("modified 20")
    assert err == f"{SOURCE}: {len(out.encode()) - 1} of {size:,} tokens, at most 100 (stub)\n"


@pytest.mark.parametrize(
    ("level", "method", "limit"),
    [("full", "whole", None), ("detailed", "outline", 2000), ("summary", "model", 500), ("stub", "stub", 100)],
)
def test_the_levels(as_json, level, method, limit):
    fields = as_json(SOURCE, "--level", level)
    assert (fields["method"], fields["limit"], fields["level"], fields["path"]) == (method, limit, level, str(SOURCE))
    assert fields["source_tokens"] == SOURCE.stat().st_size


def test_a_limit_of_ones_own(as_json):
    for level, method in (("full", "truncated"), ("detailed", "outline"), ("summary", "model"), ("stub", "stub")):
        fields = as_json(SOURCE, "--level", level, "--max-tokens", 150)
        assert (fields["limit"], fields["method"]) == (150, method)
        assert fields["tokens"] <= 150
    assert as_json(SOURCE, "--no-model")["method"] == "extractive"


def test_a_summary_is_kept_until_the_file_changes(as_json, tmp_path, home):
    file = tmp_path / "notes.txt"
    file.write_text("The weather was fine. The boat was not. " * 40)
    first = as_json(file)
    again = as_json(file)
    assert (first["cached"], again["cached"], again["text"]) == (False, True, first["text"])
    assert not as_json(file, "--no-cache")["cached"]
    assert not as_json(file, "--no-model")["cached"]
    assert as_json(file, "--max-age", "1")["cached"]
    assert not as_json(file, "--max-age", "0")["cached"]
    os.utime(file, (0, 0))
    assert as_json(file)["cached"]  # a new date is no new text
    file.write_text(file.read_text() + "Then it sank.")
    assert not as_json(file)["cached"]


def test_without_the_cache_nothing_is_written(as_json, home):
    as_json(SOURCE, "--no-cache")
    as_json(SOURCE, "--level", "stub")
    assert not home.exists()


def test_a_journal_that_is_broken_costs_no_summary(run, home):
    home.mkdir(mode=0o700)
    (home / "journal.sqlite").write_bytes(b"no database " * 100)
    code, out, err = run(SOURCE)
    assert (code, out.startswith("You asked: ")) == (0, True)
    assert err.startswith("Not cached: ")
    assert (home / "journal.sqlite").read_bytes() == b"no database " * 100


def _make(tmp_path, kind):
    path = tmp_path / "file.txt"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"text\0more" * 10)
    elif kind == "large":
        path.write_bytes(b"a" * (16 * 1024 * 1024 + 1))
    elif kind == "dangling":
        path.symlink_to(tmp_path / "gone")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "below a file":
        path.write_text("x")
        return path / "child"
    return path


BAD = ["missing", "folder", "binary", "large", "dangling", "loop", "pipe", "below a file"]


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_clear_line(run, tmp_path, home, kind):
    path = _make(tmp_path, kind)
    code, out, err = run(path)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    error, hint = err.splitlines()
    assert error.startswith(f"Error: {path} ")
    assert hint
    assert not home.exists()  # nothing half-written
    code, out, _ = run(path, "--json")
    assert (code, json.loads(out)["error"]["type"]) == (2, "UsageError")


def test_a_file_that_may_not_be_read(run, tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads every file")
    code, _, err = run(path)
    assert code == 2
    assert "Permission denied" in err


@pytest.mark.parametrize("args", [["--level", "tiny"], ["--max-tokens", "0"], ["--max-age", "-1"], ["--max-age", "soon"]])
def test_a_bad_option_is_refused(run, args):
    code, out, err = run(SOURCE, *args)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")


def test_a_file_in_an_old_encoding_is_read(as_json, tmp_path):
    path = tmp_path / "alt.txt"
    path.write_bytes("Größe und Maß".encode("cp1252"))
    assert as_json(path)["text"] == "Größe und Maß"
    odd = tmp_path / os.fsdecode(b"\xff.txt")
    try:
        odd.write_text("x")
    except OSError:
        pytest.skip("this file system takes no such name")
    assert as_json(odd, "--level", "stub")["path"].endswith("\\xff.txt")


@pytest.fixture
def meanwhile():
    """Runs a line of Python again and again in another process, on the file that it is given as `path`."""
    started = []

    def _meanwhile(line, path):
        code = f"import pathlib, sys\npath = pathlib.Path(sys.argv[1])\nprint(flush=True)\nwhile True:\n    {line}"
        started.append(subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE))
        started[-1].stdout.readline()

    yield _meanwhile
    for process in started:
        process.kill()
        process.communicate()


def _readings(path, seconds):
    """The texts that were read in so many seconds, and the messages of refusals."""
    texts, refusals = set(), set()
    stop_at = time.monotonic() + seconds
    while time.monotonic() < stop_at:
        try:
            texts.add(read_source(path, "summarized").text)
        except UsageError as error:
            refusals.add(error.message.removeprefix(str(path)))
    return texts, refusals


CHANGES = " cannot be summarized: it changed while it was read."


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that never has the size it says")
def test_a_file_that_is_never_what_it_says_is_refused():
    with pytest.raises(UsageError, match=CHANGES):
        read_source(Path("/proc/self/status"), "summarized")


def test_a_file_that_grows_all_the_time_is_refused_or_read_to_the_end_of_a_write(tmp_path, meanwhile):
    path = tmp_path / "log.txt"
    path.write_text("line\n" * 200_000)
    meanwhile("with path.open('a') as file: file.write('more\\n')", path)
    texts, refusals = _readings(path, 0.5)
    assert refusals <= {CHANGES}
    # a write that crosses a page is two to the kernel, and the writer can be stopped between them
    assert all(text.endswith("\n") or len(text) % mmap.PAGESIZE == 0 for text in texts)


def test_a_file_that_comes_and_goes_is_read_whole_or_refused(tmp_path, meanwhile):
    path = tmp_path / "file.txt"
    meanwhile("path.write_text('whole\\n' * 10_000); path.unlink()", path)
    texts, refusals = _readings(path, 0.5)
    assert " cannot be summarized: No such file or directory." in refusals
    assert all(set(text.splitlines()) <= {"whole"} or text.startswith("whole\n") for text in texts)


def test_help_imports_no_parser():
    code = (
        "import sys; from localrag.cli import main; code = main(['summarize', '--help']);"
        "assert not {'llama_cpp', 'tree_sitter', 'markdown_it', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: localrag summarize")
