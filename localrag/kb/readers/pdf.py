"""PDF: the text layer, page by page, with the outline (bookmarks) as headings."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from localrag.kb.readers.base import Reading, UnreadableError
from localrag.kb.readers.draft import Draft, check_size, clean, one_line
from localrag.kb.readers.pdf_pages import joined_words, without_repeated

if TYPE_CHECKING:
    from pypdf import PdfReader
    from pypdf.generic import Destination

_SENTENCE_ENDS = ".!?:…。！？"
_PROGRAM = re.compile(r"^Microsoft (?:Word|PowerPoint|Excel) - |\.(?:docx?|pptx?|xlsx?|odt|tex|dvi|indd|qxd)$", re.IGNORECASE)

logging.getLogger("pypdf").addHandler(logging.NullHandler())  # it reports every oddity of a file; what cannot be read is an error here


def read(data: bytes) -> Reading:
    """The text of a PDF; places are pages. Sections are those of its outline, else there is one.

    A page that cannot be read is left out. UnreadableError if none can, or if the file needs a password.
    """
    try:
        return _read(data)
    except (UnreadableError, ImportError):
        raise
    except RecursionError:
        raise UnreadableError("its parts are nested too deep, or hold themselves") from None
    except MemoryError:
        raise UnreadableError("it takes too much memory") from None
    except Exception as error:  # pypdf raises its own errors and, on broken files, most others
        raise UnreadableError(f"it is damaged ({one_line(str(error)) or type(error).__name__})") from error


def _read(data: bytes) -> Reading:
    reader = _opened(data)
    texts = list(_page_texts(reader))
    if not texts:
        raise UnreadableError("it has no pages")
    if all(text is None for text in texts):
        raise UnreadableError("it is damaged: none of its pages can be read")
    if not any(text and text.strip() for text in texts):
        raise UnreadableError("it holds pictures of pages and no text (no text layer)")
    pages = joined_words(without_repeated([text or "" for text in texts]))
    about = dict(_metadata(reader))
    entries = _outline(reader)
    draft = Draft()
    for number, page in enumerate(pages):
        if page.strip():
            draft.place("page", number + 1)
        _write(draft, page.strip("\n"), entries.get(number, ()))
    title = about.pop("title", "")
    return draft.reading(title=title, fields=list(about.items()))


def _opened(data: bytes) -> PdfReader:
    from pypdf import PasswordType, PdfReader  # noqa: PLC0415  # 0.2 s, wanted only here
    from pypdf.errors import DependencyError  # noqa: PLC0415

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted:
        try:
            opened = reader.decrypt("")
        except DependencyError:
            raise UnreadableError("it is encrypted with AES, which needs the package cryptography", lasts=False) from None
        if opened == PasswordType.NOT_DECRYPTED:
            raise UnreadableError("it is protected by a password")
    return reader


def _page_texts(reader: PdfReader) -> Iterator[str | None]:
    """The text of each page; None for one that cannot be read."""
    num_chars = 0
    for number in range(len(reader.pages)):
        try:
            text = clean(reader.pages[number].extract_text().replace("\u00ad\n", "-\n"))
        except Exception:  # noqa: BLE001  # pypdf raises most kinds of errors on broken pages; the others may be whole
            yield None
            continue
        num_chars += len(text)
        check_size(num_chars)
        yield text


def _write(draft: Draft, page: str, entries: Sequence[_Entry]) -> None:
    """A page, with the headings that the outline has on it, each where its words stand on a line, else at the page's beginning."""
    at = 0
    for entry in entries:
        found = _title_line(entry.title).search(page, at)
        if found:
            draft.write(page[at : found.start()])
            at = found.end()
        draft.heading(entry.level, entry.title, found.group() if found else "")
    rest = page[at:].rstrip()
    if rest:
        draft.write(rest + ("\n\n" if rest[-1] in _SENTENCE_ENDS else "\n"))


class _Entry(NamedTuple):
    """One line of the outline: `level` 1 is the highest."""

    level: int
    title: str


def _title_line(title: str) -> re.Pattern[str]:
    words = r"\s+".join(map(re.escape, title.split()))
    return re.compile(rf"^[ \t]*(?:[\dA-Z][\d.]{{0,16}}[ \t]+)?{words}[ \t]*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)


def _outline(reader: PdfReader) -> dict[int, list[_Entry]]:
    """The entries of the outline by page, from 0. A broken outline is none."""
    entries: dict[int, list[_Entry]] = {}
    try:
        by_id = {page.indirect_reference.idnum: number for number, page in enumerate(reader.pages) if page.indirect_reference}
        for level, item in _entries(reader.outline, 1):
            number = by_id.get(getattr(item.page, "idnum", -1))
            title = one_line(str(item.title or ""))
            if number is not None and title:
                entries.setdefault(number, []).append(_Entry(level, title))
    except Exception:  # noqa: BLE001  # as for pages: without an outline, the text is still there
        return {}
    return entries


def _entries(items: Sequence[object], level: int) -> Iterator[tuple[int, Destination]]:
    for item in items:
        if isinstance(item, list):
            yield from _entries(item, level + 1)
        elif hasattr(item, "page"):
            yield level, cast("Destination", item)


def _metadata(reader: PdfReader) -> Iterator[tuple[str, str]]:
    """Title, author, subject, keywords and date, as far as they can be read."""
    try:
        about = reader.metadata
        if about is None:
            return
        title = _PROGRAM.sub("", one_line(str(about.title or "")))
        yield "title", "" if title.lower() == "untitled" else title
        yield from ((key, str(about.get(f"/{key.title()}") or "")) for key in ("author", "subject", "keywords"))
        if "/CreationDate" in about:  # macOS has its text elsewhere in the file, where the property does not look
            about.update({"/CreationDate": about["/CreationDate"]})
        yield "date", about.creation_date.isoformat() if about.creation_date else ""
    except Exception:  # noqa: BLE001  # as for pages
        return
