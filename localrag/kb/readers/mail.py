"""Read e-mail: single messages (.eml) and mailboxes (.mbox)."""

from __future__ import annotations

import email.policy
import re
from collections.abc import Iterator
from email.message import EmailMessage
from email.parser import BytesParser
from email.utils import parseaddr, parsedate_to_datetime
from functools import lru_cache
from itertools import zip_longest

from localrag.kb.readers import html
from localrag.kb.readers.base import Draft, Reading, UnreadableError, decode_as, one_line
from localrag.kb.readers.text import decode

MAX_DEPTH = 8
"""Nesting limit of attached messages; deeper ones are listed but not read."""

_BORDER = re.compile(rb"(?:\A|(?<=\n\n)|(?<=\r\n\r\n))From [^\n]*\n(?=[!-9;-~]{1,100}:)")  # before a line that is a header
_QUOTED_BORDER = re.compile(rb"(?m)^>(?=>{0,9}From )")
_TOO_DEEP = "nested too deep"
_MAX_HEADER_CHARS = 2000  # the standard library's header parser takes quadratic time
_TEXTS = frozenset({"text/plain", "text/csv", "text/markdown", "text/html", "text/x-rst", "text/tab-separated-values"})


def read(data: bytes) -> Reading:
    """Read a message as one section under its subject. A file that begins with a "From " line is read as a mailbox.

    The text is the plain text part, or else the visible text of the HTML part. Attachments are listed, and read if they are text.
    `fields` are author (the sender's name), from, to, date (ISO 8601) and subject.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.startswith(b"From "):
        return read_mbox(data)
    return _single(data)


def read_mbox(data: bytes) -> Reading:
    """Read a mailbox. Each message is a section and a place; a mailbox with one message is read as that message."""
    raw = list(_messages(data))
    if not raw:
        raise UnreadableError("it is not a mailbox (no message in it)")
    if len(raw) == 1:
        return _single(raw[0])
    draft = Draft()
    for number, message in enumerate(raw, start=1):
        draft.place("message", number)
        try:
            _write(draft, _parsed(message))
        except RecursionError:
            draft.write(f"(The parts of this message are {_TOO_DEEP}.)\n\n")
    return draft.reading()


def _single(data: bytes) -> Reading:
    draft = Draft()
    try:
        message = _parsed(data)
        _write(draft, message)
    except RecursionError:
        raise UnreadableError(f"its parts are {_TOO_DEEP}") from None
    if not message.keys():
        raise UnreadableError("it is not an e-mail (no headers)")
    return draft.reading(title=_header(message, "subject"), prefix="", fields=_fields(message))


def _messages(data: bytes) -> Iterator[bytes]:
    borders = list(_BORDER.finditer(data))
    for border, following in zip_longest(borders, borders[1:]):
        yield _QUOTED_BORDER.sub(b"", data[border.end() : following.start() if following else len(data)])


class _Policy(email.policy.EmailPolicy):
    """The standard library's policy for modern mail, but long headers are truncated and malformed ones are plain text."""

    def header_source_parse(self, sourcelines: list[str]) -> tuple[str, str]:
        name, value = super().header_source_parse(sourcelines)
        return name, value[:_MAX_HEADER_CHARS]

    def header_fetch_parse(self, name: str, value: str) -> str:
        return _header_text(name, value)


@lru_cache(maxsize=256)
def _header_text(name: str, value: str) -> str:
    """Parse a header to text. Cached, because parsing 2,000 characters takes up to 0.1 s and each message needs it many times."""
    try:
        return str(email.policy.default.header_fetch_parse(name, value))
    except Exception:  # noqa: BLE001  # the header parser has raised most kinds of errors on broken headers
        return one_line(value)


_POLICY = _Policy()


def _parsed(raw: bytes) -> EmailMessage:
    message = BytesParser(EmailMessage, policy=_POLICY).parsebytes(raw)
    assert isinstance(message, EmailMessage)
    return message


def _write(draft: Draft, message: EmailMessage, depth: int = 1) -> None:
    draft.heading(depth, one_line(_header(message, "subject")))
    headers = [(name, _header(message, name)) for name in ("From", "To", "Cc")] + [("Date", _date(message))]
    draft.write("".join(f"{name}: {one_line(value)}\n" for name, value in headers if value) + "\n")
    attached: list[tuple[str, EmailMessage]] = []
    for part in _leaves(message):
        name, kind = _name(part), part.get_content_type()
        is_body = kind in ("text/plain", "text/html") or kind.startswith("multipart/")  # a multipart without boundaries is one text
        if name or part.get_content_disposition() == "attachment" or not is_body:
            attached.append((name, part))
        elif text := _text(part).strip():
            draft.write(text + "\n\n")
    for name, part in attached:
        _write_attachment(draft, name, part, depth)


def _write_attachment(draft: Draft, name: str, part: EmailMessage, depth: int) -> None:
    kind = part.get_content_type()
    inner = part.get_payload() if kind == "message/rfc822" else None
    if isinstance(inner, list) and inner and isinstance(inner[0], EmailMessage) and depth < MAX_DEPTH:
        _write(draft, inner[0], depth + 1)
        return
    draft.write(f"Attachment: {name or 'without a name'} ({kind})\n")
    text = _text(part).strip() if kind in _TEXTS or kind.startswith("text/x-") else ""
    draft.write(text + "\n\n" if text else "\n")


def _leaves(message: EmailMessage) -> Iterator[EmailMessage]:
    """Yield the leaf parts in order. Of alternatives, only the plain text, or else the HTML, is kept."""
    kind = message.get_content_type()
    parts = [part for part in message.get_payload() if isinstance(part, EmailMessage)] if message.is_multipart() else []
    if not parts or kind == "message/rfc822":
        yield message
    elif kind == "multipart/alternative":
        leaves = [leaf for part in parts for leaf in _leaves(part)]
        bodies = [leaf for leaf in leaves if leaf.get_content_type() in ("text/plain", "text/html") and not _name(leaf)]
        best = min((leaf for leaf in bodies if _text(leaf).strip()), key=lambda leaf: leaf.get_content_type() != "text/plain", default=None)
        yield from (leaf for leaf in leaves if leaf is best or leaf not in bodies)
    else:
        for part in parts:
            yield from _leaves(part)


def _name(part: EmailMessage) -> str:
    """Return the file name of a part; "" if it has none or it cannot be decoded."""
    try:
        return one_line(part.get_filename() or "")
    except ValueError:  # some encodings decode nothing
        return ""


def _text(part: EmailMessage) -> str:
    """Return the text of a part, for HTML its visible text; "" if its bytes are not text."""
    try:
        data = part.get_payload(decode=True)
        if not isinstance(data, bytes):
            return ""
        text = decode_as(data, part.get_content_charset() or "utf-8")
        if text is None:
            text = decode(data, known=True)
    except (UnreadableError, ValueError, LookupError, TypeError, AttributeError):  # binary data or broken headers
        return ""
    return html.extract(text).text if part.get_content_type() == "text/html" else text


def _header(message: EmailMessage, name: str) -> str:
    return str(message.get(name, ""))


def _date(message: EmailMessage) -> str:
    header = _header(message, "date")
    try:
        return parsedate_to_datetime(header).isoformat()
    except (ValueError, TypeError, IndexError, OverflowError):
        return header


def _fields(message: EmailMessage) -> list[tuple[str, str]]:
    sender = _header(message, "from")
    return [
        ("author", next((part for part in parseaddr(sender) if part), "")),
        ("from", sender),
        ("to", _header(message, "to")),
        ("date", _date(message)),
        ("subject", _header(message, "subject")),
    ]
