"""Documents that are given as texts: what holds of a knowledge base in a folder holds of one on a server."""

import hashlib
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.errors import KnowledgeBaseBusyError, KnowledgeBaseError, KnowledgeBaseNotFoundError, UsageError
from localrag.kb import KnowledgeBase, Where, import_kb, list_kbs
from localrag.kb.database import MIGRATIONS, migrate
from localrag.kb.filters import MAX_METADATA_BYTES, MAX_METADATA_DEPTH
from localrag.kb.readers.base import clean
from localrag.kb.texts import MAX_ID_CHARS, Text
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.servers import ServerHome, chunk_ids, faults, open_kb
from tests.kb.support import write_notes

PARAGRAPHS = [f"Paragraph {at} says zebra{at}. " + " ".join(f"It is number {at}{n}." for n in range(14)) for at in range(5)]
LONG = "\n\n".join(PARAGRAPHS)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=10), inside, max_size=3),
    max_leaves=8,
)
METADATA = st.dictionaries(st.text(max_size=10), JSON, max_size=4)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=300).filter(lambda text: clean(text).strip())


@pytest.fixture
def kb_dir(any_home):
    return any_home


@pytest.fixture
def given_kb(kb_dir, embedder):
    """A long text of five parts with metadata, and a short one."""
    with open_kb(kb_dir, "texts", create=True) as kb:
        kb.texts.put([Text.of(LONG, {"title": "Five", "author": "Ann", "tags": ["x", "y"], "n": 1}, text_id="five"), _short()], embedder)
        yield kb


def _short(text="A cat sleeps.", **metadata):
    return Text.of(text, metadata)


def test_what_is_given_comes_back_whole(given_kb, embedder):
    found, total = given_kb.texts.page()
    assert total == 2
    assert [(row.id, row.text, row.metadata, row.is_whole) for row in found] == [
        ("five", LONG, {"title": "Five", "author": "Ann", "tags": ["x", "y"], "n": 1}, True),
        (hashlib.sha256(b"A cat sleeps.").hexdigest(), "A cat sleeps.", {}, True),
    ]
    assert given_kb.texts.get("five") == found[0]
    assert given_kb.texts.get("six") is given_kb.texts.get("\ud800") is None
    assert given_kb.num_documents == 2
    assert faults(given_kb) == []


def test_a_long_text_is_cut_and_none_of_it_left_out(given_kb, embedder):
    chunks = given_kb.around(1, num_behind=100)
    assert len(chunks) == given_kb.num_chunks - 1 > 4
    assert all(embedder.count(chunk.text) <= embedder.max_tokens for chunk in chunks)
    assert all(LONG[chunk.start : chunk.end] == chunk.text for chunk in chunks)
    assert "".join("".join(chunk.text.split()) for chunk in chunks) == "".join(LONG.split())
    assert [chunk.place for chunk in chunks][-1] == "line 9"
    (hit, *_) = given_kb.retrieve("zebra3", embedder)
    assert (hit.chunk.source, "zebra3" in hit.chunk.text) == ("Five", True)
    assert given_kb.texts.names([hit.chunk.document_id, 999]) == {hit.chunk.document_id: ("five", given_kb.texts.get("five").metadata)}


def test_the_same_again_changes_nothing(given_kb, embedder):
    generation, num_embedded = given_kb._store.generation, embedder.num_embedded
    rows, _ = given_kb.texts.page()
    given_kb.texts.put([Text.of(row.text, row.metadata, text_id=row.id) for row in rows], embedder)
    given_kb.texts.put([], embedder)
    assert (given_kb._store.generation, embedder.num_embedded) == (generation, num_embedded)


def test_only_what_changed_is_embedded_again_and_the_rest_keeps_its_ids(given_kb, embedder):
    before, num_embedded = chunk_ids(given_kb)["text:five"], embedder.num_embedded
    given_kb.texts.put([Text.of(LONG, {"title": "Other"}, text_id="five")], embedder)
    assert (chunk_ids(given_kb)["text:five"], embedder.num_embedded) == (before, num_embedded)
    assert given_kb.fields() == {"Other": {"title": ["Other"]}}

    changed = LONG.replace(PARAGRAPHS[4], "Nothing is said here.")
    given_kb.texts.put([Text.of(changed, {"title": "Other"}, text_id="five")], embedder)
    after = chunk_ids(given_kb)["text:five"]
    kept = [one for one in after if one in before]
    assert len(kept) >= 4
    assert embedder.num_embedded - num_embedded == len(after) - len(kept) > 0
    assert min(one for one in after if one not in kept) > max(before)
    assert faults(given_kb) == []


def test_what_became_of_each(given_kb, embedder):
    short = _short()
    outcomes = given_kb.texts.update(
        [
            short,
            Text.of("A dog sleeps.", text_id=short.id),
            Text.of("A dog sleeps.", text_id=short.id),
            Text.of(LONG, {"n": 1.0, "tags": ["x", "y"], "author": "Ann", "title": "Five"}, text_id="five"),  # equal as JSON
            Text.of(LONG, {"n": True, "tags": ["x", "y"], "author": "Ann", "title": "Five"}, text_id="five"),
            Text.of("No such text.", text_id="none"),
        ],
        embedder,
    )
    assert outcomes == ["unchanged", "updated", "unchanged", "unchanged", "updated", "not_found"]
    assert [row.text for row in given_kb.texts.page()[0]] == [LONG, "A dog sleeps."]
    assert given_kb.texts.get("five").metadata["n"] is True
    assert given_kb.texts.remove(["five", "none", "\ud800", "five"]) == {"five"}
    assert (given_kb.num_documents, given_kb.num_chunks, given_kb.texts.page()[1]) == (1, 1, 1)
    assert given_kb.texts.remove([]) == set()
    assert faults(given_kb) == []


def test_pages(kb_dir, embedder):
    with open_kb(kb_dir, "texts", create=True) as kb:
        kb.texts.put([Text.of(f"This is text {at}.", {"even": at % 2 == 0}, text_id=str(at)) for at in range(7)], embedder)
        assert [row.id for row in kb.texts.page(offset=2, limit=3)[0]] == ["2", "3", "4"]
        assert kb.texts.page(offset=7) == ([], 7)
        found, total = kb.texts.page(offset=1, limit=2, max_chars=4, where=Where.equals({"even": True}))
        assert ([(row.id, row.text, row.num_chars, row.is_whole) for row in found], total) == (
            [("2", "This", 15, False), ("4", "This", 15, False)],
            4,
        )


@pytest.mark.parametrize(
    ("metadata", "passes"),
    [
        ({"n": 1}, True),
        ({"n": 1.0}, True),
        ({"n": True}, False),
        ({"n": "1"}, False),
        ({"author": "Ann", "n": 1}, True),
        ({"author": "ann"}, False),
        ({"author": "A*"}, False),
        ({"tags": ["x", "y"]}, True),
        ({"tags": ["y", "x"]}, False),
        ({"tags": "x"}, False),
        ({"author": "Ann", "none": None}, False),
        ({"author": "'; DROP TABLE texts; --"}, False),
        ({"\ud800": "\0"}, False),
    ],
)
def test_metadata_that_is_equal(given_kb, embedder, metadata, passes):
    where = Where.equals(metadata)
    assert [row.id for row in given_kb.texts.page(where=where)[0]] == (["five"] if passes else [])
    assert bool(given_kb.retrieve("zebra1", embedder, where=where)) == passes
    assert bool(given_kb.retrieve("zebra1", None, mode="keyword", where=where)) == passes


@pytest.mark.parametrize("text", ["author=ann", "tag=y", "n=1", "source=five", "title=F*"])
def test_patterns_find_metadata(given_kb, embedder, text):
    assert [source for source, _ in given_kb.sources(Where.parse([text]))] == ["Five"]
    assert {hit.chunk.source for hit in given_kb.retrieve("zebra1", embedder, where=Where.parse([text]))} == {"Five"}


def test_filters_that_are_none():
    assert not Where.equals({})
    assert str(Where.equals({"a": [1.0, "é"]})) == 'a=[1,"\\u00e9"]'
    for wrong in ({"a": float("nan")}, {str(at): at for at in range(65)}, _deep(MAX_METADATA_DEPTH + 1)):
        with pytest.raises(UsageError):
            Where.equals(wrong)


def _deep(levels):
    found = {}
    for _ in range(levels - 1):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    ("text", "metadata", "text_id", "reason"),
    [
        ("a\0b", {}, "", "NUL"),
        ("a\ud800", {}, "", "surrogate"),
        ("", {}, "", "empty"),
        (" \n\u200b", {}, "", "empty"),
        ("x" * 20_000_001, {}, "", "20000000"),
        ("x", {"a": "\ud800"}, "", "not valid JSON"),
        ("x", {"a": float("inf")}, "", "not valid JSON"),
        ("x", {"a": object()}, "", "not valid JSON"),
        ("x", {"a": "é" * (MAX_METADATA_BYTES // 2)}, "", "bytes"),
        ("x", _deep(MAX_METADATA_DEPTH + 1), "", "nested"),
        ("x", {}, "a\nb", "id"),
        ("x", {}, "a" * (MAX_ID_CHARS + 1), "id"),
    ],
)
def test_what_cannot_be_kept_is_refused(text, metadata, text_id, reason):
    with pytest.raises(UsageError, match=reason):
        Text.of(text, metadata, text_id=text_id)


@given(text=TEXTS, metadata=METADATA, text_id=st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=20))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_and_metadata_come_back(given_kb, embedder, text, metadata, text_id):
    one = Text.of(text, metadata, text_id=text_id)
    given_kb.texts.put([one], embedder)
    row = given_kb.texts.get(one.id)
    assert (row.text, row.metadata, row.sha256) == (text, metadata, one.sha256)
    assert list(row.metadata) == list(metadata)
    assert row in given_kb.texts.page(limit=100, where=Where.equals(metadata))[0]


def test_the_deepest_metadata_is_kept(given_kb, embedder):
    one = Text.of("x", _deep(MAX_METADATA_DEPTH) | {"list": [1]})
    given_kb.texts.put([one], embedder)
    assert given_kb.texts.get(one.id).metadata == one.metadata


def test_what_nobody_can_see_is_kept_and_not_indexed(given_kb, embedder):
    one = Text.of("The secr\u200bet word\r\nis mango\u202e.")
    given_kb.texts.put([one], embedder)
    assert given_kb.texts.get(one.id).text == one.text
    (hit,) = given_kb.retrieve("secret mango", embedder, k=1)
    assert hit.chunk.text == "The secret word\nis mango."


def test_indexing_files_leaves_texts_alone(given_kb, tmp_path, embedder):
    before, notes = given_kb.texts.page(), tmp_path / "notes"
    write_notes(notes, 3)
    result = given_kb.ingest([notes], embedder)
    assert (result.added, result.removed) == (3, 0)
    (notes / "note-000.md").unlink()
    (notes / "note-001.md").rename(notes / "renamed.md")
    plan = given_kb.plan([notes])
    assert (plan.removed, plan.renamed) == (("notes/note-000.md",), ("notes/renamed.md",))
    result = given_kb.ingest([notes], embedder)
    assert (result.renamed, result.removed, result.unchanged) == (1, 1, 1)
    rows, total = given_kb.texts.page()
    assert (rows[: before[1]], total) == (before[0], before[1] + 2)
    assert set(given_kb.paths()) == {"notes/note-002.md", "notes/renamed.md"}
    assert {source for source, _ in given_kb.sources()} == {"Five", before[0][1].id, "notes/note-002.md", "notes/renamed.md"}
    (hit, *_) = given_kb.retrieve("zebra2x1", embedder)
    number = hit.chunk.document_id
    assert given_kb.texts.names([number]) == {number: ("notes/note-002.md", {"source": "notes/note-002.md"})}
    assert faults(given_kb) == []


def test_verifying_takes_no_text_for_lost(given_kb, tmp_path, embedder):
    write_notes(tmp_path / "notes", 2)
    given_kb.ingest([tmp_path / "notes"], embedder)
    shutil.rmtree(tmp_path / "notes")
    found = given_kb.verify()
    assert (found.is_sound, found.num_documents, found.changed, found.missing, found.repaired) == (True, 4, (), (), ())
    assert found.not_compared == (f"2 documents were indexed from {tmp_path / 'notes'}, which does not exist now",)


def test_chunks_that_were_taken_out_are_made_again_from_the_text(given_kb, tmp_path, embedder):
    before = chunk_ids(given_kb)["text:five"]
    with given_kb._store.writing():
        assert given_kb._store.drop_chunks(before[1:3]) == ["Five"]
    assert len(chunk_ids(given_kb)["text:five"]) == len(before) - 2
    write_notes(tmp_path / "notes", 1)
    given_kb.ingest([tmp_path / "notes"], embedder)
    after = chunk_ids(given_kb)["text:five"]
    assert ([*after[:1], *after[3:]], len(after)) == ([*before[:1], *before[3:]], len(before))

    with given_kb._store.writing():
        given_kb._store.drop_chunks(after)
    (row,) = [row for row in given_kb.texts.page()[0] if row.id == "five"]
    assert given_kb.texts.update([Text.of(row.text, row.metadata, text_id="five")], embedder) == ["unchanged"]
    assert len(chunk_ids(given_kb)["text:five"]) == len(before)
    assert faults(given_kb) == []


class _Failing(HashEmbedder):
    """Breaks off at the second text that is long."""

    def embed(self, texts):
        if "two" in texts[0]:
            raise KeyboardInterrupt
        return super().embed(texts)


def test_a_document_is_there_whole_or_not_at_all(kb_dir):
    long = {name: "\n\n".join(f"{name} {at}. " + "Words stand here. " * 14 for at in range(140)) for name in ("one", "two", "three")}
    with open_kb(kb_dir, "texts", create=True) as kb:
        with pytest.raises(KeyboardInterrupt):
            kb.texts.put([Text.of(text, text_id=name) for name, text in long.items()], _Failing())
        assert [(row.id, row.text) for row in kb.texts.page()[0]] == [("one", long["one"])]
        assert faults(kb) == []
        kb.texts.put([Text.of(text, text_id=name) for name, text in long.items()], HashEmbedder())
        assert kb.texts.page()[1] == 3


def test_another_embedder_is_refused(given_kb):
    other = HashEmbedder(fingerprint="other")
    with pytest.raises(KnowledgeBaseError, match="another embedder"):
        given_kb.texts.put([_short("New.")], other)
    assert given_kb.texts.page()[1] == 2


def test_one_at_a_time_writes(given_kb, kb_dir, embedder):
    waited = []
    with open_kb(kb_dir, "texts") as other, other._location.taken(wait_s=0):
        for change in (
            lambda **how: given_kb.texts.put([_short("New.")], embedder, **how),
            lambda **how: given_kb.texts.remove(["five"], **how),
        ):
            with pytest.raises(KnowledgeBaseBusyError, match="is indexing"):
                change(wait_s=0.1, on_wait=lambda: waited.append(1))
    assert (given_kb.texts.page()[1], waited) == (2, [1, 1])


def test_nothing_is_made_before_there_is_something_to_keep(kb_dir, embedder):
    with open_kb(kb_dir, "texts", create=True) as kb:
        assert (kb.texts.page(), kb.texts.get("x"), kb.texts.names([1])) == (([], 0), None, {})
        kb.texts.put([], embedder)
        assert not kb_dir.exists()
        for change in (lambda: kb.texts.update([_short()], embedder), lambda: kb.texts.remove(["x"])):
            with pytest.raises(KnowledgeBaseNotFoundError):
                change()


def test_what_was_removed_or_replaced_meanwhile_is_not_written_to(given_kb, kb_dir, embedder):
    with open_kb(kb_dir, "texts") as other:
        other.remove()
    with pytest.raises(KnowledgeBaseNotFoundError):
        given_kb.texts.remove(["five"])
    given_kb.texts.put([_short("The first again.")], embedder)
    with open_kb(kb_dir, "texts") as other:
        assert [row.text for row in other.texts.page()[0]] == ["The first again."]
        other.remove()
    with open_kb(kb_dir, "texts", create=True) as other:
        other.texts.put([_short("Another one.")], embedder)
    given_kb.texts.put([_short("And mine.")], embedder)
    assert [row.text for row in given_kb.texts.page()[0]] == ["Another one.", "And mine."]
    assert faults(given_kb) == []


def test_a_text_is_of_no_machine(server, embedder):
    home = ServerHome(server)

    def on(machine):
        return KnowledgeBase.open(Path(), home.address("texts").replace("#", f"?machine={machine}#"), create=True)

    with on("atlas") as kb:
        kb.texts.put([Text.of("One.", text_id="a")], embedder)
    with on("bora") as kb:
        assert kb.texts.update([Text.of("Two.", text_id="a")], embedder) == ["updated"]
        assert (kb.num_documents, kb.verify().not_compared) == (1, ())
    with on("atlas") as kb:
        assert [row.text for row in kb.texts.page()[0]] == ["Two."]


# Of one in a folder alone.


@pytest.fixture
def folder_kb(tmp_path, embedder):
    with KnowledgeBase.open(tmp_path / "kb", "texts", create=True) as kb:
        kb.texts.put([Text.of(LONG, {"title": "Five", "n": 1}, text_id="five"), _short()], embedder)
        yield kb


def test_texts_are_exported_and_imported(folder_kb, tmp_path, embedder):
    folder_kb.export(tmp_path / "texts.kb")
    assert import_kb(tmp_path / "kb", tmp_path / "texts.kb", "again") == "again"
    with KnowledgeBase.open(tmp_path / "kb", "again") as other:
        assert other.texts.page() == folder_kb.texts.page()
        assert [row.id for row in other.texts.page(where=Where.equals({"n": 1}))[0]] == ["five"]


def test_an_import_replaces_what_is_there_when_it_is_whole(folder_kb, tmp_path, embedder):
    folder_kb.export(tmp_path / "texts.kb")
    folder_kb.texts.remove(["five"])
    with pytest.raises(KnowledgeBaseError, match="already"):
        import_kb(tmp_path / "kb", tmp_path / "texts.kb")
    (tmp_path / "broken.kb").write_bytes((tmp_path / "texts.kb").read_bytes()[:-100])
    with pytest.raises(KnowledgeBaseError, match="cannot be imported"):
        import_kb(tmp_path / "kb", tmp_path / "broken.kb", "texts", replace=True)
    assert folder_kb.texts.page()[1] == 1
    import_kb(tmp_path / "kb", tmp_path / "texts.kb", replace=True)
    with KnowledgeBase.open(tmp_path / "kb", "texts") as kb:
        assert kb.texts.page()[1] == 2
    assert list_kbs(tmp_path / "kb") == ["texts"]
    assert import_kb(tmp_path / "kb", tmp_path / "texts.kb", "new", replace=True) == "new"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE texts SET text = 'lies' WHERE id = 'five'",
        "UPDATE texts SET metadata = '[]' WHERE id = 'five'",
        "UPDATE texts SET metadata = '{' WHERE id = 'five'",
        "UPDATE texts SET metadata = '{\"n\":2}' WHERE id = 'five'",
        "UPDATE entries SET entry = zeroblob(32) WHERE entry = (SELECT min(entry) FROM entries)",
        "DELETE FROM entries",
    ],
)
def test_texts_that_are_not_what_was_given_are_a_fault_and_not_imported(folder_kb, tmp_path, statement):
    with closing(sqlite3.connect(folder_kb.path, isolation_level=None)) as db:
        db.execute(statement)
    found = folder_kb.verify()
    assert (found.is_sound, found.problems) == (False, ("the text 'five' is damaged",))
    folder_kb.export(tmp_path / "texts.kb")
    with pytest.raises(KnowledgeBaseError, match="the text 'five' is damaged"):
        import_kb(tmp_path / "kb", tmp_path / "texts.kb", "again")


def test_a_file_from_before_there_were_texts_takes_them(tmp_path, notes, embedder):
    path = tmp_path / "kb" / "old" / "kb.sqlite"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        migrate(db, MIGRATIONS[:3])
    with KnowledgeBase.open(tmp_path / "kb", "old") as kb:
        kb.ingest([notes], embedder)
        kb.texts.put([_short()], embedder)
        assert (kb.num_documents, kb.texts.page()[1]) == (5, 5)
        assert faults(kb) == []


def test_files_are_on_the_same_pages_and_are_removed_by_their_sources(given_kb, notes, embedder):
    given_kb.ingest([notes], embedder)
    rows, total = given_kb.texts.page(limit=100)
    assert total == given_kb.num_documents == len(rows)
    (row,) = [row for row in rows if row.id == "notes/note-001.md"]
    assert row.metadata == {"source": "notes/note-001.md"}
    assert row.is_whole
    assert "zebra1x1" in row.text
    (short,) = [each for each in given_kb.texts.page(limit=100, max_chars=7)[0] if each.id == row.id]
    assert (short.text, short.num_chars, short.is_whole) == (row.text[:7], row.num_chars, False)
    assert [each.id for each in given_kb.texts.page(where=Where.equals({"source": row.id}))[0]] == [row.id]
    assert given_kb.texts.files([row.id, "five", "none"]) == {row.id}
    assert given_kb.texts.remove([row.id, "none"]) == {row.id}
    assert given_kb.texts.page()[1] == total - 1
    assert given_kb.ingest([notes], embedder).added == 1
