import pytest

from localrag.kb import KnowledgeBase
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.support import write_notes


@pytest.fixture
def embedder():
    return HashEmbedder()


@pytest.fixture
def notes(tmp_path):
    """A folder of four notes."""
    folder = tmp_path / "notes"
    write_notes(folder, 4)
    return folder


@pytest.fixture
def kb_dir(tmp_path):
    return tmp_path / "home" / "kb"


@pytest.fixture
def kb(kb_dir, notes, embedder):
    """The four notes, indexed."""
    with KnowledgeBase.open(kb_dir, "notes", create=True) as base:
        base.ingest([notes], embedder)
        yield base
