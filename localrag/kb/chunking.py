"""Split a text into passages that fit the embedder, each with its place in the file for people.

A passage is counted exactly as it is embedded, heading path included, with the embedder's tokenizer, so that it is never truncated.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localrag.errors import KnowledgeBaseError
from localrag.kb.database import embedded, embedded_sha256
from localrag.kb.readers.base import Reading
from localrag.text.tokens import Embedder

TARGET_TOKENS = 200
"""Target size of a passage: a few paragraphs, small enough to have one topic."""

CUTTER = 3
"""Version of the readers and of this module. Increment it when either changes: documents of an older version are then indexed again.
Chunks that stay the same keep their ids and vectors."""

_CHARS_PER_TOKEN = 10
# A WordPiece tokenizer turns any run of more than 100 letters into one unknown token, so a megabyte of base64 would count as one token.
# A token is therefore assumed to cover at most 10 characters; in ordinary text it covers 2 to 5.

_WINDOW_CHARS = 4000
# The splitter takes quadratic time on an unbroken run: 28 s for 100,000 Chinese characters without punctuation, 1 s in windows.

_LINE_END = re.compile(r"\r\n|\r|\n")
_BORDERS = ("\n\n", "\n", "。", ". ", " ")  # window ends, in order of preference


@dataclass(frozen=True, slots=True)
class Passage:
    """Characters `start` to `end` (exclusive) of a text.

    `heading` is the path of headings above them; `place` is their place in the file for people, such as "page 3".
    """

    start: int
    end: int
    text: str
    heading: str = ""
    place: str = ""

    @property
    def embedded(self) -> str:
        """The text to embed."""
        return embedded(self.heading, self.text)

    @property
    def sha256(self) -> bytes:
        """The digest that identifies a passage."""
        return embedded_sha256(self.heading, self.text)


def cut(reading: Reading, embedder: Embedder) -> list[Passage]:
    """Cut a text into passages, in order and without overlap. Each is `reading.text[start:end]`, without outer white space.

    A passage has at most `min(TARGET_TOKENS, embedder.max_tokens)` tokens, its heading path included, and stays within its section. A
    path over a quarter of that limit loses its outer headings. If a section needs several passages, its heading appears only in their
    paths. Raises KnowledgeBaseError if a single character exceeds the limit.
    """
    limit = min(TARGET_TOKENS, embedder.max_tokens)
    passages: list[Passage] = []
    place_of = _Places(reading)
    for section in reading.sections:
        heading = _shortened(section.heading, embedder, limit // 4)
        splitter = _Splitter(embedder.count, limit, heading=heading, markdown=reading.markdown)
        whole = reading.text[section.start : section.end].strip()
        start = section.start if not heading or splitter.size(whole) <= limit else max(section.start, section.body)
        for at, text in splitter.split(reading.text, start, section.end):
            passages.append(Passage(at, at + len(text), text, heading, place_of(at, at + len(text))))
    return passages


def split_counted(text: str, count: Callable[[str], int], limit: int) -> Iterator[tuple[int, str]]:
    """Split plain text into pieces of at most `limit` tokens, as `count` counts them. Yield (offset, piece) without outer white space."""
    return _Splitter(count, limit).split(text, 0, len(text))


class _Places:
    """Finds places in a reading. A call returns the place of characters `start` to `end`, such as "page 3" or "lines 12-40", or ""."""

    def __init__(self, reading: Reading) -> None:
        self._places = reading.places
        if not self._places and not reading.own_lines:
            self._starts: list[int] | None = None
        elif self._places:
            self._starts = [place.start for place in self._places]
        else:
            self._starts = [0, *(match.end() for match in _LINE_END.finditer(reading.text))]

    def __call__(self, start: int, end: int) -> str:
        if self._starts is None:
            return ""
        first = max(0, bisect_right(self._starts, start) - 1)
        last = max(first, bisect_left(self._starts, end) - 1)
        if not self._places:
            return _place("line", first + 1, last + 1)
        one, other = self._places[first], self._places[last]
        if one.kind != other.kind:
            return _place(one.kind, one.number, one.number)
        return _place(one.kind, one.number, other.number)


def _place(kind: str, first: int, last: int) -> str:
    return f"{kind}s {first}-{last}" if last > first else f"{kind} {first}"


class _Splitter:
    """Splits text into pieces of at most `limit` tokens, each counted with the heading path, at the largest structural breaks."""

    def __init__(self, count: Callable[[str], int], limit: int, *, heading: str = "", markdown: bool = False) -> None:
        self.count = count
        self.limit = limit
        self.heading = heading
        self.markdown = markdown

    def size(self, piece: str) -> int:
        """Count the tokens of a piece as embedded. For a piece that is far too long, return any number over the limit."""
        at_least = -(-len(piece) // _CHARS_PER_TOKEN)
        return at_least if at_least > self.limit else max(at_least, self.count(embedded(self.heading, piece)))

    def split(self, text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
        """Split characters `start` to `end` of `text`. Yield (offset in `text`, piece)."""
        from semantic_text_splitter import MarkdownSplitter, TextSplitter  # noqa: PLC0415  # an extension module, needed only here

        # Its CodeSplitter took six minutes for 60 kB of nested blocks, so code is cut at the sections of its reader instead.
        splitter = (MarkdownSplitter if self.markdown else TextSplitter).from_callback(self.size, self.limit)
        for begin, stop in _windows(text, start, end):
            for offset, piece in splitter.chunk_indices(text[begin:stop]):
                if (num_tokens := self.size(piece)) > self.limit:
                    raise KnowledgeBaseError(
                        f"A piece of {len(piece)} characters takes {num_tokens} tokens, and the limit is {self.limit}.",
                        hint="Use an embedder that takes longer texts.",
                        num_tokens=num_tokens,
                        limit_tokens=self.limit,
                    )
                if piece.strip():
                    yield begin + offset, piece


def _windows(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    while end - start > _WINDOW_CHARS:
        half, full = start + _WINDOW_CHARS // 2, start + _WINDOW_CHARS
        at = next((position + len(border) for border in _BORDERS if (position := text.rfind(border, half, full)) >= 0), full)
        yield start, at
        start = at
    yield start, end


def _shortened(heading: str, embedder: Embedder, limit: int) -> str:
    while heading and embedder.count(heading) > limit:
        heading = heading.partition(" > ")[2]
    return heading
