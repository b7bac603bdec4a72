from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.errors import UsageError
from localrag.kb.chunking import Passage
from localrag.kb.filters import FolderRule, Where
from localrag.kb.protocols import DocumentRow
from localrag.kb.query import Term
from localrag.kb.store import Store
from tests.kb.servers import made_store

SIGNS = st.text("aB*?[]^-/é.", max_size=8)


@pytest.fixture(params=["folder", "server"])
def store(request, tmp_path):
    with made_store(request.param, tmp_path, request) as store:
        _put(store, "notes/guide/Heat.md", tags=("Price", "draft"), fields=(("author", "Ann Lee"), ("date", "2024-05-01")))
        _put(store, "notes/guide/cold.pdf", tags=("price",))
        _put(store, "other.md", fields=(("author", "Bo"),))
        yield store


def _put(store, source, text="alpha 中文字符", **more):
    passage = Passage(0, len(text), text)
    with store.writing():
        store.put_document(DocumentRow(f"/{source}", source, source, 1, **more), [passage], {passage.sha256: b"\0" * 8})


@pytest.mark.parametrize(
    ("texts", "ids"),
    [
        ([], None),
        (["tag=price"], [1, 2]),
        (["tag=PRICE", "tag=nothing"], [1, 2]),
        (["tag=price", "tag=draft"], [1, 2]),  # either
        (["tag=draft,author=ann*"], [1]),
        (["tag=price", "author=bo"], []),  # both
        (["author=Lee, Ann"], []),  # one condition
        (["author=*lee"], [1]),
        (["author=lee"], []),
        (["source=notes/guide/*.md"], [1]),
        (["source=notes"], [1, 2]),
        (["source=notes/"], [1, 2]),
        (["source=note"], []),
        (["format=md"], [1, 3]),
        (["format=.pdf"], [2]),
        (["date=2024-*"], [1]),
        (["tag=pri[c]e"], []),
        (["tag='; DROP TABLE fields; --"], []),
    ],
)
def test_what_passes(store, texts, ids):
    where = Where.parse(texts)
    assert store.allowed(where) == ids
    wanted = [1, 2, 3] if ids is None else ids
    assert sorted(one for one, _ in store.keyword_ids([Term("alpha")], 9, where)) == wanted
    assert sorted(one for one, _ in store.character_ids([Term("中 文 字")], 9, where)) == wanted
    assert len(store.sources(where)) == len(wanted)


@pytest.mark.parametrize("text", ["", "tag", "=x", "tag=", "1=x", "tag=" + "*a" * 7, "tag=" + "a" * 256, "tag=caf\udce9"])
def test_what_is_no_condition(text):
    with pytest.raises(UsageError) as caught:
        Where.parse([text])
    assert caught.value.hint


def test_a_condition_is_shown_as_it_was_written():
    where = Where.parse(["tag=a,source=b/*", "tag=c"])
    assert str(where) == "tag=a, tag=c, source=b/*"
    assert where
    assert not Where.parse([])


def test_a_run_of_stars_is_one_star():
    assert FolderRule("a" + "*" * 60 + "b", ()).holds("a/b")
    assert not FolderRule("a" + "*" * 60 + "b", ()).holds("a" * 60)


@given(pattern=SIGNS.filter(bool), source=SIGNS)
def test_a_folder_rule_holds_where_the_filter_of_its_pattern_passes(shared_db, pattern, source):
    _, values = Where((("source", (pattern,)),)).to_sql()
    passes = shared_db.execute("SELECT s GLOB ? OR s GLOB ? FROM (SELECT folded(?) AS s)", (*values, source)).fetchone()[0]
    if not pattern.endswith("/"):
        assert FolderRule(pattern, ()).holds(source) == bool(passes)


@pytest.fixture(scope="module")
def shared_db(tmp_path_factory):
    with closing(Store(tmp_path_factory.mktemp("db") / "kb.sqlite", create=True)) as store:
        yield store._db
