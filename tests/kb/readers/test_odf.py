import random
from xml.sax.saxutils import escape

import pytest

from localrag.kb.readers import UnreadableError, odf, read
from tests.kb.readers.office_files import zipped

_SPACES = "office style text table presentation meta"
NAMESPACES = " ".join(f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"' for name in _SPACES.split())
NAMESPACES += ' xmlns:draw="urn:oasis:names:tc:opendocument:xmlns:drawing:1.0" xmlns:dc="http://purl.org/dc/elements/1.1/"'
STYLES = (
    '<style:style style:name="Unseen" style:family="text"><style:text-properties text:display="none"/></style:style>'
    '<style:style style:name="Heir" style:family="text" style:parent-style-name="Unseen"/>'
    '<style:style style:name="Loop" style:family="text" style:parent-style-name="Loop"/>'
    '<style:style style:name="Aside" style:family="table"><style:table-properties table:display="false"/></style:style>'
    '<style:style style:name="Skipped" style:family="drawing-page">'
    '<style:drawing-page-properties presentation:visibility="hidden"/></style:style>'
)


def odf_of(kind, body, *, meta="", manifest="<manifest/>"):
    """A document whose body is the inner XML of office:text, office:spreadsheet or office:presentation."""
    content = (
        f"<office:document-content {NAMESPACES}><office:automatic-styles>{STYLES}</office:automatic-styles>"
        f"<office:body><office:{kind}>{body}</office:{kind}></office:body></office:document-content>"
    )
    return zipped(
        {
            "mimetype": f"application/vnd.oasis.opendocument.{kind}",
            "content.xml": content,
            "meta.xml": f"<office:document-meta {NAMESPACES}><office:meta>{meta}</office:meta></office:document-meta>",
            "META-INF/manifest.xml": manifest,
        }
    )


def p(text):
    return f"<text:p>{text if text.startswith('<') else escape(text)}</text:p>"


def h(level, text):
    return f'<text:h text:outline-level="{level}">{text}</text:h>'


def cells(*texts):
    return "".join(f"<table:table-cell>{p(text)}</table:table-cell>" for text in texts)


def row(*texts, repeated=1):
    return f'<table:table-row table:number-rows-repeated="{repeated}">{cells(*texts)}</table:table-row>'


def _sections(reading):
    return [(section.heading, reading.text[section.start : section.end].strip()) for section in reading.sections]


def test_a_text_with_headings_lists_notes_and_a_table():
    inner = f"<text:list><text:list-item>{p('inner')}</text:list-item></text:list>"
    items = f"<text:list><text:list-item>{p('one')}{inner}</text:list-item></text:list>"
    note = "<text:note><text:note-citation>7</text:note-citation><text:note-body><text:p>below</text:p></text:note-body></text:note>"
    table = f"<table:table>{row('Item', 'Cost', 'Kind')}{row('Screw', '3', 'steel')}</table:table>"
    body = h(1, "Guide") + f'<text:p>a<text:s text:c="2"/>b{note}<text:line-break/>c</text:p>' + h(2, "Parts") + items + table
    reading = odf.read(
        odf_of(
            "text",
            body,
            meta="<dc:title>Book</dc:title><meta:initial-creator>Ann</meta:initial-creator><dc:date>2024-05-01T10:00:00</dc:date>",
        )
    )
    assert _sections(reading) == [
        ("Book > Guide", "Guide\n\na  b[1]\nc\n[1] below"),
        ("Book > Guide > Parts", "Parts\n\n- one\n  - inner\n\nItem | Cost | Kind\nItem: Screw; Cost: 3; Kind: steel"),
    ]
    assert (reading.title, reading.fields, reading.places) == ("Book", (("author", "Ann"), ("date", "2024-05-01")), ())


def test_what_is_deleted_hidden_or_the_table_of_contents_is_left_out():
    body = (
        f"<text:tracked-changes><text:changed-region><text:deletion>{p('deleted')}</text:deletion></text:changed-region></text:tracked-changes>"
        '<text:p>kept <text:span text:style-name="Unseen">unseen <text:span>inner</text:span></text:span>'
        '<text:span text:style-name="Heir">heir</text:span><text:span text:style-name="Loop">shown</text:span></text:p>'
        f'<text:section text:display="none">{p("section")}</text:section>'
        f"<text:table-of-content>{p('contents 3')}</text:table-of-content>"
        "<text:p>end<office:annotation><dc:creator>x</dc:creator><text:p>comment</text:p></office:annotation></text:p>"
    )
    assert odf.read(odf_of("text", body)).text == "kept shown\n\nend"


def test_rows_of_sheets_with_their_numbers():
    date = '<table:table-cell office:value-type="date" office:date-value="2024-05-01T00:00:00"><text:p>1.5.24</text:p></table:table-cell>'
    empty = '<table:table-cell table:number-columns-repeated="16000"/>'
    sheet = (
        row(repeated=3) + row("Fruit", "Day") + f"<table:table-row>{cells('Apple')}{date}{empty}</table:table-row>" + row("Pear", "soon")
    )
    body = (
        f'<table:table table:name="Sales">{sheet}</table:table>'
        f'<table:table table:name="Secret" table:style-name="Aside">{row("hidden")}</table:table>'
        f'<table:table table:name="More">{row("x")}</table:table>'
    )
    reading = odf.read(odf_of("spreadsheet", body))
    assert _sections(reading) == [
        ("Sales", "Sales\n\nFruit | Day\nFruit: Apple; Day: 2024-05-01\nFruit: Pear; Day: soon"),
        ("More", "More\n\nx"),
    ]
    assert [(kind, number) for _, kind, number in reading.places] == [("row", n) for n in (1, 4, 5, 6, 1, 1)]


def test_slides_with_their_titles_and_notes():
    def slide(title, text, style="", notes=""):
        box = f'<draw:frame presentation:class="title"><draw:text-box>{p(title)}</draw:text-box></draw:frame>' if title else ""
        aside = f"<presentation:notes><draw:frame><draw:text-box>{p(notes)}</draw:text-box></draw:frame></presentation:notes>"
        frame = f"<draw:frame><draw:text-box>{p(text)}</draw:text-box></draw:frame>"
        return f'<draw:page draw:style-name="{style}">{box}{frame}{aside}</draw:page>'

    reading = odf.read(odf_of("presentation", slide("Start", "one", notes="say this") + slide("", "secret", "Skipped") + slide("", "last")))
    assert _sections(reading) == [("Start", "Start\n\none\n\nNotes: say this"), ("", "last")]
    assert [(kind, number, reading.text[start : start + 5]) for start, kind, number in reading.places] == [
        ("slide", 1, "Start"),
        ("slide", 3, "last"),
    ]


@pytest.mark.parametrize("name", ["a.odt", "a.ods", "a.docx", "a.txt", "a"])
def test_an_opendocument_file_is_known_by_what_it_holds(name):
    assert read(name, odf_of("text", p("Inside."))).text == "Inside."


def test_a_protected_document_says_so():
    with pytest.raises(UnreadableError, match="password"):
        odf.read(odf_of("text", p("x"), manifest="<manifest><encryption-data/></manifest>"))


def test_damaged_files_are_read_or_refused():
    whole = odf_of("text", h(1, "Guide") + p("words"))
    change = random.Random(0)
    for _ in range(200):
        broken = bytearray(whole)
        for _ in range(4):
            broken[change.randrange(len(broken))] = change.randrange(256)
        try:
            assert isinstance(odf.read(bytes(broken)).text, str)
        except UnreadableError:
            continue


def test_a_repeated_cell_does_not_multiply_without_bound():
    sheet = f'<table:table-row><table:table-cell table:number-columns-repeated="999999999">{p("x")}</table:table-cell></table:table-row>'
    assert len(odf.read(odf_of("spreadsheet", f'<table:table table:name="a">{sheet}</table:table>')).text) < 1000
