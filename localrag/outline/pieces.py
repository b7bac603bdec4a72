"""The outline of a text: of code from its syntax tree, of Markdown from the block structure that markdown-it-py finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from localrag.outline.languages import ROLES, Role, body_of, first_child, parse, walk
from localrag.text.sentences import first_sentence

if TYPE_CHECKING:
    from markdown_it.token import Token
    from tree_sitter import Node

Kind = Literal["heading", "class", "function", "type", "field", "import", "doc", "detail", "text", "list", "table", "omitted"]
"""`doc` is the first paragraph of a docstring or comment and `detail` the rest; `omitted` tells how much was not read."""

_MAX_PIECES = 20_000
_SHORT_TYPE_BYTES = 1500
"""A shorter struct, interface or enumeration is one piece."""
_MOST_CHARS: dict[Kind, int] = {"field": 200, "doc": 800, "detail": 2000, "type": _SHORT_TYPE_BYTES}
_WHOLE: dict[Role, Kind] = {"import": "import", "type": "type"}
_PLACES = frozenset({"mod_item", "package_clause", "namespace_definition", "file_scoped_namespace_declaration"})
"""Nodes that name a file's module if they have no body."""
_MOST_HEAD_CHARS = 1000
_FUNCTIONS = frozenset({"arrow_function", "function_expression", "generator_function", "function_definition"})
_MARKS = "/*#!-\"'` \t\r"
"""Characters without meaning in a line of a comment."""

_MAX_MARKDOWN_CHARS = 256 * 1024
"""Most characters to parse: real text takes 0.1 s, the shortest list items 4 s. Blocks nest at most 20 deep."""
_MAX_LINE_CHARS = 500
_LIST_ITEMS = 3
"""The number of first items of a list to show."""
_MAX_FRONT_MATTER_LINES = 200
_LINE_END = re.compile(r"\r\n|\r|\n")  # as markdown-it counts lines


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters `start` to `end` (exclusive) of a text, with their indentation.

    For kind "omitted", `text` tells in words how much was not read from `start` to `end`. `path` is the path of Markdown headings
    above, joined by " > ".
    """

    start: int
    end: int
    text: str
    kind: Kind
    path: str = ""


def outline_code(text: str, language: str) -> list[Piece]:
    """The outline of source code in a language of `ROLES`."""
    parsed = parse(text, language)
    if parsed is None:
        return [_omitted(text, 0)] if text else []
    tree, data, num_chars = parsed
    finder = _Finder(language, data)
    walk(tree, finder.enter)
    pieces = _in_characters(text, data, sorted(finder.spans))
    if len(finder.spans) >= _MAX_PIECES and pieces:
        num_chars = pieces[-1].end
    return [*pieces, _omitted(text, num_chars)] if num_chars < len(text) else pieces


class _Finder:
    """Collects (start byte, end byte, kind) from the nodes of a walk."""

    def __init__(self, language: str, data: bytes) -> None:
        self.roles = ROLES[language]
        self.data = data
        self.spans: list[tuple[int, int, Kind]] = []
        self._lead: tuple[int, int] | None = None  # byte and row where the next definition begins: its wrapper or attributes
        self._lead_end = 0  # where the wrapper ends; 0 for an attribute, which belongs to the next node
        self._comment: tuple[int, int, int, int] | None = None  # start byte, end byte, first row, last row
        self._last_row = -1  # where the last node that is not a comment ended

    def enter(self, node: Node) -> bool:
        role = self.roles.get(node.type)
        if role is None or not node.is_named or len(self.spans) >= _MAX_PIECES:
            if node.is_named:
                self._last_row = node.end_point.row
                self._lead = None if self._lead_end == 0 else self._lead
            return False
        if role == "comment":
            self._keep_comment(node)
            return False
        if role in {"wrap", "attribute"}:
            is_within = self._lead is not None and (self._lead_end == 0 or node.start_byte < self._lead_end)
            if not is_within:
                self._lead = (node.start_byte, node.start_point.row)
            self._lead_end = node.end_byte if role == "wrap" else 0
            return role == "wrap"
        if role == "inside":
            return True
        return self._define(node, role)

    def _keep_comment(self, node: Node) -> None:
        first, last = node.start_point.row, node.end_point.row - (node.end_point.column == 0)
        if first == self._last_row:
            return  # a remark after a statement
        start = node.start_byte
        if self._comment is not None and first <= self._comment[3] + 1:
            start, first = self._comment[0], self._comment[2]
        self._comment = (start, node.end_byte, first, last)

    def _define(self, node: Node, role: Role) -> bool:
        start, row = node.start_byte, node.start_point.row
        if self._lead is not None and (self._lead_end == 0 or start < self._lead_end):
            start, row = self._lead
        self._lead, self._lead_end = None, 0
        comment, self._comment = self._comment, None
        self._last_row = node.end_point.row
        span = self._span(node, role)
        if span is None:
            return False
        end, kind, deeper = span
        if comment is not None and comment[3] + 1 >= row:
            self._add_doc(comment[0], comment[1])
        if kind == "doc":
            self._add_doc(start, end)
        else:
            self.spans.append((start, end, kind))
        if kind == "function":
            self._add_docstring(node)
        if deeper:
            self._last_row = row
        return deeper

    def _span(self, node: Node, role: Role) -> tuple[int, Kind, bool] | None:
        """The end of a definition's piece, its kind, and whether to enter the node."""
        body = body_of(node)
        head = node.end_byte if body is None else body.start_byte
        if role == "class":
            return head, "import" if body is None and node.type in _PLACES else "class", body is not None
        if role == "type" and node.end_byte - node.start_byte > _SHORT_TYPE_BYTES:
            return min(head, self._line_end(node)) if body is None else head, "type", True
        if role == "statement":
            return self._statement(node)
        if role in _WHOLE:
            return node.end_byte, _WHOLE[role], False
        function = head if role == "function" else _assigned_function(node) if role == "assign" else None
        if function is not None:
            return function, "function", False
        return self._line_end(node), "function" if _declares_function(node) else "field", False

    def _statement(self, node: Node) -> tuple[int, Kind, bool] | None:
        inner = first_child(node)
        if inner is not None and inner.type == "string":
            return node.end_byte, "doc", False
        return (self._line_end(node), "field", False) if inner is not None and inner.type == "assignment" else None

    def _line_end(self, node: Node) -> int:
        end = self.data.find(b"\n", node.start_byte, node.end_byte)
        return node.end_byte if end < 0 else end

    def _add_docstring(self, function: Node) -> None:
        """The string that a Python function begins with."""
        first = first_child(function.child_by_field_name("body"))
        string = first_child(first)
        if first is not None and self.roles.get(first.type) == "statement" and string is not None and string.type == "string":
            self._add_doc(string.start_byte, string.end_byte)

    def _add_doc(self, start: int, end: int) -> None:
        """A comment in two pieces: its first paragraph, and the rest."""
        border, at, has_text = end, start, False
        while at < end:
            stop = self.data.find(b"\n", at, end)
            stop = end if stop < 0 else stop
            blank = not self.data[at : min(stop, at + 400)].decode("utf-8", "replace").strip(_MARKS)
            if blank and has_text:
                border = at
                break
            has_text, at = has_text or not blank, stop + 1
        self.spans.append((start, border, "doc"))
        if border < end:
            self.spans.append((border, end, "detail"))


def _assigned_function(node: Node) -> int | None:
    """The end of the head of a function that a statement of JavaScript or Lua names, or None."""
    function = assigned_function(node)
    body = None if function is None else function.child_by_field_name("body")
    return None if body is None else body.start_byte


def assigned_function(node: Node) -> Node | None:
    """The function that a statement of JavaScript or Lua gives a name to."""
    target: Node | None = node
    if node.type in {"lexical_declaration", "variable_declaration"}:
        target = next((child for child in node.named_children[:1] if child.type in {"variable_declarator", "assignment_statement"}), None)
    if target is not None and target.type == "assignment_statement":
        values = target.named_child(1) if target.named_child_count > 1 else None
        value = first_child(values)
    else:
        value = None if target is None else target.child_by_field_name("right") or target.child_by_field_name("value")
    return value if value is not None and value.type in _FUNCTIONS else None


def _declares_function(node: Node) -> bool:
    """Whether this is a prototype of C or C++: its declarator, without pointers and references, is that of a function."""
    declarator: Node | None = node
    for _ in range(8):
        declarator = None if declarator is None else declarator.child_by_field_name("declarator")
        if declarator is None or declarator.type == "function_declarator":
            break
    return declarator is not None and declarator.type == "function_declarator"


def _in_characters(text: str, data: bytes, spans: list[tuple[int, int, Kind]]) -> list[Piece]:
    """Byte spans as pieces of the text, each with its indentation and not overlapping the one before."""
    borders = sorted({offset for start, end, _ in spans for offset in (start, end)})
    offsets = {0: 0}
    if len(data) == len(text):
        offsets = {border: border for border in borders}
    else:
        for before, border in pairwise([0, *borders]):
            offsets[border] = offsets[before] + len(data[before:border].decode("utf-8", "replace"))
    pieces: list[Piece] = []
    last_end = 0
    for start_byte, end_byte, kind in spans:
        start, end = offsets[start_byte], offsets[end_byte]
        line_end = text.rfind("\n", last_end, start)
        if (line_end >= 0 or last_end == 0) and not text[line_end + 1 : start].strip():
            start = line_end + 1
        if text.startswith("@", start) and end - start > _MOST_HEAD_CHARS:  # decorators go before the signature does
            start = text.find("\n", end - _MOST_HEAD_CHARS, end) + 1 or start
        end = start + len(_shortened(text[start:end].rstrip(), _MOST_CHARS.get(kind, _MOST_HEAD_CHARS)))
        if start >= last_end and text[start:end].strip():
            pieces.append(Piece(start, end, text[start:end], kind))
            last_end = end
    return pieces


def _shortened(text: str, limit: int) -> str:
    """Whole lines of a piece that is too long, or the beginning of its first line."""
    if len(text) <= limit:
        return text
    return (text[: text.rfind("\n", 0, limit)] if "\n" in text[:limit].strip() else text[:limit]).rstrip()


@dataclass(slots=True)
class _MarkdownReader:
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
        text = (first_sentence(text) if kind == "text" else text).rstrip()
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


def outline_markdown(text: str) -> list[Piece]:
    """Outline Markdown: headings, first sentences, the first items of top-level lists, and table heads. Front matter is skipped."""
    from markdown_it import MarkdownIt  # noqa: PLC0415  # weight

    num_chars = len(text)
    if num_chars > _MAX_MARKDOWN_CHARS:
        num_chars = text.rfind("\n", _MAX_MARKDOWN_CHARS // 2, _MAX_MARKDOWN_CHARS) + 1 or _MAX_MARKDOWN_CHARS
    starts = [0, *(match.end() for match in _LINE_END.finditer(text, 0, num_chars)), num_chars]
    skipped = _front_matter_lines(text, starts)
    # inline text is not parsed: hostile text is slow there, and the outline does not need it
    tokens = MarkdownIt("commonmark").enable("table").disable("inline").parse(text[starts[skipped] : num_chars])
    reader = _MarkdownReader(text, starts)
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
    return [*reader.pieces, _omitted(text, num_chars)] if num_chars < len(text) else reader.pieces


def _blocks(tokens: list[Token]) -> Iterator[tuple[str, Token, str]]:
    """(role, token, text) of the blocks that an outline shows; quotes, code and inner lists are skipped."""
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
    """The number of lines of front matter at the very top: from `---` to the next `---` or `...`."""
    lines = [text[start:end].rstrip() for start, end in pairwise(starts[: _MAX_FRONT_MATTER_LINES + 1])]
    if not lines or lines[0] != "---":
        return 0
    return next((number + 1 for number, line in enumerate(lines[1:], 1) if line in {"---", "..."}), 0)


def _omitted(text: str, start: int) -> Piece:
    """Return the piece for the unread rest of a text."""
    num_lines = text.count("\n", start) + (not text.endswith("\n"))
    return Piece(start, len(text), f"… {num_lines:,} more lines were not read", "omitted")
