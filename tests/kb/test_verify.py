import os
import sqlite3
from contextlib import closing

import pytest

from localrag.kb import KnowledgeBase, import_kb
from localrag.kb.texts import Text
from tests.kb.support import contents, problems


def _change(kb, *statements):
    with closing(sqlite3.connect(kb.path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def test_a_whole_one_is_sound(kb, embedder):
    kb.retrieve("zebra", embedder)
    found = kb.verify()
    assert (found.is_sound, found.num_documents, found.num_chunks) == (True, 4, 12)
    assert (found.problems, found.repaired, found.changed, found.missing) == ((), (), (), ())
    assert found.to_dict()["sound"] is True


def test_documents_that_changed_are_reported_and_no_fault(kb, notes):
    (notes / "note-000.md").write_text("changed")
    (notes / "note-001.md").unlink()
    os.utime(notes / "note-002.md")
    found = kb.verify()
    assert (found.is_sound, found.changed, found.missing) == (True, ("notes/note-000.md",), ("notes/note-001.md",))


def test_full_text_that_says_something_else_is_made_again(kb):
    _change(kb, "INSERT INTO chunks_fts (chunks_fts) VALUES ('delete-all')")
    assert not kb.retrieve("zebra1x1", None, mode="keyword")
    assert kb.verify().repaired == ("chunks_fts was rebuilt",)
    assert kb.retrieve("zebra1x1", None, mode="keyword")
    assert kb.verify().repaired == ()


def test_a_file_of_vectors_that_is_damaged_is_removed(kb, embedder):
    kb.retrieve("zebra", embedder)
    (file,) = kb.path.parent.glob("vec-*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (repaired,) = kb.verify().repaired
    assert file.name in repaired
    assert kb.retrieve("zebra1x1", embedder)


def test_chunks_that_are_not_what_was_written_are_made_again(kb, kb_dir, notes, embedder):
    before = contents(kb)
    _change(
        kb,
        "DELETE FROM vectors WHERE chunk_id = 1",
        "UPDATE vectors SET vector = zeroblob(length(vector)) WHERE chunk_id = 5",
        "UPDATE chunks SET text = 'other' WHERE id = 9",
    )
    found = kb.verify()
    assert found.is_sound
    assert found.num_chunks == 9
    assert {line.split()[0] for line in found.repaired if "read again" in line} == {f"notes/note-00{at}.md" for at in range(3)}
    result = kb.ingest([notes], embedder)
    assert (result.updated, result.unchanged, result.num_embedded) == (3, 1, 3)
    assert contents(kb) == before
    assert problems(kb.path) == []


def test_a_page_that_is_damaged_is_a_problem(kb, kb_dir):
    kb.close()
    with closing(sqlite3.connect(kb.path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'vectors'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    data = bytearray(kb.path.read_bytes())
    data[(root - 1) * size : root * size] = b"\xff" * size
    kb.path.write_bytes(data)
    with KnowledgeBase.open(kb_dir, "notes") as damaged:
        found = damaged.verify()
    assert not found.is_sound
    assert found.problems


@pytest.mark.parametrize(
    "change",
    ["start = -1", '"end" = 99999999999', "place = 'page' || char(27)", "ordinal = -7", 'start = start + 9000, "end" = "end" + 9000'],
)
def test_a_chunk_that_cannot_be_is_taken_out_and_read_again(kb, notes, embedder, change):
    before = contents(kb)
    _change(kb, f"UPDATE chunks SET {change} WHERE id = 5")
    found = kb.verify()
    assert found.num_chunks == 11
    assert any("position" in line or "control characters" in line for line in found.repaired)
    assert kb.ingest([notes], embedder).updated == 1
    assert contents(kb) == before


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE documents SET source = 'a' || char(27) || '[2J' WHERE id = 1",
        "UPDATE documents SET title = 'a' || char(27) || '[2J' WHERE id = 1",
        "UPDATE documents SET path = path || char(27) WHERE id = 1",
        "UPDATE state SET embedder = embedder || char(27)",
        "INSERT INTO fields VALUES (1, 'k', char(7), 'file')",
    ],
)
def test_a_name_that_steers_a_terminal_is_a_problem(kb, statement):
    _change(kb, statement)
    (problem,) = kb.verify().problems
    assert "control characters" in problem
    assert problem.isprintable()


def test_a_language_that_is_none_is_a_problem_and_no_error_of_a_search(kb):
    _change(kb, "DROP TRIGGER chunks_changed_language", "UPDATE chunks SET language = 'x' || id")
    assert kb.retrieve("zebra1x1", None, mode="keyword")
    assert kb.verify().problems == ("a chunk is in a language that localrag does not know",)


@pytest.mark.parametrize("name", ["a\x1b[2Jb.md", "a\nb.md", "a\x9bb.md", "a\u202eb.md", "a\x7f.md"])
def test_a_file_with_control_characters_in_its_name_is_sound_by_another(notes, kb_dir, embedder, name):
    (notes / name).write_text("# Odd\n\nAn odd name.\n")
    with KnowledgeBase.open(kb_dir, "odd", create=True) as odd:
        odd.ingest([notes], embedder)
        (source,) = [source for source, _ in odd.sources() if source.startswith("notes/a")]
        assert source.isprintable()
        assert "\\" in source
        assert odd.paths()[source] == notes / name
        assert odd.verify().is_sound
        odd.export(notes.parent / "odd.kb")
        (notes / name).unlink()
        assert odd.verify().is_sound
    assert import_kb(kb_dir, notes.parent / "odd.kb", "again") == "again"


def test_control_characters_in_front_matter_and_headings_of_markdown_are_not_indexed(notes, kb_dir, embedder):
    (notes / "odd.md").write_text(
        "---\ntitle: An \x1b[2J odd one\nauthor: A\x07nn\n---\n# An odd\x1b[2J heading\n\nwords\n\nUnder\x1blined\n====\n\nwords\n"
    )
    with KnowledgeBase.open(kb_dir, "odd", create=True) as odd:
        odd.ingest([notes], embedder)
        found = odd.verify()
        assert (found.is_sound, found.repaired) == (True, ())


def test_a_text_whose_metadata_name_it_with_control_characters_is_sound(kb, embedder):
    kb.texts.put([Text.of("words", {"file_name": "a\x9b2Jb\x1bc"}, text_id="x")], embedder)
    assert kb.verify().is_sound
