"""A summary made of a text's own sentences."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from localrag.summary.fitting import SENTENCE_END, Count, truncate

_MAX_CHARS = 1024 * 1024
_NUM_STRETCHES = 16
_MAX_UNIT_CHARS = 600
_WRAPPED_CHARS = 50
"""A line that is at least so long may have been broken: it was if the next begins with a small letter, which in code is rare."""
_MAX_MISSES = 30
"""Sentences that did not fit, one after the other, before the rest is taken to be too long as well."""
_MAX_RESCORED = 200_000
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W\d_]{2,}|\d{2,}")  # scripts without spaces, a character each; words; numbers
_COMMON = 0.2
"""A word in more than this share of the sentences is about nothing in particular."""
_ASIDE = 0.05
_SAID = 0.25
"""What a word's weight is multiplied by where it is common or stands alone, and each time that it was said."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A sentence or a line: `text`, on line number `line` of the text, with its words."""

    text: str
    line: int
    words: tuple[str, ...]


def extract(text: str, limit: int, count: Count) -> str:
    """The sentences that say most of what a text says, in their order, in at most `limit` tokens by `count`.

    After SumBasic (Nenkova and Vanderwende, "The Impact of Frequency on Summarization", 2005): the sentence whose words are the most
    frequent comes first, then its words weigh less, so that the next one says something else. SumBasic squares frequencies for that, which
    in a short text puts chance words first; here they are quartered. Words of a fifth of all sentences and words of one sentence weigh a
    twentieth, in place of a list of stop words for some languages; the first sentence weighs double, the second half as much more.
    A line is a sentence too, which makes it work for code and tables. Of a text over 1 MiB, 16 stretches are read.
    Same text, same result. Where no sentence fits, this is `truncate`.
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
    while chosen:
        joined = _joined(units, sorted(chosen))
        excess = count(joined) - limit
        if excess <= 0:
            return joined
        del chosen[-max(1, len(chosen) * excess // (excess + limit)) :]
    return truncate(text.strip(), limit, count)


def _units(text: str) -> list[_Unit]:
    if len(text) > _MAX_CHARS:
        size, step = _MAX_CHARS // _NUM_STRETCHES, len(text) // _NUM_STRETCHES
        text = "\n".join(text[at : at + size] for at in range(0, step * _NUM_STRETCHES, step))
    units = []
    for number, line in enumerate(_unwrapped(text)):
        at = 0
        while at < len(line):
            ended = SENTENCE_END.search(line, at, at + _MAX_UNIT_CHARS)
            end = ended.end() if ended else min(len(line), at + _MAX_UNIT_CHARS)
            sentence = line[at:end].rstrip() if at == 0 else line[at:end].strip()  # a line keeps its indentation
            if sentence.strip():
                units.append(_Unit(sentence, number, tuple(word.casefold() for word in _WORD.findall(sentence))))
            at = end
    return units


def _unwrapped(text: str) -> Iterator[str]:
    """The lines of a text, where one that was broken in the middle of a sentence goes on with the next."""
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

    Scores only fall while sentences are chosen, so that one which was computed before is an upper bound, and only the best
    need be computed again. Where all sentences share their words that would take forever: after _MAX_RESCORED the old ones count.
    """
    weights = _weights(units)

    def score(index: int) -> float:
        words = units[index].words
        # five more words than there are, for else the shortest lines would be the best
        return sum(weights[word] for word in words) / (len(words) + 5) * (1 + 1 / (1 + index))

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
    """How often each word occurs, less for common words and for those of a single sentence."""
    frequency = Counter(word for unit in units for word in unit.words)
    spread = Counter(word for unit in units for word in set(unit.words))
    common = max(3.0, _COMMON * len(units))
    return {word: number if 1 < spread[word] <= common else number * _ASIDE for word, number in frequency.items()}


def _joined(units: list[_Unit], indices: list[int]) -> str:
    parts = [units[indices[0]].text]
    for before, index in pairwise(indices):
        same_line = index == before + 1 and units[index].line == units[before].line
        parts += [" " if same_line else "\n", units[index].text]
    return "".join(parts).strip()
