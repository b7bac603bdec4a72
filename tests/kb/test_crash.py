"""The process is killed at any write and at any instant, the disk is full, two write at once: nothing that was committed is lost, nothing
is embedded again, and what comes out is what an undisturbed build makes. `python -m benchmarks.kb_crash` does all of it."""

import random
import time
from pathlib import Path

import pytest

from localrag.kb import KnowledgeBase
from tests.kb import crashes
from tests.kb.crashes import CannotMountError, CannotTraceError, History, Indexer, Log, Outcome, Scene
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.support import write_notes

NUM_KILLS = 6
NUM_SYSCALLS = 3  # of 600 and of 400; those that are rare, besides


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return Scene.make(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def indexer():
    with Indexer() as process:
        yield process


@pytest.fixture(scope="module")
def other():
    with Indexer() as process:
        yield process


@pytest.mark.parametrize("from_earlier", [False, True])
def test_killed_at_random_moments_it_loses_nothing_and_goes_on(tmp_path, scene, indexer, from_earlier):
    rng, num_killed = random.Random(5), 0
    length_s = crashes.length_s(scene, indexer, tmp_path / "whole", from_earlier=from_earlier)
    history = History(scene, tmp_path / "killed", from_earlier=from_earlier)
    while num_killed < NUM_KILLS // 2:
        if history.run(indexer, crashes.after(rng.uniform(0, length_s))).was_killed:
            num_killed += 1
        else:
            length_s /= 2  # it was measured while the machine had other work
    history.finish(indexer)


@pytest.mark.parametrize("from_earlier", [False, True])
def test_killed_at_a_write_fsync_or_rename_it_loses_nothing_and_goes_on(tmp_path, scene, indexer, from_earlier):
    try:
        counts = crashes.count_syscalls(scene, indexer, tmp_path, from_earlier=from_earlier)
    except CannotTraceError as error:
        pytest.skip(str(error))
    assert {"pwrite64", "write", "fdatasync"} <= counts.keys()
    points = [(name, number) for name, count in sorted(counts.items()) for number in range(1, count + 1)]
    step = len(points) // NUM_SYSCALLS
    chosen = [*points[random.Random(6).randrange(step) :: step], *((name, 1) for name in counts if name in ("fsync", "rename"))]
    num_killed = 0
    for at, (name, number) in enumerate(chosen):
        history = History(scene, tmp_path / str(at), from_earlier=from_earlier)
        num_killed += history.run(indexer, crashes.at_syscall(name, number)).was_killed
        history.finish(indexer)
    assert num_killed >= len(chosen) - 2  # how often a run writes is not the same each time


@pytest.mark.parametrize("last_statement", [250, 400])
def test_killed_at_a_statement_it_loses_nothing_and_goes_on(tmp_path, scene, indexer, last_statement):
    history = History(scene, tmp_path, from_earlier=last_statement % 100 != 0)
    assert history.run(indexer, crashes.to_the_end, last_statement=last_statement).was_killed
    history.finish(indexer)


@pytest.mark.parametrize(("from_earlier", "num_free_bytes"), [(False, 0), (False, 300_000), (True, 300_000)])
def test_on_a_full_disk_it_says_so_and_goes_on_when_there_is_space(tmp_path, scene, indexer, from_earlier, num_free_bytes):
    disk = tmp_path / "disk"
    try:
        with crashes.small_disk(disk, 6 << 20):
            outcome = crashes.stop_by_full_disk(scene, indexer, tmp_path / "kb", disk, num_free_bytes, from_earlier=from_earlier)
    except CannotMountError as error:
        pytest.skip(f"no small disk can be made here: {error}")
    assert outcome.status == 6


def test_a_second_indexer_waits_and_does_nothing_twice(tmp_path, scene, indexer, other):
    history = History(scene, tmp_path, from_earlier=False)
    logs = _start_both(history, indexer, other)
    assert (indexer.end(), other.end()) == (Outcome(0), Outcome(0))
    first, second = map(Log.read, logs)
    assert second.waited
    embedded = first.embedded + second.embedded
    assert len(embedded) == len(set(embedded))
    history.look(first)
    history.compare()


def test_a_second_indexer_goes_on_where_the_first_was_killed(tmp_path, scene, indexer, other):
    history = History(scene, tmp_path, from_earlier=False)
    logs = _start_both(history, indexer, other)
    while not Log.read(logs[0]).num_done:
        time.sleep(0.01)
    indexer.kill()
    assert indexer.end().was_killed
    assert other.end() == Outcome(0)
    first, second = map(Log.read, logs)
    committed = scene.sha256s(first.num_done)
    assert committed
    assert not committed.intersection(second.embedded)
    history.look(second)
    history.compare()


def test_a_second_indexer_that_does_not_wait_says_so(tmp_path, scene, indexer, other):
    history = History(scene, tmp_path, from_earlier=False)
    _start_both(history, indexer, other, wait_s=0)
    refused = other.end()
    assert "Another localrag is indexing" in refused.error
    assert "Wait" in refused.hint
    assert indexer.end() == Outcome(0)
    history.look()
    history.compare()


def _start_both(history, first, second, **options):
    """The second when the first is at work; the logs of both."""
    orders = [history.order(pause_s=0.15), history.order(**options)]
    for indexer, order in zip((first, second), orders, strict=True):
        indexer.start(order)
    logs = [Path(order["log"]) for order in orders]
    first.go()
    while not Log.read(logs[0]).embedded:
        time.sleep(0.01)
    second.go()
    return logs


def test_killed_while_removing_it_is_there_or_gone(kb_dir, tmp_path):
    folder = tmp_path / "many"
    write_notes(folder, 9)
    with KnowledgeBase.open(kb_dir, "many", create=True) as kb:
        kb.ingest([folder], HashEmbedder())
    leftover = kb_dir / ".removed-by-a-killed-process"
    (kb_dir / "many").rename(leftover)
    with KnowledgeBase.open(kb_dir, "many", create=True) as kb:
        kb.ingest([folder], HashEmbedder())
        assert kb.num_documents == 9
        kb.remove()
    assert list(kb_dir.iterdir()) == []
