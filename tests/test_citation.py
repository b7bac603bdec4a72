"""Citations are checked against what was supplied."""

from localrag.citation import cite
from localrag.passages import Chunk, Citation, Hit


def hits(*labels):
    for label in labels:
        scope, _, number = label.rpartition("/")
        yield Hit(Chunk(id=int(number), document_id=1, ordinal=0, text="", start=0, end=0, source="a", scope=scope), 1.0)


def test_each_is_named_once_in_order_and_invented_ones_are_told_apart():
    text = "Hot [KB#12], colder (KB#3; KB#12) and [KB#99]."
    assert cite(text, hits("3", "12")) == [Citation("KB#12", True), Citation("KB#3", True), Citation("KB#99", False)]


def test_the_scope_is_part_of_the_label():
    assert cite("[KB#pets/1] [KB#1] [KB#stdin/1]", hits("pets/1")) == [
        Citation("KB#pets/1", True),
        Citation("KB#1", False),
        Citation("KB#stdin/1", False),
    ]


def test_what_only_looks_like_one_is_none():
    assert cite("KB# 12, KB#x, [KB12], SKB#1, KB#1a", hits("1", "12")) == []
