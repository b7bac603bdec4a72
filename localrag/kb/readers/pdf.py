"""Read PDF: the text layer, page by page, with the outline (bookmarks) as headings."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from localrag.kb.readers.base import Draft, Reading, UnreadableError, check_size, clean, numbered, one_line

if TYPE_CHECKING:
    from pypdf import PdfReader
    from pypdf.generic import Destination

_DIGITS = re.compile(r"\d+")
_MIN_LETTERS = 8  # a page with a picture and fewer letters has only a page number or a stamp
_SCAN_PIXELS = 100_000  # a page at 36 dpi; a logo has fewer
_MAX_IMAGES = 1000  # images to look at per page or form
_MAX_FORMS = 3  # nesting depth of forms
_DRAWING_BYTES = 3000  # size of a content stream that draws something; a frame or a line takes less
_INLINE_IMAGE = re.compile(rb"\bBI\s[^\0]{1,500}?\sID\s")
_SENTENCE_ENDS = ".!?:…。！？"
_PROGRAM = re.compile(r"^Microsoft (?:Word|PowerPoint|Excel) - |\.(?:docx?|pptx?|xlsx?|odt|tex|dvi|indd|qxd)$", re.IGNORECASE)

# Repeated headers and footers, and words broken at line ends.
_EDGE_LINES = 2  # lines at the top and the bottom of a page that may be headers and footers
_MIN_PAGES = 3  # a line on fewer pages does not count as repeated
_MOST = 0.6
_MIN_WORDS = 3  # words in a line whose page number is ignored; "Step 3" is a heading
_NUMBERING = frozenset("page p pg of seite von página de pagina di sur sida av стр".split())  # noqa: SIM905  # words next to a page number
_NUMBER = re.compile(r"\d{1,5}")
_EDGE_NUMBER = re.compile(r"^\d{1,5}\b|\b\d{1,5}$")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_BROKEN = re.compile(r"([^\W\d_]+)-[ \t]*\n[ \t]*([^\W\d_]+)")
_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st"})

logging.getLogger("pypdf").addHandler(logging.NullHandler())  # it logs every oddity of a file; unreadable parts are errors here


def read(data: bytes) -> Reading:
    """Read the text of a PDF. Places are pages; sections are those of the outline, or one for the whole file.

    `missing` lists the pages that cannot be read, and those that show something but hold no text. Raises UnreadableError if no page has
    text, or if the file needs a password.
    """
    try:
        return _read(data)
    except (UnreadableError, ImportError):
        raise
    except RecursionError:
        raise UnreadableError("its parts are nested too deep, or contain themselves") from None
    except MemoryError:
        raise UnreadableError("it takes too much memory") from None
    except Exception as error:  # on broken files, pypdf raises most kinds of errors
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
    missing = list(_missing(reader, texts, pages))
    about = dict(_metadata(reader))
    entries = _outline(reader)
    draft = Draft()
    for number, page in enumerate(pages):
        if page.strip():
            draft.place("page", number + 1)
        _write(draft, page.strip("\n"), entries.get(number, ()))
    title = about.pop("title", "")
    return draft.reading(title=title, fields=list(about.items()), missing=missing)


def _opened(data: bytes) -> PdfReader:
    from pypdf import PasswordType, PdfReader  # noqa: PLC0415  # heavy: 0.2 s
    from pypdf.errors import DependencyError  # noqa: PLC0415

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted:
        try:
            password_type = reader.decrypt("")
        except DependencyError:
            raise UnreadableError("it is encrypted with AES, which needs the package cryptography", lasts=False) from None
        if password_type == PasswordType.NOT_DECRYPTED:
            raise UnreadableError("it is protected by a password")
    return reader


def _page_texts(reader: PdfReader) -> Iterator[str | None]:
    """Yield the text of each page; None if it cannot be read."""
    num_chars = 0
    for number in range(len(reader.pages)):
        try:
            text = clean(reader.pages[number].extract_text().replace("\u00ad\n", "-\n"))
        except Exception:  # noqa: BLE001  # on a broken page, pypdf raises most kinds of errors; other pages may be fine
            yield None
            continue
        num_chars += len(text)
        check_size(num_chars)
        yield text


def _missing(reader: PdfReader, texts: Sequence[str | None], pages: Sequence[str]) -> Iterator[str]:
    """Yield what the text lacks. `texts` are the pages as extracted, `pages` those without repeated headers and footers."""
    stamps = Counter(_DIGITS.sub("", text) for text in texts if text and text.strip())
    scanned, drawing_pages = [], []
    for number, (text, page) in enumerate(zip(texts, pages, strict=True)):
        is_stamp = text is not None and (stamps[_DIGITS.sub("", text)] > 1 or sum(map(str.isalpha, page)) < _MIN_LETTERS)
        if text is not None and (not page.strip() or is_stamp):
            kind = _shows(reader, number)
            if kind == "image":
                scanned.append(number + 1)
            elif kind == "drawing" and not page.strip():
                drawing_pages.append(number + 1)
    broken = [number for number, text in enumerate(texts, start=1) if text is None]
    if scanned:
        yield numbered("page", scanned, "holds no text; it looks scanned", "hold no text; they look scanned")
    if drawing_pages:
        yield numbered("page", drawing_pages, "holds drawings and no text", "hold drawings and no text")
    if broken:
        yield numbered("page", broken, "cannot be read", "cannot be read")


def _shows(reader: PdfReader, number: int) -> Literal["image", "drawing", ""]:
    """Return what a page without text shows. No image is decoded."""
    try:
        page = reader.pages[number]
        if _num_pixels(page.get("/Resources"), _MAX_FORMS) >= _SCAN_PIXELS:
            return "image"
        contents = page.get_contents()
        data = b"" if contents is None else contents.get_data()
        if len(data) > _SCAN_PIXELS // 8 and _INLINE_IMAGE.search(data):
            return "image"
        return "drawing" if len(data) > _DRAWING_BYTES else ""
    except Exception:  # noqa: BLE001  # as in _page_texts; a page damaged here counts as empty
        return ""


def _num_pixels(resources: object, depth: int) -> int:
    """Count the pixels of all images on a page or form. A scan may consist of many strips. Stops at _SCAN_PIXELS."""
    objects = _dictionary(_dictionary(resources).get("/XObject"))
    num_pixels = 0
    for value in list(objects.values())[:_MAX_IMAGES]:
        image = _dictionary(value)
        if image.get("/Subtype") == "/Image":
            num_pixels += max(0, int(image.get("/Width", 0))) * max(0, int(image.get("/Height", 0)))
        elif image.get("/Subtype") == "/Form" and depth:
            num_pixels += _num_pixels(image.get("/Resources"), depth - 1)
        if num_pixels >= _SCAN_PIXELS:
            break
    return num_pixels


def _dictionary(value: object) -> dict[str, Any]:
    """Follow a reference to a dictionary; {} if it leads to anything else."""
    target = value.get_object() if hasattr(value, "get_object") else value
    return target if isinstance(target, dict) else {}


def _write(draft: Draft, page: str, entries: Sequence[_Entry]) -> None:
    """Write a page with its outline headings. A heading goes to the line with its words, or else after the heading before it."""
    at = 0
    for entry in entries:
        line = _title_line(entry.title).search(page, at)
        if line:
            draft.write(page[at : line.start()])
            at = line.end()
        draft.heading(entry.level, entry.title, line.group() if line else "")
    rest = page[at:].rstrip()
    if rest:
        draft.write(rest + ("\n\n" if rest[-1] in _SENTENCE_ENDS else "\n"))


class _Entry(NamedTuple):
    """An entry of the outline. Level 1 is the highest."""

    level: int
    title: str


def _title_line(title: str) -> re.Pattern[str]:
    words = r"\s+".join(map(re.escape, title.split()))
    return re.compile(rf"^[ \t]*(?:[\dA-Z][\d.]{{0,16}}[ \t]+)?{words}[ \t]*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)


def _outline(reader: PdfReader) -> dict[int, list[_Entry]]:
    """Return page index (from 0) → entries of the outline; {} if the outline is broken."""
    entries: dict[int, list[_Entry]] = {}
    try:
        by_id = {page.indirect_reference.idnum: number for number, page in enumerate(reader.pages) if page.indirect_reference}
        for level, item in _entries(reader.outline, 1):
            number = by_id.get(getattr(item.page, "idnum", -1))
            title = one_line(str(item.title or ""))
            if number is not None and title:
                entries.setdefault(number, []).append(_Entry(level, title))
    except Exception:  # noqa: BLE001  # as in _page_texts; the text is readable without an outline
        return {}
    return entries


def _entries(items: Sequence[object], level: int) -> Iterator[tuple[int, Destination]]:
    for item in items:
        if isinstance(item, list):
            yield from _entries(item, level + 1)
        elif hasattr(item, "page"):
            yield level, cast("Destination", item)


def _metadata(reader: PdfReader) -> Iterator[tuple[str, str]]:
    """Yield title, author, subject, keywords and date, until one cannot be read."""
    try:
        about = reader.metadata
        if about is None:
            return
        title = _PROGRAM.sub("", one_line(str(about.title or "")))
        yield "title", "" if title.lower() == "untitled" else title
        yield from ((key, str(about.get(f"/{key.title()}") or "")) for key in ("author", "subject", "keywords"))
        if "/CreationDate" in about:  # macOS stores the date behind a reference, which the property does not follow
            about.update({"/CreationDate": about["/CreationDate"]})
        yield "date", about.creation_date.isoformat() if about.creation_date else ""
    except Exception:  # noqa: BLE001  # as in _page_texts
        return


def without_repeated(pages: Sequence[str]) -> list[str]:
    """Remove headers and footers that repeat on most pages.

    Page numbers are removed everywhere; a repeated line of words stays on the first page that has it.
    """
    split = [page.split("\n") for page in pages]
    filled = [[at for at, line in enumerate(lines) if line.strip()] for lines in split]
    dropped: list[set[int]] = [set() for _ in pages]
    num_pages = sum(1 for indices in filled if indices)
    for edge in (range(_EDGE_LINES), range(-1, -1 - _EDGE_LINES, -1)):
        for nth, at in enumerate(edge):
            lines = {page: indices[at] for page, indices in enumerate(filled) if len(indices) > nth}
            keys = {page: _key(split[page][line], page) for page, line in lines.items()}
            repeated = _repeated(keys.values(), num_pages)
            earlier_keys: set[str] = set()
            for page, key in keys.items():
                if key in repeated and (key in earlier_keys or _numbers_only(key)):
                    dropped[page].add(lines[page])
                earlier_keys.add(key)
            if not repeated:
                break
    return ["\n".join(line for at, line in enumerate(lines) if at not in drop) for lines, drop in zip(split, dropped, strict=True)]


def _key(line: str, page: int) -> str:
    """Return a key that is equal for lines which differ only in the page number. Numbers become offsets from `page`."""
    text = " ".join(line.split())
    if _numbers_only(text):
        return _NUMBER.sub(lambda match: f"#{int(match[0]) - page}", text, count=1)
    if len(_WORD.findall(line)) < _MIN_WORDS:
        return text
    return _EDGE_NUMBER.sub(lambda match: f"#{int(match[0]) - page}", text)


def _numbers_only(text: str) -> bool:
    """Whether a line is a page number, such as "- 3 -" or "Page 3 of 9"."""
    return 1 <= len(_NUMBER.findall(text)) <= 2 and all(word.lower() in _NUMBERING for word in _WORD.findall(text))


def _repeated(keys: Iterable[str], num_pages: int) -> set[str]:
    """Return the one or two most common keys (left and right pages may differ), if together they are on most pages."""
    common = [(key, num) for key, num in Counter(keys).most_common(2) if num >= _MIN_PAGES]
    return {key for key, _ in common} if sum(num for _, num in common) > _MOST * num_pages else set()


def joined_words(pages: Sequence[str]) -> list[str]:
    """Rejoin words that were broken at line ends. A hyphen stays if the text has the hyphenated word elsewhere."""
    pages = [page.translate(_LIGATURES) for page in pages]
    broken = {(match[1] + match[2]).lower() for page in pages for match in _BROKEN.finditer(page)}
    whole: set[str] = set()
    hyphenated: set[str] = set()
    if broken:
        for page in pages:
            for match in _WORD.finditer(page):
                word = match.group().lower()
                bare = word.replace("-", "")
                if bare in broken:
                    (whole if bare == word else hyphenated).add(bare)

    def join(match: re.Match[str]) -> str:
        word = (match[1] + match[2]).lower()
        keeps = word not in whole and (word in hyphenated or not match[2][0].islower())
        return f"{match[1]}-{match[2]}" if keeps else match[1] + match[2]

    return [_BROKEN.sub(join, page) for page in pages]
