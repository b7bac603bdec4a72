import subprocess
import sys
from pathlib import Path

import pytest

from localrag.errors import KnowledgeBaseBusyError, KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb import KnowledgeBase, list_kbs
from localrag.kb.texts import Text
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.servers import ServerHome, chunk_ids, contents, faults, open_kb
from tests.kb.support import write_notes


def test_a_knowledge_base_by_name(kb, kb_dir, embedder):
    assert (kb_dir / "notes" / "kb.sqlite").is_file()
    assert list_kbs(kb_dir) == ["notes"]
    with KnowledgeBase.open(kb_dir, "notes") as again:
        assert (again.num_documents, again.num_chunks) == (4, 12)
        assert again.embedder == (embedder.fingerprint, embedder.dim)
        assert again.sources() == [(f"notes/note-00{at}.md", 3) for at in range(4)]


@pytest.mark.parametrize("name", ["", "Notes", "-a", "_a", "a b", "../a", "a/b", "a.b", "é", "a" * 65, "a\n", ".removed-x"])
def test_names_that_cannot_be(kb_dir, name):
    with pytest.raises(KnowledgeBaseError, match="is not a valid name") as caught:
        KnowledgeBase.open(kb_dir, name, create=True)
    assert not isinstance(caught.value, KnowledgeBaseNotFoundError)
    assert "lower-case" in caught.value.hint


def test_an_unknown_name_shows_the_nearest_and_the_way_out(kb, kb_dir):
    with pytest.raises(KnowledgeBaseNotFoundError, match="Did you mean notes") as caught:
        KnowledgeBase.open(kb_dir, "note")
    assert caught.value.numbers == {"kb": "note", "nearest": ["notes"]}
    assert caught.value.hint == "Create it with: localrag index PATH --kb note"
    with pytest.raises(KnowledgeBaseNotFoundError, match="Existing knowledge bases: notes"):
        KnowledgeBase.open(kb_dir, "zzz")


def test_a_home_without_any(tmp_path):
    assert list_kbs(tmp_path / "none") == []
    with pytest.raises(KnowledgeBaseNotFoundError):
        KnowledgeBase.open(tmp_path / "none", "x")
    assert not (tmp_path / "none").exists()


def test_one_that_is_not_made_yet_is_empty(kb_dir, embedder):
    with KnowledgeBase.open(kb_dir, "new", create=True) as kb:
        assert (kb.num_documents, kb.num_chunks, kb.sources(), kb.embedder, kb.retrieve("x", embedder)) == (0, 0, [], None, [])
    assert not kb_dir.exists()


def test_remove(kb, kb_dir):
    kb.remove()
    assert list_kbs(kb_dir) == []
    assert list(kb_dir.iterdir()) == []
    assert kb.num_documents == 0
    with pytest.raises(KnowledgeBaseNotFoundError):
        KnowledgeBase.open(kb_dir, "notes")


def test_what_is_no_knowledge_base_is_not_listed(kb, kb_dir):
    (kb_dir / "empty").mkdir()
    (kb_dir / "file").write_text("")
    (kb_dir / ".removed-1").mkdir()
    assert list_kbs(kb_dir) == ["notes"]


def test_a_damaged_file_is_one_clear_error(kb, kb_dir):
    kb.close()
    kb.path.write_bytes(b"no database at all" * 100)
    with pytest.raises(KnowledgeBaseError, match="cannot be used"):
        KnowledgeBase.open(kb_dir, "notes")


def test_keyword_search_needs_neither_faiss_nor_torch(kb, kb_dir):
    code = (
        "import sys; from pathlib import Path; from localrag.kb import KnowledgeBase\n"
        "with KnowledgeBase.open(Path(sys.argv[1]), 'notes') as kb: assert kb.retrieve('zebra1x1', None, mode='keyword')\n"
        "print([name for name in ('numpy', 'faiss', 'torch', 'sentence_transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(kb_dir)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# What holds of one in a folder and of one on a server.


def test_documents_are_removed_by_name_pattern_or_path_and_texts_by_their_id(any_home, notes, embedder):
    with open_kb(any_home, "notes", create=True) as kb:
        kb.ingest([notes], embedder)
        kb.texts.put([Text("idea", "A text on zebras.", {"source": "notes/idea"})], embedder)
        assert kb.matching(["notes/NOTE-00?.md"]) == {str(notes / f"note-00{at}.md"): f"notes/note-00{at}.md" for at in range(4)}
        assert kb.matching([str(notes / "note-001.md"), "notes/idea"]).keys() == {str(notes / "note-001.md"), "text:idea"}
        with pytest.raises(KnowledgeBaseError, match=r"no document 'note-001\.md'"):
            kb.matching(["notes/note-000.md", "note-001.md"])
        generation = kb._store.generation
        gone = kb.matching([str(notes / "note-001.md"), "notes/idea"])
        assert kb.remove_documents([*gone, "/nowhere", "text:nothing"]) == list(gone)
        assert (kb.num_documents, kb.num_chunks, kb._store.generation, faults(kb)) == (3, 9, generation + 1, [])
        assert kb.remove_documents(gone) == []
        assert kb.remove_documents(kb.matching([str(notes)])) == [str(notes / f"note-00{at}.md") for at in (0, 2, 3)]
        assert (kb.num_documents, kb.retrieve("zebra1x1", embedder)) == (0, [])
        assert kb.ingest([notes], embedder).added == 4


def test_rename_keeps_all_and_another_process_sees_it_under_one_name_or_the_other(any_home, notes, embedder):
    new = "t-new" if isinstance(any_home, ServerHome) else "new"
    with open_kb(any_home, "notes", create=True) as kb, open_kb(any_home, "other", create=True) as other:
        kb.ingest([notes], embedder)
        other.ingest([notes / "note-000.md"], embedder)
        ids, whole = chunk_ids(kb), contents(kb)
        for name in (other.name, "", "Bad", "a/b", "a" * 65):
            with pytest.raises(KnowledgeBaseError, match="already" if name == other.name else "not a valid name"):
                kb.rename(name)
        with open_kb(any_home, "other") as indexer, indexer._location.taken(wait_s=0), pytest.raises(KnowledgeBaseBusyError):
            other.rename("third")
        kb.rename(new)
        assert (kb.name, chunk_ids(kb), contents(kb), kb.retrieve("zebra1x1", embedder)[0].chunk.kb) == (new, ids, whole, new)
        assert kb.ingest([notes], embedder).unchanged == 4
        assert kb.verify().is_sound
        assert other.num_documents == 1
        with pytest.raises(KnowledgeBaseNotFoundError):
            open_kb(any_home, "notes")
        address = f"{any_home.server.url()}#{new}" if isinstance(any_home, ServerHome) else new
        with KnowledgeBase.open(any_home if not isinstance(any_home, ServerHome) else Path(), address) as again:
            assert contents(again) == whole
            again.remove()


def test_documents_are_kept_from_the_first_one_on(any_home, tmp_path, embedder):
    """Indexing that is interrupted while it embeds loses little at first, and never more than 128 chunks and a document."""
    write_notes(tmp_path / "many", 100)

    class Interrupted(HashEmbedder):
        def __init__(self, num_calls):
            super().__init__()
            self.left = num_calls

        def embed(self, texts):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().embed(texts)

    kept = []
    for num_calls in (3, 4, 5):  # the first two are the pairs of the calibration
        with open_kb(any_home, f"kb{num_calls}", create=True) as kb:
            with pytest.raises(KeyboardInterrupt):
                kb.ingest([tmp_path / "many"], Interrupted(num_calls))
            kept.append(kb.num_documents)
            if num_calls == 5:
                result = kb.ingest([tmp_path / "many"], embedder)
                assert (result.unchanged, result.added) == (kept[-1], 100 - kept[-1])
    assert kept == [1, 9, 52]  # of three chunks each
