"""The process that files are read in: real children, real limits, and programs in its place that do not speak as they should."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.errors import KnowledgeBaseError
from localrag.kb.readers import UnreadableError
from localrag.kb.readers import read as read_here
from localrag.kb.reading import Readers
from localrag.kb.reading_worker import describe

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows knows no such limits or signals")
LINUX = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of a process is not to be had here")

FILES = {
    "a.md": "---\ntitle: T\ntags: [x, y]\nAuthor: Ann\n---\n# One\n\ntext\n\n## Two\n\nmore 日本 🙂\n".encode(),
    "b.txt": "Le café est prêt à l’heure.".encode("cp1252"),
    "c.py": b"import os\n\n\ndef f():\n    return os\n",
    "none": b"plain",
}


MANY = b"# ABC\n\nx\n\n" * 1_500_000  # seconds of computing


@pytest.fixture(scope="module")
def readers():
    with Readers() as one:
        yield one


@pytest.mark.parametrize("name", FILES)
def test_a_reading_comes_back_as_it_was(readers, name):
    assert readers.read(name, FILES[name]) == read_here(name, FILES[name])


def test_one_child_reads_many_files(readers):
    readers.read("a.md", b"x")
    pid = readers.pid
    for number in range(50):
        assert readers.read("a.md", b"text %d" % number).text == f"text {number}"
    assert readers.pid == pid


@pytest.mark.parametrize(("name", "data", "reason"), [("a.txt", b"a\0b", "binary file"), ("a.md", b"", "no text"), ("a.doc", b"x", "DOC")])
def test_a_reason_comes_back(readers, name, data, reason):
    with pytest.raises(UnreadableError, match=reason):
        readers.read(name, data)


def test_names_that_are_no_unicode_and_large_files(readers):
    assert readers.read("\udcff.txt", b"x").text == "x"
    large = ("ü" * 99 + "\n") * 100_000
    assert readers.read("a.txt", large.encode()).text == large


def test_the_child_starts_with_the_first_file_and_ends_with_the_block():
    with Readers() as readers:
        assert readers.pid is None
        readers.read("a.txt", b"x")
        pid = readers.pid
        os.kill(pid, 0)
    assert readers.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_too_much_text(name):
    with Readers(max_text_chars=1 << 20) as readers:
        with pytest.raises(UnreadableError, match=r"^its text is longer than 1 MB$"):
            readers.read(name, b"x = 1;" * 200_000)
        assert readers.read(name, b"x = 1").text == "x = 1"


def test_too_many_headings(readers):
    """A heading is repeated in the path of each that stands below it."""
    for letter, count, refusal in (
        ("T", 700, "it holds more than 20 MB of text"),
        ("🔥", 600, "its headings and parts take more than 64 MB"),
    ):
        headings = "".join(f"## {number}\n\nx\n\n" for number in range(count))
        with pytest.raises(UnreadableError, match=f"^{refusal}$"):
            readers.read("a.md", f"# {letter * 30_000}\n\nx\n\n{headings}".encode())


@LINUX
@pytest.mark.parametrize("unit", ["a ", "/a", 'a=">" ', "/", " ", "a1 b2 c3 ", "a= ", 'a="b"', '"'])
@pytest.mark.parametrize("end", [">text</p>", " hidden>x</p><p>text</p>", "", "='>text"])
def test_a_long_tag_takes_little_memory(unit, end):
    """The standard library's tokenizer takes 500 MB for 2 MB of attributes."""
    with Readers(memory_limit_bytes=64 << 20) as readers:
        reading = readers.read("a.html", b"<h1>Top</h1><p " + (unit * (1 << 21))[: 1 << 20].encode() + end.encode())
    assert reading.text.startswith("Top")


@LINUX
def test_a_page_of_attributes_stays_far_below_the_limit():
    with Readers(memory_limit_bytes=128 << 20) as readers:
        reading = readers.read("a.html", b"<h1>Top</h1><p " + b"a='>' " * ((8 << 20) // 6) + b">text")
    assert reading.text.split() == ["Top", "text"]


@LINUX
def test_too_much_memory():
    with Readers(memory_limit_bytes=48 << 20) as readers:
        readers.read("a.md", b"x")
        with pytest.raises(UnreadableError, match=r"^reading it took more than 48 MB of memory$"):
            readers.read("a.txt", b"\xe9" * (16 << 20))
        assert readers.read("a.md", b"after").text == "after"


@POSIX
def test_too_much_computing():
    with Readers(cpu_limit_s=0.5) as readers:
        with pytest.raises(UnreadableError, match=r"^reading it took more than 0\.5 s of CPU time$"):
            readers.read("a.md", MANY)
        assert readers.read("a.md", b"after").text == "after"


def test_too_long_a_wait():
    with Readers(wall_limit_s=0.3) as readers:
        with pytest.raises(UnreadableError, match=r"^reading it took more than 0\.3 s$"):
            readers.read("a.md", MANY)
        assert readers.read("a.md", b"after").text == "after"


@POSIX
def test_the_limit_of_computing_is_each_file_s_own():
    data = MANY[:300_000]
    with Readers(cpu_limit_s=1) as readers:
        readers.read("a.md", b"x")
        pid, started = readers.pid, time.monotonic()
        while time.monotonic() - started < 3:  # more computing in all than a file is allowed
            readers.read("a.md", data)
        assert readers.pid == pid


@POSIX
def test_a_child_that_was_killed_meanwhile_costs_no_file():
    with Readers() as readers:
        readers.read("a.md", b"x")
        os.kill(readers.pid, signal.SIGKILL)
        assert readers.read("a.md", b"y").text == "y"
        os.kill(readers.pid, signal.SIGSEGV)
        time.sleep(0.1)
        assert readers.read("a.md", b"z").text == "z"


@POSIX
def test_the_child_ends_with_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys\nfrom localrag.kb.reading import Readers\n"
        "r = Readers()\nr.read('a.txt', b'x')\nprint(r.pid, flush=True)\nos._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    pid = int(done.stdout)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").exists() and " Z " in Path(f"/proc/{pid}/stat").read_text():
            return  # ended, and not yet reaped by whoever has it now
        time.sleep(0.05)
    pytest.fail("the child lives on")


# In place of the child: programs that break the protocol in every way. Each is greeted rightly first, unless it says otherwise.

START = """
import json, os, signal, sys, time
def main(job, parent):
    def say(header, data=b"", encoded=None):
        header = {**header, "num_bytes": len(data)} if isinstance(header, dict) else header
        write((json.dumps(header).encode() if encoded is None else encoded) + b"\\n" + data)
    def write(data):
        parent.replies.write(data)
        parent.replies.flush()
    def hear():
        if parent.receive() is None:
            sys.exit(0)
    GOOD = {"headings": ["h"], "sections": [0, 1, 0, 0], "kinds": [], "places": [], "title": "", "tags": [], "markdown": False,
            "language": None, "own_lines": True, "fields": [], "missing": []}
    say({"ready": True})
    while True:
        hear()
        """


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Make a module that runs `body` for each file; return its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(body, start=START):
        (tmp_path / "fake_worker.py").write_text(start + body + "\n")
        return "fake_worker"

    return make


def test_the_program_in_its_place_can_speak_as_it_should(fake):
    with Readers(worker=fake('say(GOOD, b"x")')) as readers:
        assert readers.read("a", b"").sections[0].heading == "h"
        assert readers.read("b", b"").text == "x"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"^its reader died \(signal SIGSEGV\)$"),
        ("os.abort()", r"^its reader died \(signal SIGABRT\)$"),
        ("os._exit(3)", r"^its reader died \(exit code 3\)$"),
        ("os._exit(0)", r"^its reader died \(exit code 0\)$"),
        ("os._exit(77)", "more than 1 GB of memory"),
        ("time.sleep(60)", r"^reading it took more than 0\.5 s$"),
        ("parent.replies.close(); time.sleep(60)", "its reader died|took more than"),
        ('write(b"garbage in place of an answer\\n")', "no usable answer"),
        ('write(b"\\0" * 5); time.sleep(60)', r"took more than 0\.5 s"),
        ("say({}, encoded=b'{')", "no usable answer"),
        ("say([1])", "no usable answer"),
        ("say({})", "no usable answer"),
        ("say({}, encoded=b'[' * 1000000)", "no usable answer"),
        ("say({}, encoded=b'{\"sections\": ' + b'9' * 10000 + b'}')", "no usable answer"),
        ('say(GOOD, b"\\xff")', "no usable answer"),
        ('say(GOOD, b"")', "no usable answer"),
        ('say({**GOOD, "sections": [0, 1, 5, 0]}, b"x")', "no usable answer"),
        ('say({**GOOD, "sections": [0, 1, 0]}, b"x")', "no usable answer"),
        ('say({**GOOD, "sections": [0, 1, 0, 0, 0, 1, 0, 0]}, b"x")', "no usable answer"),
        ('say({**GOOD, "sections": [0, 1, 0, 7]}, b"x")', "no usable answer"),
        ('say({**GOOD, "sections": [-1, 1, 0, 0]}, b"x")', "no usable answer"),
        ('say({**GOOD, "fields": [["one"]]}, b"x")', "no usable answer"),
        ('say({**GOOD, "places": [0, 3, 1]}, b"x")', "no usable answer"),
        ("say({}, encoded=b'{\"num_bytes\":1152921504606846976}'); time.sleep(60)", "no usable answer"),
        ("say({}, encoded=b'{\"num_bytes\":-1}'); time.sleep(60)", "no usable answer"),
        ('say({"error": "two\\nlines\\x1b[31m"})', r"^two lines\[31m$"),
    ],
)
def test_no_child_takes_the_parent_with_it(fake, body, reason):
    wall_limit_s = 0.5 if "took more than" in reason else 60
    with Readers(worker=fake(body), wall_limit_s=wall_limit_s) as readers, pytest.raises(UnreadableError, match=reason):
        readers.read("a.txt", b"x")


def test_an_earlier_file_is_not_blamed_on_a_later_one(fake):
    """A child that dies of its second file: the fresh one reads it as its first."""
    with Readers(worker=fake('say(GOOD, b"x"); hear(); os.abort()')) as readers:
        pids = set()
        for _ in range(3):
            assert readers.read("a", b"").text == "x"
            pids.add(readers.pid)
        assert len(pids) == 3


def test_a_child_that_does_not_start_is_not_the_file_s_fault(fake):
    garbage = START.replace('say({"ready": True})', 'write(b"hello, this is not a message of ours\\n")')
    for program in ("", "raise SystemExit(3)", "def main(job, parent): pass", "import no_such_module", garbage):
        with Readers(worker=fake("", program)) as readers, pytest.raises(KnowledgeBaseError, match="did not start"):
            readers.read("a", b"")


TEXT = st.text(st.characters(exclude_characters="\0"), max_size=9)


@given(st.lists(st.tuples(TEXT, st.integers(0, 9)), max_size=9), TEXT)
@settings(max_examples=25, deadline=None)
def test_any_reading_survives_the_way(readers, fields, text):
    front = "".join(f"k{number}: {value!r}\n" for value, number in fields)
    data = f"---\n{front}---\n# {text}\n\n{text}x\n".encode("utf-8", "replace")
    assert readers.read("a.md", data) == read_here("a.md", data)


def test_lone_surrogates_do_not_come_through():
    """What JSON files can hold and no store can."""
    from localrag.kb.readers.base import Reading, Section  # noqa: PLC0415

    header = describe(Reading("x", (Section(0, 1, "h\ud800"),), title="\udfff", tags=("\ud900",), fields=(("k", "\udc00"),)))
    json.dumps(header).encode("ascii")
    assert [header["headings"], header["title"], header["tags"], header["fields"]] == [["h\ufffd"], "\ufffd", ["\ufffd"], [["k", "\ufffd"]]]
