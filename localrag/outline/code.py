"""The outline of source code."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from localrag.outline.languages import ROLES, Role
from localrag.outline.parsing import body_of, first_child, parse, walk
from localrag.outline.piece import Kind, Piece, omitted

if TYPE_CHECKING:
    from tree_sitter import Node

_MAX_PIECES = 20_000
_SHORT_TYPE_BYTES = 1500
"""A struct, interface or enumeration that is shorter is one piece."""
_MOST_CHARS: dict[Kind, int] = {"field": 200, "doc": 800, "detail": 2000, "type": _SHORT_TYPE_BYTES}
_WHOLE: dict[Role, Kind] = {"import": "import", "type": "type"}
_PLACES = frozenset({"mod_item", "package_clause", "namespace_definition", "file_scoped_namespace_declaration"})
"""What says, where it has no body, which module a file belongs to or has."""
_MOST_HEAD_CHARS = 1000
_FUNCTIONS = frozenset({"arrow_function", "function_expression", "generator_function", "function_definition"})
_MARKS = "/*#!-\"'` \t\r"
"""What a comment's line is made of that says nothing."""


def read(text: str, language: str) -> list[Piece]:
    """The pieces of a text in a language of `ROLES`."""
    parsed = parse(text, language)
    if parsed is None:
        return [omitted(text, 0)] if text else []
    tree, data, num_chars = parsed
    found = _Finder(language, data)
    walk(tree, found.enter)
    pieces = _in_characters(text, data, sorted(found.spans))
    if len(found.spans) >= _MAX_PIECES and pieces:
        num_chars = pieces[-1].end
    return [*pieces, omitted(text, num_chars)] if num_chars < len(text) else pieces


class _Finder:
    """Collects (start byte, end byte, kind) from the nodes of a walk."""

    def __init__(self, language: str, data: bytes) -> None:
        self.roles = ROLES[language]
        self.data = data
        self.spans: list[tuple[int, int, Kind]] = []
        self._lead: tuple[int, int] | None = None  # byte and row where the definition to come begins: its wrapper or attributes
        self._lead_end = 0  # where the wrapper ends; 0 for an attribute, which belongs to what comes next
        self._comment: tuple[int, int, int, int] | None = None  # start byte, end byte, first row, last row
        self._last_row = -1  # where the last thing that is no comment ended

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
            return  # a remark behind a statement
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
        """Where a definition's piece ends, its kind, and whether there is more to find in it."""
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
        border, at, begun = end, start, False
        while at < end:
            stop = self.data.find(b"\n", at, end)
            stop = end if stop < 0 else stop
            blank = not self.data[at : min(stop, at + 400)].decode("utf-8", "replace").strip(_MARKS)
            if blank and begun:
                border = at
                break
            begun, at = begun or not blank, stop + 1
        self.spans.append((start, border, "doc"))
        if border < end:
            self.spans.append((border, end, "detail"))


def _assigned_function(node: Node) -> int | None:
    """Where the head of the function ends that a statement of JavaScript or Lua gives a name to; None if it gives none."""
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
