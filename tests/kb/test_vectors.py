import random
import subprocess
import sys

import numpy as np
import pytest

from localrag.kb import ann
from localrag.kb.ann import build, start_build
from localrag.kb.chunking import Passage
from localrag.kb.protocols import DocumentRow
from localrag.kb.store import Store
from localrag.kb.vector_cache import HEADER_BYTES, Version, publishing, write_file
from localrag.kb.vectors import NUM_CHANGED, load_index, verify_index

DIM = 16
BUILDER = """
import sys
from pathlib import Path
from localrag.kb.ann import build
from localrag.kb.store import Store

store = Store(Path(sys.argv[1]))
for _ in range(3):
    print(build(store, min_rows=1) is not None)
store.close()
"""
SEARCHER = f"""
import sys
from pathlib import Path
import numpy as np
from localrag.kb.store import Store
from localrag.kb.vectors import load_index

store = Store(Path(sys.argv[1]))
load_index(store).search(np.ones({DIM}, dtype=np.float32), 3)
store.close()
print([name for name in ("faiss", "torch") if name in sys.modules])
"""


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "kb" / "kb.sqlite", create=True)
    yield store
    store.close()


def _vectors(num, seed=1, num_centres=40):
    """Unit vectors around some centres."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((num_centres, DIM))
    vectors = (centres[rng.integers(num_centres, size=num)] + 0.4 * rng.standard_normal((num, DIM))).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _put(store, name, vectors):
    """One document with a chunk for each vector."""
    passages = [Passage(at, at + 1, f"{name} {at}") for at in range(len(vectors))]
    with store.writing():
        store.claim_embedder("f" * 64, DIM)
        store.put_document(
            DocumentRow(f"/{name}", name, name, 1), passages, {p.sha256: v.tobytes() for p, v in zip(passages, vectors, strict=True)}
        )


def _remove(store, *names):
    with store.writing():
        store.remove_documents([f"/{name}" for name in names])


def _exact(store, queries, k, among=None):
    """What a search for each query must find: every vector of the store compared, best first, ties by id."""
    rows = [(one, vector) for one, vector in store.vectors() if among is None or one in among]
    ids = np.array([one for one, _ in rows], dtype=np.int64)
    vectors = np.frombuffer(b"".join(vector for _, vector in rows), dtype="<f4").reshape(-1, DIM).astype(np.float64)
    for query in queries:
        scores = (vectors @ query).astype(np.float32)
        best = np.lexsort((ids, -scores))[:k]
        yield list(zip(ids[best].tolist(), scores[best].tolist(), strict=True))


def _agrees(index, store, queries, k=12, among=None):
    for query, expected in zip(queries, _exact(store, queries, k, among), strict=True):
        found = index.search(query, k, among)
        assert [one for one, _ in found] == [one for one, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-6)


def _files(store):
    return sorted(file.name for file in store.path.parent.glob("vec-*"))


def test_search_is_exact_and_equal_vectors_tie_by_id_wherever_they_stand(store):
    vectors = _vectors(1200)
    vectors[::7] = vectors[3]  # in several groups, more than are asked for
    _put(store, "a", vectors)
    load_index(store)
    _put(store, "b", np.concatenate((vectors[3:4], _vectors(5, seed=2))))  # and beside the file
    index = load_index(store)
    for _ in range(2):  # checked now, and then known to be
        found = index.search(vectors[3], 30)
        assert [one for one, _ in found] == sorted(one for one, _ in found)
        assert {score for _, score in found} == {found[0][1]}
    _agrees(index, store, _vectors(8, seed=3))
    assert index.search(vectors[3], 7) == index.search(vectors[3], 30)[:7]
    assert index.search(vectors[3], 0) == []
    assert len(index.search(vectors[3], 5000)) == len(index) == 1206


def test_similarities_and_vectors_of_chunks(store):
    vectors = _vectors(20)
    _put(store, "a", vectors[:10])
    _put(store, "b", vectors[10:15])
    load_index(store)
    _put(store, "c", vectors[15:])
    _remove(store, "b")
    index = load_index(store)
    similarities = index.similarities(vectors[17], [3, 11, 18, 999, -1])
    assert similarities.keys() == {3, 18}
    assert similarities[18] == pytest.approx(1, abs=1e-6)
    assert np.array_equal(index.vectors_of([3])[3], vectors[2])


def test_nothing_stored(store):
    assert load_index(store) is None
    with store.writing():
        store.claim_embedder("f" * 64, DIM)
    index = load_index(store)
    assert (len(index), index.search(np.ones(DIM, dtype=np.float32), 3), index.similarities(np.ones(DIM), [1])) == (0, [], {})
    _put(store, "a", _vectors(3))
    assert len(load_index(store).search(np.ones(DIM, dtype=np.float32), 9)) == 3


@pytest.mark.parametrize("clustered", [False, True])
def test_a_file_of_the_past_serves_with_what_came_and_without_what_went(store, clustered):
    rng = random.Random(5)
    for at in range(12):
        _put(store, f"d{at}", _vectors(100, seed=at))
    if clustered:
        assert build(store, min_rows=1).centroids is not None
    else:
        load_index(store)
    files, index, names = _files(store), None, [f"d{at}" for at in range(12)]
    for at in range(12, 24):
        _put(store, f"d{at}", _vectors(20, seed=at))
        _remove(store, names.pop(rng.randrange(len(names))))
        names.append(f"d{at}")
        index = load_index(store, index)
        assert (index.generation, len(index)) == (store.generation, store.num_chunks)
        present = {one for one, _ in store.vectors()}
        for query in _vectors(6, seed=100 + at):
            found = index.search(query, 15)
            assert len(found) == 15
            assert {one for one, _ in found} <= present
        newest = [one for one, _ in store.vectors(max(present) - 20)]
        _agrees(index, store, _vectors(3, seed=at), among=newest)
        if not clustered:
            _agrees(index, store, _vectors(4, seed=200 + at), k=40)
    assert _files(store) == files  # nothing of it was made anew
    assert index.similarities(_vectors(1)[0], sorted(present)).keys() == present


def test_when_all_that_is_near_was_removed_the_rest_is_found(store):
    near = np.tile(_vectors(1), (300, 1))
    _put(store, "near", near)
    _put(store, "far", -_vectors(200, seed=4))
    assert build(store, min_rows=1).num_probes < 20
    _remove(store, "near")
    _agrees(load_index(store), store, near[:1], k=150)


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("num", [1, 30, 1400])
def test_a_filter_is_exact(store, clustered, num):
    _put(store, "a", _vectors(1500))
    if clustered:
        build(store, min_rows=1)
    _put(store, "b", _vectors(30, seed=2))
    among = random.Random(num).sample(range(1, 1531), num)
    index = load_index(store)
    assert (index.base.centroids is not None) == clustered
    _agrees(index, store, _vectors(5, seed=3), among=[*among, 10_000, -4])
    assert index.search(_vectors(1)[0], 5, []) == index.search(_vectors(1)[0], 5, [9999]) == []


def test_the_recall_of_clusters_is_what_was_measured(store):
    _put(store, "a", _vectors(4000, num_centres=60))
    file = build(store, min_rows=1)
    index = load_index(store)
    assert (file.recall >= 0.97, index.base.recall, len(file)) == (True, file.recall, 4000)
    assert file.num_probes < len(file.centroids) / 2  # else nothing is gained
    queries = _vectors(50, seed=9)
    exact = _exact(store, queries, 10)
    hits = sum(len({one for one, _ in index.search(q, 10)} & {one for one, _ in true}) for q, true in zip(queries, exact, strict=True))
    assert hits / 500 >= 0.95
    assert build(store, min_rows=1) is None  # there is nothing to gain
    assert build(store, min_rows=7000) is None
    _put(store, "b", _vectors(NUM_CHANGED + 400, seed=2))
    assert len(build(store, min_rows=1)) == 4000 + NUM_CHANGED + 400
    assert _files(store) == [f"vec-{store.generation}"]


def test_a_small_file_is_made_anew_when_much_has_changed(store):
    _put(store, "a", _vectors(100))
    load_index(store)
    (store.path.parent / "vec-0.99.tmp").write_bytes(b"left by a killed process")
    _put(store, "b", _vectors(NUM_CHANGED - 10, seed=2))
    load_index(store)
    assert _files(store) == ["vec-0.99.tmp", "vec-1"]
    _put(store, "c", _vectors(20, seed=3))
    index = load_index(store)
    assert _files(store) == ["vec-3"]
    assert len(index.base) == len(index) == NUM_CHANGED + 110
    _remove(store, "b")
    load_index(store)
    assert _files(store) == ["vec-3"]
    _remove(store, "c")
    _put(store, "d", _vectors(130, seed=4))
    assert load_index(store).num_changed == 0
    assert _files(store) == ["vec-6"]


@pytest.mark.parametrize("clustered", [False, True])
def test_a_damaged_file_is_never_believed(store, clustered):
    _put(store, "a", _vectors(900))
    _put(store, "b", _vectors(40, seed=2))
    if clustered:
        build(store, min_rows=1)
    queries = _vectors(2, seed=3)
    index = load_index(store)
    file = store.path.parent / _files(store)[0]
    among = list(range(1, 941, 13))
    answers = [[index.search(q, 9), index.search(q, 9, among), index.similarities(q, among)] for q in queries]
    whole, rng = file.read_bytes(), random.Random(2)
    damaged = [whole[:cut] for cut in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, 4000, len(whole) // 2, len(whole) - 1)]
    damaged += [
        whole + b"\0",
        b"\0" * len(whole),
        rng.randbytes(len(whole)),
        whole[: len(whole) // 2] + b"\0" * (len(whole) - len(whole) // 2),
    ]
    for at in [*range(0, 88, 2), *(rng.randrange(len(whole)) for _ in range(30))]:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    swapped = bytearray(whole)
    row = 4 * DIM
    swapped[HEADER_BYTES : HEADER_BYTES + 2 * row] = (
        whole[HEADER_BYTES + row : HEADER_BYTES + 2 * row] + whole[HEADER_BYTES : HEADER_BYTES + row]
    )
    damaged.append(bytes(swapped))
    exact = list(_exact(store, queries, 9))
    for number, data in enumerate(damaged):
        file.unlink(missing_ok=True)  # others may have it mapped
        file.write_bytes(data)
        index = load_index(store)
        for query, right, true in zip(queries, answers, exact, strict=True):
            found = index.search(query, 9)
            assert found == right[0] or [one for one, _ in found] == [one for one, _ in true], number  # exact, once it was found out
            assert [index.search(query, 9, among), index.similarities(query, among)] == right[1:], number
        file.unlink(missing_ok=True)
        file.write_bytes(data)
        assert len(verify_index(store)) == 1, number
        assert _files(store) == []


def test_verify_finds_what_is_whole_but_wrong(store):
    _put(store, "a", _vectors(50))
    assert verify_index(store) == []
    load_index(store)
    _put(store, "b", _vectors(5, seed=2))
    assert verify_index(store) == []
    version = Version(1, store.stamp(1), "f" * 64, DIM)
    write_file(store.path.parent, version, [(np.arange(1, 51), _vectors(50)[::-1])])
    assert load_index(store).search(_vectors(50)[0], 1)[0][0] == 50  # so the tests here speak of a file that is read
    assert verify_index(store) == ["vec-1: it differs from the stored vectors"]
    assert _files(store) == []


def test_a_file_of_another_past_is_not_believed(store):
    _put(store, "a", _vectors(50))
    backup = store.path.with_name("backup")
    store._db.execute("VACUUM INTO ?", (str(backup),))
    _put(store, "b", _vectors(50, seed=2))
    load_index(store)
    assert _files(store) == ["vec-2"]
    restored = Store(backup)  # in the same folder
    try:
        _put(restored, "c", _vectors(50, seed=3))
        assert restored.generation == 2
        _agrees(load_index(restored), restored, _vectors(5, seed=4))
        _put(restored, "d", _vectors(5, seed=5))
        (store.path.parent / "vec-3").write_bytes((store.path.parent / "vec-2").read_bytes())
        _agrees(load_index(restored), restored, _vectors(5, seed=4))
    finally:
        restored.close()


def test_a_file_that_cannot_be_written_or_is_being_written_does_no_harm(store):
    _put(store, "a", _vectors(30))
    with publishing(store.path.parent) as first, publishing(store.path.parent) as second:
        assert (first, second) == (True, False)
        _agrees(load_index(store), store, _vectors(3, seed=2))
        assert build(store, min_rows=1) is None
    assert _files(store) == []
    (store.path.parent / "vec-1").mkdir()
    (store.path.parent / "vec-1" / "x").write_text("")
    _agrees(load_index(store), store, _vectors(3, seed=2))
    assert _files(store) == ["vec-1"]


def test_the_background_build_runs_while_others_write_and_search(store, tmp_path):
    _put(store, "a", _vectors(3000))
    child = subprocess.Popen([sys.executable, "-c", BUILDER, str(store.path)], stdout=subprocess.PIPE, text=True)
    index, at = None, 0
    while child.poll() is None or at < 5:
        _put(store, f"w{at}", _vectors(4, seed=at))
        with store.reading():
            index = load_index(store, index)
            newest = max(one for one, _ in store.vectors(3000))
            vector = index.vectors_of([newest])[newest]
            assert newest in [one for one, _ in index.search(vector, 5)]
        at += 1
    assert "True" in child.communicate()[0]
    index = load_index(store, index)
    assert index.base.centroids is not None
    assert len(index) == 3000 + 4 * at


def test_started_in_the_background_it_is_one_process(store):
    _put(store, "a", _vectors(10))  # too few: it ends at once
    start_build(store.path)
    first = ann._running[store.path]
    start_build(store.path)
    assert first.poll() is not None or ann._running[store.path] is first
    assert [child.wait(120) for child in (first, ann._running[store.path])] == [0, 0]
    assert _files(store) == []


def test_a_query_imports_no_faiss(store):
    _put(store, "a", _vectors(10))
    assert subprocess.run([sys.executable, "-c", SEARCHER, str(store.path)], capture_output=True, text=True, check=True).stdout == "[]\n"
