"""Cut a text to a number of tokens at good places, with few counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain

from localrag.text import sentences

Count = Callable[[str], int]
"""Tokens of a text by a model's own tokenizer."""

MARK = " […]"
"""Marks where a text was cut."""
_SOLID = re.compile(r"\S")
_CHARS_PER_TOKEN = 4  # only where to begin to look
_MAX_STEPS = 12
_MAX_BREAK_CHARS = 8
_MAX_WHOLE_CHARS = 128
"""Most characters of a match that is never cut in two."""


def truncate(text: str, limit: int, count: Count) -> str:
    """Truncate a text to at most `limit` tokens by `count`, with " […]" after it if it was cut.

    It is cut at the end of a line or a sentence, or between words, if there is one in the second half of the text that fits, else after a
    character. Leading blank lines are dropped if nothing else would fit. Empty if not even one character fits with the mark. Counts about
    three times as much text as it keeps.
    """
    cut = fit(text, limit, count, MARK)
    if not cut and text[:1].isspace():
        text = text.lstrip()  # more blank lines than fit
        cut = fit(text, limit, count, MARK)
    return text if cut == len(text) else text[:cut].rstrip() + MARK if cut else ""


def cut_middle(text: str, limit: int, count: Count, *, whole: re.Pattern[str] | None = None) -> str:
    """Cut the middle of a text so that at most `limit` tokens by `count` remain, with " […] " between beginning and end.

    Three fifths go to the end, which holds the conclusion. Both are cut as by `truncate`, and never inside a match of `whole`. With too
    few tokens for both, only the beginning remains; empty if not even one character fits with the mark.
    """
    if count(text) <= limit:
        return text
    solid = text.strip()
    if solid != text:
        return cut_middle(solid, limit, count, whole=whole)
    start = _outside(text, _ending(text, (limit - count(MARK)) * 3 // 5, count), whole, forward=True)
    mark = f"{MARK} {text[start:]}".rstrip()
    room = limit - count(mark)
    while room > 0 and start < len(text):
        end = _outside(text, fit(text[:start], room, count), whole)
        cut = text[:end].rstrip() + mark
        if end and count(cut) <= limit:
            return cut
        room -= 1 + room // 10  # joined they can take more than apart
    end = _outside(text, fit(text, limit, count, MARK), whole)
    cut = text[:end].rstrip() + MARK
    return cut if end and count(cut) <= limit else ""


def _ending(text: str, limit: int, count: Count) -> int:
    """The start of the longest end of a text with at most `limit` tokens, within 2 %, mirroring `fit`; the text's length if none fits."""

    def size(length: int) -> int:
        return count(text[len(text) - length :])

    if limit <= 0:
        return len(text)
    low, high, too_many = _gallop(text, limit, size, 0)
    if too_many is not None:
        low = _narrow(low, high, too_many, limit, size, 0)
    while low > 0:
        start = _opening(text, len(text) - low)
        if size(len(text) - start) <= limit:
            return start
        low = min(len(text) - start - 1, low * 9 // 10)
    return len(text)


def _opening(text: str, start: int) -> int:
    """The first good place to begin in the first half of `text[start:]`, or `start`."""
    if start == 0:
        return 0
    half = start + (len(text) - start) // 2
    found = (match.end() for match in sentences.BREAK.finditer(text, max(0, start - _MAX_BREAK_CHARS), half))
    borders = (at for at in found if at >= start and not text[at].isspace())
    words = (at for at in range(start, half) if text[at - 1].isspace() and not text[at].isspace())
    return next(chain(borders, words), start)


def _outside(text: str, at: int, whole: re.Pattern[str] | None, *, forward: bool = False) -> int:
    """The place, or the nearest one outside of a match of `whole`."""
    found = whole.finditer(text, max(0, at - _MAX_WHOLE_CHARS), at + _MAX_WHOLE_CHARS) if whole else ()
    match = next((match for match in found if match.start() < at < match.end()), None)
    return at if match is None else match.end() if forward else match.start()


def fit(text: str, limit: int, count: Count, mark: str = "", *, start: int = 0) -> int:
    """The end of the longest beginning of `text[start:]` that fits with `mark` after it, within 2 %, cut as by `truncate`.

    `len(text)` if all of it fits, then without the mark; `start` if nothing does.
    """

    def size(end: int) -> int:
        return count(text[start:end] if end == len(text) else text[start:end].rstrip() + mark)

    if limit <= 0 or start >= len(text):
        return start
    low, high, too_many = _gallop(text, limit, size, start)
    if too_many is None:
        return len(text)
    low = _narrow(low, high, too_many, limit, size, start)
    while low > start:
        cut = _border(text, start, low)
        if text[start:cut].strip() and size(cut) <= limit:
            return cut
        # what a shorter text takes is nearly always less, but no tokenizer promises it
        low = min(cut - 1, start + (low - start) * 9 // 10)
    return start


def split(text: str, limit: int, count: Count) -> Iterator[str]:
    """Split a text into pieces of at most `limit` tokens, cut as by `truncate`; a character that does not fit is skipped."""
    at = 0
    while found := _SOLID.search(text, at):
        at = found.start()
        end = fit(text, limit, count, start=at)
        if end > at:
            yield text[at:end].rstrip()
        at = max(end, at + 1)


def _gallop(text: str, limit: int, size: Callable[[int], int], start: int) -> tuple[int, int, int | None]:
    """(an end that fits, an end that does not, its size), by doubling; the size is None if the whole text fits."""
    low, end = start, min(len(text), start + _CHARS_PER_TOKEN * (limit + 1))
    while (num_tokens := size(end)) <= limit:
        if end == len(text):
            return end, end, None
        low, end = end, min(len(text), end + 2 * (end - start))
    return low, end, num_tokens


def _narrow(low: int, high: int, too_many: int, limit: int, size: Callable[[int], int], start: int) -> int:
    """An end near the last that fits, by guessing from the tokens a character takes, and halving where that does not help."""
    for step in range(_MAX_STEPS):
        if high - low <= max(1, (low - start) // 50):
            break
        guess = start + (high - start) * limit // too_many if step % 3 < 2 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        num_tokens = size(middle)
        if num_tokens <= limit:
            low = middle
        else:
            high, too_many = middle, num_tokens
    return low if low > start else high - 1


def _border(text: str, start: int, end: int) -> int:
    """The last good place to cut in the second half of `text[start:end]`, or `end`."""
    if end == len(text) or text[end - 1] == "\n":
        return end
    half = start + (end - start) // 2
    sentence = max((match.end() for match in sentences.END.finditer(text, half, end + 1) if match.end() <= end), default=0)
    best = max(sentence, text.rfind("\n", half, end) + 1)
    if not best:
        best = next((at for at in range(end, half, -1) if text[at - 1].isspace()), 0)
    return best or end
