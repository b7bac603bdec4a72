"""A document whose folder is not here was not lost: it is on another machine, or on a disk that was taken out."""

import pytest

from tests.kb.servers import open_kb
from tests.kb.support import write_notes


@pytest.fixture
def kb(any_home, tmp_path, embedder):
    write_notes(tmp_path / "disk" / "notes" / "sub", 2)
    write_notes(tmp_path / "letters", 2)
    with open_kb(any_home, "notes", create=True) as kb:
        kb.ingest([tmp_path / "disk" / "notes", tmp_path / "letters", tmp_path / "letters" / "note-000.md"], embedder)
        yield kb


def test_documents_of_a_folder_that_is_not_here_are_not_compared(kb, tmp_path):
    (tmp_path / "disk").rename(tmp_path / "taken out")
    (tmp_path / "letters" / "note-001.md").unlink()
    found = kb.verify()
    assert (found.is_sound, found.changed, found.missing) == (True, (), ("letters/note-001.md",))
    assert found.not_compared == (f"2 documents were indexed from {tmp_path / 'disk' / 'notes'}, which does not exist now",)
    assert found.to_dict()["not_compared"] == found.not_compared


def test_a_folder_inside_that_was_removed_is_missed(kb, tmp_path):
    (tmp_path / "disk" / "notes" / "sub").rename(tmp_path / "sub")
    found = kb.verify()
    assert found.missing == ("notes/sub/note-000.md", "notes/sub/note-001.md")
    assert found.not_compared == ()


def test_a_file_that_was_given_alone_is_missed_where_its_folder_is(any_home, tmp_path, embedder):
    write_notes(tmp_path / "letters", 1)
    file = tmp_path / "letters" / "note-000.md"
    with open_kb(any_home, "alone", create=True) as kb:
        kb.ingest([file], embedder)
        file.unlink()
        assert kb.verify().missing == ("note-000.md",)
        file.parent.rmdir()
        found = kb.verify()
    assert (found.missing, found.not_compared) == ((), (f"1 document was indexed from {file.parent}, which does not exist now",))
