"""The files of office97 were made by LibreOffice; each holds text that nobody sees, marked "zebra"."""

import lzma
from pathlib import Path

import pytest

from localrag.kb.readers import UnreadableError, is_document, needs_threads, read
from localrag.kb.reading import Readers


def _probe(kind):
    return lzma.decompress((Path(__file__).parent / "office97" / f"probe.{kind}.xz").read_bytes())


def _sections(reading):
    return [(section.heading, reading.text[section.start : section.end].strip()) for section in reading.sections]


def test_an_rtf_document():
    data = (
        rb"{\rtf1\ansi{\stylesheet{\s1 heading 1;}}{\info{\title Guide}{\author Ann}}"
        rb"{\pard\s1\outlinelevel0 Heat\par}{\pard Gr\'fc\'dfe {\v unseen }and\par}"
        rb"{\trowd\cellx1000\cellx2000 Item\cell Cost\cell\row\trowd\cellx1000\cellx2000 Screw\cell 3\cell\row}}"
    )
    reading = read("a.rtf", data)
    assert reading.title == "Guide"
    assert dict(reading.fields)["author"] == "Ann"
    assert _sections(reading) == [("Guide > Heat", "Heat\n\nGrüße and\n\nItem | Cost\nItem: Screw; Cost: 3")]
    assert read("a.txt", data).text == reading.text


def test_tracked_deletions_of_rtf_are_left_out():
    data = rb"{\rtf1 kept {\deleted gone {\b inner} \'e9 \u233?}still \deleted gone\deleted0 there}"
    assert read("a.rtf", data).text.split() == ["kept", "still", "there"]
    assert read("a.rtf", rb"{\rtf1 a}}}{\deleted b}").text.split() == ["a"]


def test_a_word_97_document():
    text = read("a.doc", _probe("doc")).text
    assert text.startswith("Opening chapter\n")
    assert "The closing visible paragraph." in text


def test_hidden_sheets_of_excel_97_are_left_out():
    reading = read("a.xls", _probe("xls"))
    assert _sections(reading) == [("Shown", "Shown\n\nFruit | Price\nFruit: Apple; Price: three"), ("Last", "Last\n\nclosing visible cell")]


def test_a_powerpoint_97_presentation_says_each_line_once():
    text = read("a.ppt", _probe("ppt")).text
    assert [text.count(line) for line in ("Visible opening slide", "Visible closing slide", "Click to edit")] == [1, 1, 0]


def test_a_fictionbook():
    data = (
        b'<?xml version="1.0"?><FictionBook xmlns="http://www.gribuser.ru/xml/fictionbook/2.0"><body><section><title><p>Part</p></title>'
        b"<p>words</p></section></body></FictionBook>"
    )
    assert _sections(read("a.fb2", data)) == [("Part", "Part\n\nwords")]


@pytest.mark.parametrize("kind", ["doc", "xls", "ppt"])
def test_a_document_is_known_by_what_it_holds(kind):
    data = _probe(kind)
    assert read("a.docx", data).text == read(f"a.{kind}", data).text == read("a", data).text
    assert is_document("a", data)
    with pytest.raises(UnreadableError):
        read(f"a.{kind}", data[:2000])


def test_the_limited_process_reads_them_beside_others():
    with Readers() as readers:
        assert readers.read("a.md", b"text").text == "text"
        assert not needs_threads("a.md", b"text")
        first = readers.pid
        assert "closing visible" in readers.read("a.xls", _probe("xls")).text
        second = readers.pid
        assert "Opening" in readers.read("a.doc", _probe("doc")).text
        assert readers.read("a.md", b"text").text == "text"
        assert first != second == readers.pid
