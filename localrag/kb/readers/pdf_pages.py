"""Text that was set for paper: what stands on every page, and words broken at the ends of lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

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
