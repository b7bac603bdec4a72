"""The process is killed at any statement and at any instant, and two write at once: nothing that was committed is lost, and no
document is ever half."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localrag.kb import KnowledgeBase
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.support import chunk_ids, contents, problems, write_notes

ROOT = Path(__file__).parents[2]
CHILD = """
import os, signal, sys
from itertools import count
from pathlib import Path
from localrag.kb import KnowledgeBase
from localrag.kb.store import Store
from tests.kb.hash_embedder import HashEmbedder

kb_dir, name, folder, last_statement = sys.argv[1:]
embedder = HashEmbedder()
embedder.embed(["numpy is loaded now"])
statements, files = count(1), count(1)

def die_at_the_last(_):
    if next(statements) == int(last_statement):
        os.kill(os.getpid(), signal.SIGKILL)

if int(last_statement):
    Store(Path(kb_dir, name, "kb.sqlite"), create=True).close()
with KnowledgeBase.open(Path(kb_dir), name, create=True) as kb:
    if int(last_statement):
        kb._store._db.set_trace_callback(die_at_the_last)
    print("ready", flush=True)
    sys.stdin.readline()
    kb.ingest([Path(folder)], embedder, lambda _: print(next(files), flush=True))
    kb.retrieve("zebra", embedder)
"""


def _child(kb_dir, name, folder, last_statement=0):
    command = [sys.executable, "-c", CHILD, str(kb_dir), name, str(folder), str(last_statement)]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


def _go(child):
    child.stdin.write("\n")
    child.stdin.flush()


@pytest.fixture
def folder(tmp_path):
    write_notes(tmp_path / "many", 90)
    return tmp_path / "many"


@pytest.fixture
def clean(tmp_path, folder):
    """The contents of an undisturbed build."""
    with KnowledgeBase.open(tmp_path / "clean", "many", create=True) as kb:
        kb.ingest([folder], HashEmbedder())
        return contents(kb)


class Watch:
    """What was committed so far: it must still be there after each kill."""

    def __init__(self, kb_dir, clean):
        self.kb_dir, self.clean, self.kept = kb_dir, clean, {}

    def look(self, when):
        with KnowledgeBase.open(self.kb_dir, "many") as kb:
            ids = chunk_ids(kb)
            assert {name: ids[name] for name in self.kept} == self.kept, when  # under the same ids
            assert all(chunks == self.clean[name] for name, chunks in contents(kb).items()), when  # each document whole
            assert problems(kb.path) == [], when
        self.kept = ids

    def finish(self, folder):
        embedder = HashEmbedder()
        with KnowledgeBase.open(self.kb_dir, "many") as kb:
            result = kb.ingest([folder], embedder)
            assert (result.unchanged, result.added) == (len(self.kept), len(self.clean) - len(self.kept))
            assert embedder.num_embedded == sum(len(self.clean[name]) for name in self.clean.keys() - self.kept.keys())
            assert contents(kb) == self.clean
            assert problems(kb.path) == []
            assert kb.retrieve("zebra7x1", embedder)[0].chunk.source == "many/note-007.md"


def test_killed_at_any_statement_it_loses_nothing_and_goes_on(kb_dir, folder, clean):
    watch, rng = Watch(kb_dir, clean), random.Random(4)
    for last_statement in (1, *rng.sample(range(2, 120), 11)):
        with _child(kb_dir, "many", folder, last_statement) as child:
            _go(child)
            child.stdout.read()
        assert child.returncode == -9
        watch.look(last_statement)
    assert 0 < len(watch.kept) < len(clean)
    watch.finish(folder)


def test_killed_at_any_instant_it_loses_nothing_and_goes_on(kb_dir, folder, clean):
    watch, rng, num_killed = Watch(kb_dir, clean), random.Random(5), 0
    for line in (1, 22, 44):  # 22 notes make a batch, whose documents are then committed one by one
        with _child(kb_dir, "many", folder) as child:
            _go(child)
            while child.stdout.readline().strip() not in ("", str(line)):
                pass
            time.sleep(rng.uniform(0, 0.02))
            child.kill()
        num_killed += child.returncode == -9
        if (kb_dir / "many" / "kb.sqlite").is_file():
            watch.look(line)
    assert num_killed >= 2
    watch.finish(folder)


def test_killed_while_removing_it_is_there_or_gone(kb_dir, folder):
    with KnowledgeBase.open(kb_dir, "many", create=True) as kb:
        kb.ingest([folder], HashEmbedder())
    leftover = kb_dir / ".removed-by-a-killed-process"
    (kb_dir / "many").rename(leftover)
    with KnowledgeBase.open(kb_dir, "many", create=True) as kb:
        kb.ingest([folder], HashEmbedder())
        assert kb.num_documents == 90
        kb.remove()
    assert list(kb_dir.iterdir()) == []


def test_two_indexers_at_once(kb_dir, tmp_path, folder, clean):
    write_notes(tmp_path / "other", 40, seed="b")
    with _child(kb_dir, "many", folder) as one, _child(kb_dir, "many", folder) as two, _child(kb_dir, "many", tmp_path / "other") as three:
        children = (one, two, three)
        for child in children:
            _go(child)
        for child in children:
            child.stdout.read()
    assert [child.returncode for child in children] == [0, 0, 0]
    with KnowledgeBase.open(kb_dir, "many") as kb:
        found = contents(kb)
        assert len(found) == 130
        assert {name: found[name] for name in clean} == clean
        assert problems(kb.path) == []
        assert max(one for ids in chunk_ids(kb).values() for one in ids) == kb.num_chunks  # none was stored twice
