"""A summary written by a model: of a text in one go, or of the summaries of its parts."""

from __future__ import annotations

import re
from collections.abc import Callable

from localrag.outline import language_of
from localrag.summary.detailed import outlined
from localrag.summary.extractive import extract
from localrag.summary.fitting import Count, split, truncate

Write = Callable[[str, int], str]
"""(a text, the most tokens to write) → its summary, as a model wrote it; empty if it could not."""

MAX_PARTS = 8
"""A text is written about in so many parts at most; one that would take more is first cut down to as much."""
ANSWER_TOKENS = 160
"""A model is asked for a short paragraph: a small one that is given room for more repeats itself."""
MIN_WRITE_TOKENS = 64
"""The least that `write` must take in: parts that are smaller say nothing."""
_MAX_ROUNDS = 4
_WORD = re.compile(r"[^\W\d_]+")


def write_summary(label: str, text: str, limit: int, count: Count, write: Write, write_tokens: int) -> str:
    """What `write` makes of a text, in at most `limit` tokens by `count`; empty if it wrote nothing usable.

    A text of more than `write_tokens` is written about in parts, and then the summaries of the parts are; a part of which nothing
    usable was written is represented by its own sentences, unless that happens to most. A text of more than MAX_PARTS parts is cut
    down to them before: to its outline if it is code or Markdown, else to its own most telling sentences.
    """
    if write_tokens < MIN_WRITE_TOKENS:
        return ""
    answer = min(limit, ANSWER_TOKENS)
    if count(text) > MAX_PARTS * write_tokens:
        most = MAX_PARTS * write_tokens * 3 // 4  # parts end at borders and are not quite full
        text = outlined(text, language_of(label), most, count) or extract(text, most, count)
    for _ in range(_MAX_ROUNDS):
        if count(text) <= write_tokens:
            return truncate(usable(write(text, answer), text), limit, count)
        whole = list(split(text, write_tokens, count))
        written = [truncate(usable(write(part, answer), part), write_tokens // 3, count) for part in whole]
        if sum(map(bool, written)) * 2 < len(whole):
            return ""
        text = "\n\n".join(short or extract(part, write_tokens // 3, count) for short, part in zip(written, whole, strict=True))
    return ""


def usable(written: str, text: str) -> str:
    """What a model wrote of a text, without heading marks; empty if it says nothing, repeats itself, or is as long as the text."""
    written = written.strip().lstrip("#").strip()
    words = [word.casefold() for word in _WORD.findall(written)]
    is_too_short = len(words) < 3 and len(written) < 12  # twelve characters are some words in scripts that need no spaces
    repeats = len(words) > 20 and len(set(words)) < 0.3 * len(words)
    return "" if not words or is_too_short or repeats or len(written) >= len(text) else written
