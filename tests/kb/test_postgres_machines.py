"""One knowledge base on a server, indexed from two machines. Which one this is stands in the address."""

import os
import shutil
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from localrag.errors import KnowledgeBaseError
from localrag.kb import KnowledgeBase
from localrag.kb.names import parse_address
from tests.kb.servers import ServerHome, chunk_ids, faults
from tests.kb.support import write_notes


@pytest.fixture
def home(server):
    return ServerHome(server)


@contextmanager
def on(home, machine):
    """The knowledge base as one machine opens it."""
    with KnowledgeBase.open(Path(), home.address("shared").replace("#", f"?machine={machine}#"), create=True) as kb:
        yield kb


@pytest.fixture
def folder(tmp_path):
    """Four notes that the machine "atlas" has; a test makes of them what "bora" has in the same place."""
    write_notes(tmp_path / "notes", 4)
    return tmp_path / "notes"


def documents(kb):
    return sorted(kb._store._db.rows("SELECT machine, source FROM documents"))


def names(*numbers):
    return [f"notes/note-{at:03}.md" for at in numbers]


def test_what_a_machine_indexes_from_another_folder_takes_nothing_away(home, folder, tmp_path, embedder):
    write_notes(tmp_path / "other", 2, seed="other")
    with on(home, "atlas") as kb:
        kb.ingest([folder], embedder)
        ids = chunk_ids(kb)
    shutil.rmtree(folder)
    with on(home, "bora") as kb:
        result = kb.ingest([tmp_path / "other"], embedder)
        assert (result.added, result.removed, result.renamed) == (2, 0, 0)
        assert {path: found for path, found in chunk_ids(kb).items() if path in ids} == ids
        assert kb.num_documents == 6
        assert kb.retrieve("zebra1x1", embedder, k=1, mode="keyword")[0].chunk.source == names(1)[0]


def test_a_folder_of_the_same_name_on_another_machine_takes_nothing_away(home, folder, embedder):
    with on(home, "atlas") as kb:
        kb.ingest([folder], embedder)
    (folder / "note-001.md").write_text("# Note\n\nAnother one, of bora: quagga.\n")
    (folder / "note-002.md").unlink()
    (folder / "note-003.md").unlink()
    with on(home, "bora") as kb:
        plan = kb.plan([folder])
        assert (len(plan.new), plan.changed, plan.removed) == (2, (), ())
        result = kb.ingest([folder], embedder)
        assert (result.added, result.updated, result.removed) == (2, 0, 0)
        assert result.num_embedded == 1  # the other one is the same there: its vectors are known
        assert documents(kb) == [("atlas", name) for name in names(0, 1, 2, 3)] + [("bora", name) for name in names(0, 1)]
        for word in ("quagga", "zebra1x1", "zebra2x1"):
            assert kb.retrieve(word, embedder, k=1, mode="keyword"), word
        assert kb.ingest([folder], embedder).unchanged == 2
        (folder / "note-000.md").unlink()
        assert kb.ingest([folder], embedder).removed == 1
        assert documents(kb) == [("atlas", name) for name in names(0, 1, 2, 3)] + [("bora", name) for name in names(1)]
        assert kb.retrieve("zebra0x1", embedder, k=1, mode="keyword")
        assert faults(kb) == []


def test_a_machine_still_removes_and_updates_what_is_its_own(home, folder, embedder):
    with on(home, "atlas") as kb:
        kb.ingest([folder], embedder)
    write_notes(folder, 4, seed="b")
    with on(home, "bora") as kb:
        kb.ingest([folder], embedder)
    write_notes(folder, 3, seed="c")
    (folder / "note-003.md").unlink()
    with on(home, "atlas") as kb:
        result = kb.ingest([folder], embedder)
        assert (result.updated, result.removed) == (3, 1)
        assert documents(kb) == [("atlas", name) for name in names(0, 1, 2)] + [("bora", name) for name in names(0, 1, 2, 3)]
        (folder / "note-002.md").rename(folder / "note-003.md")
        assert kb.ingest([folder], embedder).renamed == 1
        assert documents(kb) == [("atlas", name) for name in names(0, 1, 3)] + [("bora", name) for name in names(0, 1, 2, 3)]


def test_verify_compares_with_the_files_of_its_own_machine(home, folder, embedder):
    with on(home, "atlas") as kb:
        kb.ingest([folder], embedder)
    shutil.rmtree(folder)
    with on(home, "bora") as kb:
        found = kb.verify()
        assert (found.is_sound, found.num_documents, found.changed, found.missing) == (True, 4, (), ())
        assert found.not_compared == ("4 documents were indexed on another machine (atlas)",)
        write_notes(folder, 1, seed="b")
        kb.ingest([folder], embedder)
        (folder / "note-000.md").unlink()
        assert kb.verify().missing == ("notes/note-000.md",)
    with on(home, "atlas") as kb:
        found = kb.verify()
        assert found.missing == tuple(names(0, 1, 2, 3))
        assert found.not_compared == ("1 document was indexed on another machine (bora)",)


def test_the_same_folder_on_two_machines_is_embedded_once_and_found_once(home, folder, embedder):
    results = []
    for machine in ("atlas", "bora", "atlas", "bora"):
        with on(home, machine) as kb:
            results.append(kb.ingest([folder], embedder))
    assert [(each.added, each.unchanged, each.num_embedded) for each in results] == [(4, 0, 12), (4, 0, 0), (0, 4, 0), (0, 4, 0)]
    with on(home, "bora") as kb:
        assert kb.num_documents == 8
        assert len(kb.retrieve("zebra1x1", embedder, k=8, mode="keyword")) == 1


def test_what_has_no_text_is_known_of_each_machine(home, folder, embedder):
    """A file that held no text is not read again while its size and time stay; another machine has to read it itself."""

    def write(text):
        (folder / "blank.md").write_text(text)
        os.utime(folder / "blank.md", (1_700_000_000, 1_700_000_000))

    for machine in ("atlas", "bora"):
        write("   ")
        with on(home, machine) as kb:
            kb.ingest([folder], embedder)
            write("abc")
            assert [skipped.source for skipped in kb.plan([folder]).skipped] == ["notes/blank.md"]
        with on(home, "cato") as kb:
            assert kb.plan([folder]).skipped == ()


def test_documents_from_before_machines_were_noted_are_those_of_any(home, server, folder, embedder):
    import psycopg  # noqa: PLC0415  # there is none where there is no server

    from localrag.kb.postgres.server import MIGRATIONS, schema_of  # noqa: PLC0415  # needs it

    with on(home, "atlas") as kb:
        kb.ingest([folder], embedder)
        old = kb._store._db.rows("SELECT path, source, folded, sha256, num_bytes, title, mtime_ns, cutter FROM documents ORDER BY id")
        name = kb.name
        kb.remove()
    with closing(psycopg.connect(server.url(), autocommit=True)) as db:
        db.execute(f'CREATE SCHEMA "{schema_of(name)}"')
        db.execute(f'SET search_path = "{schema_of(name)}", public')
        for statement in MIGRATIONS[0]:
            db.execute(statement)
        db.execute("UPDATE state SET version = 1")
        for row in old:
            db.execute(
                "INSERT INTO documents (path, source, folded, sha256, num_bytes, title, mtime_ns, cutter) "
                "VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
                row,
            )
    (folder / "note-003.md").unlink()
    (folder / "note-002.md").write_text("# Note\n\nA new one.\n")
    with on(home, "bora") as kb:
        found = kb.verify()
        assert (found.changed, found.missing, found.not_compared) == (tuple(names(2)), tuple(names(3)), ())
        result = kb.ingest([folder], embedder)
        assert (result.updated, result.unchanged, result.removed) == (1, 2, 1)
        assert documents(kb) == [("bora", name) for name in names(0, 1, 2)]  # whose files it has


def test_the_machine_stands_in_the_address():
    address = parse_address("postgresql://ann:secret@host/db?machine=atlas.example-1&sslmode=require#notes")
    assert address.machine == "atlas.example-1"
    assert address.shown == "postgresql://ann@host/db?sslmode=require&machine=atlas.example-1#notes"
    assert parse_address(address.shown) == parse_address(parse_address(address.shown).shown)
    assert "machine" not in address.conninfo
    assert parse_address("postgresql://host/db").machine


@pytest.mark.parametrize("machine", ["", "a b", "a" * 65, "a%20b", "ä"])
def test_what_is_no_name_of_a_machine_is_refused(machine):
    with pytest.raises(KnowledgeBaseError, match="name of the machine"):
        parse_address(f"postgresql://host/db?machine={machine}")
