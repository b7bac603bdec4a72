"""Read RTF, the binary Office 97 formats, Outlook messages and FictionBook with the kreuzberg library.

The library is a Rust extension that starts threads of its own: call `prepare` before the process forbids itself new threads. Features
that need a model or the network stay off. Places are not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from localrag.kb.readers.base import Composer, Reading, Table, UnreadableError, one_line

if TYPE_CHECKING:
    from kreuzberg import ExtractionConfig

_MIME = {
    "rtf": "application/rtf",
    "doc": "application/msword",
    "xls": "application/vnd.ms-excel",
    "ppt": "application/vnd.ms-powerpoint",
    "msg": "application/vnd.ms-outlook",
    "fb2": "application/x-fictionbook+xml",
}
_TEXTS = frozenset({"title", "paragraph", "code", "formula", "quote", "raw_block", "footnote", "citation"})
_PROMPTS = re.compile(r"Click to edit Master .*|(?:Second|Third|Fourth|Fifth) level|\*|Page\s+\*")
"""Prompts of the master slides of English presentations, which no slide shows."""

# Tracked deletions: text after \deleted, up to \deleted0 or the end of the group.
_RTF_TOKEN = re.compile(rb"(?s)\\([a-z]{1,32})(-?\d{0,10}) ?|\\'[0-9a-fA-F]{2}|\\.|[{}]|[^\\{}]+")
_RTF_TEXT = frozenset({b"u", b"tab", b"line", b"par", b"lquote", b"rquote", b"ldblquote", b"rdblquote", b"emdash", b"endash", b"bullet"})


def prepare() -> None:
    """Import the library and let it start its threads."""
    from kreuzberg import extract_bytes_sync  # noqa: PLC0415  # heavy: 0.1 s and 45 MB

    extract_bytes_sync(b"-", "text/plain", _config())


def read(data: bytes, kind: str) -> Reading:
    """Read a document of a `kind` such as "doc". Raises UnreadableError if the library cannot read it."""
    from kreuzberg import KreuzbergError, extract_bytes_sync  # noqa: PLC0415  # as above

    try:
        result = extract_bytes_sync(_without_deleted(data) if kind == "rtf" else data, _MIME[kind], _config())
    except KreuzbergError as error:
        reason = one_line(str(error)) or type(error).__name__
        raise UnreadableError(f"it is protected by a password or damaged ({reason.removeprefix('ParsingError: ')})") from None
    nodes: Sequence[Mapping[str, Any]] = result.document["nodes"] if result.document else ()
    about: Mapping[str, Any] = result.metadata
    if kind == "msg":
        return _message(nodes, about)
    composer = Composer()
    if kind == "xls":
        _write(composer, _shown_sheets(nodes, data), is_sheet=True)
    else:
        _write(composer, _without_repeated(nodes) if kind == "ppt" else nodes)
    return composer.reading(str(about.get("title") or ""), _fields(about))


def _config() -> ExtractionConfig:
    from kreuzberg import ConcurrencyConfig, ExtractionConfig  # noqa: PLC0415  # as above

    config = ExtractionConfig(  # type: ignore[call-arg]  # disable_ocr is not among the types
        use_cache=False,
        enable_quality_processing=False,
        include_document_structure=True,
        disable_ocr=True,  # OCR of attached pictures would keep their text on disk
        concurrency=ConcurrencyConfig(max_threads=1),
    )
    config.max_archive_depth = 0  # attachments stay closed
    return config


def _write(composer: Composer, nodes: Iterable[Mapping[str, Any]], *, is_sheet: bool = False) -> None:
    after_item = False
    for node in nodes:
        content = node["content"]
        kind, text = content["node_type"], str(content.get("text") or content.get("title") or "")
        if node.get("content_layer") in ("header", "footer"):
            continue
        if kind in ("heading", "slide"):
            composer.heading(int(content.get("level", 2)), text)
        elif kind == "table":
            table = Table(composer, sheet=is_sheet)
            for _, cells in groupby(content["grid"]["cells"], key=lambda cell: cell["row"]):
                table.row((cell["col"], cell["content"]) for cell in cells)
            table.close()
        elif kind == "list_item":
            (composer.line if after_item else composer.paragraph)(f"- {text}")
        elif kind in _TEXTS:
            composer.paragraph(text)
        after_item = kind == "list_item"


def _fields(about: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    authors = about.get("authors")
    author = "; ".join(map(str, authors)) if isinstance(authors, list) else ""
    fields = {"author": author, "date": str(about.get("created_at") or "")}
    return tuple((key, one_line(value)) for key, value in fields.items() if value)


def _message(nodes: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> Reading:
    """Read an Outlook message like `localrag.kb.readers.mail` reads others: the subject is the heading, and attachments are listed."""
    headers = {"Subject": str(about.get("subject") or "")}
    rest = []
    for node in nodes:
        if node["content"]["node_type"] == "metadata_block":
            headers |= {str(key): str(value) for key, value in node["content"]["entries"]}
        else:
            rest.append(node)
    composer = Composer()
    subject = headers.pop("Subject")
    composer.heading(1, subject)
    for key, value in headers.items():
        composer.line(f"{key.capitalize()}: {one_line(value)}")
    _write(composer, rest)
    for name in about.get("attachments") or ():
        composer.line(f"Attachment: {one_line(str(name))}")
    sender = headers.get("From", "")
    fields = {
        "author": str(about.get("from_name") or sender),
        "from": sender,
        "to": headers.get("To", ""),
        "date": headers.get("Date", ""),
        "subject": subject,
    }
    return composer.reading(subject, tuple((key, one_line(value)) for key, value in fields.items() if value))


def _without_repeated(nodes: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Keep only the first copy of each line. The library repeats master text on each slide, and slide text as notes."""
    earlier_lines: set[str] = set()
    for node in nodes:
        content = node["content"]
        key = "title" if content["node_type"] == "slide" else "text"
        lines = str(content.get(key) or "").splitlines()
        new = [line for line in lines if line.strip() and line not in earlier_lines and not _PROMPTS.fullmatch(line.strip())]
        earlier_lines.update(lines)
        if new or content["node_type"] not in ("slide", *_TEXTS):
            yield {**node, "content": {**content, key: "\n".join(new)}}


def _shown_sheets(nodes: Iterable[Mapping[str, Any]], data: bytes) -> Iterator[Mapping[str, Any]]:
    """Drop hidden sheets, which the library reads like others. The records of the workbook tell which are hidden."""
    is_hidden = False
    for node in nodes:
        content = node["content"]
        if content["node_type"] == "heading":
            name = str(content["text"])
            records = [bytes([len(name), 1]) + name.encode("utf-16-le", "replace")] if len(name) < 32 else []
            if records and name.isascii():
                records.append(bytes([len(name), 0]) + name.encode())
            is_hidden = any(re.search(rb"(?s)\x85\0.\0....[\1\2]." + re.escape(record), data) for record in records)
        if not is_hidden:
            yield node


def _without_deleted(rtf: bytes) -> bytes:
    """Remove text that was deleted under tracked changes from RTF."""
    if b"\\deleted" not in rtf or b"\\bin" in rtf:  # binary data has no tokens
        return rtf
    pieces: list[bytes] = []
    deleted = [False]
    for token in _RTF_TOKEN.finditer(rtf):
        piece, word = token.group(), token[1]
        if piece == b"{":
            deleted.append(deleted[-1])
        elif piece == b"}":
            del deleted[max(1, len(deleted) - 1) :]
        elif word == b"deleted":
            deleted[-1] = token[2] != b"0"
            continue
        is_text = piece not in (b"{", b"}") and (word is None or word in _RTF_TEXT)
        if not (deleted[-1] and is_text):
            pieces.append(piece)
    return b"".join(pieces)
