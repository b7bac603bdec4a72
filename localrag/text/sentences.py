"""Sentence boundaries: one rule for summaries, outlines, cuts, repeats and excerpts.

A sentence ends with its stops and the closing marks after them. In alphabetic scripts, white space must follow; in Chinese and
Japanese it need not. All repetitions are possessive, so that the time is linear in the length of any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_STOPS = r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+"
_WIDE_STOPS = r"[。！？]++[”’」』）]*+"

END = re.compile(rf"{_STOPS}(?=\s)|{_WIDE_STOPS}")
"""The end of a sentence, without the white space after it. The end of the text does not count: more may follow."""

BREAK = re.compile(rf"{_STOPS}\s++|{_WIDE_STOPS}\s*+|\n\s*+")
"""The end of a sentence or a line, with the white space after it."""


def sentences(text: str) -> Iterator[str]:
    """Split a text into its sentences and lines, each with the white space after it. Joined, they are the text."""
    start = 0
    for match in BREAK.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def first_sentence(text: str) -> str:
    """Return the text up to the end of its first sentence; all of it if none ends."""
    end = END.search(text)
    return text[: end.end()] if end else text


def whole_sentences(text: str) -> str:
    """Remove an incomplete sentence at the end. A text without a complete sentence is returned unchanged."""
    ends = [match.end() for match in END.finditer(f"{text}\n")]
    return text[: ends[-1]] if ends else text


Span = tuple[int, int]
"""Start and end (exclusive) of a part of a text, in code points."""

_ROW = re.compile(r"[ \t]*+\|.*\|[ \t]*+\Z")
_RULE = re.compile(r"[ \t]*+\|(?=[^-]*-)[ \t|:-]++(?<=[| \t])\Z")
_ITEM = re.compile(r"[ \t]*+(?:[-*+]|\d{1,9}[.)])[ \t]")
_FENCE = re.compile(r"[ \t]*+(?:```|~~~)")


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest part of a passage that can be read alone: a sentence, a list item, a table row or a block of code. `header` is the
    span of the head of a row's table."""

    span: Span
    header: Span | None = None


def units(text: str) -> list[Unit]:
    """Return the units of a Markdown text in order. Headings and blank lines belong to none."""
    found: list[Unit] = []
    lines = list(_lines(text))
    at = 0
    while at < len(lines):
        start, end = lines[at]
        line = text[start:end]
        if _ROW.match(line) and at + 1 < len(lines) and _RULE.match(text[slice(*lines[at + 1])]):
            header, at = (start, lines[at + 1][1]), at + 2
            while at < len(lines) and _ROW.match(text[slice(*lines[at])]):
                found.append(Unit(lines[at], header))
                at += 1
            continue
        if _FENCE.match(line):
            last = next((number for number in range(at + 1, len(lines)) if _FENCE.match(text[slice(*lines[number])])), len(lines) - 1)
            found.append(Unit((start, lines[last][1])))
            at = last
        elif _ITEM.match(line):
            found.append(Unit((start, end)))
        elif line.strip() and not line.startswith("#"):
            found += [Unit(span) for span in _sentence_spans(text, start, end)]
        at += 1
    return found


def excerpt(text: str, spans: Sequence[Span]) -> str:
    """Return these parts of a text, in order and without overlap. Parts of one line are joined by a space, others by a line end.

    Nothing marks the gaps: small models stop copying at an ellipsis.
    """
    pieces: list[str] = []
    end_before = 0
    for start, end in spans:
        gap = text[end_before:start]
        if pieces:
            pieces.append(gap if not gap.strip() else "\n" if "\n" in gap else " ")
        pieces.append(text[start:end])
        end_before = end
    return "".join(pieces)


def _lines(text: str) -> Iterator[Span]:
    """Yield the span of each line, without its end."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield start, end
        start = end + 1


def _sentence_spans(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the spans of the sentences of a line, without white space around them."""
    for sentence in sentences(text[start:end]):
        stripped = sentence.strip()
        if stripped:
            first = start + len(sentence) - len(sentence.lstrip())
            yield first, first + len(stripped)
        start += len(sentence)
