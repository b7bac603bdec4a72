import random
import struct
import zlib

import numpy as np
import pytest

from localrag.kb.vectors import VectorIndex, load_index


@pytest.fixture
def store(kb):
    return kb._store


@pytest.fixture
def cache(kb, store):
    load_index(store)
    return kb.path.with_name(f"vec-{store.generation}")


def _answers(index, embedder):
    query = embedder.embed(["the word of note 2"])[0]
    return index.search(query, 12)


def test_search_is_exact_and_ordered():
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((50, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[10] = vectors[40]
    ids = np.arange(50, dtype=np.int64) * 3 + 5
    index = VectorIndex(1, ids, vectors)
    expected = sorted(
        ((int(one), float(vector @ vectors[40])) for one, vector in zip(ids, vectors, strict=True)), key=lambda hit: (-hit[1], hit[0])
    )
    found = index.search(vectors[40], 50)
    assert [one for one, _ in found[:2]] == [35, 125]
    assert [one for one, _ in found] == [one for one, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-6)
    assert index.search(vectors[40], 7) == found[:7]
    assert index.search(vectors[40], 0) == []
    assert len(index) == 50
    similarities = index.similarities(vectors[40], [125, 4, 5, 6, 152, 999])
    assert similarities.keys() == {125, 5, 152}
    assert similarities[125] == pytest.approx(1, abs=1e-6)


def test_an_empty_index():
    index = VectorIndex(1, np.zeros(0, dtype=np.int64), np.zeros((0, 4), dtype=np.float32))
    assert index.search(np.ones(4, dtype=np.float32), 3) == []
    assert index.similarities(np.ones(4, dtype=np.float32), [1]) == {}


def test_the_index_follows_the_generation_and_old_caches_go(kb, store, cache, embedder, notes):
    (cache.parent / f"vec-{store.generation - 1}.99.tmp").write_bytes(b"left by a killed process")
    (notes / "more.md").write_text("more about quaggas")
    kb.ingest([notes], embedder)
    index = load_index(store)
    assert (index.generation, len(index)) == (store.generation, kb.num_chunks)
    assert [file.name for file in kb.path.parent.glob("vec-*")] == [f"vec-{store.generation}"]
    assert kb.retrieve("quaggas", embedder)[0].chunk.source == "notes/more.md"


def test_a_cache_that_fits_is_used(store, cache, embedder):
    data = bytearray(cache.read_bytes())
    body = bytearray(data[32:])
    num = len(load_index(store))
    body[8 * num :] = np.roll(np.frombuffer(bytes(body[8 * num :]), dtype="<f4").reshape(num, -1), 1, axis=0).tobytes()
    before = _answers(load_index(store), embedder)
    cache.write_bytes(bytes(data[:28]) + struct.pack("<I", zlib.crc32(body)) + body)
    assert _answers(load_index(store), embedder) != before  # so the tests below speak of a file that is read


def test_a_damaged_cache_is_built_again(store, cache, embedder):
    whole = cache.read_bytes()
    answers = _answers(load_index(store), embedder)
    rng = random.Random(2)
    damaged = [bytes(whole[:cut]) for cut in (0, 1, 31, 32, 40, len(whole) // 2, len(whole) - 1)]
    damaged += [whole + b"\0", b"\0" * len(whole), rng.randbytes(len(whole))]
    for at in [*range(32), *(rng.randrange(len(whole)) for _ in range(60))]:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    for data in damaged:
        cache.write_bytes(data)
        assert _answers(load_index(store), embedder) == answers
        assert cache.read_bytes() == whole


def test_the_cache_of_another_generation_is_not_believed(kb, store, cache, embedder, notes):
    old = cache.read_bytes()
    (notes / "note-000.md").unlink()
    kb.ingest([notes], embedder)
    cache.with_name(f"vec-{store.generation}").write_bytes(old)
    assert len(load_index(store)) == kb.num_chunks == 9


def test_a_cache_that_cannot_be_written_does_no_harm(store, cache, embedder):
    answers = _answers(load_index(store), embedder)
    cache.unlink()
    cache.mkdir()
    (cache / "x").write_text("")
    assert _answers(load_index(store), embedder) == answers
    assert [file.name for file in cache.parent.glob("*.tmp")] == []
