import codecs
import inspect
import io
import subprocess
import sys
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.kb import readers
from localrag.kb.readers import UnreadableError, markdown, read
from tests.growth import check_linear

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
BODY = (
    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body><w:p><w:r><w:t>Inside.</w:t></w:r></w:p>'
    "</w:body></w:document>"
)
TYPES = '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>'


def zipped(*names, body="x"):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, TYPES if name == "[Content_Types].xml" else body)
    return made.getvalue()


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
        (codecs.BOM_UTF8 + b"a\0b", "a\ufffdb"),
        (codecs.BOM_UTF16_LE + "日本".encode("utf-16-le"), "日本"),
        (codecs.BOM_UTF16_LE + "日\0本".encode("utf-16-le"), "日\ufffd本"),
        (codecs.BOM_UTF16_BE + "日本".encode("utf-16-be"), "日本"),
        (codecs.BOM_UTF32_LE + "日本".encode("utf-32-le"), "日本"),
        (b"it\x92s caf\xe9", "it’s café"),
        ("Пожалуйста, проверьте".encode("koi8_r"), "Пожалуйста, проверьте"),
        ("日本\n".encode("utf-16-le") * 9, "日本\n" * 9),
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
        ("a.odt", zipped("content.xml"), "it is damaged: content.xml in it is not XML"),
        ("a.odg", zipped("content.xml"), "ODG files are not read"),
        ("a.DOC", b"plain", "it is not in DOC format"),
        ("a.rtf", b"plain", "it is not in RTF format"),
        ("a.docx", b"plain", "it is not in DOCX format"),
        ("a.pdf", b"plain", "it is not in PDF format"),
        ("a.doc", OLE, "an OLE container"),
        ("a.docx", OLE, "an OLE container"),
        ("a.docx", OLE + "WordDocument".encode("utf-16-le"), "protected by a password or damaged"),
        ("a.xlsx", OLE + "EncryptedPackage".encode("utf-16-le"), "it is protected by a password"),
        ("a.txt", b"\x1f\x8b\x08text", "a gzip archive"),
        ("a", b"GGUF\x03", "a GGUF model"),
        ("a.txt", zipped("one.txt"), "a ZIP archive"),
        ("a.txt", b" \n\t", "no text"),
        ("a.md", b"", "no text"),
    ],
)
def test_what_is_no_text_says_why(name, data, reason):
    with pytest.raises(UnreadableError, match=reason):
        read(name, data)


def test_a_file_of_no_known_kind_is_text_if_it_is_utf8():
    assert read("Makefile", "all:\n\techo ✓".encode()).text == "all:\n\techo ✓"


@pytest.mark.parametrize("name", ["a.docx", "a.pdf", "a.doc", "a.xlsx", "a.txt", "a", "a.html"])
def test_a_document_is_known_by_what_it_holds(name):
    assert read(name, zipped("[Content_Types].xml", "word/document.xml", body=BODY)).text.strip() == "Inside."


@pytest.mark.parametrize("name", ["a.docx", "a.pdf", "a.doc", "a.xls", "a.epub", "a", "a.htm"])
def test_a_page_under_a_wrong_name(name):
    page = b"<!DOCTYPE html><html><head><title>T</title></head><body><p>Words of a page that is long enough.</p></body></html>"
    reading = read(name, page)
    assert "Words of a page" in reading.text
    assert "<p>" not in reading.text


def test_markup_in_a_text_file_is_its_text():
    assert read("a.txt", b"<html><p>x</p></html>").text == "<html><p>x</p></html>"
    assert read("a.txt", b"The header %PDF- marks a PDF, PK\x03 a ZIP.").text.startswith("The header")
    assert read("a.txt", b"GGUF is the format of llama.cpp.").text.startswith("GGUF")


def test_a_pdf_under_another_name_is_no_text():
    with pytest.raises(UnreadableError):
        read("a.txt", b"%PDF-1.7\nnothing of one")


def test_every_ending_has_a_reader():
    for reader in set(readers._READERS.values()):
        assert next(iter(inspect.signature(readers._function(reader)).parameters)) == "data", reader


def test_a_text_file_needs_no_library():
    program = (
        "import sys; from localrag.kb.readers import read; read('a.md', b'x'); read('a.txt', b'x');"
        "print([name for name in ('pypdf', 'tree_sitter', 'charset_normalizer', 'torch', 'email', 'html.parser') if name in sys.modules])"
    )
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {program}"], capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_what_front_matter_says_besides():
    text = "---\ntitle: T\ntags:\n  - a\n  - 'b c'\nAuthor: Ann\ndate: 2024-01-02\nkinds: [x, \"y\"]\nempty:\nsee:\n- one\n- two\n---\nx"
    reading = read("a.md", text.encode())
    assert reading.own_lines
    assert reading.tags == ("a", "b c")
    assert reading.fields == (
        ("author", "Ann"), ("date", "2024-01-02"), ("kinds", "x"), ("kinds", "y"), ("see", "one"), ("see", "two"),
    )  # fmt: skip


def test_front_matter():
    text = '---\ntitle: "Heat: a guide"\ntags: [pla, "heat bed", pla, \'x\']\nDraft : yes\nlist:\n  - no\n---\nBody\n'
    fields, body = markdown.front_matter(text)
    assert fields == {"title": "Heat: a guide", "tags": "[pla, \"heat bed\", pla, 'x']", "draft": "yes", "list": "[no]"}
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


HOSTILE_LINES = {
    "# and spaces": lambda size: "# " + " " * size + "x",
    "=": lambda size: "=" * size,
    "`": lambda size: "`" * size,
    "a and colons": lambda size: "a" * size + ":" * size,
    "#": lambda size: "#" * size,
    "closing #": lambda size: "# x" + " #" * (size // 2),
    "spaces and ---": lambda size: " " * size + "---",
    "links": lambda size: "[" * size + "](" * size,
    "brackets": lambda size: "<" * size,
    "emphasis": lambda size: "*a_" * (size // 3),
    "a table": lambda size: "|" * size + "\n" + "|-" * (size // 2),
}


@pytest.mark.parametrize("kind", HOSTILE_LINES)
def test_long_hostile_lines_take_as_long_as_their_length_says(kind):
    def reading(size):
        line = HOSTILE_LINES[kind](size)
        read("x.md", f"---\n{line}\n---\n{line}\n\nx\n{line}\n".encode())

    check_linear(reading, 200_000)


@pytest.mark.parametrize("reader", sorted({*readers._READERS.values(), *(kind for kind, _ in (*readers._MEMBERS, *readers._STREAMS))}))
def test_every_format_that_is_named_has_its_reader(reader):
    assert callable(readers._function(reader))


def test_a_table_is_read_by_its_ending():
    reading = readers.read("prices.csv", b"part,price\nnozzle,4\nbed,30\nbelt,9\n")
    assert "nozzle" in reading.text
    assert [place.kind for place in reading.places]
