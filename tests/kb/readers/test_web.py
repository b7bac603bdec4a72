from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.kb.readers import UnreadableError, html
from localrag.kb.readers.base import Draft
from localrag.kb.readers.html import hides, style_rules
from tests.growth import check_linear


def _text(body):
    return html.extract(body).text.strip()


def _sections(page):
    reading = html.extract(page)
    return [(section.heading, reading.text[section.start : section.end].strip()) for section in reading.sections]


def test_headings_become_paths():
    page = "<title>T</title><p>before<h1>Guide ¶</h1><p>one<h2>Heat<h3>Bed</h3>hot<h2><a href=x>Cold</a> C#</h2><p>two"
    assert _sections(page) == [
        ("", "before"),
        ("Guide", "Guide\n\none"),
        ("Guide > Heat > Bed", "Heat\n\nBed\n\nhot"),
        ("Guide > Cold C#", "Cold C#\n\ntwo"),
    ]
    assert _sections("<title>Beds</title><h2>Heat</h2>hot") == [("Beds > Heat", "Heat\n\nhot")]
    assert _sections("<title>Beds</title>hot") == [("Beds", "hot")]


def test_the_head_gives_title_fields_and_tags():
    page = """<head><title> A &amp; B
        </title><META NAME=Author CONTENT="Ann Lee"><meta name="keywords" content="pla, heat bed,,pla"><meta name=description content=D>
        <meta property="article:published_time" content="2024-01-02"></head>x"""
    reading = html.extract(page)
    assert (reading.title, reading.tags) == ("A & B", ("pla", "heat bed"))
    assert dict(reading.fields) == {"author": "Ann Lee", "description": "D", "date": "2024-01-02"}
    assert html.extract("<h1>Only here</h1>x").title == "Only here"
    assert html.extract('<svg><title>no</title></svg><meta property="og:title" content="Shared">x').title == "Shared"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("one <b>bold</b>\n  two<br>three&nbsp;&eacute;&#233;&lt;b&gt;", "one bold two\nthree éé<b>"),
        ("<ul><li>a<ul><li>deep</ul><li><p>b</p><p>more</p></ul><ol start=3><li>c<li>d</ol>", "- a\n  - deep\n- b\n  more\n3. c\n4. d"),
        ("<pre>\n  if x:\n      <b>y</b>  \n\n&lt;z&gt;</pre>after", "  if x:\n      y\n\n<z>\n\nafter"),
        ("<pre><div>a</div><div>  b</div></pre>", "a\n  b"),
        ('see <a href="http://x">the page</a>.', "see the page."),
        ("<dl><dt>PLA<dd>a plastic</dl>", "PLA\n\na plastic"),
        ("soft&shy;ware zero\u200bwidth \u202eevil", "software zerowidth evil"),
        ("<p>a<p>b</p></p></x></div>c", "a\n\nb\n\nc"),
        ("<math><mi>x</mi><annotation>\\x</annotation></math>", "x"),
        ("a < b & c <3", "a < b & c <3"),
        ("<![if !IE]>seen<![endif]><![CDATA[no]]>", "seen"),
        ("<p/>a<div/>b", "a\n\nb"),
    ],
)
def test_text(body, text):
    assert html.extract(body).text.strip("\n") == text


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        ("<tr><th>Material<th>Heat<tr><td>PLA<td>200<tr><td>ABS<td>", ["Material: PLA; Heat: 200", "Material: ABS"]),
        ("<thead><tr><td>A<td>B</thead><tbody><tr><td>1<td>2</tbody>", ["A: 1; B: 2"]),
        ("<tr><th>Height<td>3 m<tr><th>Width<td>4 m<td>5 m", ["Height: 3 m", "Width: 4 m; 5 m"]),
        ("<tr><td>1<td>2<tr><td>3<td>4", ["1; 2", "3; 4"]),
        ("<caption>Heat</caption><tr><th>A<th>B<tr><td>1<td>2", ["Heat", "A: 1; B: 2"]),
        ("<tr><th colspan=2>All<tr><th>A<th>B<tr><td>1<td>2", ["All", "A: 1; B: 2"]),
        ("<tr><th><th colspan=2>Heat<tr><th>A<th>min<th>max<tr><td>x<td>1<td>2", ["A: x; Heat min: 1; Heat max: 2"]),
        ("<tr><th>A<th>B<tr><td rowspan=2>x<td>1<tr><td>2", ["A: x; B: 1", "A: x; B: 2"]),
        ("<tr><th>A<th>B<tr><td colspan=2>both<tr><td>1<td>2", ["A: both", "A: 1; B: 2"]),
        ("<tr><th>A<th>B", ["A; B"]),
        ("<tr><td><p>left</p><p>menu</p><td><table><tr><th>A<th>B<tr><td>1<td>2</table>", ["left", "menu", "A: 1; B: 2"]),
        ("<tr><td><h2>Head</h2>text<td>more", ["Head", "text", "more"]),
        ("<tr><td>only<tr><td>column", ["only", "column"]),
        ("<tr><th>A<th>B<tr hidden><td>1<td>2<tr><td>3<td>4", ["A: 3; B: 4"]),
        ("stray<tr><td colspan=99999999999 rowspan=x>1<td>2", ["stray", "1; 2"]),
    ],
)
def test_tables(table, lines):
    assert [line for line in _text(f"<table>{table}</table>").split("\n") if line] == lines


@pytest.mark.parametrize(
    "hidden",
    [
        "<script>if (a < b) { '</p>' } EVIL</script>",
        "<style>.x { content: 'EVIL' }</style>",
        "<!-- EVIL --><!--[if IE]>EVIL<![endif]-->",
        "<template><p>EVIL</p></template><noscript>EVIL</noscript><iframe>EVIL</iframe><object>EVIL</object>",
        "<svg><text>EVIL</text></svg><select><option>EVIL</select><button>EVIL</button><textarea>EVIL</textarea>",
        "<p hidden>EVIL</p>",
        "<div aria-hidden=true><p>EVIL<b>EVIL</b></div>",
        '<p style="color: red; DISPLAY : None !important">EVIL',
        '<p style="visibility:hidden">EVIL</p><i style="font-size:0px">EVIL</i><i style="opacity: 0.0">EVIL</i>',
        '<p style="display:/* */none">EVIL',
        "<dialog>EVIL</dialog>",
        '<input type=hidden value=EVIL><img alt="EVIL">',
        "<style>.a, p.b, #c { display: none }</style><p class='x a'>EVIL</p><p class=b>EVIL</p><p id=c>EVIL</p>",
        "<style>@media screen { .x { color: red } } .trap { opacity: 0 }</style><p class=trap>EVIL",
        "<script>EVIL",
    ],
)
def test_what_nobody_sees_is_not_read(hidden):
    assert _text(f"<p>seen {hidden}") == "seen"
    assert _text(f"<p>seen</p>{hidden}") == "seen"


@pytest.mark.parametrize(
    "shown",
    [
        "<p hidden=until-found>SEEN</p>",
        '<p style="display:block;opacity:0.5;font-size:0.8em">SEEN</p>',
        "<dialog open>SEEN</dialog>",
        "<style>@media print { .x { display: none } } .a .x { display: none }</style><p class=x>SEEN</p>",
        "<style>.y { display: none } .y { display: block }</style><p class=y>SEEN</p>",
        "<style media=print>.x { display: none }</style><p class=x>SEEN</p>",
        '<body style="opacity:0">SEEN</body>',
        "<details><summary>SEEN</summary></details>",
    ],
)
def test_what_may_be_seen_is_read(shown):
    assert _text(shown) == "SEEN"


def test_css():
    assert style_rules("<STYLE>a{} .x,/*{*/ .y > b {display:none} #z{visibility:hidden}</STYLE><style>.w{display:none") == {".x", "#z"}
    assert [hides(css) for css in ("font-size:0", "font-size:10px; opacity:1; display", "")] == [True, False, False]


CONTENT = "<h1>Beds</h1><p>The text of the page, long enough to be its content.</p>"


@pytest.mark.parametrize(
    ("page", "left_out"),
    [
        (f"<header>SITE</header><nav>MENU</nav>{CONTENT}<aside>ADS</aside><footer>IMPRINT</footer>", "SITE MENU ADS IMPRINT"),
        (f"<div>COOKIES</div><main>{CONTENT}</main><div>SIDE</div>", "COOKIES SIDE"),
        (f"<div>COOKIES</div><div role=main>{CONTENT}</div><div role=navigation>MENU</div>", "COOKIES MENU"),
        (f"<div>TEASER</div><article>{CONTENT}</article>", "TEASER"),
    ],
)
def test_what_stands_around_the_content_is_left_out(page, left_out):
    assert _text(page) == "Beds\n\nThe text of the page, long enough to be its content."
    assert all(word in page for word in left_out.split())


def test_what_stands_around_is_read_where_nothing_else_is():
    assert _text("<header><h1>All</h1><p>is here</header>") == "All\n\nis here"
    assert _text("<nav><p>all") == "all"
    assert _text("<main></main><p>all") == "all"
    assert _text(f"<article>small</article>{CONTENT}").startswith("small\n\nBeds")
    assert _text("<article><header><h1>Title</h1></header>text</article>") == "Title\n\ntext"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("<meta charset=utf-8>Grüße".encode(), "Grüße"),
        ("<meta charset=iso-8859-1>it’s €".encode("cp1252"), "it’s €"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=shift_jis">日本'.encode("shift_jis"), "日本"),
        ('<?xml version="1.0" encoding="koi8-r"?><p>да'.encode("koi8-r"), "да"),
        ("<meta charset=utf-16>Grüße".encode(), "Grüße"),
        ("<meta charset=latin-1>日本".encode("utf-16"), "日本"),
        ("<meta charset=utf-8>caf\xe9 au lait, s'il vous pla\xeet".encode("cp1252"), "café au lait, s'il vous plaît"),
        ("<meta charset=punycode>Grüße".encode(), "Grüße"),
        ("<meta charset=no-such>Grüße".encode(), "Grüße"),
        ("<meta charset=base64>Grüße".encode(), "Grüße"),
    ],
)
def test_encodings(data, text):
    assert html.read(data).text.strip() == text


NUM = 10_000


@pytest.mark.parametrize(
    "unit",
    [
        *("<div>", "<ul><li>x", "<table><tr><td>x", "<pre><p>x", "<h1>x", "<b>", "<svg>", "<title>", "<p>x</b>", "</p></x><i>", "<x/>"),
        *("<!--", "<![", "<!", "</", "<?", "<a", "<a b ", "<a\tb='", '<p class="x', "<", "&#", "&"),
        *("<style", "<style>", "<script>", "</script", "<p style='display:none;/*", "<tr><td colspan=99>x"),
    ],
)
def test_time_is_linear(unit):
    check_linear(lambda num: html.extract(unit * num), NUM // 2)


def test_many_attributes_and_deep_nesting():
    assert _text("<p " + " ".join(f"a{number}=b" for number in range(30_000)) + ">x") == "x"
    assert _text("<div>" * 50_000 + "x") == "x"


@pytest.mark.parametrize("filler", ["a " * 6_000, "/ " * 6_000, " " * 11_000, f"x='{'>' * 11_000}'"])
@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ("<p {}>x", "x"),
        ("<p hidden {}>x</p>", ""),
        ("<img alt='>' {}>x", "x"),
        ("<script {}><b>no</b></script>x", "x"),
        ("<br {}/>x", "x"),
        ("<p title=a/ {}>x", "x"),
    ],
)
def test_a_long_tag_is_read_as_a_short_one(tag, text, filler):
    assert _text(tag.format(filler)) == _text(tag.format("")) == text


def test_tables_do_not_multiply_text():
    wide = "<tr>" + f"<td rowspan=99>{'x' * 190}" * 500
    reading = html.extract(f"<table>{wide}{'<tr>' * 5_000}<tr><td>end</table>")
    assert len(reading.text) < 20 * len(wide) + 20_000


def test_headings_do_not_multiply_text():
    draft = Draft()
    for level in [*range(1, 6), *[6] * 21_000]:
        draft.heading(level, "x" * 250 if level < 6 else "a")
        draft.write("b\n")
    with pytest.raises(UnreadableError, match="more than 20 MB"):
        draft.reading()


def test_a_page_with_too_much_text_says_so():
    with pytest.raises(UnreadableError, match="more than 20 MB of text"):
        html.extract("x" * 20_000_001)


TAGS = "p div span h1 h2 ul ol li table tr td th thead pre br main nav article header dl dt title head body script style svg a b".split()  # noqa: SIM905  # a word list reads better as words
PIECES = (
    [f"<{tag}>" for tag in TAGS] + [f"</{tag}>" for tag in TAGS] + ["x", " y\n", "<p hidden>", "<!--", "-->", "&lt;", "<td colspan=2>", "<"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_any_order_of_tags_is_read(pieces):
    reading = html.extract("".join(pieces))
    assert all(one.end == two.start for one, two in pairwise(reading.sections))
    assert "".join(reading.text[section.start : section.end] for section in reading.sections).strip() == reading.text.strip()
    assert all(section.start <= section.body <= section.end or section.body == 0 for section in reading.sections)
    if not any(piece in ("<script>", "<style>", "<svg>", "<head>", "<title>", "<p hidden>", "<!--", "<", "<nav>") for piece in pieces):
        kept = reading.text.count("x")
        assert kept == pieces.count("x") or any(piece in ("<main>", "<article>", "<header>") for piece in pieces)
