"""PDF: the text layer, page by page, with the outline (bookmarks) as headings."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from localrag.kb.readers.base import Reading, UnreadableError
from localrag.kb.readers.draft import Draft, check_size, clean, numbered, one_line

if TYPE_CHECKING:
    from pypdf import PdfReader
    from pypdf.generic import Destination

_DIGITS = re.compile(r"\d+")
_MIN_LETTERS = 8  # fewer beside a picture are a page number or a stamp
_SCAN_PIXELS = 100_000  # a page at 36 dpi; a logo has fewer
_MAX_IMAGES = 1000  # that are looked at, of a page or a form
_MAX_FORMS = 3  # in one another
_DRAWING_BYTES = 3000  # of a content stream; a frame or a line takes fewer
_INLINE_IMAGE = re.compile(rb"\bBI\s[^\0]{1,500}?\sID\s")
_SENTENCE_ENDS = ".!?:…。！？"
_PROGRAM = re.compile(r"^Microsoft (?:Word|PowerPoint|Excel) - |\.(?:docx?|pptx?|xlsx?|odt|tex|dvi|indd|qxd)$", re.IGNORECASE)

# What stands on every page, and words broken at the ends of lines.
_EDGE_LINES = 2  # where headers and footers stand: so many lines from the top and the bottom of a page
_MIN_PAGES = 3  # fewer do not show what is repeated
_MOST = 0.6
_MIN_WORDS = 3  # of a line in which the page number does not count; "Step 3" is a heading
_NUMBERING = frozenset("page p pg of seite von página de pagina di sur sida av стр".split())  # noqa: SIM905  # words beside a page number
_NUMBER = re.compile(r"\d{1,5}")
_EDGE_NUMBER = re.compile(r"^\d{1,5}\b|\b\d{1,5}$")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_BROKEN = re.compile(r"([^\W\d_]+)-[ \t]*\n[ \t]*([^\W\d_]+)")
_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st"})

logging.getLogger("pypdf").addHandler(logging.NullHandler())  # it reports every oddity of a file; what cannot be read is an error here


def read(data: bytes) -> Reading:
    """The text of a PDF; places are pages. Sections are those of its outline, else there is one.

    Pages that cannot be read, or hold no text and are not blank, are named in `missing`. UnreadableError if no page has text, or if the
    file needs a password.
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


def _missing(reader: PdfReader, texts: Sequence[str | None], pages: Sequence[str]) -> Iterator[str]:
    """What `texts`, those of the pages as they are, lack. `pages` are without what is repeated on most of them."""
    stamps = Counter(_DIGITS.sub("", text) for text in texts if text and text.strip())
    scanned, drawn = [], []
    for number, (text, page) in enumerate(zip(texts, pages, strict=True)):
        is_stamp = text is not None and (stamps[_DIGITS.sub("", text)] > 1 or sum(map(str.isalpha, page)) < _MIN_LETTERS)
        if text is not None and (not page.strip() or is_stamp):
            kind = _shows(reader, number)
            if kind == "image":
                scanned.append(number + 1)
            elif kind == "drawing" and not page.strip():
                drawn.append(number + 1)
    broken = [number for number, text in enumerate(texts, start=1) if text is None]
    if scanned:
        yield numbered("page", scanned, "holds no text; it looks scanned", "hold no text; they look scanned")
    if drawn:
        yield numbered("page", drawn, "holds drawings and no text", "hold drawings and no text")
    if broken:
        yield numbered("page", broken, "cannot be read", "cannot be read")


def _shows(reader: PdfReader, number: int) -> Literal["image", "drawing", ""]:
    """What a page without text shows, if anything; nothing is decoded that its text did not need."""
    try:
        page = reader.pages[number]
        if _num_pixels(page.get("/Resources"), _MAX_FORMS) >= _SCAN_PIXELS:
            return "image"
        contents = page.get_contents()
        data = b"" if contents is None else contents.get_data()
        if len(data) > _SCAN_PIXELS // 8 and _INLINE_IMAGE.search(data):
            return "image"
        return "drawing" if len(data) > _DRAWING_BYTES else ""
    except Exception:  # noqa: BLE001  # as for pages: a page that is damaged here was read as empty
        return ""


def _num_pixels(resources: object, depth: int) -> int:
    """Of all images that a page or a form may show; a scan can be made of many strips."""
    objects = _dictionary(_dictionary(resources).get("/XObject"))
    num_pixels = 0
    for value in list(objects.values())[:_MAX_IMAGES]:
        found = _dictionary(value)
        if found.get("/Subtype") == "/Image":
            num_pixels += max(0, int(found.get("/Width", 0))) * max(0, int(found.get("/Height", 0)))
        elif found.get("/Subtype") == "/Form" and depth:
            num_pixels += _num_pixels(found.get("/Resources"), depth - 1)
        if num_pixels >= _SCAN_PIXELS:
            break
    return num_pixels


def _dictionary(value: object) -> dict[str, Any]:
    """What a PDF refers to, where that is a dictionary; else an empty one."""
    found = value.get_object() if hasattr(value, "get_object") else value
    return found if isinstance(found, dict) else {}


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


def without_repeated(pages: Sequence[str]) -> list[str]:
    """Pages without the headers and footers that are the same on most of them.

    Page numbers go; a repeated line of words stays on the page where it stands first.
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
            seen: set[str] = set()
            for page, key in keys.items():
                if key in repeated and (key in seen or _numbers_only(key)):
                    dropped[page].add(lines[page])
                seen.add(key)
            if not repeated:
                break
    return ["\n".join(line for at, line in enumerate(lines) if at not in drop) for lines, drop in zip(split, dropped, strict=True)]


def _key(line: str, page: int) -> str:
    """What two lines have in common that differ in the page number alone: a number that counts with the pages."""
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
    found = [(key, num) for key, num in Counter(keys).most_common(2) if num >= _MIN_PAGES]  # two: those of left and of right pages
    return {key for key, _ in found} if sum(num for _, num in found) > _MOST * num_pages else set()


def joined_words(pages: Sequence[str]) -> list[str]:
    """Pages whose words are whole where a line end broke them. A hyphen stays where the text has the word with it elsewhere."""
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
