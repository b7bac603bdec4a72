"""Shorten a text in its own words: truncate it, cut its middle, select sentences, or outline it. Counts of tokens are few."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from localrag.outline import Piece, outline
from localrag.text import sentences
from localrag.text.terms import CJK, spaced, words

Count = Callable[[str], int]
"""Tokens of a text by a model's own tokenizer."""

MARK = " […]"
"""Marks where a text was cut."""
_SOLID = re.compile(r"\S")
_CHARS_PER_TOKEN = 4  # only a first guess
_MAX_STEPS = 12
_MAX_BREAK_CHARS = 8
_MAX_WHOLE_CHARS = 128
"""Most characters of a match that is never cut in two."""


def truncate(text: str, limit: int, count: Count) -> str:
    """Truncate a text to at most `limit` tokens by `count`; " […]" marks the cut.

    The cut is at the end of a line or sentence, or between words, if there is one in the second half of the text that fits,
    else after a character. Leading blank lines are dropped if nothing else would fit. The result is empty if not even one
    character fits with the mark. Counts about three times as much text as it keeps.
    """
    cut = fit(text, limit, count, MARK)
    if not cut and text[:1].isspace():
        text = text.lstrip()  # there are more blank lines than fit
        cut = fit(text, limit, count, MARK)
    return text if cut == len(text) else text[:cut].rstrip() + MARK if cut else ""


def cut_middle(text: str, limit: int, count: Count, *, whole: re.Pattern[str] | None = None) -> str:
    """Cut the middle of a text so that at most `limit` tokens by `count` remain, with " […] " between beginning and end.

    Three fifths go to the end, which holds the conclusion. Both parts are cut as by `truncate`, and never inside a match of
    `whole`. With too few tokens for both, only the beginning remains; the result is empty if not even one character fits with
    the mark.
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
        room -= 1 + room // 10  # joined texts can take more tokens than separate ones
    end = _outside(text, fit(text, limit, count, MARK), whole)
    cut = text[:end].rstrip() + MARK
    return cut if end and count(cut) <= limit else ""


def _ending(text: str, limit: int, count: Count) -> int:
    """Return the start of the longest suffix with at most `limit` tokens, within 2 %, mirroring `fit`; the text's length if none fits."""

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
    """Return the first good place to begin in the first half of `text[start:]`, or `start`."""
    if start == 0:
        return 0
    half = start + (len(text) - start) // 2
    breaks = (match.end() for match in sentences.BREAK.finditer(text, max(0, start - _MAX_BREAK_CHARS), half))
    borders = (at for at in breaks if at >= start and not text[at].isspace())
    words = (at for at in range(start, half) if text[at - 1].isspace() and not text[at].isspace())
    return next(chain(borders, words), start)


def _outside(text: str, at: int, whole: re.Pattern[str] | None, *, forward: bool = False) -> int:
    """Return the nearest place to `at` outside any match of `whole`."""
    matches = whole.finditer(text, max(0, at - _MAX_WHOLE_CHARS), at + _MAX_WHOLE_CHARS) if whole else ()
    match = next((match for match in matches if match.start() < at < match.end()), None)
    return at if match is None else match.end() if forward else match.start()


def fit(text: str, limit: int, count: Count, mark: str = "", *, start: int = 0) -> int:
    """Return the end of the longest prefix of `text[start:]` that fits with `mark` after it, within 2 %, cut as by `truncate`.

    Returns `len(text)` if all of it fits without the mark, and `start` if nothing fits.
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
        # a shorter text nearly always takes fewer tokens, but no tokenizer guarantees it
        low = min(cut - 1, start + (low - start) * 9 // 10)
    return start


def split(text: str, limit: int, count: Count) -> Iterator[str]:
    """Split a text into pieces of at most `limit` tokens, cut as by `truncate`; a character that does not fit is skipped."""
    at = 0
    while match := _SOLID.search(text, at):
        at = match.start()
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
    """Return an end near the last that fits: guess from tokens per character, and bisect if that does not help."""
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
    """Return the last good place to cut in the second half of `text[start:end]`, or `end`."""
    if end == len(text) or text[end - 1] == "\n":
        return end
    half = start + (end - start) // 2
    sentence = max((match.end() for match in sentences.END.finditer(text, half, end + 1) if match.end() <= end), default=0)
    best = max(sentence, text.rfind("\n", half, end) + 1)
    if not best:
        best = next((at for at in range(end, half, -1) if text[at - 1].isspace()), 0)
    return best or end


_MAX_CHARS = 1024 * 1024
_NUM_STRETCHES = 16
_MAX_UNIT_CHARS = 600
_WRAPPED_CHARS = 50
"""A line of at least this length may be wrapped; it is if the next begins with a lower-case letter, which is rare in code."""
_MAX_MISSES = 30
"""Stop after this many sentences in a row that do not fit."""
_MAX_RESCORED = 200_000
_COMMON = 0.2
"""A word in more than this share of the sentences is too common to matter."""
_ASIDE = 0.05
_SAID = 0.25
"""Factors of a word's weight: for a word that is common or occurs in one sentence only, and each time that it was chosen."""

_RANKS = {"heading": 0, "class": 0, "function": 0, "omitted": 0, "type": 1, "import": 2, "text": 2, "table": 2, "doc": 3, "list": 3}
_LAST_RANK = 4
_GAP = " …"
_MAX_PIECE_MISSES = 50
"""Stop after this many pieces that do not fit."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A sentence or a line: `text`, from line number `line`, with its words."""

    text: str
    line: int
    words: tuple[str, ...]


def extract(text: str, limit: int, count: Count) -> str:
    """Select the most telling sentences of a text, in order, in at most `limit` tokens by `count`.

    After SumBasic (Nenkova and Vanderwende, "The Impact of Frequency on Summarization", 2005): the sentence whose words are the most
    frequent comes first, then its words weigh less, so that the next one says something else. SumBasic squares frequencies for that, which
    in a short text puts chance words first; here they are quartered. Words of a fifth of all sentences and words of one sentence weigh a
    twentieth, in place of a list of stop words for some languages; the first sentence weighs double, the second half as much more.
    A line is a sentence too, which makes it work for code and tables. Of a text over 1 MiB, 16 stretches are read.
    Deterministic. If no sentence fits, the text is truncated (`truncate`).
    """
    if limit <= 0 or not text.strip():
        return ""
    units = _units(text)
    room, selection, misses = limit, [], 0
    for index in _ranked(units):
        num_tokens = count(units[index].text + "\n")
        if num_tokens > room:
            misses += 1
            if misses > _MAX_MISSES or room < limit // 20:
                break
            continue
        selection.append(index)
        room, misses = room - num_tokens, 0
    joined = _within(selection, lambda indices: _joined_units(units, indices), limit, count)
    return joined or truncate(text.strip(), limit, count)


def outlined(text: str, language: str | None, limit: int, count: Count) -> str:
    """Outline a text in at most `limit` tokens, in order, with "…" for gaps between pieces.

    Headings and the heads of definitions come first, then types, imports and first sentences, then docstrings, then fields. The
    result is empty for a text without a known outline, or if no piece fits.
    """
    pieces = outline(text, language)
    if all(piece.kind == "omitted" for piece in pieces):
        return ""
    room, selection, misses = limit, [], 0
    for index in sorted(range(len(pieces)), key=lambda index: (_RANKS.get(pieces[index].kind, _LAST_RANK), index)):
        num_tokens = count(f"{pieces[index].text}{_GAP}\n")
        if num_tokens <= room:
            selection.append(index)
            room -= num_tokens
        elif (misses := misses + 1) > _MAX_PIECE_MISSES:
            break
    return _within(selection, lambda indices: _joined_pieces(text, [pieces[index] for index in indices]), limit, count)


def _within(selection: list[int], join: Callable[[Sequence[int]], str], limit: int, count: Count) -> str:
    """Join the chosen indices in order. `selection` is best first and loses its last entries until the text fits; empty if none fits."""
    while selection:
        joined = join(sorted(selection))
        excess = count(joined) - limit
        if excess <= 0:
            return joined
        del selection[-max(1, len(selection) * excess // (excess + limit)) :]
    return ""


def _words(sentence: str) -> tuple[str, ...]:
    """Return the words in lower case, without single letters and digits. In scripts without spaces, each character is a word."""
    return tuple(word for word in words(spaced(sentence).casefold()) if len(word) > 1 or CJK.match(word))


def _units(text: str) -> list[_Unit]:
    if len(text) > _MAX_CHARS:
        size, step = _MAX_CHARS // _NUM_STRETCHES, len(text) // _NUM_STRETCHES
        text = "\n".join(text[at : at + size] for at in range(0, step * _NUM_STRETCHES, step))
    units = []
    for number, line in enumerate(_unwrapped(text)):
        at = 0
        while at < len(line):
            ended = sentences.END.search(line, at, at + _MAX_UNIT_CHARS)
            end = ended.end() if ended else min(len(line), at + _MAX_UNIT_CHARS)
            sentence = line[at:end].rstrip() if at == 0 else line[at:end].strip()  # a line keeps its indentation
            if sentence.strip():
                units.append(_Unit(sentence, number, _words(sentence)))
            at = end
    return units


def _unwrapped(text: str) -> Iterator[str]:
    """The lines of a text, with wrapped lines joined."""
    whole, last = "", 0
    for line in text.splitlines():
        if last >= _WRAPPED_CHARS and line[:1].islower() and len(whole) < _MAX_UNIT_CHARS:
            whole += " " + line
        else:
            yield whole
            whole = line
        last = len(line)
    yield whole


def _ranked(units: list[_Unit]) -> Iterator[int]:
    """Yield the units that have words, best first, the same text only once.

    Scores only fall as sentences are chosen, so an old score is an upper bound and only the best are computed again. If all
    sentences share their words, that could take forever: after _MAX_RESCORED computations, old scores are used.
    """
    weights = _weights(units)

    def score(index: int) -> float:
        own = units[index].words
        # add five words, or the shortest lines would win
        return sum(weights[word] for word in own) / (len(own) + 5) * (1 + 1 / (1 + index))

    first = {unit.text.strip(): index for index, unit in reversed(list(enumerate(units))) if unit.words}
    heap = [(-score(index), index) for index in first.values()]
    heapq.heapify(heap)
    rescored = 0
    while heap:
        _, index = heapq.heappop(heap)
        if rescored < _MAX_RESCORED and heap and (fresh := (-score(index), index)) > heap[0]:
            heapq.heappush(heap, fresh)
            rescored += 1
            continue
        yield index
        for word in set(units[index].words):
            weights[word] *= _SAID


def _weights(units: list[_Unit]) -> dict[str, float]:
    """Word frequencies, reduced for common words and for those of a single sentence."""
    frequency = Counter(word for unit in units for word in unit.words)
    spread = Counter(word for unit in units for word in set(unit.words))
    common = max(3.0, _COMMON * len(units))
    return {word: number if 1 < spread[word] <= common else number * _ASIDE for word, number in frequency.items()}


def _joined_units(units: list[_Unit], indices: Sequence[int]) -> str:
    parts = [units[indices[0]].text]
    for before, index in pairwise(indices):
        same_line = index == before + 1 and units[index].line == units[before].line
        parts += [" " if same_line else "\n", units[index].text]
    return "".join(parts).strip()


def _joined_pieces(text: str, pieces: list[Piece]) -> str:
    parts: list[str] = []
    at = 0
    for piece in pieces:
        between = text[at : piece.start]
        if between.strip():
            parts.append(f"{_GAP}\n".lstrip(" " if not parts else ""))
        elif parts:
            parts.append("\n" * min(2, between.count("\n")) or " ")
        parts.append(piece.text)
        at = piece.end
    return "".join(parts) + (_GAP if text[at:].strip() else "")
