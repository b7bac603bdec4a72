import pytest

from tests.kb import servers
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.servers import home_of, open_kb
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


@pytest.fixture(scope="session")
def server():
    """A PostgreSQL server with pgvector."""
    server = servers.start()
    yield server
    server.stop()


@pytest.fixture
def kb_dir(tmp_path):
    return tmp_path / "home" / "kb"


@pytest.fixture(params=["folder", "server"])
def any_home(request, tmp_path):
    """Where knowledge bases are, for `open_kb`: what holds of one holds of both."""
    return home_of(request, tmp_path)


@pytest.fixture
def kb(kb_dir, notes, embedder):
    """The four notes, indexed."""
    with open_kb(kb_dir, "notes", create=True) as base:
        base.ingest([notes], embedder)
        yield base
