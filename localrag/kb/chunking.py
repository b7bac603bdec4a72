"""Sections to passages: stretches of a text that the embedder takes in whole.

Everything is counted as it is embedded, heading path included, with the embedder's own tokenizer, so that no passage is ever cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localrag.errors import KnowledgeBaseError
from localrag.kb.places import Places
from localrag.kb.readers.base import Reading
from localrag.kb.schema import embedded, embedded_sha256
from localrag.tokens import Embedder

TARGET_TOKENS = 200
"""A passage is made as large as structure allows up to this: a few paragraphs, small enough to be about one thing."""

CUTTER = 1
"""The version of the readers and of what is below: documents that an older one made are made again, with ids and vectors of chunks
that come out the same. Count it up when either is changed."""

_CHARS_PER_TOKEN = 10
# A WordPiece tokenizer calls any run of more than 100 letters one unknown token, so that a megabyte of base64 would count as one.
# A token is therefore taken to cover 10 characters at most; ordinary text has 2 to 5.

_WINDOW_CHARS = 4000
# The splitter's time grows with the square of an unbroken run: 28 s for 100,000 Chinese characters without punctuation, 1 s in windows.

_BORDERS = ("\n\n", "\n", "。", ". ", " ")  # where a window ends, best first


@dataclass(frozen=True, slots=True)
class Passage:
    """Characters `start` to `end` (exclusive) of a text.

    `heading` is the path of headings it stands under, `place` where a person finds it in the file.
    """

    start: int
    end: int
    text: str
    heading: str = ""
    place: str = ""

    @property
    def embedded(self) -> str:
        """What the embedder is given."""
        return embedded(self.heading, self.text)

    @property
    def sha256(self) -> bytes:
        """By what a passage is known again."""
        return embedded_sha256(self.heading, self.text)


def cut(reading: Reading, embedder: Embedder) -> list[Passage]:
    """The passages of a text, in order, not overlapping: `text == reading.text[start:end]`, without outer white space.

    Each is at most `min(TARGET_TOKENS, embedder.max_tokens)` tokens long with its heading path, and none crosses the border of a section.
    A path that takes more than a quarter of that loses its outer parts. Where a section takes several passages, its heading stands only
    in their paths. KnowledgeBaseError if a single character is too long.
    """
    limit = min(TARGET_TOKENS, embedder.max_tokens)
    passages: list[Passage] = []
    places = Places(reading)
    for section in reading.sections:
        heading = _shortened(section.heading, embedder, limit // 4)
        splitter = _Splitter(embedder.count, limit, heading=heading, markdown=reading.markdown)
        whole = reading.text[section.start : section.end].strip()
        start = section.start if not heading or splitter.size(whole) <= limit else max(section.start, section.body)
        for at, text in splitter.split(reading.text, start, section.end):
            passages.append(Passage(at, at + len(text), text, heading, places(at, at + len(text))))
    return passages


def split_counted(text: str, count: Callable[[str], int], limit: int) -> Iterator[tuple[int, str]]:
    """(offset, piece) of plain text in pieces of at most `limit` tokens by `count`, without outer white space."""
    return _Splitter(count, limit).split(text, 0, len(text))


class _Splitter:
    """Splits text where its structure is weakest into pieces of at most `limit` tokens, the heading path counted with each."""

    def __init__(self, count: Callable[[str], int], limit: int, *, heading: str = "", markdown: bool = False) -> None:
        self.count = count
        self.limit = limit
        self.heading = heading
        self.markdown = markdown

    def size(self, piece: str) -> int:
        """The tokens of a piece as it is embedded; where it is far over the limit, some number over the limit."""
        at_least = -(-len(piece) // _CHARS_PER_TOKEN)
        return at_least if at_least > self.limit else max(at_least, self.count(embedded(self.heading, piece)))

    def split(self, text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
        """(offset in `text`, piece) of its characters `start` to `end`."""
        from semantic_text_splitter import MarkdownSplitter, TextSplitter  # noqa: PLC0415  # an extension module, wanted only here

        # Its CodeSplitter took six minutes for 60 kB of nested blocks. Where code is cut, the sections of its reader say.
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
        at = next((found + len(border) for border in _BORDERS if (found := text.rfind(border, half, full)) >= 0), full)
        yield start, at
        start = at
    yield start, end


def _shortened(heading: str, embedder: Embedder, limit: int) -> str:
    while heading and embedder.count(heading) > limit:
        heading = heading.partition(" > ")[2]
    return heading
