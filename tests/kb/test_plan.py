"""A plan says what the run after it does, over every kind of file."""

import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.kb import KnowledgeBase
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.readers.pdf_files import pdf_of, with_images

WORDS = "# A note\n\nIt has some words.\n"
SCAN = with_images(pdf_of([["Words are on the first page."], [], []]), [1, 2])
CONTENTS = {
    "broken.pdf": b"%PDF-1.7\nnothing\n",
    "encrypted.pdf": pdf_of([["words"]], password="secret"),
    "scanned.pdf": with_images(pdf_of([[], []]), [0, 1]),
    "partly-scanned.pdf": SCAN,
    "~$x.docx": b"\x0bAnn" + bytes(150),
    "old.odt": b"PK\x03\x04mimetypeapplication/vnd.oasis.opendocument.text",
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(50),
    "empty.md": b"",
    "blank.md": b" \n\t\n",
    "front-matter-only.md": b"---\ntitle: x\n---\n",
    "binary.txt": b"a\0b",
    "prod.env": b"A=b\n",
    ".hidden.md": WORDS.encode(),
    "new.md": WORDS.encode(),
    "new.py": b"def f():\n    return 1\n",
}
KINDS = ("added", "updated", "unchanged", "renamed", "removed")


def compared(kb, folder, embedder, *, hidden=False):
    """The plan, which the run after it has kept to."""
    plan = kb.plan([folder], hidden=hidden)
    before = kb.sources()
    assert kb.plan([folder], hidden=hidden) == plan
    assert kb.sources() == before
    result = kb.ingest([folder], embedder, hidden=hidden)
    planned = (plan.new, plan.changed, plan.unchanged, plan.renamed, plan.removed)
    assert dict(zip(KINDS, map(len, planned), strict=True)) == {kind: getattr(result, kind) for kind in KINDS}
    assert (plan.skipped, plan.partial) == (result.skipped, result.partial)
    return plan


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def test_a_plan_is_what_the_run_does(kb_dir, folder, embedder):
    for name in ("changed.md", "same.md", "gone.md", "old-name.md", "touched.md"):
        (folder / name).write_text(f"# {name}\n\nIt has words.\n")
    with KnowledgeBase.open(kb_dir, "notes", create=True) as kb:
        assert len(compared(kb, folder, embedder).new) == 5
        for name, data in CONTENTS.items():
            (folder / name).write_bytes(data)
        (folder / "changed.md").write_text("# Other\n\nIt has other words.\n")
        (folder / "gone.md").unlink()
        (folder / "old-name.md").rename(folder / "new-name.md")
        os.utime(folder / "touched.md", (1, 1))
        plan = compared(kb, folder, embedder)
        assert plan.new == ("notes/new.md", "notes/new.py", "notes/partly-scanned.pdf")
        assert plan.changed == ("notes/changed.md",)
        assert plan.unchanged == ("notes/same.md", "notes/touched.md")
        assert plan.renamed == ("notes/new-name.md",)
        assert plan.removed == ("notes/gone.md",)
        assert {skip.source for skip in plan.skipped} == {f"notes/{name}" for name in CONTENTS} - set(plan.new)
        assert [(skip.source, skip.reason) for skip in plan.partial] == [
            ("notes/partly-scanned.pdf", "pages 2-3 hold no text; they look scanned")
        ]
        again = compared(kb, folder, embedder)
        assert (again.new, again.changed, again.partial) == ((), (), plan.partial)
        assert set(compared(kb, folder, embedder, hidden=True).new) == {"notes/prod.env", "notes/.hidden.md"}
        assert set(compared(kb, folder, embedder).removed) == {"notes/prod.env", "notes/.hidden.md"}
        assert kb.fields()["notes/partly-scanned.pdf"] == {"incomplete": [plan.partial[0].reason]}
        (folder / "partly-scanned.pdf").write_bytes(pdf_of([["Words are on the first page."]]))
        assert compared(kb, folder, embedder).partial == ()
        assert "notes/partly-scanned.pdf" not in kb.fields()


def test_a_plan_makes_no_knowledge_base(kb_dir, folder):
    (folder / "a.md").write_text(WORDS)
    with KnowledgeBase.open(kb_dir, "none", create=True) as kb:
        assert kb.plan([folder]).new == ("notes/a.md",)
    assert not (kb_dir / "none").exists()


def test_a_plan_over_nothing_that_can_be_read_removes_nothing(kb_dir, folder, embedder):
    (folder / "a.md").write_text(WORDS)
    with KnowledgeBase.open(kb_dir, "notes", create=True) as kb:
        kb.ingest([folder], embedder)
        (folder / "a.md").write_bytes(b"\0")
        plan = kb.plan([folder])
    assert (plan.new, plan.removed, len(plan.skipped)) == ((), (), 1)


NAMES = ("a.md", "b.md", "c.txt", "d.py", ".e.md", "f.env")
TEXTS = (b"# One\n\nwords\n", b"other words\n", b"", b"\0", b"x = 1\n")


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TEXTS), min_size=1), min_size=2, max_size=4), st.data())
def test_any_plan_is_kept_to(tmp_path_factory, states, data):
    place = tmp_path_factory.mktemp("plan")
    folder = place / "notes"
    folder.mkdir()
    (folder / "stays.md").write_text("# Stays\n\nalways\n")
    embedder = HashEmbedder(max_tokens=256)
    with KnowledgeBase.open(place / "kb", "notes", create=True) as kb:
        for state in states:
            for name in NAMES:
                (folder / name).unlink(missing_ok=True)
            for name, text in state.items():
                (folder / name).write_bytes(text)
                if data.draw(st.booleans()):
                    old = time.time() - 60
                    os.utime(folder / name, (old, old))
            compared(kb, folder, embedder, hidden=data.draw(st.booleans()))
