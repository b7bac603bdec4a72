"""Sentence boundaries: one rule for summaries, outlines, cuts and repeats.

A sentence ends with its stops and the closing marks after them. In alphabetic scripts, white space must follow; in Chinese and
Japanese it need not. All repetitions are possessive, so that the time is linear in the length of any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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
