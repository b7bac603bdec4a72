import random
import zipfile
from functools import partial
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.kb.readers import UnreadableError, docx, epub, package, pptx, records, xlsx
from localrag.kb.readers.base import Composer
from tests.kb.readers import office_files as files
from tests.kb.readers.office_files import cell, p, row, run, slide_table, sp, tbl


def _sections(reading):
    return [(section.heading, reading.text[section.start : section.end].strip()) for section in reading.sections]


def _places(reading):
    """(kind, number, first words) of each place."""
    return [(kind, number, reading.text[start : start + 5]) for start, kind, number in reading.places]


def _refused(read, data):
    with pytest.raises(UnreadableError) as error:
        read(data)
    return str(error.value)


# DOCX


def test_headings_by_style_whatever_its_language_and_by_outline_level():
    body = (
        p("Buch", "Titel") + p("vor") + p("Eins", "berschrift1") + p("a") + p("Zwei", "Kapitel") + p("b")
        + p("Drei", properties='<w:outlineLvl w:val="0"/>') + p("c") + p("keine", "berschrift1", '<w:outlineLvl w:val="9"/>') + p("d", "A")
    )  # fmt: skip
    reading = docx.read(files.docx(body))
    assert reading.title == "Buch"
    assert _sections(reading) == [
        ("Buch", "Buch\n\nvor"),
        ("Buch > Eins", "Eins\n\na"),
        ("Buch > Eins > Zwei", "Zwei\n\nb"),
        ("Buch > Drei", "Drei\n\nc\n\nkeine\n\nd"),
    ]
    assert reading.places == ()


def test_a_strict_document_and_one_without_styles_are_read():
    assert docx.read(files.docx(p("x"), namespace="http://purl.oclc.org/ooxml/wordprocessingml/main")).text == "x"
    assert docx.read(files.zipped({"word/document.xml": f'<w:document xmlns:w="{files.W}">{p("x")}</w:document>'})).text == "x"


def test_what_is_deleted_hidden_or_the_table_of_contents_is_left_out():
    body = p(
        run("kept ")
        + "<w:del><w:r><w:delText>deleted</w:delText></w:r><w:r><w:tab/><w:t>deleted</w:t></w:r></w:del>"
        + "<w:ins>" + run("inserted ") + "</w:ins>"
        + run("hidden ", "<w:vanish/>") + run("shown ", '<w:vanish w:val="0"/>')
        + "<w:r><w:rPr><w:rPrChange><w:rPr><w:vanish/></w:rPr></w:rPrChange></w:rPr><w:t>now shown</w:t></w:r>"
        + "<mc:AlternateContent><mc:Choice><w:r><w:t> once</w:t></w:r></mc:Choice><mc:Fallback><w:r><w:t> twice</w:t></w:r></mc:Fallback>"
        + "</mc:AlternateContent><w:r><w:instrText>PAGE</w:instrText></w:r>"
    ) + p("hidden", "Geheim") + p("One ... 5", "Verzeichnis1")  # fmt: skip
    assert docx.read(files.docx(body)).text == "kept inserted shown now shown once"


def test_a_hidden_mark_of_a_paragraph_hides_no_text_and_a_text_box_is_read():
    box = f"<w:r><w:txbxContent>{p('in the box')}</w:txbxContent><w:t>outside</w:t></w:r>"
    assert docx.read(files.docx(p("text", properties="<w:rPr><w:vanish/></w:rPr>") + p(box))).text == "text\n\nin the box\n\noutside"


def test_lists():
    deeper = '<w:numPr><w:ilvl w:val="1"/><w:numId w:val="1"/></w:numPr>'
    body = (
        p("To do") + p("one", "Liste") + p("two", "Liste", deeper) + p("Done") + p("no", "Liste", '<w:numPr><w:numId w:val="0"/></w:numPr>')
    )
    assert docx.read(files.docx(body)).text == "To do\n\n- one\n  - two\n\nDone\n\nno"


def test_footnotes_follow_their_paragraph_once():
    note = '<w:r><w:footnoteReference w:id="2"/></w:r>'
    notes = f'<w:footnote w:type="separator" w:id="0">{p("---")}</w:footnote><w:footnote w:id="2">{p("A")}{p("note")}</w:footnote>'
    reading = docx.read(files.docx(p(run("Text") + note + run(" more") + note) + p("End"), footnotes=notes))
    assert reading.text == "Text[1] more\n[1] A note\n\nEnd"


def test_a_row_stands_with_its_header():
    merged = "<w:tc><w:tcPr><w:vMerge{}/></w:tcPr>{}</w:tc>"
    region = (
        "<w:tbl><w:tr><w:trPr><w:tblHeader/></w:trPr><w:tc>" + p("Area") + "</w:tc><w:tc>" + p("City") + "</w:tc></w:tr>"
        "<w:tr>" + merged.format(' w:val="restart"', p("North")) + "<w:tc>" + p("Kiel") + "</w:tc></w:tr>"
        "<w:tr>" + merged.format("", "<w:p/>") + "<w:tc>" + p("Bremen") + p("(new)") + "</w:tc></w:tr></w:tbl>"
    )
    body = (
        p("Prices")
        + tbl(("Name", "Price"), ("Apple", "1.20 €"), ("Pear", "2"))
        + p("Data")
        + tbl(("Name", "Ann"), ("Town", "Kiel"))
        + p("Areas")
        + region
        + tbl(("x", p("a") + tbl(("b", "c")) + p("d")))
    )
    assert docx.read(files.docx(body)).text.split("\n\n") == [
        "Prices",
        "Name | Price\nName: Apple; Price: 1.20 €\nName: Pear; Price: 2",
        "Data",
        "Name | Ann\nTown | Kiel",
        "Areas",
        "Area | City\nArea: North; City: Kiel\nArea: North; City: Bremen (new)",
        "x | a b | c d",
    ]


def test_core_properties():
    properties = files.core("The  title", "Ann & Bob", "2020-01-01T00:00:00Z", "2021-02-03T04:05:06Z", "heat, bed")
    reading = docx.read(files.docx(p("x"), properties=properties))
    assert reading.title == reading.sections[0].heading == "The title"
    assert reading.fields == (("author", "Ann & Bob"), ("keywords", "heat, bed"), ("created", "2020-01-01"), ("date", "2021-02-03"))


# PPTX


def test_slides_of_pictures_are_named():
    picture = '<p:pic><p:nvPicPr><p:cNvPr id="3" name="p"/></p:nvPicPr></p:pic>'
    number = sp("7", kind="sldNum")
    slides = [
        sp("Title", kind="title") + picture,
        picture,
        picture + number,
        sp("text") + picture,
        "",
        picture,
        picture,
        slide_table(["a"]) + picture,
    ]
    reading = pptx.read(files.pptx(*slides, notes={5: ("words",)}, hidden=(6,)))
    assert reading.missing == ("slides 2-3 hold pictures and no text",)
    assert pptx.read(files.pptx(sp("text"), picture)).missing == ("slide 2 holds pictures and no text",)
    assert pptx.read(files.pptx(sp("text"), "")).missing == ()


def test_slides_in_the_order_of_the_presentation():
    data = files.pptx(
        sp("Start", kind="ctrTitle") + sp("one", "two") + sp("7", kind="sldNum") + sp("unseen", hidden=True),
        sp("Hidden", kind="title") + sp("not shown"),
        sp("untitled") + slide_table(("Item", "Cost"), ("Screw", "3"), ("Nut", "4")),
        notes={0: ("say", "this")},
        hidden={1},
        properties=files.core("Deck"),
    )
    reading = pptx.read(data)
    assert _sections(reading) == [
        ("Deck > Start", "Start\n\none\ntwo\n\nNotes: say\nthis"),
        ("Deck", "untitled\n\nItem | Cost\nItem: Screw; Cost: 3\nItem: Nut; Cost: 4"),
    ]
    assert _places(reading) == [("slide", 1, "Start"), ("slide", 3, "untit")]


# XLSX


def test_rows_of_sheets():
    sales = (
        row(1, cell("A1", "Report", "inlineStr"))
        + row(3, cell("A3", "0", "s"), cell("B3", "1", "s"), cell("D3", "Share", "inlineStr"))
        + row(4, cell("A4", "Apple", "inlineStr"), cell("B4", "45413", style=1), cell("D4", "0.256", style=2))
        + row(9, cell("A9", "Pear", "str"), cell("B9", "45413.5", style=3), cell("C9", "0.30000000000000004"), cell("D9", "1", "b"))
        + row(10, cell("A10", "99", "s"), cell("B10", "#N/A", "e"))
    )
    data = files.xlsx(
        {"Sales": sales, "Secret": row(1, cell("A1", "5")), "Very": row(1, cell("A1", "6")), "More": row(7, cell("A7", "1E3"))},
        strings=("Fruit", "Day"),
        formats=(0, 14, 9, 164),
        own=((164, 'yyyy\\-mm\\-dd" at "hh:mm'),),
        states={"Secret": "hidden", "Very": "veryHidden"},
        properties=files.core("Books"),
    )
    reading = xlsx.read(data)
    lines = [
        "Report",
        "Fruit | Day | Share",
        "Fruit: Apple; Day: 2024-05-01; Share: 25.6%",
        "Fruit: Pear; Day: 2024-05-01 12:00:00; 0.3; Share: TRUE",
        "Day: #N/A",
    ]
    assert _sections(reading) == [("Books > Sales", "Sales\n\n" + "\n".join(lines)), ("Books > More", "More\n\n1000")]
    assert [number for _, number, _ in _places(reading)] == [1, 1, 3, 4, 9, 10, 1, 7]


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        ("1", "dd.mm.yyyy", "1900-01-01"),
        ("59", "d/m/yy", "1900-02-28"),
        ("61", "[$-409]d-mmm-yy", "1900-03-01"),
        ("0.75", "h:mm AM/PM", "18:00:00"),
        ("1.0625", "[h]:mm:ss", "25:30:00"),
        ("45292.999999", "yyyy-mm-dd hh:mm", "2024-01-02 00:00:00"),
        ("45292", 'yyyy"年"m"月"', "2024-01-01"),
        ("45292", '#,##0.00" days"', "45292"),
        ("45292", "[Red]0.0;[Blue]-0.0", "45292"),
        ("45292", "General", "45292"),
        ("0.125", "0.0%", "12.5%"),
        ("-5", "yyyy", "-5"),
        ("99999999", "yyyy", "99999999"),
        ("1.5E-7", "0.00E+00", "1.5e-07"),
        ("12345678901234567890", "0", "12345678901234567890"),
        ("nan", "yyyy", "nan"),
        ("what", "yyyy", "what"),
    ],
)
def test_numbers_as_their_format_shows_them(text, code, shown):
    assert xlsx.number_as_text(text, xlsx.kind_of_format(code)) == shown


def test_days_counted_from_1904():
    assert xlsx.read(files.xlsx({"a": row(1, cell("A1", "0"))}, formats=(14,), date1904=True)).text == "a\n\n1904-01-01"


# CSV


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name,price\nApple,1\nPear,2\n", ["name | price", "name: Apple; price: 1", "name: Pear; price: 2"]),
        ("name;price\nApple;1,5\nPear;2,5\n", ["name | price", "name: Apple; price: 1,5", "name: Pear; price: 2,5"]),
        ("1,5;2,5\n3,5;4,5\n", ["1,5 | 2,5", "3,5 | 4,5"]),
        ("a\tb, c\n1\t2\n", ["a | b, c", "a: 1; b, c: 2"]),
        ("a|b\r1|2\r", ["a | b", "a: 1; b: 2"]),
        ("sep=|\r\na|b\r\n1|2\r\n", ["a | b", "a: 1; b: 2"]),
        ('a,b\n"one\ntwo","say ""x"""\n', ["a | b", 'a: one two; b: say "x"']),
        ('a,b\n1,"open\n2,x\n', ["a | b", 'a: 1; b: "open', "a: 2; b: x"]),
        ("yes,1\nno,2\nyes,3\n", ["yes | 1", "no | 2", "yes | 3"]),
        ("town,yes\nKiel,yes\n", ["town | yes", "Kiel | yes"]),
        ("item,2022,2023\nnut,5,6\n", ["item | 2022 | 2023", "item: nut; 2022: 5; 2023: 6"]),
        ("a,b\n1,2,3\n,4\n", ["a | b", "a: 1; b: 2; 3", "b: 4"]),
    ],
)
def test_rows_of_text(text, expected):
    assert records.read_csv(text.encode()).text.split("\n") == expected


def test_a_place_is_the_line_where_a_row_begins():
    reading = records.read_csv(b'sep=,\na,b\n"one\r\ntwo\xe9",x\n\n3,4\n')
    assert _places(reading) == [("row", 2, "a | b"), ("row", 3, "a: on"), ("row", 6, "a: 3;")]


def test_text_that_nothing_divides_is_read_as_it_stands():
    reading = records.read_csv(b"one line\nand, another\n\nthird\n")
    assert (reading.text, reading.own_lines, reading.places) == ("one line\nand, another\n\nthird\n", True, ())


def test_a_long_field_is_bounded_and_the_limit_of_the_process_stays():
    before = records.csv.field_size_limit()
    assert len(records.read_csv(b"a,b\n1," + b"x" * 1_000_000).text) > 1_000_000
    assert "longer than 1 MB" in _refused(records.read_csv, b"a,b\n1," + b"x" * 1_100_000)
    assert records.csv.field_size_limit() == before


@given(st.lists(st.sampled_from(["a", "b1", "7", ",", ";", "\t", "|", '"', "\n", "\r", "\r\n", " ", "日本", "sep=,\n"]), max_size=60))
def test_no_character_of_a_table_is_lost(pieces):
    text = "".join(pieces)
    reading = records.read_csv(text.encode())
    for word in ("a", "b1", "7", "日本"):
        assert text.count(word) <= reading.text.count(word)
    starts = [place.start for place in reading.places]
    assert starts == sorted(set(starts))


# EPUB


def test_chapters_in_reading_order():
    chapters = {
        "c1.xhtml": "<h1>One</h1><p>first</p>",
        "c2.xhtml": "<p>second</p><h2>Sub</h2><p>third</p>",
        "x.xhtml": "<p>not in order</p>",
    }
    data = files.epub(chapters, contents=(("c1.xhtml", "One"), ("c2.xhtml", "Two &amp; more")), order=["c2.xhtml", "c1.xhtml", "gone"])
    reading = epub.read(data)
    assert reading.title == "A Book"
    assert reading.fields == (("author", "Ann; Bob"), ("date", "2020-02-01"))
    assert _sections(reading) == [
        ("A Book > Two & more", "second"),
        ("A Book > Two & more > Sub", "Sub\n\nthird"),
        ("A Book > One", "One\n\nfirst"),
    ]
    assert _places(reading) == [("chapter", 1, "secon"), ("chapter", 2, "One\n\n")]


def test_titles_from_an_older_table_of_contents_with_its_doctype():
    reading = epub.read(files.epub({"c1.xhtml": "<p>first</p>"}, contents=(("c1.xhtml", "Chapter 1"),), ncx=True))
    assert _sections(reading) == [("A Book > Chapter 1", "first")]


def test_a_protected_book_says_so():
    chapters = {"c1.xhtml": "<p>x</p>"}
    assert "protected" in _refused(epub.read, files.epub(chapters, encrypted=("c1.xhtml",)))
    assert epub.read(files.epub(chapters, encrypted=("font.otf",))).text.strip() == "x"


# Hostile files

LAUGHS = (
    "<!DOCTYPE l [<!ENTITY a 'ha'>"
    + "".join(f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "]>"
)
XXE = '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
DOCUMENT = f'<w:document xmlns:w="{files.W}"><w:p><w:r><w:t>&{{}};</w:t></w:r></w:p></w:document>'
ALL = [(docx, "DOCX"), (pptx, "PPTX"), (xlsx, "XLSX"), (epub, "EPUB")]
GOOD = {
    docx: files.docx(p("Head", "berschrift1") + p("text") + tbl(("a", "b"), ("1", "2")), properties=files.core("t")),
    pptx: files.pptx(sp("Title", kind="title") + sp("text"), notes={0: ("note",)}),
    xlsx: files.xlsx({"a": row(1, cell("A1", "0", "s"), cell("B1", "45413", style=0))}, strings=("x",), formats=(14,)),
    epub: files.epub({"c1.xhtml": "<h1>One</h1><p>hello</p>"}, contents=(("c1.xhtml", "One"),)),
}


@pytest.mark.parametrize(("reader", "kind"), ALL)
def test_what_is_no_document_says_why(reader, kind):
    assert _refused(reader.read, b"") == "it is empty"
    assert _refused(reader.read, b"plain text") == f"it is not a {kind} file"
    assert "cut off" in _refused(reader.read, GOOD[reader][:-30])
    assert "is missing" in _refused(reader.read, files.zipped({"a.txt": "x"}))
    assert "not XML" in _refused(reader.read, _with(GOOD[reader], lambda part: part[: len(part) * 2 // 3]))
    locked = bytearray(GOOD[reader])
    at = -1
    while (at := locked.find(b"PK\x01\x02", at + 1)) >= 0:
        locked[at + 8] |= 1
    assert _refused(reader.read, bytes(locked)) == "it is protected by a password"


def _with(data, change):
    """The same container with its XML changed."""
    with zipfile.ZipFile(BytesIO(data)) as file:
        return files.zipped({name: change(file.read(name)) for name in file.namelist()})


@pytest.mark.parametrize("doctype", [LAUGHS, XXE, XXE.replace("x SYSTEM", "% x SYSTEM")])
def test_entities_are_refused(doctype):
    data = files.zipped({"word/document.xml": doctype + DOCUMENT.format("x")})
    assert _refused(docx.read, data) == "its XML declares entities"


def test_an_outer_doctype_is_not_fetched():
    data = files.zipped({"word/document.xml": '<!DOCTYPE d SYSTEM "file:///etc/passwd">' + DOCUMENT.format("amp")})
    assert docx.read(data).text == "&"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("<w:p>" * 5000 + "</w:p>" * 5000, "elements deep"),
        ("<w:p>" + "x" * 50_000_000 + "</w:p>", "zip bomb"),
        ("<!--" + "".join(random.Random(1).choices("abc", k=3_000_000)) + "-->", "longer than 1 MB"),
        ("".join(f"<x{number}/>" for number in range(30_000)), "different names"),
    ],
)
def test_what_is_too_much_is_refused(body, reason):
    assert reason in _refused(docx.read, files.docx(body))


def test_bounds_of_text_and_headings():
    for add, num, reason in (
        (lambda: Composer().paragraph("x" * 20_000_001), 1, "MB of text"),
        (partial(Composer().heading, 2, "x"), 100_001, "100,000 headings"),
    ):
        with pytest.raises(UnreadableError, match=reason):
            _repeated(add, num)
    composer = Composer()
    for level in (*range(3), *[3] * 40_000):
        composer.heading(level, "x" * 190 if level < 3 else "x")
        composer.paragraph("x")
    with pytest.raises(UnreadableError, match="MB of text"):  # the paths are longer than the text
        composer.reading()


def _repeated(add, num):
    for _ in range(num):
        add()


def test_bounds_over_all_members():
    many = files.zipped({f"{number}.xml": "" for number in range(package.MAX_MEMBERS + 1)})
    assert "10,000 files" in _refused(docx.read, many)
    data = files.docx("<w:p/>" * 100)
    few = package.Package(data, "DOCX", max_elements=150)
    few.parse("word/document.xml", package.XmlHandler())
    with pytest.raises(UnreadableError, match="elements"):
        few.parse("word/document.xml", package.XmlHandler())
    with pytest.raises(UnreadableError, match="unpacks to more than"):
        package.Package(data, "DOCX", max_unpacked_bytes=500).read("word/document.xml")
    with pytest.raises(UnreadableError, match="is larger than"):
        package.Package(data, "DOCX").read("word/document.xml", max_bytes=500)


def test_many_paragraphs_and_one_cell_far_to_the_right():
    assert docx.read(files.docx("<w:p><w:r><w:t>x</w:t></w:r></w:p>" * 50_000)).text.count("x") == 50_000
    rows = "".join(row(number, cell(f"XFD{number}", "1")) for number in range(1, 10_000))
    assert len(xlsx.read(files.xlsx({"a": rows})).places) == 10_000


def test_what_many_refer_to_does_not_multiply_without_bound():
    rows = "".join(row(number, cell(f"A{number}", "0", "s")) for number in range(1, 100))
    assert "MB of text" in _refused(xlsx.read, files.xlsx({"a": rows}, strings=["x" * 900_000]))
    wide = b",".join(b"h%d" % number for number in range(20_000)) + b"\n" + b"1,2\n" * 20_000
    assert records.read_csv(wide).text.endswith("h0: 1; h1: 2")


@pytest.mark.parametrize(("reader", "kind"), ALL)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_files_are_read_or_refused(reader, kind, data):
    whole = bytearray(GOOD[reader])
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=8)):
        whole[at] = value
    _survives(reader, bytes(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole))


@pytest.mark.parametrize(("reader", "kind"), ALL)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_xml_is_read_or_refused(reader, kind, data):
    seed = data.draw(st.integers(0, 2**32))
    change = random.Random(seed)

    def damage(part):
        pieces = part.split(b'"')  # values of attributes are changed most, so that it stays XML
        for _ in range(change.randrange(4)):
            at = change.randrange(len(pieces))
            pieces[at] = change.choice(
                [b"", b"-1", b"1e999", b"99999999999999999999", b"../../x", b"\xff", pieces[change.randrange(len(pieces))]]
            )
        return b'"'.join(pieces)

    _survives(reader, _with(GOOD[reader], damage))


def _survives(reader, data):
    try:
        reading = reader.read(data)
    except UnreadableError as error:
        assert str(error)
        assert "\n" not in str(error)
        return
    reading.text.encode()
    ends = [0]
    for section in reading.sections:
        assert ends[-1] <= section.start <= section.end <= len(reading.text)
        ends.append(section.end)
    starts = [place.start for place in reading.places]
    assert starts == sorted(starts)
    assert all(0 <= start <= len(reading.text) for start in starts)
