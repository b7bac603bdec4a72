import subprocess
import sys

import pytest

from localrag.errors import KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb import KnowledgeBase, list_kbs


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
