import time
from email.message import EmailMessage
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.kb.readers import UnreadableError, mail


def _message(subject="Heat bed", text="Sixty degrees, I think.\n", **headers):
    message = EmailMessage()
    about = {
        "From": "Ann Lee <ann@example.org>",
        "To": "Bo <bo@example.org>",
        "Date": "Tue, 02 Jan 2024 03:04:05 +0100",
        "Subject": subject,
    }
    for name, value in (about | headers).items():
        message[name] = value
    message.set_content(text)
    return message


def _sections(reading):
    return [(section.heading, reading.text[section.start : section.end].strip()) for section in reading.sections]


HEAD = "From: Ann Lee <ann@example.org>\nTo: Bo <bo@example.org>\nDate: 2024-01-02T03:04:05+01:00"


def test_a_message():
    reading = mail.read(bytes(_message("Größe des Betts", "Sechzig Grad für PLA, hätte ich gesagt: " + "lange Zeile " * 20)))
    assert reading.title == "Größe des Betts"
    assert dict(reading.fields) == {
        "author": "Ann Lee",
        "from": "Ann Lee <ann@example.org>",
        "to": "Bo <bo@example.org>",
        "date": "2024-01-02T03:04:05+01:00",
        "subject": "Größe des Betts",
    }
    ((heading, text),) = _sections(reading)
    assert heading == "Größe des Betts"
    assert text.startswith(f"Größe des Betts\n\n{HEAD}\n\nSechzig Grad für PLA, hätte")
    assert text.endswith("lange Zeile")
    assert not reading.places


def test_the_plain_text_is_preferred():
    message = _message(text="plain")
    message.add_alternative("<p>page</p>", subtype="html")
    assert _sections(mail.read(bytes(message)))[0][1].endswith("\n\nplain")
    only_html = _message(text=" ")
    only_html.add_alternative("<h1>Head</h1><p>page<p hidden>EVIL<script>EVIL</script>", subtype="html")
    assert _sections(mail.read(bytes(only_html)))[0][1].endswith("\n\nHead\n\npage")


def test_attachments_are_named_and_texts_are_read():
    message = _message()
    message.add_attachment("a,b\n1,2\n", subtype="csv", filename="täble.csv")
    message.add_attachment(b"\0\1", maintype="application", subtype="pdf", filename="plan.pdf")
    message.add_attachment("<p>page<script>EVIL</script>", subtype="html", filename="page.html")
    message.add_attachment(_message("Before", "The first message."))
    reading = mail.read(bytes(message))
    (_, own), (path, inner) = _sections(reading)
    assert own.endswith("I think.\n\nAttachment: täble.csv (text/csv)\na,b\n1,2\n\nAttachment: plan.pdf (application/pdf)\n\n"
                        "Attachment: page.html (text/html)\npage")  # fmt: skip
    assert (path, inner) == ("Heat bed > Before", f"Before\n\n{HEAD}\n\nThe first message.")


@pytest.mark.parametrize(
    ("headers", "body", "text"),
    [
        (b"Content-Type: text/plain; charset=iso-8859-1", b"it\x92s caf\xe9", "it’s café"),
        (b"Content-Type: text/plain; charset=no-such", "Grüße".encode(), "Grüße"),
        (b"Content-Type: text/plain; charset=punycode", "Grüße".encode(), "Grüße"),
        (b"Content-Type: text/plain", "Grüße".encode(), "Grüße"),
        (b"Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: quoted-printable", b"Gr=C3=BC=\n=C3=9Fe =ZZ", "Grüße =ZZ"),
        (b"Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: base64", b"R3LDvMOfZQ", "Grüße"),
        (b"Content-Transfer-Encoding: x-unknown", b"as it is", "as it is"),
        (b"Content-Type: ;;; =", b"still text", "still text"),
        (b"Content-Type: multipart/mixed; boundary=x", b"no boundary in it", "no boundary in it"),
    ],
)
def test_bodies(headers, body, text):
    reading = mail.read(b"Subject: S\n" + headers + b"\n\n" + body)
    assert reading.text.strip().removeprefix("S").strip() == text


def test_broken_headers_are_text():
    raw = b'From: =?utf-8?b?!!!?= <<>@,;\xff\nTo: "\nDate: yesterday\nSubject: =?x?q?=FF?= a\xe9\nContent-Disposition: =?\n\nbody'
    reading = mail.read(raw)
    assert reading.text.rstrip().endswith("body")
    assert dict(reading.fields)["date"] == "yesterday"
    reading.text.encode()


def test_a_file_name_that_cannot_be_decoded_is_none():
    reading = mail.read(b"Subject: S\nContent-Disposition: attachment; filename*=undefined''x.txt\n\nbody")
    assert "Attachment: without a name (text/plain)\nbody" in reading.text


def _mailbox(*messages):
    return b"".join(b"From ann@example.org Tue Jan  2 03:04:05 2024\n" + bytes(message).rstrip() + b"\n\n" for message in messages)


def test_mailboxes():
    data = _mailbox(_message("One", "first\n\n>From here on\n\nFrom the start: no\n"), _message("Two", "second"), _message("", "third"))
    for reading in (mail.read(data), mail.read_mbox(data.replace(b"\n", b"\r\n"))):
        assert _sections(reading) == [
            ("One", f"One\n\n{HEAD}\n\nfirst\n\nFrom here on\n\nFrom the start: no"),
            ("Two", f"Two\n\n{HEAD}\n\nsecond"),
            ("", f"{HEAD}\n\nthird"),
        ]
        assert [place[1:] for place in reading.places] == [("message", 1), ("message", 2), ("message", 3)]
        assert [place.start for place in reading.places] == [section.start for section in reading.sections]
        assert not reading.fields
    assert mail.read(_mailbox(_message())).title == "Heat bed"


@pytest.mark.parametrize(
    ("read", "data", "reason"),
    [
        (mail.read, b"no headers at all", "no headers"),
        (mail.read, b"", "no headers"),
        (mail.read_mbox, b"Subject: x\n\nbody", "not a mailbox"),
        (mail.read, b"From x\n\n", "not a mailbox"),
        (mail.read, b"Subject: x\n" + b"Content-Type: message/rfc822\n\n" * 2000, "too deep"),
    ],
)
def test_what_is_no_mail_says_why(read, data, reason):
    with pytest.raises(UnreadableError, match=reason):
        read(data)


def test_long_headers_and_nested_messages_take_no_time():
    started = time.process_time()
    for value in (b"a@b.c, " * 10_000, b"(" * 30_000, b"=?utf-8?q?x?= " * 10_000, b'"' * 30_000, b"a;" * 30_000):
        mail.read(b"".join(name + b": " + value + b"\n" for name in (b"From", b"To", b"Date", b"Subject", b"Content-Type")) + b"\nbody")
    mail.read(b"Subject: x\nContent-Type: message/rfc822\n\n" * 50 + b"body")
    assert time.process_time() - started < 10


MIXED = _message()
MIXED.add_alternative("<p>page", subtype="html")
MIXED.add_attachment("x,y\n", subtype="csv", filename="t.csv")
SMALL = _mailbox(MIXED, _message("Two", "zwei ü"))
SNIPPETS = [
    b"\n",
    b"\n\n",
    b": ",
    b"=?utf-8?q?",
    b"multipart/",
    b"message/rfc822",
    b"\xff",
    b"\0",
    b"--",
    b"; charset=",
    b'"',
    b"base64",
    b"From ",
]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_mail_is_read_or_unreadable(data):
    damaged = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=4) | st.sampled_from(SNIPPETS))
    try:
        reading = mail.read(bytes(damaged))
    except UnreadableError as error:
        assert str(error)
        return
    reading.text.encode()
    assert all(one.end == two.start for one, two in pairwise(reading.sections))
    assert all(one.start <= two.start for one, two in pairwise(reading.places))
