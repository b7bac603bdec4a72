"""The outline of Markdown, from the block structure that markdown-it-py finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from localrag.outline.piece import Kind, Piece, omitted

if TYPE_CHECKING:
    from markdown_it.token import Token

MAX_CHARS = 256 * 1024
"""The most that is parsed, in characters: real text takes 0.1 s, the shortest list items 4 s. Blocks nest 20 deep at most."""
_MAX_LINE_CHARS = 500
_LIST_ITEMS = 3
"""The first items of a list say what it lists."""
_MAX_FRONT_MATTER_LINES = 200
_LINE_END = re.compile(r"\r\n|\r|\n")  # as markdown-it counts lines
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]*_]*(?=\s)|[。！？]")


@dataclass(slots=True)
class _Reader:
    """Collects pieces from block tokens, whose `map` counts lines."""

    text: str
    starts: list[int]
    pieces: list[Piece] = field(default_factory=list)
    path: list[tuple[int, str]] = field(default_factory=list)  # (level, name) of the headings above
    wants_text: bool = True  # whether the section still lacks its first sentence

    def add(self, first: int, end: int, kind: Kind, path: str | None = None) -> None:
        """Lines `first` to `end` (exclusive), the first sentence of them for a text, and no more than _MAX_LINE_CHARS."""
        start, stop = self.starts[first], self.starts[min(end, len(self.starts) - 1)]
        text = self.text[start : min(stop, start + _MAX_LINE_CHARS)]
        if kind == "text" and (sentence := _SENTENCE_END.search(text)):
            text = text[: sentence.end()]
        text = text.rstrip()
        if text and (not self.pieces or start >= self.pieces[-1].end):
            self.pieces.append(Piece(start, start + len(text), text, kind, self.heading if path is None else path))

    @property
    def heading(self) -> str:
        return " > ".join(name for _, name in self.path)

    def enter_heading(self, level: int, name: str, first: int, end: int) -> None:
        self.path = [above for above in self.path if above[0] < level]
        self.add(first, end, "heading")
        self.path.append((level, " ".join(name.split())[:_MAX_LINE_CHARS]))
        self.wants_text = True


def read(text: str) -> list[Piece]:
    """Headings, first sentences, the first items of outer lists and the heads of tables. Front matter is passed over."""
    from markdown_it import MarkdownIt  # noqa: PLC0415  # weight

    num_chars = len(text)
    if num_chars > MAX_CHARS:
        num_chars = text.rfind("\n", MAX_CHARS // 2, MAX_CHARS) + 1 or MAX_CHARS
    starts = [0, *(match.end() for match in _LINE_END.finditer(text, 0, num_chars)), num_chars]
    skipped = _front_matter_lines(text, starts)
    # paragraphs and cells are not parsed within: that is where hostile text is slow, and nothing of it is wanted here
    tokens = MarkdownIt("commonmark").enable("table").disable("inline").parse(text[starts[skipped] : num_chars])
    reader = _Reader(text, starts)
    for role, token, content in _blocks(tokens):
        assert token.map is not None
        first, end = (line + skipped for line in token.map)
        if role == "heading":
            reader.enter_heading(int(token.tag[1]), content, first, end)
        elif role == "text" and reader.wants_text:
            reader.add(first, end, "text")
            reader.wants_text = False
        elif role == "table":
            reader.add(first, first + 2, "table")
        elif role == "list":
            reader.add(first, first + 1, "list")
    return [*reader.pieces, omitted(text, num_chars)] if num_chars < len(text) else reader.pieces


def _blocks(tokens: list[Token]) -> Iterator[tuple[str, Token, str]]:
    """(what it is, token, its text) of the blocks that an outline shows; quotes, code and inner lists are passed over."""
    hidden, depth, items = 0, 0, 0
    for index, token in enumerate(tokens):
        kind = token.type
        if kind in {"bullet_list_open", "ordered_list_open"}:
            depth, items = depth + 1, items if depth else 0
        elif kind in {"bullet_list_close", "ordered_list_close"}:
            depth -= 1
        elif kind in {"blockquote_open", "blockquote_close"}:
            hidden += token.nesting
        if hidden or token.map is None:
            continue
        if kind == "list_item_open" and depth == 1 and (items := items + 1) <= _LIST_ITEMS:
            yield "list", token, ""
        elif depth == 0 and kind in {"heading_open", "paragraph_open", "table_open"}:
            # a heading and a paragraph are followed by the token that holds their text
            yield {"heading_open": "heading", "paragraph_open": "text", "table_open": "table"}[kind], token, tokens[index + 1].content


def _front_matter_lines(text: str, starts: list[int]) -> int:
    """How many lines a block of front matter takes at the very top: from `---` to the next `---` or `...`."""
    lines = [text[start:end].rstrip() for start, end in pairwise(starts[: _MAX_FRONT_MATTER_LINES + 1])]
    if not lines or lines[0] != "---":
        return 0
    return next((number + 1 for number, line in enumerate(lines[1:], 1) if line in {"---", "..."}), 0)
