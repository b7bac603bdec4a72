import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.kb.chunking import Passage
from localrag.kb.protocols import DocumentRow
from localrag.kb.query import Term, parse
from localrag.kb.store import fts5_query
from localrag.text.terms import MAX_TERMS
from tests.kb.servers import made_store

TEXTS = {
    1: "The nozzle was annealed in an oven. Thermal runaway is an error.",
    2: "An error of the thermal fuse: runaway costs. Printing overhangs.",
    3: "打印温度是多少。材料需要干燥",
    4: "ノズルの温度は PLA材料 で決まる。水を使う",
    5: "노즐의 온도",
    6: "温度, and nothing else",
}


@pytest.fixture(scope="module", params=["folder", "server"])
def store(request, tmp_path_factory):
    """A store of these texts, whose ids are those above."""
    with made_store(request.param, tmp_path_factory.mktemp("query"), request) as store:
        for one, text in TEXTS.items():
            passage = Passage(0, len(text), text)
            with store.writing():
                store.put_document(DocumentRow(f"/{one}", f"{one}", "", 1), [passage], {passage.sha256: b"\0" * 8})
        yield store


def found(store, text):
    query = parse(text)
    ids = {one for one, _ in store.keyword_ids(query.keyword, 99)} if query.keyword else set()
    return ids | ({one for one, _ in store.character_ids(query.characters, 99)} if query.characters else set())


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("runaway", {1, 2}),
        ("What is a thermal runaway?", {1, 2}),
        ('"thermal runaway"', {1}),
        ("“thermal runaway” or „thermal runaway“ or «thermal runaway»", {1}),
        ('"is an error"', {1}),  # stop words count in a phrase
        ('"runaway"', {1, 2}),
        ('"thermal', {1, 2}),  # one quotation mark is none
        ("over*", {2}),
        ("anneal*", {1}),
        ("anneali*", {1}),  # the stem is shorter than the prefix
        ("printi*", {2}),
        ("no*", {1, 6}),
        ("an*", {1, 2, 6}),
        ("2 * runaway", {1, 2}),
        ("a*runaway*b", {1, 2}),
        ("**runaway**", {1, 2}),
        ("打印温度", {3, 4, 6}),
        ("请问打印温度", {3, 4, 6}),  # some pairs of the question are enough
        ("온도를", {5}),
        ("노즐의", {5}),
        ("水", {4}),
        ("PLA材料", {3, 4}),
        ("PLA 温度は", {3, 4, 6}),
        ("「PLA材料」", {4}),
        ("「温度是多少」", {3}),
        ("「印温多少」", set()),
        ("温度", {3, 4, 6}),
        ("what is the of and", set()),
        ("", set()),
    ],
)
def test_what_a_question_finds(store, text, ids):
    assert found(store, text) == ids


def test_no_more_than_so_many_things_are_looked_for():
    assert len(parse(" ".join(f"w{at}" for at in range(1000))).keyword) == MAX_TERMS
    assert len(parse("".join(map(chr, range(0x4E00, 0x4F00)))).characters) == MAX_TERMS
    assert len(parse(" ".join(f'"a w{at}"' for at in range(1000))).keyword) == MAX_TERMS
    assert not parse("?")
    assert parse("x")


def test_what_is_looked_for():
    assert parse('"an Oven" anneali* 温度').keyword == (
        Term("an oven"),
        Term("anneali", is_prefix=True, stems=("anneal",)),
    )
    assert parse("温度 x").characters == (Term("温 度"), Term("x"))


ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=40) | st.lists(
    st.sampled_from(['"', "*", "oven", "AND", "温", "温度是", "(", "^", "é\u0301", "x:", "«", "»", "a_b*", "\u0301*"]), max_size=9
).map("".join)


@given(ANY_TEXT)
def test_what_is_looked_for_is_no_syntax(text):
    query = parse(text)
    for term in (*query.keyword, *query.characters):
        assert all(char.isalnum() or char == " " or char >= "\u0300" for each in (term.text, *term.stems) for char in each)


@given(ANY_TEXT)
def test_any_text_is_a_question(store, text):
    query = parse(text)
    for terms, holders in ((query.keyword, store.keyword_holders), (query.characters, store.character_holders)):
        matches = holders(terms, [1, 2])
        assert len(matches) == len(terms)
        assert all(set(ids) <= {1, 2} and len(ids) <= num <= len(TEXTS) for num, ids in matches)


@pytest.mark.parametrize("text", ['oven"', '" OR "x', "oven*", "^oven", 'a:"'])
def test_no_term_becomes_syntax_of_fts5(text):
    base = sqlite3.connect(":memory:")
    try:
        base.execute("CREATE VIRTUAL TABLE t USING fts5 (text)")
        base.execute("INSERT INTO t VALUES ('x')")
        assert base.execute("SELECT count(*) FROM t WHERE t MATCH ?", (fts5_query([Term(text)]),)).fetchone() == (0,)
    finally:
        base.close()
