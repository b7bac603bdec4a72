"""Small PDFs, written for the tests."""

import io

from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject, NumberObject, StreamObject


def pdf_of(pages, *, outline=(), metadata=None, password=None) -> bytes:
    """Pages as lists of lines. `outline` holds (title, page from 0, index of the entry above or None)."""
    writer = PdfWriter()
    font = writer._add_object(
        DictionaryObject(
            {
                NameObject("/Type"): NameObject("/Font"),
                NameObject("/Subtype"): NameObject("/Type1"),
                NameObject("/BaseFont"): NameObject("/Helvetica"),
                NameObject("/Encoding"): NameObject("/WinAnsiEncoding"),
            }
        )
    )
    for lines in pages:
        page = writer.add_blank_page(612, 792)
        shown = " ".join("(" + line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)") + ") Tj T*" for line in lines)
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 72 720 Td 14 TL {shown} ET".encode("cp1252"))
        page[NameObject("/Contents")] = writer._add_object(stream)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})})
    entries = []
    for title, number, above in outline:
        entries.append(writer.add_outline_item(title=title, page_number=number, parent=None if above is None else entries[above]))
    writer.add_metadata(metadata or {})
    if password is not None:
        writer.encrypt(user_password=password, owner_password="owner", algorithm="RC4-128")
    return written(writer)


def written(writer) -> bytes:
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def pdf_by_hand(*objects: bytes, trailer: bytes = b"") -> bytes:
    """A file of these objects, from number 1 on; the first is the catalog. `trailer` is what else its trailer says."""
    data = b"%PDF-1.7\n"
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return data + b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R %s >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        table,
        len(objects) + 1,
        trailer,
        len(data),
    )


def stream(data: bytes, entries: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), entries, data)


def with_images(data: bytes, numbers, *, pixels=(1240, 1754), in_form=False) -> bytes:
    """The same PDF with an image of this size on each of these pages (from 0), as a scanner makes them; `in_form`, one level down."""
    writer = PdfWriter(clone_from=io.BytesIO(data))
    image = StreamObject()
    image.update(
        {
            NameObject("/Type"): NameObject("/XObject"),
            NameObject("/Subtype"): NameObject("/Image"),
            NameObject("/Width"): NumberObject(pixels[0]),
            NameObject("/Height"): NumberObject(pixels[1]),
            NameObject("/ColorSpace"): NameObject("/DeviceGray"),
            NameObject("/BitsPerComponent"): NumberObject(8),
        }
    )
    objects = DictionaryObject({NameObject("/I"): writer._add_object(image)})
    if in_form:
        form = DecodedStreamObject()
        form.update({NameObject("/Type"): NameObject("/XObject"), NameObject("/Subtype"): NameObject("/Form")})
        form[NameObject("/Resources")] = DictionaryObject({NameObject("/XObject"): objects})
        form.set_data(b"/I Do")
        objects = DictionaryObject({NameObject("/F"): writer._add_object(form)})
    for number in numbers:
        resources = DictionaryObject(writer.pages[number].get("/Resources", {}))
        resources[NameObject("/XObject")] = objects
        writer.pages[number][NameObject("/Resources")] = resources
    return written(writer)
