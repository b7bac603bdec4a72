import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import Passage
from localrag.kb.protocols import DocumentRow, Feedback
from localrag.kb.query import Term
from localrag.kb.store import Store
from tests.kb.servers import again, made_store, store_faults


@pytest.fixture(params=["folder", "server"])
def store(request, tmp_path):
    with made_store(request.param, tmp_path, request) as store:
        yield store


@pytest.fixture
def file_store(tmp_path):
    with closing(Store(tmp_path / "kb.sqlite", create=True)) as store:
        yield store


def _put(store, name="a", text="alpha beta", sha256="1"):
    with store.writing():
        passage = Passage(0, len(text), text, "Top")
        store.put_document(DocumentRow(f"/{name}", name, sha256, 1), [passage], {passage.sha256: b"\0" * 8})


def test_importing_it_brings_no_heavy_library():
    heavy = "numpy faiss torch sentence_transformers tokenizers semantic_text_splitter pathspec"
    code = f"import sys, localrag.kb.store, localrag.kb; print([name for name in {heavy.split()!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_was_put_is_found(store):
    _put(store)
    (chunk_id, score), *more = store.keyword_ids([Term("alphas")], 5)  # stemmed
    assert not more
    assert score > 0
    chunk = store.chunks([chunk_id], kb="k")[0]
    assert (chunk.text, chunk.heading, chunk.source, chunk.kb, chunk.start, chunk.end) == ("alpha beta", "Top", "a", "k", 0, 10)
    assert store.keyword_ids([Term("top")], 5)
    assert list(store.vectors()) == [(chunk_id, b"\0" * 8)]
    assert store.sources() == [("a", 1)]
    assert {path: known.sha256 for path, known in store.documents().items()} == {"/a": "1"}


def test_chunks_come_in_the_order_asked_for_and_unknown_ids_are_left_out(store):
    for at in range(3):
        _put(store, f"d{at}", f"text {at}")
    assert [chunk.text for chunk in store.chunks([3, 99, 1])] == ["text 2", "text 0"]
    assert [chunk.id for chunk in store.chunks([2] * 1200)] == [2] * 1200


def test_each_writing_transaction_is_one_generation(store):
    assert store.generation == 0
    _put(store)
    _put(store, "b")
    assert store.generation == 2
    with store.reading():
        assert store.generation == 2
    assert store.generation == 2


def test_an_error_inside_a_transaction_undoes_all_of_it(store):
    _put(store)

    def remove_and_fail():
        with store.writing():
            store.remove_documents(["/a"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        remove_and_fail()
    assert (store.num_documents, store.generation) == (1, 1)
    _put(store, "b")


def test_ids_are_never_used_again(store):
    _put(store, "a")
    _put(store, "a", "gamma", sha256="2")
    assert [one for one, _ in store.vectors()] == [2]
    with store.writing():
        store.remove_documents(["/a"])
    assert (store.num_documents, store.num_chunks, list(store.vectors()), store.keyword_ids([Term("gamma")], 5)) == (0, 0, [], [])
    _put(store, "a")
    assert [one for one, _ in store.vectors()] == [3]
    assert store_faults(store) == []


def test_the_same_chunks_again_keep_their_ids_and_what_was_learned_of_them(store):
    _put(store, "a", "alpha", sha256="1")
    with store.writing(moves_on=False):
        store.add_feedback({1: Feedback(retrieved=2, cited=1), 99: Feedback(1)})
        store.add_feedback({1: Feedback(useful=1)})
    _put(store, "a", "alpha", sha256="2")
    assert store.feedback() == store.feedback([1, 7]) == {1: Feedback(2, 0, 1, 1, 0)}
    assert store.existing([3, 1, 2]) == [1]
    with store.writing(moves_on=False):
        store.reset_feedback()
    assert store.feedback() == {}


def test_characters_are_only_of_chinese_japanese_and_korean(store):
    for at, text in enumerate(("plain words", "中文字符串", "ひらがな", "한국어 문장", "é")):
        _put(store, f"d{at}", text, sha256=str(at))
    assert [one for one, _ in store.character_ids([Term("文 字 符")], 5)] == [2]
    assert store.character_ids([Term("국 어")], 5)
    assert store.character_ids([Term("plain")], 5) == []
    with store.writing():
        store.remove_documents(["/d1"])
    assert store.character_ids([Term("文 字 符")], 5) == []
    assert store_faults(store) == []


def test_each_generation_has_a_stamp_of_its_own(store):
    _put(store)
    _put(store, "b")
    stamps = [store.stamp(generation) for generation in range(3)]
    assert None not in stamps
    assert len(set(stamps)) == 3
    assert store.stamp(3) is None


def test_another_embedder_is_refused_with_a_way_out(store):
    with store.writing():
        store.claim_embedder("x" * 64, 3)
    store.check_embedder("x" * 64, 3)
    for fingerprint, dim in (("y" * 64, 3), ("x" * 64, 4)):
        with pytest.raises(KnowledgeBaseError, match="another embedder") as caught, store.writing():
            store.claim_embedder(fingerprint, dim)
        assert "localrag kb reembed" in caught.value.hint
    assert store.embedder == ("x" * 64, 3)


def test_a_reader_sees_one_state_while_another_writes(store):
    _put(store, "a")
    other = again(store)
    with store.reading():
        assert store.num_chunks == 1
        _put(other, "b")
        assert (store.num_chunks, store.generation) == (1, 1)
    assert (store.num_chunks, store.generation) == (2, 2)
    other.close()


def test_it_commits_to_the_disk_before_it_says_so(file_store):
    with closing(sqlite3.connect(file_store.path)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert file_store._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_file_that_is_no_database_is_refused_unchanged(tmp_path, content):
    path = tmp_path / "kb.sqlite"
    path.write_bytes(content)
    with pytest.raises(KnowledgeBaseError, match="cannot be used") as caught:
        Store(path)
    assert "index the documents again" in caught.value.hint
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KnowledgeBaseError, match="Cannot create the folder") as caught:
        Store(tmp_path / "file" / "kb" / "kb.sqlite", create=True)
    assert "LOCALRAG_HOME" in caught.value.hint
