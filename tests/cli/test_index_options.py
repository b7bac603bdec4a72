"""`localrag index` with each of its options, as a new user tries them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.kb.readers.pdf_files import pdf_of, with_images
from tests.kb.support import write_notes


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """A folder `notes` in the current one: two notes, one of them about prices, and what is left out."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "notes"
    write_notes(folder, 1, num_parts=1)
    write_notes(folder / "prices", 1, num_parts=1, seed="p")
    (folder / ".draft.md").write_text("# Draft\n\nA hidden word.\n")
    (folder / "key.pem").write_text("a key\n")
    (folder / "empty.md").write_text("")
    return folder


def documents(localrag, *args):
    """Tags by source."""
    code, out, _ = localrag("kb", "show", "notes", "--json", *args)
    assert code == 0
    return {each["source"]: each["fields"].get("tag", []) for each in json.loads(out)["documents"]}


def test_what_was_done_is_one_line_and_what_was_skipped_is_named(localrag, notes):
    code, out, err = localrag("index", "notes", "--kb", "notes")
    assert (code, out) == (0, "notes: 2 added, 0 updated, 0 unchanged, 0 removed, 3 skipped; 4 chunks, 3 new\n")
    assert err.splitlines() == [
        "Indexing notes: reading and embedding",
        "skipped notes/.draft.md: hidden",
        "skipped notes/key.pem: may hold a secret by its name; --hidden reads it",
        "skipped notes/empty.md: it holds no text",
    ]
    assert "2 unchanged" in localrag("index", "notes", "--kb", "notes")[1]


def test_many_skipped_files_are_counted_and_named_by_verbose(localrag, notes):
    for number in range(6):
        (notes / f".hidden-{number}").write_text("x")
    short = localrag("index", "notes", "--kb", "notes", "--dry-run")[2]
    assert "skipped 7, hidden: notes/.draft.md, notes/.hidden-0, notes/.hidden-1 and 4 more (--verbose names them)" in short
    assert "notes/.hidden-5" in localrag("index", "notes", "--kb", "notes", "--dry-run", "--verbose")[2]


def test_files_that_may_hold_secrets_are_all_named(localrag, notes):
    names = ["a.env", "b.env", "docker-secrets.yml", "env.prod", "key.pem"]
    for name in names[:-1]:
        (notes / name).write_text("TOKEN=x\n")
    err = localrag("index", "notes", "--kb", "notes", "--dry-run")[2]
    named = ", ".join(f"notes/{name}" for name in names)
    assert f"skipped 5, may hold a secret by its name; --hidden reads it: {named}" in err.splitlines()


def test_tags_are_given_replaced_and_taken_away(localrag, notes):
    localrag("index", "notes", "--kb", "notes", "--tag", "work", "--tag", "2024")
    assert documents(localrag) == {"notes/note-000.md": ["2024", "work"], "notes/prices/note-000.md": ["2024", "price", "work"]}
    localrag("index", "notes", "--kb", "notes")
    assert documents(localrag, "--where", "tag=work").keys() == documents(localrag).keys()
    localrag("index", "notes/prices", "--kb", "notes", "--tag", "new")
    assert documents(localrag, "--where", "tag=new") == {"notes/prices/note-000.md": ["new", "price"]}
    localrag("index", "notes", "--kb", "notes", "--tag", "")
    assert documents(localrag, "--where", "tag=work") == documents(localrag, "--where", "tag=new") == {}


def test_hidden_files_are_read_if_asked_for(localrag, notes):
    localrag("index", "notes", "--kb", "notes", "--hidden")
    assert {"notes/.draft.md", "notes/key.pem"} <= documents(localrag).keys()
    assert "2 removed" in localrag("index", "notes", "--kb", "notes")[1]
    assert "notes/.draft.md" not in documents(localrag)


def test_a_dry_run_lists_and_does_nothing(localrag, notes, home):
    code, out, err = localrag("index", "notes", "--kb", "notes", "--dry-run")
    assert (code, out.splitlines()) == (0, ["notes/note-000.md", "notes/prices/note-000.md"])
    assert err.splitlines()[-2:] == [
        "skipped notes/empty.md: it holds no text",
        "notes: 2 new, 0 changed, 0 unchanged, 0 removed, 3 skipped; nothing was embedded or written",
    ]
    assert not (home / "kb").exists()


def test_a_dry_run_on_a_changed_folder_names_every_document_as_it_is_shown(localrag, notes):
    old = time.time() - 60
    for file in notes.rglob("*.md"):
        os.utime(file, (old, old))
    localrag("index", "notes", "--kb", "notes")
    (notes / "prices" / "note-000.md").unlink()
    (notes / "new.md").write_text("# New\n")
    data = json.loads(localrag("index", "notes", "--kb", "notes", "--dry-run", "--json")[1])
    assert (data["new"], data["changed"], data["unchanged"], data["removed"]) == (
        ["notes/new.md"], [], ["notes/note-000.md"], ["notes/prices/note-000.md"],
    )  # fmt: skip
    (notes / "note-000.md").write_text("# Another\n")
    code, out, err = localrag("index", "notes", "--kb", "notes", "--dry-run")
    assert (code, out.splitlines()) == (0, ["notes/new.md", "notes/note-000.md"])
    assert "would be removed: notes/prices/note-000.md" in err.splitlines()
    assert "1 new, 1 changed, 0 unchanged, 1 removed" in err
    assert len(documents(localrag)) == 2


def test_a_dry_run_without_anything_to_index_says_so(localrag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    code, out, err = localrag("index", "void", "--kb", "void", "--dry-run")
    assert (code, out) == (0, "")
    assert err.splitlines() == [
        "skipped void/x.png: binary file: a PNG image",
        "void: 0 new, 0 changed, 0 unchanged, 0 removed, 1 skipped; nothing was embedded or written",
        "There is nothing to index. A run would fail and remove nothing.",
    ]


def test_pages_without_text_are_named_by_every_command_that_reads_the_file(localrag, notes):
    (notes / "scan.pdf").write_bytes(with_images(pdf_of([["Nylon is dried at eighty degrees."], [], [], [], [], []]), range(1, 6)))
    reason = "pages 2-6 hold no text; they look scanned"
    for dry in ([], ["--dry-run"], []):
        code, out, err = localrag("index", "notes", "--kb", "notes", *dry)
        assert code == 0
        assert f"incomplete notes/scan.pdf: {reason}" in err.splitlines()
        assert "3 skipped, 1 incomplete;" in out + err
        data = json.loads(localrag("index", "notes", "--kb", "notes", "--json", *dry)[1])
        assert data["partial"] == [{"source": "notes/scan.pdf", "reason": reason}]
    shown = json.loads(localrag("kb", "show", "notes", "--json")[1])["documents"]
    assert [each["fields"]["incomplete"] for each in shown if each["source"] == "notes/scan.pdf"] == [[reason]]
    assert reason in localrag("kb", "show", "notes")[1]
    assert f"incomplete scan.pdf: {reason}" in localrag("score", "notes/scan.pdf", "--task", "dry nylon", "--method", "keyword")[2]
    assert f"incomplete scan.pdf: {reason}" in localrag("summarize", "notes/scan.pdf", "--model", "echo")[2]


def test_secrets_are_named_and_read_if_asked_for(localrag, notes):
    (notes / "prod.env").write_text("TOKEN=x\n")
    (notes / "key.txt").write_text(
        "mine\n-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj\n" * 9
    )
    lines = localrag("index", "notes", "notes/prod.env", "--kb", "notes")[2].splitlines()
    assert "skipped notes/key.txt: holds a private key; --hidden reads it" in lines
    assert any(line.startswith("skipped 3, may hold a secret by its name; --hidden reads it") for line in lines)
    assert "4 added" in localrag("index", "notes", "--kb", "notes", "--hidden")[1]
    assert {"notes/key.txt", "notes/prod.env"} <= documents(localrag).keys()
    assert "4 removed" in localrag("index", "notes", "--kb", "notes")[1]


def test_bad_input_is_refused_with_a_way_out(localrag, refused, notes, tmp_path):
    (tmp_path / "void").mkdir()
    assert "Nothing to index in void: there are no files." in refused(6, "index", "void", "--kb", "void")
    assert "no file or folder nowhere" in refused(6, "index", "notes", "nowhere", "--kb", "void")
    assert "no file or folder nowhere" in refused(6, "index", "nowhere", "--kb", "void", "--dry-run")
    assert "--watch and --dry-run" in refused(2, "index", "notes", "--kb", "void", "--watch", "--dry-run")
    assert "is not a valid name" in refused(6, "index", "notes", "--kb", "No!")
    assert "--kb" in refused(2, "index", "notes")
    assert "PATHS" in refused(2, "index", "--kb", "void")
    code, out, _ = localrag("index", "void", "--kb", "void", "--json")
    assert (code, json.loads(out)["error"]["reasons"]) == (6, {})
    assert json.loads(localrag("kb", "list", "--json")[1]) == {"knowledge_bases": []}


def test_a_missing_path_is_said_before_anything_is_loaded(localrag, notes, tmp_path):
    (tmp_path / "models.toml").write_text('default_embedder = "none"\n[embedders.none]\npath = "none.gguf"\n')
    code, _, err = localrag("index", "nowhere", "--kb", "x", "--models", tmp_path / "models.toml")
    assert (code, err.splitlines()[0]) == (6, "Error: There is no file or folder nowhere.")
    assert localrag("index", "notes", "--kb", "x", "--models", tmp_path / "models.toml")[0] == 4


# --- watching


class Watched:
    """`localrag index … --watch` in a process of its own, and the lines that it has written."""

    def __init__(self, process, log):
        self.process = process
        self._log = log

    def lines(self):
        return self._log.read_text().splitlines()

    def await_line(self, start, act=lambda: None):
        """The first line that begins so; until it is there, `act` is done once a second."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            act()
            for _ in range(20):
                found = [line for line in self.lines() if line.startswith(start)]
                if found:
                    return found[0]
                assert self.process.poll() is None, self.lines()
                time.sleep(0.05)
        raise AssertionError(self.lines())

    def end(self):
        """Ctrl-C, as a terminal sends it: to the process and its children."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(timeout=120)


@contextmanager
def watching(tmp_path, *args):
    log = tmp_path / "log"
    command = [sys.executable, "-m", "localrag", "index", "notes", "--kb", "notes", "--watch", *args]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    try:
        yield Watched(process, log)
    finally:
        process.kill()
        process.wait()


def test_a_watched_folder_is_followed_until_it_is_gone(localrag, notes, tmp_path):
    shutil.rmtree(notes)
    notes.mkdir()

    def save(heading):
        """In one step, as good editors do: in two, it may be read while it is empty."""
        (tmp_path / "new.md").write_text(f"# {heading}\n\n{time.time()}\n")
        (tmp_path / "new.md").replace(notes / "new.md")

    with watching(tmp_path) as watched:
        watched.await_line("Watching for changes")
        watched.await_line("notes: 1 added", lambda: save("New"))
        watched.await_line("notes: 0 added, 1 updated", lambda: save("Newer"))
        os.utime(notes / "new.md")
        time.sleep(1)
        watched.process.send_signal(signal.SIGSTOP)  # it hears of both at once, however long they take
        (notes / "stays.md").write_text("# Stays\n")
        (notes / "new.md").unlink()
        watched.process.send_signal(signal.SIGCONT)
        assert watched.await_line("notes: 1 added, 0 updated, 0 unchanged, 1 removed")
        shutil.rmtree(notes)
        assert watched.process.wait(timeout=120) == 6
        lines = watched.lines()
    assert lines[:3] == [
        "Indexing notes: reading and embedding",
        "Nothing to index in notes: there are no files.",
        "Watching for changes. Press Ctrl-C to stop.",
    ]
    assert [line for line in lines if line.startswith("Error")] == ["Error: There is no file or folder notes."]
    assert not any("0 added, 0 updated, 1 unchanged, 0 removed" in line for line in lines)  # what changed nothing is not told
    assert set(documents(localrag)) == {"notes/stays.md"}


def test_ctrl_c_ends_watching_with_a_word(localrag, notes, tmp_path):
    with watching(tmp_path, "--json") as watched:
        watched.await_line("Watching for changes")
        assert json.loads(watched.await_line("{"))["added"] == 2
        assert watched.end() == 130
        assert watched.lines()[-1] == "Stopped watching."
        assert not any("Traceback" in line or line.startswith("Error") for line in watched.lines())


def test_an_interrupted_run_says_that_it_can_go_on(localrag, notes, tmp_path):
    write_notes(notes, 20, num_parts=1)
    command = [sys.executable, "-m", "localrag", "index", "notes", "--kb", "notes"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        assert process.stderr.readline() == "Indexing notes: reading and embedding\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines() == ["Error: Interrupted.", "  Indexed documents are kept. Run the same command to continue."]
    assert localrag("index", "notes", "--kb", "notes")[0] == 0
    assert len(documents(localrag)) == 21
