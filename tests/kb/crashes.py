"""Stops processes that index, and looks at what they left. test_crash.py does a little of it, benchmarks/kb_crash.py all of it.

postgres_crashes.py does the same with a knowledge base on a server.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from localrag.errors import KnowledgeBaseError
from localrag.kb import KnowledgeBase
from localrag.kb.walk import walk
from tests.kb.crash_child import DIM, GIVEN, NAME
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.support import documents, known_chunks, unread, words, write_notes

ROOT = Path(__file__).parents[2]
SYSCALLS = ("write", "pwrite64", "fsync", "fdatasync", "ftruncate", "fallocate", "rename", "renameat", "renameat2", "unlink", "unlinkat")
"""Those that change what is on a disk, or when."""

_SETTLED = 1_700_000_000
_QUERY = "zebra1x5"


class FaultError(AssertionError):
    """What was found after a process was stopped is not what was promised."""


class CannotTraceError(Exception):
    """No strace here, or it may not trace; the message says why."""


class CannotMountError(Exception):
    """A small disk may not be made here; the message says why."""


class Outcome(NamedTuple):
    """The exit status of a run, -9 where it was killed, and the error that it gave out."""

    status: int
    error: str = ""
    hint: str = ""

    @property
    def was_killed(self) -> bool:
        return self.status == -signal.SIGKILL


class Indexer:
    """A process that indexes in a fork of itself (crash_child.py)."""

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kb.crash_child"],
            cwd=ROOT,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a fork has only the thread that made it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()

    def start(self, order) -> None:
        self._send(order)
        self.pid = self._receive()["pid"]

    def go(self) -> None:
        self._send({})

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> Outcome:
        """Waits for the end of the run."""
        said = {}
        while "status" not in said:
            said |= self._receive()
        return Outcome(said["status"], said.get("error", ""), said.get("hint", ""))

    def _send(self, words) -> None:
        self._process.stdin.write(f"{json.dumps(words)}\n")
        self._process.stdin.flush()

    def _receive(self):
        return json.loads(self._process.stdout.readline())


Stop = Callable[[Indexer], Outcome]
"""Lets a run go that was started, stops it somewhere or not, and waits for its end."""


def to_the_end(indexer: Indexer) -> Outcome:
    indexer.go()
    return indexer.end()


def after(seconds: float) -> Stop:
    def stop(indexer: Indexer) -> Outcome:
        indexer.go()
        time.sleep(seconds)
        indexer.kill()
        return indexer.end()

    return stop


def at_syscall(name: str, number: int) -> Stop:
    """Instead of the `number`-th call of `name`, from 1 on, the process dies."""

    def stop(indexer: Indexer) -> Outcome:
        with _traced(indexer, "/dev/null", "-e", f"inject={name}:signal=SIGKILL:when={number}"):
            return to_the_end(indexer)

    return stop


@contextmanager
def _traced(indexer: Indexer, out, *options) -> Iterator[None]:
    program = shutil.which("strace")
    reason = "strace is not installed (apt-get install strace)"
    if program:
        trace = f"trace={','.join(f'?{name}' for name in SYSCALLS)}"
        strace = subprocess.Popen(
            [program, "-o", str(out), "-p", str(indexer.pid), "-e", trace, *options], stderr=subprocess.PIPE, text=True
        )
        with closing(strace.stderr):
            reason = strace.stderr.readline().strip()
            if reason.endswith("attached"):
                yield
                strace.wait(120)
                return
            strace.kill()
            strace.wait()
    indexer.kill()
    indexer.end()
    raise CannotTraceError(reason)


class Log(NamedTuple):
    """What a run wrote down: the sha256 of what it embedded, how many files it was done with, and whether it waited for another."""

    embedded: list[str]
    num_done: int
    waited: bool

    @classmethod
    def read(cls, file: Path):
        lines = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
        done = [int(what) for kind, what in lines if kind == "done"]
        return cls([what for kind, what in lines if kind == "embedded"], max(done, default=0), any(kind == "waited" for kind, _ in lines))


class State(NamedTuple):
    """What two builds of a folder have in common. `best` is what a question finds first."""

    documents: dict[str, dict]
    words: dict[str, list[tuple]]
    unread: list[tuple]
    best: tuple[str, int]

    @classmethod
    def of(cls, kb_dir: Path):
        with KnowledgeBase.open(kb_dir, NAME) as kb:
            chunk = kb.retrieve(_QUERY, HashEmbedder(dim=DIM))[0].chunk
            return cls(documents(kb.path), words(kb.path), unread(kb.path), (chunk.source, chunk.ordinal))


@dataclass
class Scene:
    """A folder as it is now, its knowledge base from an earlier time, and what a clean build of it holds.

    `earlier` is where that knowledge base is: a folder, or the name of a database.
    """

    folder: Path
    files: list[str]
    earlier: Path | str
    before: dict[str, dict]
    ids_before: dict[tuple[str, str, str], int]
    renamed: tuple[str, str]
    clean: State

    def sha256s(self, num_files: int) -> set[str]:
        """What is embedded of the first files, as a log names it."""
        clean = self.clean.documents
        return {chunk[-2].hex() for name in self.files[:num_files] if name in clean for chunk in clean[name]["chunks"]}

    @classmethod
    def make(cls, base: Path):
        folder = write_earlier(base)
        before = _build(base / "earlier", folder)
        renamed = change(base, folder)
        _build(base / "clean", folder, tagging=GIVEN)
        files = [file.path for file in walk([folder]).files]
        return cls(folder, files, base / "earlier", documents(before), known_chunks(before), renamed, State.of(base / "clean"))


def write_earlier(base: Path) -> Path:
    """A folder of long notes, so that a batch is four of them."""
    folder = base / "docs"
    write_notes(folder, 6, num_parts=16)
    _settle(folder)
    return folder


def change(base: Path, folder: Path) -> tuple[str, str]:
    """One of them is changed, one is gone, one has another name, and some are new. The old name and the new one."""
    write_notes(base / "new", 5, seed="n", num_parts=16)
    for at in range(5):
        text = (base / "new" / f"note-{at:03}.md").read_text()
        (folder / f"{'a' if at < 4 else 'z'}-{at}.md").write_text(f"---\ntags: [fresh]\nauthor: Ann\n---\n{text}\n漢字 {at}\n")
    changed, gone, old, new = folder / "note-001.md", folder / "note-002.md", folder / "note-003.md", folder / "sub" / "moved.md"
    changed.write_text(changed.read_text().replace("## Part 7", "## Part new\n\nThis is new here.\n\n## Part 7").replace("1x9", "1y9"))
    gone.unlink()
    new.parent.mkdir()
    old.rename(new)
    (folder / "binary.md").write_bytes(b"a\0b")
    _settle(folder)
    return str(old), str(new)


class History:
    """One knowledge base over several runs, each of which is looked at. It starts from nothing or from the earlier state."""

    def __init__(self, scene: Scene, base: Path, *, from_earlier: bool, kb_dir: Path | None = None) -> None:
        self.scene = scene
        self.base = base
        self.from_earlier = from_earlier
        self.num_runs = 0
        self._committed: set[str] = set()  # what was embedded of every chunk
        self._done: dict[str, list[int]] = {}  # the ids of the chunks of documents that are as they shall be
        base.mkdir(parents=True, exist_ok=True)
        self._begin(kb_dir or base / "kb")
        self.look()

    def _begin(self, kb_dir: Path) -> None:
        self.kb_dir = kb_dir
        self.path = kb_dir / NAME / "kb.sqlite"
        if self.from_earlier:
            shutil.copytree(self.scene.earlier, kb_dir)

    def _opened(self) -> KnowledgeBase | None:
        """None if it is not made yet."""
        return KnowledgeBase.open(self.kb_dir, NAME) if self.path.is_file() else None

    def _documents(self, kb):
        return documents(kb.path)

    def _known_chunks(self, kb):
        return known_chunks(kb.path)

    def _state(self) -> State:
        return State.of(self.kb_dir)

    def _strays(self) -> list[str]:
        """What nobody needs any more."""
        return [
            file.name for file in self.path.parent.iterdir() if not re.fullmatch(r"kb\.sqlite|indexed|(vec|index)\.lock|vec-\d+", file.name)
        ]

    def order(self, **options):
        """For another run, with a log of its own."""
        self.num_runs += 1
        return {"kb_dir": str(self.kb_dir), "folder": str(self.scene.folder), "log": str(self.base / f"log-{self.num_runs}"), **options}

    def run(self, indexer: Indexer, stop: Stop, **options) -> Outcome:
        order = self.order(**options)
        indexer.start(order)
        outcome = stop(indexer)
        self.look(Log.read(Path(order["log"])))
        return outcome

    def finish(self, indexer: Indexer) -> None:
        """Goes on to the end, and compares with a clean build."""
        outcome = self.run(indexer, to_the_end)
        _check(outcome == Outcome(0), "it does not go on", outcome)
        self.compare()

    def compare(self) -> None:
        for what, found, wanted in zip(State._fields, self._state(), self.scene.clean, strict=True):
            _check(found == wanted, f"its {what} are not those of a clean build")
        strays = self._strays()
        _check(not strays, "files are left over", strays)

    def look(self, log: Log | None = None) -> None:
        """Whether all that was committed is there, each document as it was or as it shall be, and nothing was embedded for nothing."""
        if log is not None:
            _check(len(set(log.embedded)) == len(log.embedded), "a chunk was embedded twice in one run")
            _check(not self._committed.intersection(log.embedded), "a chunk was embedded again after its commit")
        opened = self._opened()
        if opened is None:
            _check(not self._done and not (log and log.num_done), "the knowledge base is gone")
            return
        with opened as kb:
            found, chunks = self._documents(kb), self._known_chunks(kb)
            self._check_documents(found, log.num_done if log else 0)
            self._check_ids(found, chunks)
            verified = kb.verify()
            _check(verified.is_sound and not verified.repaired, "verify had something to repair", verified)
            _check(self._documents(kb) == found, "verify has changed it")
        self._committed = {sha256 for _, sha256, _ in chunks}

    def _check_documents(self, found, num_done: int) -> None:
        clean, before = self.scene.clean.documents, self.scene.before if self.from_earlier else {}
        for name, document in found.items():
            either = [_settled_part(state[name]) for state in (before, clean) if name in state]
            _check(_settled_part(document) in either, "a document is half", name)
        missing = [name for name in before if name in clean and name not in found]
        _check(not missing, "documents are lost", missing)
        done = [name for name in self.scene.files[:num_done] if name in clean]
        lost = [name for name in done if name not in found or _settled_part(found[name]) != _settled_part(clean[name])]
        _check(not lost, "documents were done, and are lost", lost)
        if self.from_earlier:
            _check(sum(name in found for name in self.scene.renamed) == 1, "the renamed document is there twice, or not at all")

    def _check_ids(self, found, chunks) -> None:
        """An unchanged chunk keeps its id: from the earlier state on, and from the moment on when its document was committed."""
        earlier_names = {new: old for old, new in [self.scene.renamed]}
        ids: dict[str, list[int]] = {}
        for (name, *what), chunk_id in chunks.items():
            if self.from_earlier:
                known = self.scene.ids_before.get((earlier_names.get(name, name), *what), chunk_id)
                _check(known == chunk_id, "an unchanged chunk has another id", name, known, chunk_id)
            ids.setdefault(name, []).append(chunk_id)
        clean = self.scene.clean.documents
        done = {name: ids[name] for name in found if name in clean and _settled_part(found[name]) == _settled_part(clean[name])}
        lost = [name for name in self._done if done.get(name) != self._done[name]]
        _check(not lost, "what was committed is lost, or has other ids", lost)
        self._done = done


def length_s(scene: Scene, indexer: Indexer, base: Path, *, from_earlier: bool) -> float:
    """How long a run takes that nothing stops."""
    return length_of(History(scene, base, from_earlier=from_earlier), indexer)


def length_of(history: History, indexer: Indexer) -> float:
    """The same of one that begins with this."""
    lengths = []

    def timed(indexer: Indexer) -> Outcome:
        started_at = time.perf_counter()
        outcome = to_the_end(indexer)
        lengths.append(time.perf_counter() - started_at)
        return outcome

    history.run(indexer, timed)
    history.compare()
    return lengths[0]


def count_syscalls(scene: Scene, indexer: Indexer, base: Path, *, from_earlier: bool) -> Counter[str]:
    """How often a run that nothing stops calls each of SYSCALLS. CannotTraceError where that cannot be told."""
    out = base / "strace.out"

    def counted(indexer: Indexer) -> Outcome:
        with _traced(indexer, out):
            return to_the_end(indexer)

    history = History(scene, base, from_earlier=from_earlier)
    history.run(indexer, counted)
    history.compare()
    return Counter(re.findall(r"^(\w+)\(", out.read_text(errors="replace"), re.MULTILINE))


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A disk of this size at `folder`. CannotMountError where none may be made."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotMountError((getattr(error, "stderr", "") or str(error)).strip()) from None
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(disk: Path, num_free_bytes: int) -> Path:
    """A file that leaves so much of a disk free."""
    status = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(b"\1" * max(0, status.f_bavail * status.f_frsize - num_free_bytes))
    return ballast


def stop_by_full_disk(scene: Scene, indexer: Indexer, base: Path, disk: Path, num_free_bytes: int, *, from_earlier: bool) -> Outcome:
    """A run that finds so much space, what is said while there is none, and a run with space again. The outcome is that of the first."""
    kb_dir = disk / base.name
    history = History(scene, base, from_earlier=from_earlier, kb_dir=kb_dir)
    ballast = fill_disk(disk, num_free_bytes)
    order = history.order()
    indexer.start(order)
    outcome = to_the_end(indexer)
    _check(outcome.status == 0 or "Free some space" in outcome.hint, "it does not say why", outcome)
    try:
        if history.path.is_file():
            with KnowledgeBase.open(kb_dir, NAME) as kb:
                kb.retrieve(_QUERY, None, mode="keyword")
    except KnowledgeBaseError as error:
        _check("Free some space" in error.hint, "it does not say why", error)
    ballast.unlink()
    history.look(Log.read(Path(order["log"])))
    history.finish(indexer)
    shutil.rmtree(kb_dir)
    return outcome


def _settle(folder: Path) -> None:
    """Old enough for a later change to show."""
    for file in folder.rglob("*"):
        os.utime(file, (_SETTLED, _SETTLED))


def _build(kb_dir: Path, folder: Path, **options) -> Path:
    embedder = HashEmbedder(dim=DIM)
    with KnowledgeBase.open(kb_dir, NAME, create=True) as kb:
        kb.ingest([folder], embedder, **options)
        kb.retrieve(_QUERY, embedder)
        return kb.path


def _settled_part(document):
    """Without what is given to unchanged documents at the end of a run."""
    return document["row"], document["chunks"], {field for field in document["fields"] if field[0] == "file"}


def _check(holds: bool, fault: str, *facts: object) -> None:
    if not holds:
        raise FaultError(": ".join((fault, *map(repr, facts))))
