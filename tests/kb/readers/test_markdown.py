import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.kb.readers import markdown


def _titles(text):
    return [(mark.level, mark.name) for mark in markdown.titles(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("=====\nTitle\n=====\n\nOne\n===\n\nTwo\n---\n\nThree\n=====\n", [(1, "Title"), (2, "One"), (3, "Two"), (2, "Three")]),
        ("====\n In \n====\nx\n", [(1, "In")]),
        ("A\n=\n\nHeat bed\n~~~~\n", [(1, "A"), (2, "Heat bed")]),
        ("Over\n==\n", []),  # shorter than the title, and than four
        ("日本\n====\n\n日本\n===\n", [(1, "日本")]),
        ("two lines\nof text\n-------\n", []),
        ("  indented\n  --------\n  x\n--------\n", []),
        ("text\n\n-----\n\ntext\n", []),
        ("+---+\n| a |\n+---+\n\n=== ===\na   b\n=== ===\n", []),
        ("A\r\n====\r\n\r\ntext\r\nB\r\n", [(1, "A")]),
        ("Title\n=-=-=\n", []),
        ("One\n***\nTwo\n***\n", [(1, "One"), (1, "Two")]),
        ("=====\n-----\n=====\n", []),
    ],
)
def test_titles(text, expected):
    assert _titles(text) == expected


def test_sections_are_the_files_own_text():
    text = ".. _top:\n\nGuide\n=====\n\n:Author: Ann Lee\n:Date: 2024-01-02\n\nintro\n\n"
    text += "Heat\n----\n\n.. note::\n\n   Hot!\n\nCold\n----\ncold\n"
    reading = markdown.read_rst(text.encode())
    assert reading.text == text
    assert reading.own_lines
    assert reading.title == "Guide"
    assert dict(reading.fields) == {"author": "Ann Lee", "date": "2024-01-02"}
    assert [(section.heading, text[section.start : section.end]) for section in reading.sections] == [
        ("Guide", ".. _top:\n\n"),
        ("Guide", "Guide\n=====\n\n:Author: Ann Lee\n:Date: 2024-01-02\n\nintro\n\n"),
        ("Guide > Heat", "Heat\n----\n\n.. note::\n\n   Hot!\n\n"),
        ("Guide > Cold", "Cold\n----\ncold\n"),
    ]
    assert text[: reading.sections[2].body].endswith("Heat\n----\n")


def test_a_text_without_titles_is_one_section():
    reading = markdown.read_rst(b"only text\n")
    assert [(section.start, section.end, section.heading) for section in reading.sections] == [(0, 10, "")]


@given(st.lists(st.sampled_from(["====", "----", "A title", "x", "", " y", ":a: b", "..", "\t", "日本", "\r"])))
def test_sections_hold_all_text(lines):
    text = "\n".join(lines)
    reading = markdown.read_rst(text.encode())
    assert "".join(text[section.start : section.end] for section in reading.sections).strip() == text.strip()
    assert all(one.end == two.start for one, two in pairwise(reading.sections))
    assert all(section.start <= section.body <= section.end or section.body == 0 for section in reading.sections)


def test_long_lines_take_no_time():
    started = time.process_time()
    for line in ("=" * 200_000, "=-" * 100_000, "x" * 200_000 + "\n" + "=" * 200_000, ":a" * 100_000, "=" * 200_000 + " " * 200_000 + "x"):
        markdown.read_rst(f"x\n{line}\n{line}\n".encode())
    assert time.process_time() - started < 5
