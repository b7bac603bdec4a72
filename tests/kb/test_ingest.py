import os
from pathlib import Path

import pytest

from localrag.errors import KnowledgeBaseError, UsageError
from localrag.kb import FolderRule, KnowledgeBase, Tagging, Where
from localrag.kb.ingest import PAIRS
from localrag.kb.readers import UnreadableError
from localrag.kb.reading import Readers
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.servers import chunk_ids, contents, faults, open_kb
from tests.kb.support import write_notes

NUM_SHOWN = 2 * len(PAIRS)  # texts that an embedder is shown once to see what is near for it


@pytest.fixture
def kb_dir(any_home):
    return any_home


def _counts(result):
    return result.added, result.updated, result.unchanged, result.removed


def test_only_what_changed_is_embedded_again(kb, notes, embedder):
    assert embedder.num_embedded - NUM_SHOWN == kb.num_chunks == 12
    ids = chunk_ids(kb)

    result = kb.ingest([notes], embedder)
    assert (_counts(result), result.num_embedded, result.num_chunks, result.skipped) == ((0, 0, 4, 0), 0, 12, ())
    assert (embedder.num_embedded - NUM_SHOWN, chunk_ids(kb)) == (12, ids)

    (notes / "note-001.md").write_text("# New\n\nAnother text.\n")
    (notes / "note-002.md").unlink()
    (notes / "added.txt").write_text("plain")
    os.utime(notes / "note-000.md")
    result = kb.ingest([notes], embedder)
    assert (_counts(result), result.num_embedded, result.num_chunks) == ((1, 1, 2, 1), 2, 8)
    after = chunk_ids(kb)
    unchanged = [str(notes / name) for name in ("note-000.md", "note-003.md")]
    assert {path: after[path] for path in unchanged} == {path: ids[path] for path in unchanged}
    assert min(after[str(notes / "note-001.md")] + after[str(notes / "added.txt")]) > 12  # never an id that was another chunk's
    assert faults(kb) == []


def test_the_result_is_fit_for_json(kb, notes, embedder):
    (notes / "x.bin").write_bytes(b"\0")
    assert kb.ingest([notes], embedder).to_dict() == {
        "added": 0,
        "updated": 0,
        "unchanged": 4,
        "renamed": 0,
        "removed": 0,
        "num_embedded": 0,
        "num_chunks": 12,
        "skipped": [{"source": "notes/x.bin", "reason": "binary file"}],
        "partial": [],
    }


def test_two_builds_of_the_same_folder_are_equal(kb, kb_dir, notes):
    with open_kb(kb_dir, "again", create=True) as other:
        other.ingest([notes], HashEmbedder())
        assert contents(other) == contents(kb)


def test_every_skipped_file_is_named_and_the_rest_is_indexed(kb_dir, notes, embedder):
    (notes / "binary.md").write_bytes(b"a\0b")
    (notes / "empty.txt").write_text("")
    (notes / "only.md").write_text("---\ntitle: x\n---\n")
    os.mkfifo(notes / "pipe")
    (notes / "loop").symlink_to(notes)
    with open_kb(kb_dir, "notes", create=True) as kb:
        result = kb.ingest([notes], embedder)
        assert _counts(result) == (4, 0, 0, 0)
        assert dict(result.skipped) == {
            "notes/binary.md": "binary file",
            "notes/empty.txt": "it holds no text",
            "notes/only.md": "it holds no text",
            "notes/pipe": "not a regular file",
            "notes/loop": "symbolic link",
        }


def test_a_file_that_cannot_be_read_this_time_stays_as_it_was(kb, notes, embedder):
    before = contents(kb)
    (notes / "note-001.md").write_bytes(b"\0")
    result = kb.ingest([notes], embedder)
    assert (_counts(result), dict(result.skipped)) == ((0, 0, 3, 0), {"notes/note-001.md": "binary file"})
    assert contents(kb) == before


def test_a_file_that_is_ignored_from_now_on_goes(kb, notes, embedder):
    (notes / ".localragignore").write_text("note-001.md\n")
    assert _counts(kb.ingest([notes], embedder)) == (0, 0, 3, 1)
    assert [source for source, _ in kb.sources()] == ["notes/note-000.md", "notes/note-002.md", "notes/note-003.md"]


def test_only_files_below_the_given_paths_can_vanish(kb, notes, tmp_path, embedder):
    write_notes(tmp_path / "other", 2, seed="o")
    kb.ingest([tmp_path / "other"], embedder)
    (notes / "note-000.md").unlink()
    (tmp_path / "other" / "note-000.md").unlink()
    assert _counts(kb.ingest([tmp_path / "other"], embedder)) == (0, 0, 1, 1)
    assert kb.num_documents == 5
    (notes / "note-001.md").write_text("changed")
    assert _counts(kb.ingest([notes / "note-001.md"], embedder)) == (0, 1, 0, 0)
    assert kb.num_documents == 5


def test_a_source_keeps_the_name_it_was_first_given(kb, notes, embedder):
    (notes / "note-001.md").write_text("changed")
    kb.ingest([notes / "note-001.md"], embedder)
    assert ("notes/note-001.md", 1) in kb.sources()


@pytest.mark.parametrize("names", [(), ("x.bin",), (".hidden.md", "empty.txt")])
def test_nothing_to_index_is_an_error_that_says_why_and_makes_nothing(tmp_path, kb_dir, embedder, names):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"\0" if name.endswith(".bin") else b"")
    with open_kb(kb_dir, "new", create=True) as kb, pytest.raises(KnowledgeBaseError, match="Nothing to index") as caught:
        kb.ingest([folder], embedder)
    assert caught.value.numbers["num_skipped"] == len(names)
    assert ("binary file" in str(caught.value)) == ("x.bin" in names)
    assert not kb_dir.exists()


def test_an_emptied_folder_empties_nothing(kb, notes, embedder):
    for file in notes.iterdir():
        file.unlink()
    with pytest.raises(KnowledgeBaseError, match="there are no files"):
        kb.ingest([notes], embedder)
    assert kb.num_documents == 4


def test_a_missing_path_makes_nothing(tmp_path, kb_dir, embedder):
    with open_kb(kb_dir, "new", create=True) as kb, pytest.raises(KnowledgeBaseError, match="no file or folder"):
        kb.ingest([tmp_path / "missing"], embedder)
    assert not kb_dir.exists()


def test_a_home_that_cannot_be_written_is_said(tmp_path, notes, embedder):
    (tmp_path / "file").write_text("")
    with (
        KnowledgeBase.open(tmp_path / "file" / "kb", "new", create=True) as kb,
        pytest.raises(KnowledgeBaseError, match="Cannot create the folder"),
    ):
        kb.ingest([notes], embedder)
    assert embedder.num_embedded == 0


def test_another_embedder_is_refused_before_any_work(kb, notes):
    other = HashEmbedder(fingerprint="hash-2")
    (notes / "note-000.md").write_text("changed")
    with pytest.raises(KnowledgeBaseError, match="another embedder"):
        kb.ingest([notes], other)
    assert other.num_embedded == 0


def test_progress_and_an_interrupted_run_that_goes_on(kb_dir, tmp_path):
    write_notes(tmp_path / "many", 60)
    embedder, seen = HashEmbedder(), []

    def interrupt(progress):
        seen.append(progress)
        if len(seen) == 50:
            raise KeyboardInterrupt

    with open_kb(kb_dir, "many", create=True) as kb:
        with pytest.raises(KeyboardInterrupt):
            kb.ingest([tmp_path / "many"], embedder, interrupt)
        done = kb.num_documents
        assert 0 < done < 50
        assert embedder.num_embedded - NUM_SHOWN == kb.num_chunks
        result = kb.ingest([tmp_path / "many"], embedder)
        assert _counts(result) == (60 - done, 0, done, 0)
        assert embedder.num_embedded - NUM_SHOWN == kb.num_chunks == 180  # nothing twice
    assert [progress.num_done for progress in seen] == [1] * 8 + [9] * 42  # batches of 3, 24 and 128 chunks
    assert [progress.num_embedded for progress in seen] == [3 * progress.num_done for progress in seen]
    assert {progress.num_files for progress in seen} == {60}
    assert Path(seen[0].source) == Path("many/note-000.md")


def test_the_last_progress_is_all_of_it(kb, notes, embedder):
    seen = []
    (notes / "note-000.md").write_text("changed")
    (notes / "z.bin").write_bytes(b"\0")
    kb.ingest([notes], embedder, seen.append)
    assert [progress.num_done for progress in seen] == [1, 2, 3, 4, 5]
    assert (seen[-1].source, seen[-1].num_files, seen[-1].num_embedded) == ("notes/z.bin", 5, 1)


SETTLED = 1_700_000_000


def _settle(folder):
    for file in folder.rglob("*"):
        os.utime(file, (SETTLED, SETTLED))


def test_an_unchanged_file_is_not_read(kb_dir, notes, embedder):
    _settle(notes)
    with open_kb(kb_dir, "settled", create=True) as kb:
        kb.ingest([notes], embedder)
        file = notes / "note-000.md"
        file.write_bytes(b"\0" * file.stat().st_size)  # as it is not read, this does not show
        _settle(notes)
        assert _counts(kb.ingest([notes], embedder)) == (0, 0, 4, 0)
        os.utime(file)
        assert dict(kb.ingest([notes], embedder).skipped) == {"notes/note-000.md": "binary file"}


def test_a_file_without_text_is_named_each_time_and_not_read_again(kb_dir, notes, embedder):
    file = notes / "binary.md"
    file.write_bytes(b"a\0b")
    _settle(notes)
    with open_kb(kb_dir, "settled", create=True) as kb:
        kb.ingest([notes], embedder)
        file.write_bytes(b"abc")  # as it is not read, this does not show
        _settle(notes)
        for _ in range(2):
            result = kb.ingest([notes], embedder)
            assert (dict(result.skipped), result.unchanged) == ({"notes/binary.md": "binary file"}, 4)
        os.utime(file)
        result = kb.ingest([notes], embedder)
        assert (result.skipped, result.added, kb._store.unread()) == ((), 1, {})


def test_a_stored_file_that_lost_its_text_is_not_read_again_and_goes_with_its_file(kb_dir, notes, embedder):
    file = notes / "note-001.md"
    _settle(notes)
    with open_kb(kb_dir, "settled", create=True) as kb:
        kb.ingest([notes], embedder)
        before = contents(kb)
        for text in (b"\0\0\0", b"abc"):
            file.write_bytes(text)
            os.utime(file, (SETTLED + 1, SETTLED + 1))
            assert dict(kb.ingest([notes], embedder).skipped) == {"notes/note-001.md": "binary file"}
            assert contents(kb) == before
        generation = kb._store.generation
        kb.ingest([notes], embedder)
        assert kb._store.generation == generation
        file.unlink()
        assert kb.ingest([notes], embedder).removed == 1
        assert kb._store.unread() == {}


def test_what_is_known_of_files_without_text_elsewhere_stays(kb_dir, tmp_path, notes, embedder):
    other = tmp_path / "other"
    write_notes(other, 1)
    for folder in (notes, other):
        (folder / "binary.md").write_bytes(b"a\0b")
        _settle(folder)
    with open_kb(kb_dir, "settled", create=True) as kb:
        kb.ingest([notes], embedder)
        kb.ingest([other], embedder)
        assert set(kb._store.unread()) == {str(folder / "binary.md") for folder in (notes, other)}
        assert [(kb.plan([folder]).new, len(kb.plan([folder]).skipped)) for folder in (notes, other)] == [((), 1), ((), 1)]


@pytest.mark.parametrize(("data", "lasts"), [(b"a\0b", True), (b"# ABC\n\nx\n\n" * 1_500_000, False)], ids=["binary", "too slow"])
def test_only_a_reason_that_is_in_the_file_lasts(data, lasts):
    with Readers(wall_limit_s=0.3) as readers, pytest.raises(UnreadableError) as caught:
        readers.read("a.md", data)
    assert caught.value.lasts is lasts


def test_a_file_that_was_changed_just_before_it_was_indexed_is_read_again(kb, notes, embedder):
    file = notes / "note-000.md"
    status = file.stat()
    file.write_text(file.read_text().replace("zebra0x0", "hippo0x0"))  # of the same size, and within the clock's grain
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert _counts(kb.ingest([notes], embedder)) == (0, 1, 3, 0)


def test_unchanged_chunks_of_a_changed_file_keep_their_ids_and_vectors(kb, notes, embedder):
    path = str(notes / "note-001.md")
    before, num_embedded = chunk_ids(kb)[path], embedder.num_embedded
    text = Path(path).read_text()
    Path(path).write_text(text.replace("## Part 1", "## Part new\n\nSomething else stands here now.\n\n## Part 1"))
    result = kb.ingest([notes], embedder)
    after = chunk_ids(kb)[path]
    assert [one for one in after if one in before] == before
    assert (len(after), result.num_embedded, embedder.num_embedded - num_embedded) == (4, 1, 1)
    assert faults(kb) == []


def test_a_renamed_file_keeps_its_chunks(kb, notes, embedder):
    before = chunk_ids(kb)
    (notes / "deep").mkdir()
    (notes / "note-001.md").rename(notes / "deep" / "moved.md")
    result = kb.ingest([notes], embedder)
    assert (result.renamed, _counts(result), result.num_embedded) == (1, (0, 0, 3, 0), 0)
    assert chunk_ids(kb)[str(notes / "deep" / "moved.md")] == before[str(notes / "note-001.md")]
    assert ("notes/deep/moved.md", 3) in kb.sources()
    (notes / "note-002.md").replace(notes / "note-003.md")  # in place of another
    result = kb.ingest([notes], embedder)
    assert (result.renamed, result.removed, kb.num_documents) == (1, 0, 3)
    assert chunk_ids(kb)[str(notes / "note-003.md")] == before[str(notes / "note-002.md")]
    assert faults(kb) == []


def test_a_copy_is_another_document_and_is_not_embedded_again(kb, notes, embedder):
    (notes / "copy.md").write_bytes((notes / "note-000.md").read_bytes())
    (notes / "twice.txt").write_text("same words here\n" * 1)
    (notes / "again.txt").write_text("same words here\n" * 1)
    result = kb.ingest([notes], embedder)
    assert (result.added, result.num_embedded, result.num_chunks) == (3, 1, 17)


def test_tags_of_files_rules_and_people(kb, notes, embedder):
    (notes / "tagged.md").write_text("---\ntags: [own]\nauthor: Ann\n---\n# T\n\nText.\n")
    rules = (FolderRule("notes/note-00[x]*", ("never",)), FolderRule("notes/tag*", ("rule",)), FolderRule(str(notes), ("all",)))
    kb.ingest([notes], embedder, tagging=Tagging(("given",), rules))
    assert kb.fields()["notes/tagged.md"]["tag"] == ["all", "given", "own", "rule"]
    assert kb.fields()["notes/note-000.md"] == {"tag": ["all", "given"]}
    kb.ingest([notes], embedder)  # rules hold for their run, what was given stays
    assert kb.fields()["notes/tagged.md"]["tag"] == ["given", "own"]
    assert [source for source, _ in kb.sources(Where.parse(["tag=own"]))] == ["notes/tagged.md"]


def test_a_tag_that_cannot_be_kept_is_refused():
    with pytest.raises(UsageError, match="not UTF-8"):
        Tagging(("price", "caf\udce9"))


def test_a_plan_says_what_would_be_done(kb_dir, notes, embedder):
    _settle(notes)
    with open_kb(kb_dir, "new", create=True) as kb:
        assert len(kb.plan([notes]).new) == 4
        assert not kb_dir.exists()
        kb.ingest([notes], embedder)
        (notes / "note-000.md").unlink()
        (notes / "note-001.md").write_text("changed")
        (notes / "new.txt").write_text("x")
        (notes / ".env").write_text("x")
        plan = kb.plan([notes])
    assert (plan.new, plan.changed, len(plan.unchanged)) == (("notes/new.txt",), ("notes/note-001.md",), 2)
    assert (plan.removed, dict(plan.skipped)) == (("notes/note-000.md",), {"notes/.env": "hidden"})


def test_hidden_files_only_when_asked_for(kb, notes, embedder):
    (notes / ".env").write_text("SECRET=1")
    (notes / "id_rsa.txt").write_text("key")
    (notes / ".git").mkdir()
    (notes / ".git" / "config").write_text("x")
    assert kb.ingest([notes], embedder, hidden=True).added == 2
    assert kb.ingest([notes], embedder).removed == 2


def test_a_second_indexer_waits_or_says_so(kb, kb_dir, notes, embedder):
    waited = []
    with (
        open_kb(kb_dir, "notes") as other,
        other._location.taken(wait_s=0),
        pytest.raises(KnowledgeBaseError, match="Another localrag") as caught,
    ):
        kb.ingest([notes], embedder, wait_s=0.2, on_wait=lambda: waited.append(1))
    assert (waited, caught.value.exit_code) == ([1], 6)
    assert "Wait" in caught.value.hint
    assert kb.ingest([notes], embedder, wait_s=0).unchanged == 4


def test_one_that_was_removed_meanwhile_is_made_again(kb, kb_dir, notes, embedder):
    with open_kb(kb_dir, "notes") as other:
        other.remove()
    assert _counts(kb.ingest([notes], embedder)) == (4, 0, 0, 0)
    with open_kb(kb_dir, "notes") as again:
        assert contents(again) == contents(kb)
