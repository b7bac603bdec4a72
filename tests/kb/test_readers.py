import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.kb.readers import UnreadableError, markdown, read


def _headings(text):
    return [(heading.level, heading.name) for heading in markdown.headings(text)]


def _sections(text):
    reading = read("x.md", text.encode())
    return [(section.heading, reading.text[section.start : section.end]) for section in reading.sections]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("Grüße 日本".encode(), "Grüße 日本"),
        (codecs.BOM_UTF8 + "Grüße".encode(), "Grüße"),
        (codecs.BOM_UTF16_LE + "日本".encode("utf-16-le"), "日本"),
        (codecs.BOM_UTF16_BE + "日本".encode("utf-16-be"), "日本"),
        (codecs.BOM_UTF32_LE + "日本".encode("utf-32-le"), "日本"),
        (b"it\x92s caf\xe9", "it’s café"),
        (b"caf\xe9 \x81", "café \x81"),
        (b"one\r\ntwo\r", "one\r\ntwo\r"),
    ],
)
def test_encodings_of_text_files(data, text):
    assert read("a.txt", data).text == text
    assert read("a.md", data).text == text


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.txt", b"ab\0cd", "binary file"),
        ("a.txt", codecs.BOM_UTF16_LE + b"a", "begins like UTF-16"),
        ("a.md", codecs.BOM_UTF8 + b"\xff", "begins like UTF-8"),
        ("photo.png", b"\x89PNG\r\n\x1a\n", "binary file"),
        ("unknown", b"caf\xe9", "encoding"),
        ("a.PDF", b"%PDF-1.4 plain", "PDF files are not read"),
        ("a.docx", b"PK", "DOCX files are not read"),
        ("a.txt", b" \n\t", "no text"),
        ("a.md", b"", "no text"),
    ],
)
def test_what_is_no_text_says_why(name, data, reason):
    with pytest.raises(UnreadableError, match=reason):
        read(name, data)


def test_a_file_of_no_known_kind_is_text_if_it_is_utf8():
    assert read("Makefile", "all:\n\techo ✓".encode()).text == "all:\n\techo ✓"


def test_front_matter():
    text = '---\ntitle: "Heat: a guide"\ntags: [pla, "heat bed", pla, \'x\']\nDraft : yes\nlist:\n  - no\n---\nBody\n'
    fields, body = markdown.front_matter(text)
    assert fields == {"title": "Heat: a guide", "tags": "[pla, \"heat bed\", pla, 'x']", "draft": "yes", "list": ""}
    assert text[body:] == "Body\n"
    reading = read("a.md", text.encode())
    assert (reading.title, reading.tags, reading.markdown) == ("Heat: a guide", ("pla", "heat bed", "x"), True)
    assert [reading.text[section.start : section.end] for section in reading.sections] == ["Body\n"]


@pytest.mark.parametrize("text", ["---\ntitle: x\nnever closed\n", "text\n---\ntitle: x\n---\n", "--- \x00".replace("\x00", "x"), ""])
def test_what_is_no_front_matter_is_text(text):
    assert markdown.front_matter(text) == ({}, 0)


@pytest.mark.parametrize("tags", ["a, b", "[a,b]", "[ 'a' , \"b\" ]", "[a, b, ]"])
def test_tags(tags):
    assert read("a.md", f"---\ntags: {tags}\n---\nx".encode()).tags == ("a", "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One\n## Two ##\n###### Six # x\n", [(1, "One"), (2, "Two"), (6, "Six # x")]),
        ("#no\n####### seven\n    # code\n\\# no\n", []),
        ("   # Three spaces", [(1, "Three spaces")]),
        ("#\n# #\n", [(1, ""), (1, "")]),
        ("One\n===\n\nTwo\n---\n", [(1, "One"), (2, "Two")]),
        ("- item\n---\n> quote\n===\n\n---\na | b\n", []),
        ("line one\nline two\n---\n", []),
        ("```\n# code\n```\n# Real\n~~~ python\n# code\n```\n# code\n~~~~\n# Also\n", [(1, "Real"), (1, "Also")]),
        ("````\n```\n# code\n````\n# Real", [(1, "Real")]),
        ("``` a`b\n# Real", [(1, "Real")]),
        ("```\n# never closed\n", []),
        ("# A\r\n\r\ntext\r\n## B\r\n", [(1, "A"), (2, "B")]),
        ("#\tTab\n", [(1, "Tab")]),
    ],
)
def test_headings(text, expected):
    assert _headings(text) == expected


def test_sections_carry_the_path_of_their_headings():
    text = "intro\n\n# Guide\n\nfirst\n\n## Heat\n\nhot\n\n### Bed\n\nbed\n\n## Cold\n\ncold\n\n# Other\n\nend\n"
    assert _sections(text) == [
        ("Guide", "intro\n\n"),
        ("Guide", "# Guide\n\nfirst\n\n"),
        ("Guide > Heat", "## Heat\n\nhot\n\n"),
        ("Guide > Heat > Bed", "### Bed\n\nbed\n\n"),
        ("Guide > Cold", "## Cold\n\ncold\n\n"),
        ("Guide > Other", "# Other\n\nend\n"),
    ]


def test_a_heading_without_text_joins_the_next_section():
    assert _sections("# Guide\n\n## Heat\n\nhot\n") == [("Guide > Heat", "# Guide\n\n## Heat\n\nhot\n")]
    assert _sections("# A\n\nx\n\n## End\n") == [("A", "# A\n\nx\n\n"), ("A > End", "## End\n")]


def test_a_text_without_headings_is_one_section_under_its_title():
    assert _sections("---\ntitle: T\n---\nonly text") == [("T", "only text")]
    assert _sections("only text") == [("", "only text")]


@given(st.lists(st.sampled_from(["# a", "## b", "===", "---", "", "text", "```", "~~~~", "- x", "\t", "\r", "日本", "title: x"])))
def test_sections_are_in_order_and_hold_all_text_after_the_front_matter(lines):
    text = "\n".join(lines)
    if not text.strip():
        return
    reading = read("x.md", text.encode())
    body = markdown.front_matter(text)[1]
    covered = "".join(reading.text[section.start : section.end] for section in reading.sections)
    assert covered.strip() == text[body:].strip()
    assert all(section.start <= section.body <= section.end or section.body == 0 for section in reading.sections)
    assert all(one.end == two.start for one, two in zip(reading.sections, reading.sections[1:], strict=False))


def test_long_hostile_lines_take_no_time():
    for line in (
        "# " + " " * 200_000 + "x",
        "=" * 200_000,
        "`" * 200_000,
        "a" * 200_000 + ":" * 200_000,
        "#" * 200_000,
        "# x" + " #" * 100_000,
    ):
        read("x.md", f"---\n{line}\n---\n{line}\n\nx\n{line}\n".encode())
