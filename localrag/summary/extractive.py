"""Summarize a text in its own words: its most telling sentences, or the pieces of its outline."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from localrag.outline import Piece, outline
from localrag.summary.fitting import Count, truncate
from localrag.text.sentences import END
from localrag.text.terms import CJK, spaced, words

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
    """A sentence or a line: `text`, on line number `line` of the text, with its words."""

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
    room, chosen, misses = limit, [], 0
    for index in _ranked(units):
        num_tokens = count(units[index].text + "\n")
        if num_tokens > room:
            misses += 1
            if misses > _MAX_MISSES or room < limit // 20:
                break
            continue
        chosen.append(index)
        room, misses = room - num_tokens, 0
    joined = _within(chosen, lambda indices: _joined_units(units, indices), limit, count)
    return joined or truncate(text.strip(), limit, count)


def outlined(text: str, language: str | None, limit: int, count: Count) -> str:
    """Outline a text in at most `limit` tokens, in order, with "…" for gaps between pieces.

    Headings and the heads of definitions have priority, then types, imports and first sentences, docstrings, and fields last. Empty for a
    text without a known outline, or if no piece fits.
    """
    pieces = outline(text, language)
    if all(piece.kind == "omitted" for piece in pieces):
        return ""
    room, chosen, misses = limit, [], 0
    for index in sorted(range(len(pieces)), key=lambda index: (_RANKS.get(pieces[index].kind, _LAST_RANK), index)):
        num_tokens = count(f"{pieces[index].text}{_GAP}\n")
        if num_tokens <= room:
            chosen.append(index)
            room -= num_tokens
        elif (misses := misses + 1) > _MAX_PIECE_MISSES:
            break
    return _within(chosen, lambda indices: _joined_pieces(text, [pieces[index] for index in indices]), limit, count)


def _within(chosen: list[int], join: Callable[[Sequence[int]], str], limit: int, count: Count) -> str:
    """Join the chosen indices in their order; `chosen` is best first, and loses its last until the text fits. Empty if none fits."""
    while chosen:
        joined = join(sorted(chosen))
        excess = count(joined) - limit
        if excess <= 0:
            return joined
        del chosen[-max(1, len(chosen) * excess // (excess + limit)) :]
    return ""


def _words(sentence: str) -> tuple[str, ...]:
    """The words in lower case, without single letters and digits; of scripts without spaces, each character is a word."""
    return tuple(word for word in words(spaced(sentence).casefold()) if len(word) > 1 or CJK.match(word))


def _units(text: str) -> list[_Unit]:
    if len(text) > _MAX_CHARS:
        size, step = _MAX_CHARS // _NUM_STRETCHES, len(text) // _NUM_STRETCHES
        text = "\n".join(text[at : at + size] for at in range(0, step * _NUM_STRETCHES, step))
    units = []
    for number, line in enumerate(_unwrapped(text)):
        at = 0
        while at < len(line):
            ended = END.search(line, at, at + _MAX_UNIT_CHARS)
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
    """The units that have words, best first, the same text once.

    Scores only fall while sentences are chosen, so an earlier score is an upper bound, and only the best are computed again. That could
    take forever if all sentences share their words: after _MAX_RESCORED, the old scores count.
    """
    weights = _weights(units)

    def score(index: int) -> float:
        own = units[index].words
        # five more words than there are, for else the shortest lines would be the best
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
