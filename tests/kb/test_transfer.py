import hashlib
import json
import sqlite3
import zipfile
from contextlib import closing

import pytest

from localrag.errors import KnowledgeBaseError
from localrag.kb import KnowledgeBase, import_kb, list_kbs
from localrag.kb.database import taken
from localrag.kb.transfer import content_sha256
from tests.kb.support import chunk_ids, contents, problems


@pytest.fixture
def exported(kb, tmp_path):
    kb.export(tmp_path / "notes.kb")
    return tmp_path / "notes.kb"


def _repack(file, change_database=None, **changes):
    """The same file, with another database or manifest."""
    with zipfile.ZipFile(file) as packed:
        manifest, data = json.loads(packed.read("manifest.json")), packed.read("kb.sqlite")
    if change_database:
        raw = file.with_name("raw.sqlite")
        raw.write_bytes(data)
        with closing(sqlite3.connect(raw, isolation_level=None)) as db:
            db.executescript(change_database)
        data = raw.read_bytes()
        manifest["members"]["kb.sqlite"] = {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("manifest.json", json.dumps(manifest | changes))
        packed.writestr("kb.sqlite", data)


def test_there_and_back(kb, kb_dir, exported, embedder, tmp_path):
    assert import_kb(kb_dir, exported, "again") == "again"
    assert import_kb(tmp_path / "elsewhere", exported) == "notes"
    with KnowledgeBase.open(kb_dir, "again") as other:
        assert contents(other) == contents(kb)
        assert chunk_ids(other) == chunk_ids(kb)
        assert problems(other.path) == []
        assert other.retrieve("zebra1x1", embedder)[0].chunk.source == "notes/note-001.md"
        assert other.verify().repaired == ()
    assert list_kbs(kb_dir) == ["again", "notes"]
    assert not list(tmp_path.glob(".*"))


def test_what_was_imported_is_written_as_what_was_made_here(kb_dir, exported):
    import_kb(kb_dir, exported, "again")
    with closing(sqlite3.connect(kb_dir / "again" / "kb.sqlite")) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_copy_says_the_same_until_its_documents_change(kb, kb_dir, exported, notes, embedder):
    import_kb(kb_dir, exported, "again")
    again = kb_dir / "again" / "kb.sqlite"
    before = content_sha256(kb.path)
    assert content_sha256(again) == before
    with KnowledgeBase.open(kb_dir, "again") as other:
        other.mark([1], useful=True)
        assert content_sha256(again) == before
        (notes / "note-001.md").write_text("# Another\n\nnote altogether\n")
        other.ingest([notes], embedder)
    assert content_sha256(again) != before == content_sha256(kb.path)


def test_one_that_is_there_stays(kb, kb_dir, exported):
    before = contents(kb)
    with pytest.raises(KnowledgeBaseError, match="already") as caught:
        import_kb(kb_dir, exported)
    assert "--name" in caught.value.hint
    assert contents(kb) == before
    assert [entry.name for entry in kb_dir.iterdir()] == ["notes"]


def test_a_folder_that_holds_a_lock_alone_is_none(kb_dir, exported):
    with taken(kb_dir / "again", wait_s=0):
        pass
    assert import_kb(kb_dir, exported, "again") == "again"
    assert list_kbs(kb_dir) == ["again", "notes"]


def test_every_damaged_byte_is_found(kb_dir, exported, tmp_path):
    data = exported.read_bytes()
    for at in range(7, len(data), len(data) // 40):
        exported.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        try:
            import_kb(tmp_path / "new", exported, f"n{at}")
        except KnowledgeBaseError:
            continue
        with KnowledgeBase.open(tmp_path / "new", f"n{at}") as got, KnowledgeBase.open(kb_dir, "notes") as kb:
            assert contents(got) == contents(kb)  # a byte that says nothing, such as a time
    exported.write_bytes(data[: len(data) // 2])
    with pytest.raises(KnowledgeBaseError, match="cannot be imported"):
        import_kb(tmp_path / "new", exported, "half")
    assert "half" not in list_kbs(tmp_path / "new")


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("CREATE TRIGGER evil AFTER INSERT ON state BEGIN SELECT 1; END", "do not match localrag"),
        ("CREATE TABLE more (x)", "do not match localrag"),
        ("PRAGMA user_version = 99", "schema 99"),
        ("PRAGMA user_version = 0", "schema 0"),
        ("UPDATE vectors SET vector = x'00' WHERE chunk_id = 2", "vector"),
        ("UPDATE chunks SET text = 'lies' WHERE id = 3", "differs from the embedded text"),
        ("DELETE FROM documents WHERE id = 1", "missing row"),  # foreign keys are off here
        ("UPDATE chunks SET text = CAST(text AS BLOB) WHERE id = 3", "'chunks' does not have its column's type"),
        ("UPDATE documents SET source = x'ff' WHERE id = 1", "'documents' does not have its column's type"),
        ("UPDATE state SET min_similarity = 'high'", "'state' does not have its column's type"),
        ("UPDATE state SET dim = NULL", "of the embedder"),
        ("UPDATE state SET min_similarity = 1", "of the embedder"),
        ("DELETE FROM state", "of the embedder"),
        ("UPDATE chunks SET start = -1 WHERE id = 1", "a position that cannot be"),
        ('UPDATE chunks SET "end" = 99999999999 WHERE id = 1', "a position that cannot be"),
        ('UPDATE chunks SET start = -1, "end" = 99999999999 WHERE id = 1', "a position that cannot be"),
        ('UPDATE chunks SET start = start + 9e15, "end" = "end" + 9e15 WHERE id = 1', "a position that cannot be"),
        ("UPDATE chunks SET ordinal = -3 WHERE id = 1", "a position that cannot be"),
        ("UPDATE chunks SET place = 'page ' || char(27) || '[2J' WHERE id = 1", "control characters"),
        ("UPDATE chunks SET place = printf('%.*c', 100, 'x') WHERE id = 1", "control characters"),
        ("UPDATE documents SET source = 'a' || char(27) || ']0;x' WHERE id = 1", "control characters in its name"),
        ("UPDATE documents SET source = 'a' || char(155) || 'x' WHERE id = 1", "control characters in its name"),
        ("UPDATE documents SET source = 'a' || char(8238) || 'x' WHERE id = 1", "control characters in its name"),
        ("UPDATE documents SET source = 'a' || char(10) || 'x' WHERE id = 1", "control characters in its name"),
        ("UPDATE documents SET title = 'a' || char(27) || '[2J' WHERE id = 1", "the title of the document"),
        ("UPDATE documents SET path = '/a' || char(27) || '[2J/' || source WHERE id = 1", "the path of the document"),
        ("UPDATE documents SET path = path || char(10) WHERE id = 1", "the path of the document"),
        ("UPDATE state SET embedder = embedder || char(27) || '[2J'", "the name of its embedder"),
        ('UPDATE chunks SET start = start + 50000, "end" = "end" + 50000 WHERE document_id = 1', "a position that cannot be"),
        ('UPDATE chunks SET start = start - 60, "end" = "end" - 60 WHERE ordinal = 2', "a position that cannot be"),
        ("INSERT INTO fields VALUES (1, 'author', char(27) || '[31m', 'file')", "tag or field"),
        ("UPDATE documents SET num_bytes = -1 WHERE id = 1", "a number in its table 'documents'"),
        ("UPDATE state SET generation = 9223372036854775807", "a number in its table 'state'"),
        ("UPDATE state SET dim = 1 << 60", "a number in its table 'state'"),
        ("UPDATE sqlite_sequence SET seq = 9223372036854775807", "a number in its table 'sqlite_sequence'"),
        ("INSERT INTO feedback VALUES (1, -1, 0, 0, 0, 0)", "a number in its table 'feedback'"),
    ],
)
def test_a_foreign_database_is_refused(kb_dir, exported, statement, reason):
    _repack(exported, statement)
    with pytest.raises(KnowledgeBaseError, match=reason):
        import_kb(kb_dir, exported, "foreign")
    assert [entry.name for entry in kb_dir.iterdir()] == ["notes"]


@pytest.mark.parametrize("changes", [{"format": "x"}, {"version": 2}, {"members": []}, {"members": {"kb.sqlite": {}}}])
def test_a_foreign_manifest_is_refused(kb_dir, exported, changes):
    _repack(exported, **changes)
    with pytest.raises(KnowledgeBaseError, match="cannot be imported"):
        import_kb(kb_dir, exported, "foreign")


def test_a_bomb_is_refused_before_it_is_unpacked(kb_dir, tmp_path):
    file = tmp_path / "bomb.kb"
    member = {"sha256": "0" * 64, "num_bytes": 50_000_000}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("manifest.json", json.dumps({"format": "localrag knowledge base", "version": 1, "members": {"kb.sqlite": member}}))
        with packed.open("kb.sqlite", "w") as out:
            for _ in range(50):
                out.write(b"\0" * 1_000_000)
    with pytest.raises(KnowledgeBaseError, match="zip bomb"):
        import_kb(kb_dir, file, "bomb")
    assert list(kb_dir.iterdir()) == []


@pytest.mark.parametrize("names", [["kb.sqlite"], ["manifest.json", "kb.sqlite", "../evil"], ["manifest.json", "kb.sqlite", "kb.sqlite"]])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_other_members_are_refused(kb_dir, tmp_path, names):
    file = tmp_path / "x.kb"
    with zipfile.ZipFile(file, "w") as packed:
        for name in names:
            packed.writestr(name, b"{}")
    with pytest.raises(KnowledgeBaseError, match="not an export of localrag"):
        import_kb(kb_dir, file, "x")


def test_another_way_of_packing_is_refused(kb_dir, exported):
    with zipfile.ZipFile(exported) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    with zipfile.ZipFile(exported, "w", zipfile.ZIP_LZMA) as packed:
        for name, data in members.items():
            packed.writestr(name, data)
    with pytest.raises(KnowledgeBaseError, match="packed by another program"):
        import_kb(kb_dir, exported, "again")


def test_a_file_that_is_not_there_is_the_same_error_with_and_without_a_name(kb_dir, tmp_path):
    for name in ("again", None):
        with pytest.raises(KnowledgeBaseError, match="No such file"):
            import_kb(kb_dir, tmp_path / "missing.kb", name)


def test_a_name_that_cannot_be_is_refused(kb_dir, exported):
    _repack(exported, name="../../evil")
    with pytest.raises(KnowledgeBaseError, match="is not a valid name"):
        import_kb(kb_dir, exported)
