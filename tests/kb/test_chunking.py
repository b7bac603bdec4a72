import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import TARGET_TOKENS, _windows, cut, split_counted
from localrag.kb.readers import Reading, UnreadableError, read
from localrag.kb.readers.base import Locator, Section
from tests.kb.hash_embedder import HashEmbedder

MARKDOWN = (
    "# Head\n\n",
    "## Sub\n",
    "Title\n===\n",
    "```\n# code\nx = 1\n```\n",
    "- item\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "> quote\n",
)
SPACES = ("\n\n", "\n", " ", "\r\n", "\t", "\u200b", "\u3000")
WORDS = ("A sentence about heat. ", "这是一个句子。", "日本語", "👩‍👩‍👧‍👦", "🇩🇪", "e\u0301", "x" * 50, "aGVsbG8gd29ybGQ" * 20, "<b>")
FRAGMENTS = st.sampled_from((*MARKDOWN, *SPACES, *WORDS))
TEXTS = st.lists(FRAGMENTS | st.text(max_size=8), max_size=40).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS, st.integers(8, 90), st.sampled_from(["x.md", "x.txt"]))
def test_passages_are_whole_ordered_slices_that_the_embedder_takes(text, max_tokens, name):
    embedder = HashEmbedder(max_tokens=max_tokens)
    try:
        reading = read(name, text.encode("utf-8", "replace"))
    except UnreadableError:
        return
    passages = cut(reading, embedder)
    at = 0
    for passage in passages:
        assert passage.text == reading.text[passage.start : passage.end]
        assert passage.text.strip()
        assert passage.start >= at
        at = passage.end
        assert embedder.count(passage.embedded) <= max_tokens
        assert any(section.start <= passage.start and passage.end <= section.end for section in reading.sections)
    embedder.embed([passage.embedded for passage in passages])
    if name == "x.txt":
        assert "".join("".join(passage.text for passage in passages).split()) == "".join(reading.text.split())


def test_a_section_that_fits_is_one_passage_with_its_heading():
    reading = read("x.md", b"# Guide\n\nFirst.\n\n## Heat\n\nIt is hot.\n\nVery hot.\n")
    passages = cut(reading, HashEmbedder())
    assert [(passage.heading, passage.text) for passage in passages] == [
        ("Guide", "# Guide\n\nFirst."),
        ("Guide > Heat", "## Heat\n\nIt is hot.\n\nVery hot."),
    ]
    assert passages[1].embedded == "Guide > Heat\n## Heat\n\nIt is hot.\n\nVery hot."


def test_a_long_section_is_cut_at_its_paragraphs_and_no_passage_is_a_heading_alone():
    paragraphs = [f"Paragraph {at} " + "about heat " * 10 for at in range(6)]
    reading = read("x.md", ("# Guide\n\n" + "\n\n".join(paragraphs)).encode())
    passages = cut(reading, HashEmbedder())
    assert [passage.text for passage in passages] == [paragraph.strip() for paragraph in paragraphs]
    assert {passage.heading for passage in passages} == {"Guide"}


def test_a_heading_that_is_in_no_path_is_not_lost():
    long = "\n\n".join(f"Paragraph {at} " + "about heat " * 10 for at in range(6))
    passages = cut(read("x.md", f"# Guide\n\n## No more frobnicators\n\n## Heat\n\n{long}\n".encode()), HashEmbedder())
    assert {passage.heading for passage in passages} == {"Guide > Heat"}
    assert "No more frobnicators" in "\n".join(passage.text for passage in passages)


def test_a_long_heading_path_loses_its_outer_parts():
    headings = "".join(f"{'#' * level} Chapter {'of words ' * level}\n\n" for level in range(1, 5))
    passages = cut(read("x.md", f"{headings}text\n\n# {'long ' * 40}\n\nmore\n".encode()), HashEmbedder(max_tokens=60))
    assert passages[0].heading == "Chapter of words of words of words of words"
    assert passages[0].text == "text"  # four headings and it would not fit
    assert passages[-1].heading == ""
    assert "more" in passages[-1].text


def test_a_long_word_of_few_tokens_is_still_cut():
    class OneToken(HashEmbedder):
        def count(self, text):
            return len(text.split())  # as a WordPiece tokenizer counts a word that it does not know

    passages = cut(read("x.txt", b"A" * 100_000), OneToken(max_tokens=20))
    assert max(len(passage.text) for passage in passages) <= 200
    assert sum(len(passage.text) for passage in passages) == 100_000


def test_a_passage_is_never_larger_than_the_target():
    embedder = HashEmbedder(max_tokens=8192)
    passages = cut(read("x.txt", b"word and word " * 3000), embedder)
    assert TARGET_TOKENS // 2 < max(embedder.count(passage.embedded) for passage in passages) <= TARGET_TOKENS


@pytest.mark.parametrize("text", ["界" * 30_000, "word " * 6000, "Line.\n" * 5000, "a\n\nb " * 5000])
def test_the_splitter_never_sees_a_long_text_at_once(text):
    windows = list(_windows(text, 10, len(text) - 10))
    assert all(end - start <= 4000 for start, end in windows)
    assert "".join(text[start:end] for start, end in windows) == text[10:-10]
    assert all(text[end - 1] in "界 \n" for _, end in windows[:-1])


def test_an_embedder_that_takes_less_than_a_character_is_an_error():
    class Large(HashEmbedder):
        def count(self, text):
            return 100 * len(text)

    with pytest.raises(KnowledgeBaseError, match="limit is 64"):
        cut(Reading("abc", (Section(0, 3),)), Large())


def test_plain_text_in_counted_pieces():
    text = "  one two three four five six seven eight nine ten  "
    pieces = list(split_counted(text, lambda piece: len(piece.split()), 4))
    assert all(text[at:].startswith(piece) for at, piece in pieces)
    assert [piece for _, piece in pieces] == ["one two three four", "five six seven eight", "nine ten"]
    assert list(split_counted(" \n", len, 4)) == []


@pytest.mark.parametrize(
    ("more", "places"),
    [
        ({"own_lines": True}, ["lines 1-2", "line 4"]),
        ({"places": (Locator(0, "page", 3), Locator(12, "page", 4), Locator(17, "page", 5))}, ["pages 3-4", "page 5"]),
        ({"places": (Locator(0, "slide", 1),)}, ["slide 1", "slide 1"]),
        ({}, ["", ""]),
    ],
)
def test_passages_know_their_place_in_the_file(more, places):
    text = "one line\nand two\n\nthe fourth\n"
    sections = (Section(0, 17), Section(17, len(text)))
    assert [passage.place for passage in cut(Reading(text, sections, **more), HashEmbedder())] == places
