import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.kb.query import any_of, parse
from localrag.terms import MAX_TERMS

TEXTS = {
    1: "The nozzle was annealed in an oven. Thermal runaway is an error.",
    2: "An error of the thermal fuse: runaway costs. Printing overhangs.",
    3: "打印温度是多少。材料需要干燥",
    4: "ノズルの温度は PLA材料 で決まる。水を使う",
    5: "노즐의 온도",
    6: "温度, and nothing else",
}


@pytest.fixture(scope="module")
def db():
    """The two full-text tables of a knowledge base, without the knowledge base."""
    base = sqlite3.connect(":memory:")
    base.execute("CREATE VIRTUAL TABLE by_word USING fts5 (text, tokenize = 'porter unicode61 remove_diacritics 2')")
    base.execute("CREATE VIRTUAL TABLE by_trigram USING fts5 (text, tokenize = 'trigram')")
    for table in ("by_word", "by_trigram"):
        base.executemany(f"INSERT INTO {table} (rowid, text) VALUES (?, ?)", TEXTS.items())
    yield base
    base.close()


def found(db, text):
    query = parse(text)
    ids = set()
    for table, expressions in (("by_word", query.keyword), ("by_trigram", query.trigram)):
        if expressions:
            ids |= {one for (one,) in db.execute(f"SELECT rowid FROM {table} WHERE {table} MATCH ?", (any_of(expressions),))}
    return ids


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
        ("打印温度", {3}),
        ("请问打印温度", {3}),  # some trigrams of the question are enough
        ("온도를", set()),
        ("노즐의", {5}),
        ("PLA材料", {3, 4}),  # 材料 stands at the beginning of a clause, too
        ("PLA 温度は", {4}),
        ("「温度是多少」", {3}),
        ("「印温多少」", set()),
        ("温度", {6}),
        ("what is the of and", set()),
        ("", set()),
    ],
)
def test_what_a_question_finds(db, text, ids):
    assert found(db, text) == ids


def test_no_more_than_so_many_things_are_looked_for():
    assert len(parse(" ".join(f"w{at}" for at in range(1000))).keyword) == MAX_TERMS
    assert len(parse("".join(map(chr, range(0x4E00, 0x4F00)))).trigram) == MAX_TERMS
    assert len(parse(" ".join(f'"a w{at}"' for at in range(1000))).keyword) == MAX_TERMS
    assert not parse("?")
    assert parse("x")


@given(
    st.text(st.characters(codec="utf-8"), max_size=40)
    | st.lists(st.sampled_from(['"', "*", "oven", "AND", "温", "温度是", "(", "^", "é\u0301", "x:", "«", "»"]), max_size=9).map("".join)
)
def test_any_text_is_a_question(text):
    base = sqlite3.connect(":memory:")
    try:
        base.execute("CREATE VIRTUAL TABLE t USING fts5 (heading, text, tokenize = 'porter unicode61')")
        query = parse(text)
        for expression in (*query.keyword, *query.trigram):
            assert base.execute("SELECT count(*) FROM t WHERE t MATCH ?", (expression,)).fetchone() == (0,)
            inside = expression.replace('"* OR "', "").replace('" OR "', "").removesuffix("*")
            assert inside[0] == inside[-1] == '"'
            assert all(char.isalnum() or char == " " or char >= "\u0300" for char in inside[1:-1])
    finally:
        base.close()
