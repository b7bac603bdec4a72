import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from localrag.errors import KnowledgeBaseError
from localrag.kb.readers import UnreadableError
from localrag.kb.walk import LEFT_OUT_BY_NAME, MAX_DEPTH, MAX_FILE_BYTES, SkippedFile, changes, read_file, walk


def _tree(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")


def _found(root):
    return [file.source.removeprefix(f"{root.name}/") for file in walk([root]).files]


def _reasons(root):
    return {skip.source.removeprefix(f"{root.name}/"): skip.reason for skip in walk([root]).skipped}


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    return folder


@pytest.fixture
def open_folder():
    """A folder that belongs to an ordinary user, who this process is for the time being."""
    folder = Path(tempfile.mkdtemp(prefix="localrag-test-"))
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        yield folder
        os.seteuid(0)
    else:
        yield folder
    shutil.rmtree(folder)


def test_files_come_sorted_with_the_path_a_person_knows(docs):
    _tree(docs, "b.md", "a/z.txt", "a/b.txt", "c.py")
    found = walk([docs])
    assert [file.source for file in found.files] == ["docs/a/b.txt", "docs/a/z.txt", "docs/b.md", "docs/c.py"]
    assert [file.path for file in found.files] == [str(docs / name) for name in ("a/b.txt", "a/z.txt", "b.md", "c.py")]
    assert found.skipped == []


def test_a_single_file_and_overlapping_folders(docs):
    _tree(docs, "a/x.md", "y.md")
    assert [file.source for file in walk([docs / "y.md"]).files] == ["y.md"]
    assert [file.source for file in walk([docs, docs / "a", docs / "y.md"]).files] == ["docs/a/x.md", "docs/y.md"]


def test_the_folder_one_stands_in(docs, monkeypatch):
    _tree(docs, "a/x.md")
    monkeypatch.chdir(docs)
    assert [file.source for file in walk([Path()]).files] == ["docs/a/x.md"]
    monkeypatch.chdir(docs / "a")
    assert [file.source for file in walk([Path("..")]).files] == ["docs/a/x.md"]


def test_a_path_that_is_not_there(docs):
    with pytest.raises(KnowledgeBaseError, match="no file or folder"):
        walk([docs / "missing"])
    (docs / "dangling").symlink_to("nowhere")
    with pytest.raises(KnowledgeBaseError, match="no file or folder"):
        walk([docs / "dangling"])


def test_hidden_secret_and_machine_made_names_are_left_out(docs):
    _tree(
        docs, "ok.md", ".env", ".env.local", ".git/config", "server.pem", "TLS.KEY", "id_rsa", "id_ed25519.pub", "node_modules/x/readme.md"
    )
    assert _found(docs) == ["ok.md"]
    reasons = _reasons(docs)
    assert reasons[".env"] == reasons[".git"] == "hidden"
    assert reasons["server.pem"] == reasons["TLS.KEY"] == reasons["id_rsa"] == reasons["id_ed25519.pub"] == LEFT_OUT_BY_NAME
    assert reasons["node_modules"] == "made by a program"
    assert len(reasons) == 8  # a folder is named once, not each file in it


def test_what_is_given_by_name_is_read(docs):
    _tree(docs, ".plan", ".notes/x.md")
    assert [file.source for file in walk([docs / ".plan", docs / ".notes"]).files] == [".plan", ".notes/x.md"]


def test_a_file_that_may_hold_a_secret_is_left_out_also_when_it_is_given_by_name(docs):
    """A shell's `*` gives every name."""
    _tree(docs, ".env", "prod.env", "ok.md")
    paths = [docs / ".env", docs / "prod.env", docs / "ok.md"]
    assert [file.source for file in walk(paths).files] == ["ok.md"]
    assert walk(paths).skipped == [SkippedFile(".env", LEFT_OUT_BY_NAME), SkippedFile("prod.env", LEFT_OUT_BY_NAME)]
    assert [file.source for file in walk(paths, hidden=True).files] == [".env", "prod.env", "ok.md"]


def test_links_pipes_and_sockets_are_not_followed_nor_waited_for(docs):
    _tree(docs, "ok.md", "sub/x.md")
    (docs / "loop").symlink_to(docs)
    (docs / "sub" / "up").symlink_to("..")
    (docs / "file-link.md").symlink_to("ok.md")
    os.mkfifo(docs / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(docs)  # the name of a socket must be short
        server.bind("sock")
        os.chdir(before)
        assert _found(docs) == ["ok.md", "sub/x.md"]
        assert _reasons(docs) == {
            "loop": "symbolic link",
            "sub/up": "symbolic link",
            "file-link.md": "symbolic link",
            "pipe": "not a regular file",
            "sock": "not a regular file",
        }
    with pytest.raises(UnreadableError, match="not a regular file"):
        read_file(str(docs / "pipe"))
    with pytest.raises(OSError, match=r"symbolic link|symbolic links"):
        read_file(str(docs / "file-link.md"))


def test_a_folder_that_is_given_may_be_a_link(docs, tmp_path):
    _tree(docs, "x.md")
    (tmp_path / "alias").symlink_to(docs)
    (file,) = walk([tmp_path / "alias"]).files
    assert (file.source, file.path) == ("alias/x.md", str(docs / "x.md"))


def test_ignore_files(docs):
    _tree(
        docs,
        "a.log",
        "keep.log",
        "build/x.md",
        "src/build/y.md",
        "src/build.md",
        "src/tmp1.txt",
        "src/deep/tmp2.txt",
        "draft.md",
        "other/draft.md",
    )
    (docs / ".gitignore").write_text("*.log\n!keep.log\nbuild/\n# comment\n\n")
    (docs / "src" / ".gitignore").write_text("tmp?.txt\n!/deep/tmp2.txt\n")
    (docs / ".localragignore").write_text("/draft.md\n!build/\n")
    assert _found(docs) == ["build/x.md", "keep.log", "other/draft.md", "src/build/y.md", "src/build.md", "src/deep/tmp2.txt"]
    reasons = _reasons(docs)
    assert reasons["a.log"] == "ignored by docs/.gitignore"
    assert reasons["draft.md"] == "ignored by docs/.localragignore"
    assert reasons["src/tmp1.txt"] == "ignored by docs/src/.gitignore"


def test_an_ignore_file_may_begin_with_a_byte_order_mark(docs):
    _tree(docs, "secret.md", "ok.md")
    (docs / ".gitignore").write_bytes(b"\xef\xbb\xbfsecret.md\n")
    assert _found(docs) == ["ok.md"]


def test_patterns_that_could_take_forever_are_refused_and_named(docs):
    _tree(docs, "a" * 100 + ".md", "x.log")
    (docs / ".gitignore").write_text("*a" * 12 + "*b\n" + "y" * 300 + "\n**/*/**/*\n!\n*.log\n")
    started = time.process_time()
    found = walk([docs])
    assert time.process_time() - started < 2
    assert [file.source for file in found.files] == [f"docs/{'a' * 100}.md"]
    patterns = [skip.reason for skip in found.skipped if skip.source == "docs/.gitignore" and "pattern" in skip.reason]
    assert len(patterns) == 3
    assert patterns[0].startswith("pattern '*a*a*a")
    assert "not valid" in patterns[2]


def test_a_folder_that_cannot_be_looked_into_is_named_and_nothing_below_it_counts_as_gone(open_folder):
    _tree(open_folder, "ok.md", "locked/x.md")
    (open_folder / "locked").chmod(0)
    found = walk([open_folder])
    (open_folder / "locked").chmod(0o755)
    assert [Path(file.path).name for file in found.files] == ["ok.md"]
    assert ("locked", "Permission denied") in [(Path(skip.source).name, skip.reason) for skip in found.skipped]
    known = [str(open_folder / name) for name in ("ok.md", "gone.md", "locked/x.md")]
    assert found.vanished([*known, "/elsewhere/y.md", f"{open_folder}-2/z.md"]) == [str(open_folder / "gone.md")]


def test_an_ignore_file_that_may_not_be_read_is_named(open_folder):
    _tree(open_folder, "ok.md", ".gitignore")
    (open_folder / ".gitignore").chmod(0)
    assert "its patterns are not used: Permission denied" in [skip.reason for skip in walk([open_folder]).skipped]


def test_a_file_that_may_not_be_read(open_folder):
    _tree(open_folder, "secret.md")
    (open_folder / "secret.md").chmod(0)
    with pytest.raises(PermissionError):
        read_file(str(open_folder / "secret.md"))


def test_a_file_that_is_too_large(docs):
    with (docs / "large.txt").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(UnreadableError, match="larger than 20 MB"):
        read_file(str(docs / "large.txt"))
    with pytest.raises(UnreadableError, match="not a regular file"):
        read_file("/dev/zero")


def test_a_name_that_is_not_utf8(docs):
    Path(os.fsdecode(os.fsencode(docs) + b"/caf\xe9.md")).write_text("x")
    assert _found(docs) == []
    assert _reasons(docs) == {"caf\\xe9.md": "its name is not valid UTF-8"}


def test_folders_are_followed_down_to_a_limit(docs):
    deep = docs.joinpath(*["d"] * (MAX_DEPTH + 1))
    _tree(deep.parent, "in.md")
    _tree(deep, "out.md")
    found = walk([docs])
    assert [Path(file.source).name for file in found.files] == ["in.md"]
    assert [skip.reason for skip in found.skipped] == [f"more than {MAX_DEPTH} folders deep"]


def test_every_save_is_heard(tmp_path):
    """A folder and a file beside it are followed, also when an editor puts a new file in the old one's place."""
    notes, other = tmp_path / "notes", tmp_path / "other"
    notes.mkdir()
    other.mkdir()
    guide = other / "guide.md"
    guide.write_text("0")
    heard = queue.Queue()

    def listen():
        for num_changed in changes([notes, guide], but=tmp_path / "kb"):
            heard.put(num_changed)

    threading.Thread(target=listen, daemon=True).start()
    assert heard.get(timeout=30) == 0
    for number in (1, 2):
        (other / "new").write_text(str(number))
        (other / "new").replace(guide)
        assert heard.get(timeout=30) >= 1
    (other / "unrelated.md").write_text("x")
    (notes / "a.md").write_text("x")
    assert heard.get(timeout=30) == 1
