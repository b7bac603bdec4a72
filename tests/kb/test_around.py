"""What stands before and behind a passage, wherever a knowledge base is kept."""

import pytest

from tests.kb.servers import chunk_ids, open_kb
from tests.kb.support import write_notes


@pytest.fixture
def kb(any_home, tmp_path, embedder):
    write_notes(tmp_path / "notes", 2, num_parts=5)
    with open_kb(any_home, "notes", create=True) as kb:
        kb.ingest([tmp_path / "notes"], embedder)
        yield kb


def around(kb, one, **options):
    return [chunk.id for chunk in kb.around(one, **options)]


def test_it_comes_with_its_neighbours_in_the_order_of_its_document(kb, tmp_path, embedder):
    first = tmp_path / "notes" / "note-000.md"
    parts = first.read_text().split("\n\n## ")
    first.write_text("\n\n## ".join([parts[0], "Zero\n\nThis one is new, and has the highest id.", *parts[1:]]))
    kb.ingest([tmp_path / "notes"], embedder)
    for ids in chunk_ids(kb).values():
        for at, one in enumerate(ids):
            assert around(kb, one) == ids[max(0, at - 1) : at + 2]
            assert around(kb, one, num_before=0, num_behind=2) == ids[at : at + 3]
            assert around(kb, one, num_before=99, num_behind=0) == ids[: at + 1]
    assert any(ids != sorted(ids) for ids in chunk_ids(kb).values())


def test_they_are_whole_chunks_of_one_document(kb):
    one = chunk_ids(kb)[min(chunk_ids(kb))][2]
    chunks = kb.around(one)
    assert len(chunks) == 3
    assert {(chunk.kb, chunk.source, chunk.document_id) for chunk in chunks} == {(kb.name, "notes/note-000.md", chunks[0].document_id)}
    assert [chunk.ordinal for chunk in chunks] == [1, 2, 3]
    assert all("zebra0x" in chunk.text for chunk in chunks)


def test_a_gap_is_not_bridged(kb):
    ids = chunk_ids(kb)[min(chunk_ids(kb))]
    with kb._store.writing():
        kb._store.drop_chunks([ids[1]])
    assert around(kb, ids[0]) == ids[:1]
    assert around(kb, ids[2]) == ids[2:4]


@pytest.mark.parametrize("one", [0, -1, 10_000, 2**63 - 1, 2**63, 10**30])
def test_an_id_that_is_not_there(kb, one):
    assert kb.around(one) == []


def test_one_that_is_not_made_yet(any_home):
    with open_kb(any_home, "new", create=True) as kb:
        assert kb.around(1) == []
