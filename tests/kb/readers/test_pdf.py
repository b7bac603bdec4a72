import io
import resource
import time
import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, NameObject

from localrag.kb.readers import UnreadableError
from localrag.kb.readers import pdf as reader
from localrag.kb.readers.base import numbered
from localrag.kb.readers.pdf import joined_words, without_repeated
from tests.kb.readers.pdf_files import pdf_by_hand, pdf_of, stream, with_images, written

PARAGRAPHS = [
    "PLA sticks at sixty degrees.",
    "Glass holds it while it is warm.",
    "Let the bed cool before you pull.",
    "Clean it with alcohol.",
]


def _sections(reading):
    return [(section.heading, reading.text[section.start : section.end].strip()) for section in reading.sections]


def test_pages_are_places_and_the_text_is_theirs():
    reading = reader.read(pdf_of([[PARAGRAPHS[0]], [], [PARAGRAPHS[1], "second line"]]))
    stretches = [(place.number, reading.text[place.start :].split("\n")[0]) for place in reading.places]
    assert stretches == [(1, PARAGRAPHS[0]), (3, PARAGRAPHS[1])]
    assert {place.kind for place in reading.places} == {"page"}
    assert _sections(reading) == [("", f"{PARAGRAPHS[0]}\n\n{PARAGRAPHS[1]}\nsecond line")]
    assert not reading.own_lines


def test_a_sentence_that_goes_over_a_page_is_one_paragraph():
    assert reader.read(pdf_of([["It goes on"], ["over there."], ["Next."]])).text == "It goes on\nover there.\n\nNext.\n\n"


def test_metadata_becomes_title_and_fields():
    about = {"/Title": "Microsoft Word - beds.docx", "/Author": "Ann Lee", "/CreationDate": "D:20240102030405Z", "/Subject": "Heat"}
    reading = reader.read(pdf_of([PARAGRAPHS], metadata=about))
    assert reading.title == "beds"
    assert dict(reading.fields) == {"author": "Ann Lee", "date": "2024-01-02T03:04:05+00:00", "subject": "Heat"}
    assert reader.read(pdf_of([PARAGRAPHS], metadata={"/Title": "untitled", "/CreationDate": "nonsense"})).title == ""


def test_the_outline_gives_the_heading_paths():
    pages = [["1 Start", PARAGRAPHS[0]], [PARAGRAPHS[1], "Heat", "and beds", PARAGRAPHS[2]], [PARAGRAPHS[3]]]
    outline = [("Start", 0, None), ("Heat and Beds", 1, 0), ("Not on its page", 2, None)]
    reading = reader.read(pdf_of(pages, outline=outline, metadata={"/Title": "Guide"}))
    assert _sections(reading) == [
        ("Guide > Start", f"1 Start\n{PARAGRAPHS[0]}\n\n{PARAGRAPHS[1]}"),
        ("Guide > Start > Heat and Beds", f"Heat\nand beds\n{PARAGRAPHS[2]}"),
        ("Guide > Not on its page", PARAGRAPHS[3]),
    ]
    assert reading.text[: reading.sections[0].body] == "1 Start\n"
    assert reading.sections[2].body == reading.sections[2].start


def test_files_that_need_no_password_are_read_and_others_say_so():
    assert PARAGRAPHS[0] in reader.read(pdf_of([PARAGRAPHS], password="")).text
    with pytest.raises(UnreadableError, match=r"^it is protected by a password$"):
        reader.read(pdf_of([PARAGRAPHS], password="secret"))


def test_pages_without_text_say_so():
    with pytest.raises(UnreadableError, match="no text layer"):
        reader.read(pdf_of([[], []]))


def test_a_page_that_cannot_be_read_is_left_out():
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Resources << /Font << /F1 7 0 R >> >> /Contents %d 0 R >>"
    good, bad = stream(b"BT /F1 12 Tf (whole) Tj ET"), stream(b"not deflated", b"/Filter /FlateDecode /DecodeParms << /Predictor 99 >>")
    catalog, pages = b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count 2 /Kids [3 0 R 4 0 R] >>"
    reading = reader.read(pdf_by_hand(catalog, pages, page % 5, page % 6, bad, good, font))
    assert reading.text == "whole\n"
    assert reading.places == ((0, "page", 2),)
    with pytest.raises(UnreadableError, match="none of its pages"):
        reader.read(pdf_by_hand(catalog, pages, page % 5, page % 5, bad, good, font))


def test_a_date_that_stands_elsewhere_in_the_file_is_read():
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Resources << /Font << /F1 5 0 R >> >> /Contents 4 0 R >>"
    font, about = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>", b"<< /Author 7 0 R /CreationDate 8 0 R >>"
    objects = (CATALOG, PAGES, page, stream(b"BT /F1 12 Tf (whole) Tj ET"), font, about, b"(Ann Lee)", b"(D:20240102030405Z)")
    reading = reader.read(pdf_by_hand(*objects, trailer=b"/Info 6 0 R"))
    assert dict(reading.fields) == {"author": "Ann Lee", "date": "2024-01-02T03:04:05+00:00"}


def test_headers_and_footers_that_stand_on_most_pages_go():
    pages = [f"The Handbook of Beds {number + 7}\n\n{word} text\nand {word} more\n{number}" for number, word in enumerate("abcdef")]
    cut = without_repeated(pages)
    assert cut[0] == "The Handbook of Beds 7\n\na text\nand a more"  # a text stays where it stands first
    assert cut[1:] == [f"\n{word} text\nand {word} more" for word in "bcdef"]


def test_headers_of_left_and_right_pages_go():
    pages = [f"{'Beds and heat' if number % 2 else 'Chapter'}\n{word} text\nPage {number} of 6" for number, word in enumerate("abcdef")]
    assert without_repeated(pages)[2:] == [f"{word} text" for word in "cdef"]


@pytest.mark.parametrize(
    "pages",
    [
        ["same\na", "same\nb"],  # two pages show no pattern
        [f"Step {number}\n{word}\nx{word}" for number, word in enumerate("abcdef")],
        [f"The invoice with number {number}\n{word}\nx{word}" for number, word in zip((17, 4711, 3, 99, 5), "abcde", strict=True)],
        ["1 2 3\n4\n71", "5 6 7\n8\n13", "9 10 11\n12\n3", "13 14\n15\n16"],
        ["same\na\na", "same\nb\nb", "other\nc\nc", "more\nd\nd", "less\ne\ne"],
    ],
)
def test_what_is_not_clearly_a_header_stays(pages):
    assert without_repeated(pages) == pages


def test_words_broken_at_line_ends_are_whole_again():
    pages = ["An exam-\nple of a well-\nknown", "thing: well-known in New-\nYork, co-\n operate; 10-\n20 - \nx"]
    assert joined_words(pages) == ["An example of a well-known", "thing: well-known in New-York, cooperate; 10-\n20 - \nx"]
    assert joined_words(["the ﬁrst oﬃce"]) == ["the first office"]


PAGE = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>"
CATALOG, PAGES = b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>"


def _deflated_twice(num_mb):
    packer = zlib.compressobj(9)
    first, again = (packer.compress(b" " * 1_000_000) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return zlib.compress(first + again * (num_mb - 1), 9)  # the blocks after a full flush are the same bytes


HOSTILE = {
    "empty": b"",
    "only a header": b"%PDF-1.7\n",
    "not a PDF": b"hello " * 100,
    "bomb": pdf_by_hand(CATALOG, PAGES, PAGE, stream(_deflated_twice(1000), b"/Filter [/FlateDecode /FlateDecode]")),
    "form that draws itself": pdf_by_hand(
        CATALOG,
        PAGES,
        PAGE[:-2] + b"/Resources << /XObject << /X 5 0 R >> >> >>",
        stream(b"/X Do"),
        stream(b"/X Do /X Do", b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >>"),
    ),
    "cyclic pages": pdf_by_hand(CATALOG, b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>", b"<< /Type /Pages /Count 1 /Kids [2 0 R] >>"),
    "a billion pages": pdf_by_hand(CATALOG, b"<< /Type /Pages /Count 1000000000 /Kids [3 0 R] >>", PAGE, stream(b"")),
    "no pages": pdf_by_hand(CATALOG, b"<< /Type /Pages /Count 0 /Kids [] >>"),
    "pages of a wrong type": pdf_by_hand(CATALOG, b"[1 2 3]"),
    "deep array": pdf_by_hand(CATALOG, PAGES, PAGE, stream(b"[" * 100_000)),
    "deep object": pdf_by_hand(CATALOG, b"<< /Kids " + b"[" * 50_000 + b" >>"),
    "endless xref": b"%PDF-1.7\nxref\n0 1\n0000000000 65535 f \ntrailer << /Size 1 /Prev 9 >>\nstartxref\n9\n%%EOF",
    "big xref": b"%PDF-1.7\nxref\n0 2000000000\ntrailer << /Size 1 >>\nstartxref\n9\n%%EOF",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_unreadable_soon_and_in_little_memory(name):
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnreadableError, match="it "):
        reader.read(HOSTILE[name])
    assert time.process_time() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024  # kB


SMALL = pdf_of([[*PARAGRAPHS], ["Second page."]], outline=[("Second page.", 1, None)], metadata={"/Title": "T", "/Author": "A"})


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_files_are_read_or_unreadable(data):
    damaged = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 4))] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"0", b"<<", b"[", b"obj", b"3 0 R"])
        )
    try:
        reading = reader.read(bytes(damaged[: data.draw(st.integers(1, len(damaged)))] if data.draw(st.booleans()) else damaged))
    except UnreadableError as error:
        assert str(error)
        return
    assert reading.text.strip()
    assert all(one.start <= two.start for one, two in pairwise(reading.places))
    assert all(one.end == two.start for one, two in pairwise(reading.sections))
    reading.text.encode()


# --- pages without text


@pytest.mark.parametrize("in_form", [False, True])
def test_scanned_pages_are_named(in_form):
    scanned = with_images(pdf_of([PARAGRAPHS, [], [], [], [], []]), range(1, 6), in_form=in_form)
    assert reader.read(scanned).missing == ("pages 2-6 hold no text; they look scanned",)
    one = with_images(pdf_of([PARAGRAPHS, [], PARAGRAPHS[1:]]), [1], in_form=in_form)
    assert reader.read(one).missing == ("page 2 holds no text; it looks scanned",)


def test_a_scan_in_strips_is_a_scan():
    data = pdf_of([PARAGRAPHS, []])
    assert reader.read(with_images(data, [1], pixels=(2480, 64))).missing
    assert not reader.read(with_images(data, [1], pixels=(120, 60))).missing  # a logo on a blank page


def test_blank_pages_and_pictures_beside_text_are_not_named():
    assert reader.read(pdf_of([PARAGRAPHS, [], PARAGRAPHS[1:], []])).missing == ()
    assert reader.read(with_images(pdf_of([PARAGRAPHS, PARAGRAPHS[1:]]), [0, 1])).missing == ()


@pytest.mark.parametrize("stamp", ["Scanned with CamScanner", "- {} -", "ABC{:06}", "Page {} of 9"])
def test_the_stamp_of_a_scanner_is_not_the_text_of_a_page(stamp):
    data = pdf_of([PARAGRAPHS, *([stamp.format(number)] for number in range(2, 10))])
    (missing,) = reader.read(with_images(data, range(1, 9))).missing
    assert missing == "pages 2-9 hold no text; they look scanned"
    assert reader.read(data).missing == ()


def test_pages_of_drawn_letters_are_named():
    drawing = b"q " + b"10 10 m 20 20 l S " * 300 + b"Q"
    data = PdfWriter(clone_from=io.BytesIO(pdf_of([PARAGRAPHS, [], []])))
    contents = DecodedStreamObject()
    contents.set_data(drawing)
    data.pages[1][NameObject("/Contents")] = data._add_object(contents)
    assert reader.read(written(data)).missing == ("page 2 holds drawings and no text",)


def test_an_inline_image_is_a_scan():
    data = PdfWriter(clone_from=io.BytesIO(pdf_of([PARAGRAPHS, []])))
    contents = DecodedStreamObject()
    contents.set_data(b"q 612 0 0 792 0 0 cm BI /W 400 /H 400 /BPC 8 /CS /G /F /AHx ID " + b"7f" * 160_000 + b"> EI Q")
    data.pages[1][NameObject("/Contents")] = data._add_object(contents)
    assert reader.read(written(data)).missing == ("page 2 holds no text; it looks scanned",)


def test_page_numbers_are_told_as_ranges():
    assert numbered("page", [4], "is x", "are x") == "page 4 is x"
    assert numbered("page", [2, 3, 4, 5, 6], "is x", "are x") == "pages 2-6 are x"
    assert numbered("page", [1, 3, 4, 9], "is x", "are x") == "pages 1, 3-4 and 9 are x"
    assert numbered("page", range(1, 61, 2), "is x", "are x").endswith("37, 39 and 10 more are x")


@pytest.mark.parametrize(
    "resources",
    [b"5 0 R", b"<< /XObject 5 0 R >>", b"<< /XObject << /A 99 0 R /B 5 0 R /C 7 >> >>", b"7", b"null", b"<< /XObject << /A 6 0 R >> >>"],
)
def test_broken_resources_of_a_page_without_text(resources):
    data = pdf_by_hand(
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R 4 0 R] /Count 2 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 7 0 R /Resources << /Font << /F1 8 0 R >> >> >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Resources " + resources + b" >>",
        b"[1 2 3]",
        b"<< /Subtype /Form /Resources << /XObject << /A 6 0 R >> >> >>",  # it holds itself
        stream(b"BT /F1 12 Tf (Some words are here.) Tj ET"),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    )
    reading = reader.read(data)
    assert (reading.text.strip(), reading.missing) == ("Some words are here.", ())


def test_pages_that_cannot_be_read_are_named():
    data = PdfWriter(clone_from=io.BytesIO(pdf_of([PARAGRAPHS, PARAGRAPHS[1:], PARAGRAPHS])))
    contents = DecodedStreamObject()
    contents.set_data(b"BT /F1 12 Tf (" + b"(" * 9)
    contents[NameObject("/Filter")] = NameObject("/NoSuchDecode")
    data.pages[1][NameObject("/Contents")] = data._add_object(contents)
    assert reader.read(written(data)).missing == ("page 2 cannot be read",)
