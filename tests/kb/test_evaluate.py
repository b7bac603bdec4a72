import json
import math
import random
from contextlib import closing

import numpy as np
import pytest

from localrag.errors import UsageError
from localrag.kb.evaluate import MEASURES, Result, evaluate, gain, measures, open_index, ranked_documents, read_collection
from localrag.types import Chunk, Hit
from tests.kb.hash_embedder import HashEmbedder

DOCUMENTS = {
    "d1": ("PLA", "PLA prints at 200 degrees and is annealed in an oven for one hour."),
    "d2": ("ABS", "ABS smells of styrene while printing. Acetone smooths ABS."),
    "d3": ("", "Nylon takes up water. Dry nylon in an oven."),
    "d4": ("Only a title about glaciers", ""),
    "d5": ("", ""),
    "d6": ("Long", "\n\n".join(f"Paragraph {at} speaks of volcanoes and of the sea. " * 4 for at in range(8))),
}
QUERIES = {"q1": "an oven for PLA and nylon", "q2": "styrene ABS", "q3": "glaciers", "q4": "never judged", "q5": "volcanoes of the sea"}
QRELS = [("q1", "d1", 2), ("q1", "d3", 1), ("q1", "d2", 0), ("q2", "d2", 1), ("q3", "d4", 1), ("q5", "d6", 1), ("q9", "d1", 1)]


def write(folder, *, qrels="qrels.tsv", header=True, columns=3):
    (folder / qrels).parent.mkdir(parents=True, exist_ok=True)
    rows = [{"_id": one, "title": title, "text": text} for one, (title, text) in DOCUMENTS.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": one, "text": text}) + "\n" for one, text in QUERIES.items()))
    lines = ["query-id\tcorpus-id\tscore"] if header else []
    lines += ["\t".join([query, *(["0"] if columns == 4 else []), document, str(grade)]) for query, document, grade in QRELS]
    (folder / qrels).write_text("\n".join(lines) + "\n")
    return folder


class Likes:
    """Reads the best again and likes those that hold a word."""

    def __init__(self, word):
        self.word = word

    def scores(self, _query, texts):
        return [float(self.word in text) for text in texts]


class Counter:
    """An embedder for what needs none: every text has the same vector. It counts fast."""

    fingerprint, dim, max_tokens = "counter", 2, 200

    def count(self, text):
        return len(text) // 5 + 1

    def embed(self, texts):
        return np.tile(np.float32([1, 0]), (len(texts), 1))


@pytest.mark.parametrize("layout", [{}, {"qrels": "qrels/test.tsv"}, {"header": False}, {"columns": 4}])
def test_the_collection_is_read(tmp_path, layout):
    collection = read_collection(write(tmp_path, **layout))
    assert list(collection.queries) == ["q1", "q2", "q3", "q5"]
    assert collection.qrels["q1"] == {"d1": 2, "d3": 1, "d2": 0}
    assert [one for one, _, _ in collection.documents()] == list(DOCUMENTS)
    assert list(read_collection(tmp_path, max_queries=2).queries) == ["q1", "q3"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("corpus.jsonl", None, "There is no .*corpus"),
        ("queries.jsonl", None, "There is no .*queries"),
        ("qrels.tsv", None, "There is no .*qrels"),
        ("queries.jsonl", '{"_id": "q1", "text": "x"}\nno json\n', "Line 2 of queries.jsonl .* not JSON"),
        ("queries.jsonl", '{"_id": 1}\n', 'Line 1 of queries.jsonl .* "_id"'),
        ("queries.jsonl", '\n{"_id": "q1"}\n\n{"_id": "q1"}\n', "Line 4 of queries.jsonl .* 'q1' repeats that of line 2"),
        ("queries.jsonl", b"\xff", "not UTF-8"),
        ("qrels.tsv", "q1\td1\t1\n\nq1 d1 1\n", "Line 3 of qrels.tsv"),
        ("qrels.tsv", "q1\td1\t1\nq1\td2\t1\nq1\td1\t2\n", "Line 3 of qrels.tsv .* another grade"),
        ("qrels.tsv", "q1\td1\t0\n", "no relevant document"),
    ],
)
def test_what_is_no_collection(tmp_path, file, text, message):
    write(tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=message) as caught:
        read_collection(tmp_path)
    assert caught.value.hint


def test_a_judgment_that_is_there_twice_is_one(tmp_path):
    write(tmp_path)
    (tmp_path / "qrels.tsv").write_text("q1\td1\t1\nq1\td1\t1\nq1\td2\t0\n")
    assert read_collection(tmp_path).qrels == {"q1": {"d1": 1, "d2": 0}}


def test_a_document_that_is_there_twice_is_refused_before_any_is_embedded(tmp_path, home):
    write(tmp_path)
    embedder = HashEmbedder()
    with (tmp_path / "corpus.jsonl").open("a") as corpus:
        corpus.write(json.dumps({"_id": "d2", "title": "ABS", "text": "Another text."}) + "\n")
    collection = read_collection(tmp_path)
    with pytest.raises(UsageError, match=r"Line 7 of corpus.jsonl cannot be used: its _id 'd2' repeats that of line 2"):
        open_index(collection, embedder, home)
    assert embedder.num_embedded == 0
    assert not (home / "eval").exists()


def test_half_of_a_surrogate_pair_is_no_error(tmp_path, home):
    with (write(tmp_path) / "corpus.jsonl").open("a") as corpus:
        corpus.write(r'{"_id": "d\ud83d", "title": "half \ud83d", "text": "a smile \ud83d"}' + "\n")
    with closing(open_index(read_collection(tmp_path), HashEmbedder(), home)) as store:
        assert dict(store.sources())["d?"] == 1


def test_the_index_is_made_once_and_goes_on_where_it_was(tmp_path, home):
    collection = read_collection(write(tmp_path / "c"))
    embedder = HashEmbedder()
    seen = []
    with_all = open_index(collection, embedder, home, lambda *numbers: seen.append(numbers))
    assert (with_all.num_documents, seen) == (5, [(6, 6)])  # d5 holds no text
    assert dict(with_all.sources())["d6"] > 1
    with with_all.writing():
        with_all.remove_documents(["d2"])
    with_all.close()
    num_embedded = embedder.num_embedded
    again = open_index(collection, embedder, home)
    assert (again.num_documents, embedder.num_embedded) == (5, num_embedded + 1)
    again.close()
    (tmp_path / "c" / "corpus.jsonl").write_text(json.dumps({"_id": "d1", "text": "another corpus"}) + "\n")
    other = open_index(read_collection(tmp_path / "c"), embedder, home)
    assert other.num_documents == 1
    other.close()


def test_each_way_of_searching_is_measured(tmp_path, home):
    collection = read_collection(write(tmp_path))
    embedder = HashEmbedder()
    store = open_index(collection, embedder, home)
    try:
        results = evaluate(collection, store, embedder, reranker=Likes("PLA"))
        (*_, other) = evaluate(collection, store, embedder, modes=["hybrid"], reranker=Likes("Nylon"))
    finally:
        store.close()
    assert [result.name for result in results] == ["hybrid", "semantic", "keyword", "hybrid + rerank"]
    for result in results:
        assert set(result.measures) == set(MEASURES)
        assert all(0 <= value <= 1 for value in result.measures.values())
        assert result.p50_ms > 0
    hybrid, _, keyword, reranked = results
    assert keyword.measures["RR"] == hybrid.measures["RR"] == 1.0  # every question has a relevant document first
    assert keyword.measures["R@100"] == 1.0
    assert reranked.measures["nDCG@10"] == 1.0 > other.measures["nDCG@10"]  # of q1, d1 is better than d3
    assert gain(results) == pytest.approx(1.0, abs=0.2)


def test_a_document_counts_by_its_best_chunk():
    hits = [Hit(Chunk(one, 1, one, "", 0, 0, source), 1.0) for one, source in enumerate(["b", "a", "b", "c", "a"])]
    assert ranked_documents(hits) == {"b": 1.0, "a": 1 / 2, "c": 1 / 3}


def test_measures_against_their_definitions():
    rng = random.Random(7)
    qrels = {f"q{q}": {f"d{d}": rng.choice([0, 1, 2]) for d in rng.sample(range(300), 30)} | {"d0": 1} for q in range(8)}
    run = {query: {f"d{d}": 1.0 / rank for rank, d in enumerate(rng.sample(range(300), 120), start=1)} for query in list(qrels)[:7]}
    found = measures(qrels, run)
    expected = dict.fromkeys(MEASURES, 0.0)
    for query, grades in qrels.items():
        ranking = sorted(run.get(query, {}), key=lambda one: -run[query][one])
        gains = [grades.get(one, 0) / math.log2(rank + 1) for rank, one in enumerate(ranking[:10], start=1)]
        ideal = [grade / math.log2(rank + 1) for rank, grade in enumerate(sorted(grades.values(), reverse=True)[:10], start=1)]
        relevant = {one for one, grade in grades.items() if grade > 0}
        first = next((rank for rank, one in enumerate(ranking, start=1) if one in relevant), math.inf)
        expected["nDCG@10"] += sum(gains) / sum(ideal) / len(qrels)
        expected["R@10"] += len(relevant & set(ranking[:10])) / len(relevant) / len(qrels)
        expected["R@100"] += len(relevant & set(ranking[:100])) / len(relevant) / len(qrels)
        expected["RR"] += 1 / first / len(qrels)
    assert found == pytest.approx(expected)


def test_the_gain_needs_what_it_compares():
    def result(name, value):
        return Result(name, {"nDCG@10": value}, 1.0)

    assert gain([result("hybrid", 0.6), result("keyword", 0.5), result("semantic", 0.4)]) == pytest.approx(1.2)
    assert gain([result("keyword", 0.5)]) is None
    assert gain([result("hybrid", 0.5), result("keyword", 0.0)]) is None


def test_by_words_cranfield_is_as_good_as_full_text_search_can_be(shared_data, home):
    """On whole documents, FTS5 with porter stemming and OR of the words reached 0.517."""
    collection = read_collection(shared_data / "cranfield", max_queries=75)
    embedder = Counter()
    store = open_index(collection, embedder, home)
    try:
        (result,) = evaluate(collection, store, embedder, modes=["keyword"])
    finally:
        store.close()
    assert len(collection.queries) == 75
    assert result.measures["nDCG@10"] >= 0.51
    assert result.measures["R@100"] >= 0.7
