"""Read source code. Each definition is a section, together with its comments, attributes and decorators."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from localrag.kb.readers.base import Reading, Section
from localrag.kb.readers.text import decode
from localrag.outline.languages import ROLES, body_of, first_child, parse
from localrag.outline.pieces import assigned_function

if TYPE_CHECKING:
    from tree_sitter import Node

_LONG_CLASS_BYTES = 1500  # shorter classes stay whole: their few methods explain each other
_SHORT_CHARS, _GROUP_CHARS = 200, 800  # neighbouring one-liners, such as getters, form one section
_MAX_DEPTH = 40
_MAX_NAME_BYTES = 400
_MAX_NAME_CHARS = 80
_MAX_NAMES = 6

_PACKAGES = frozenset(
    {"package_declaration", "package_header", "package_clause", "namespace_definition", "file_scoped_namespace_declaration"}
)
_DEFINITIONS = frozenset({"class", "function", "type"})
_PASSED = frozenset({"comment", "attribute"})
_MAX_INDENT_BYTES = 400
_REST_OF_LINE = re.compile(rb"[ \t;,]{0,400}(?:(?://|#|--)[^\n]{0,400}|/\*[^\n*]{0,400}\*/[ \t]{0,400})?(?:\r?\n|\Z)")
_CLOSING = re.compile(r"(?:[\s{}()\[\];,]++|\bend\b)*+")
_RECEIVER = re.compile(r"(\w+)(?:\[.*)?\)$")


def read(data: bytes, language: str) -> Reading:
    """Read a source file in a language of `ROLES`. Every character is in a section; headings are paths like "package > Class > method".

    A section is a function, a type or a short class. A long class is split: its head, each run of fields and each method are sections of
    their own. Code outside definitions forms sections too. Neighbouring definitions of a line or two share one section, whose heading
    names them all. Text that is not parsed (after 512 K characters, or if the parser takes too long) is one section.
    """
    text = decode(data, known=True)
    return Reading(text, tuple(_sections(text, language)), language=language, own_lines=True, fields=(("language", language),))


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes, later characters, `start` to `end`. `path` names the enclosing definitions; `names` is the part's own name, if it has one."""

    start: int
    end: int
    path: tuple[str, ...]
    names: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        more = "" if len(self.names) <= _MAX_NAMES else ", …"
        return " > ".join((*self.path, ", ".join(self.names[:_MAX_NAMES]) + more) if self.names else self.path)


def _sections(text: str, language: str) -> Iterator[Section]:
    parsed = parse(text, language)
    parts = []
    num_chars = 0
    if parsed is not None:
        tree, data, num_chars = parsed
        collector = _Collector(language, data)
        collector.enter(tree.root_node, (), 0)
        parts = _in_characters(data, _filled(collector.parts, len(data)))
    if num_chars < len(text):
        parts.append(_Part(num_chars, len(text), ()))
    for part in _grouped(_without_closing(text, parts)):
        yield Section(part.start, part.end, part.heading)


class _Collector:
    """Collects the definitions below a node as `parts`, in bytes. Parts without names mark where a long class begins and ends."""

    def __init__(self, language: str, data: bytes) -> None:
        self.parts: list[_Part] = []
        self._roles = ROLES[language]
        self._data = data
        self._package: tuple[str, ...] = ()
        self._lead: Node | None = None  # the first of the comments and attributes directly above
        self._lead_row = -1  # the row where the last of those ends
        self._last_row = -1  # the row where the last node that is not a comment ends

    def enter(self, node: Node, path: tuple[str, ...], depth: int) -> None:
        """Collect the definitions among the children of a node."""
        for child in node.named_children:
            role = self._roles.get(child.type)
            if role in _PASSED:
                self._keep_lead(child)
                continue
            if role == "inside" and depth < _MAX_DEPTH:
                self.enter(child, path, depth + 1)
            else:
                inner = self._definition(child)
                if child.type in _PACKAGES and body_of(child) is None:
                    self._package = tuple(self._names(child))
                elif inner is not None:
                    self._define(child, inner, path, depth)
            self._lead, self._last_row = None, child.end_point.row

    def _keep_lead(self, node: Node) -> None:
        row = node.start_point.row
        if row == self._last_row and self._roles[node.type] == "comment":
            return  # a comment after a statement on the same line
        if self._lead is None or row > self._lead_row + 1:
            self._lead = node
        self._lead_row = node.end_point.row - (node.end_point.column == 0)

    def _definition(self, node: Node) -> Node | None:
        """Return the definition that a node is or wraps; None if there is none."""
        inner: Node | None = node
        for _ in range(8):
            role = None if inner is None else self._roles.get(inner.type)
            if inner is None or role in _DEFINITIONS:
                return inner
            if role == "assign":
                return inner if assigned_function(inner) is not None else None
            if role != "wrap":
                return None
            inner = next(
                (child for child in inner.named_children if self._roles.get(child.type) in {*_DEFINITIONS, "assign", "wrap"}), None
            )
        return None

    def _define(self, node: Node, inner: Node, path: tuple[str, ...], depth: int) -> None:
        start, end = node.start_byte, node.end_byte
        if self._lead is not None and self._lead_row + 1 >= node.start_point.row:
            start = self._lead.start_byte
        line = self._data.rfind(b"\n", max(0, start - _MAX_INDENT_BYTES), start) + 1
        if (line or start <= _MAX_INDENT_BYTES) and not self._data[line:start].strip():
            start = line
        if rest := _REST_OF_LINE.match(self._data, end):
            end = rest.end()
        start = max(start, self.parts[-1].end if self.parts else 0)
        end = max(start, end)
        names = tuple(self._names(inner))
        if self._roles[inner.type] == "class" and end - start > _LONG_CLASS_BYTES and depth < _MAX_DEPTH and names:
            within = (*path, *names)
            self.parts.append(_Part(start, start, (*self._package, *within)))
            self._lead, self._last_row = None, inner.start_point.row
            self.enter(inner, within, depth + 1)
            self.parts.append(_Part(max(end, self.parts[-1].end), max(end, self.parts[-1].end), (*self._package, *path)))
        else:
            self.parts.append(_Part(start, end, (*self._package, *path, *names[:-1]), names[-1:]))

    def _names(self, node: Node) -> Iterator[str]:
        """Yield the names of a definition: first its class, if the head names one as in Go, then its own name."""
        if node.type == "impl_item":  # rust
            trait, target = self._field(node, "trait"), self._field(node, "type")
            yield f"{trait} for {target}" if trait else target
            return
        if node.type == "method_declaration" and (receiver := _RECEIVER.search(self._field(node, "receiver"))):  # go
            yield receiver[1]
        name = self._field(node, "name") or self._text(_named(node))
        if name or node.type == "companion_object":
            yield name or "companion object"

    def _field(self, node: Node, name: str) -> str:
        return self._text(node.child_by_field_name(name))

    def _text(self, node: Node | None) -> str:
        if node is None:
            return ""
        text = self._data[node.start_byte : min(node.end_byte, node.start_byte + _MAX_NAME_BYTES)].decode("utf-8", "replace")
        return " ".join(text.split())[:_MAX_NAME_CHARS]


def _named(node: Node) -> Node | None:
    """Find the name node of a definition without a `name` field: a C declarator, a Go type_spec, a variable, a package."""
    if node.type in _PACKAGES:
        return next((child for child in node.named_children if not child.type.endswith("annotation")), None)
    if node.type in {"lexical_declaration", "variable_declaration", "type_declaration"}:
        inner = first_child(node)
        return None if inner is None else inner.child_by_field_name("name") or first_child(inner)
    if node.type == "assignment_statement":
        return first_child(node)
    if node.type == "assignment_expression":
        return node.child_by_field_name("left")
    declarator = node.child_by_field_name("declarator")
    for _ in range(8):
        inner = None if declarator is None else declarator.child_by_field_name("declarator")
        if inner is None:
            break
        declarator = inner
    return declarator


def _filled(definitions: Iterable[_Part], end: int) -> Iterator[_Part]:
    """Yield the definitions and, in the gaps, parts for the code between them, so that every byte is covered."""
    path: tuple[str, ...] = ()
    at = 0
    for part in definitions:
        if part.start > at:
            yield _Part(at, part.start, path)
        path = part.path
        if part.end > part.start:
            yield part
        at = max(at, part.end)
    if end > at:
        yield _Part(at, end, path)


def _in_characters(data: bytes, parts: Iterable[_Part]) -> list[_Part]:
    """Convert parts that cover all of `data` from byte offsets to character offsets."""
    converted = []
    at = 0
    for part in parts:
        end = at + len(data[part.start : part.end].decode("utf-8", "replace"))
        converted.append(replace(part, start=at, end=end))
        at = end
    return converted


def _without_closing(text: str, parts: list[_Part]) -> list[_Part]:
    """Join blank lines and closing braces to the part before them; at the very top, to the part after them."""
    joined: list[_Part] = []
    for part in parts:
        if joined and not part.names and _CLOSING.fullmatch(text, part.start, part.end):
            joined[-1] = replace(joined[-1], end=part.end)
        else:
            joined.append(part)
    if len(joined) > 1 and not text[joined[0].start : joined[0].end].strip():
        joined[:2] = [replace(joined[1], start=joined[0].start)]
    return joined


def _grouped(parts: list[_Part]) -> Iterator[_Part]:
    """Join neighbouring short parts under the same path."""
    group: _Part | None = None
    for before, part in pairwise([_Part(0, 0, ()), *parts]):
        both_short = before.end - before.start <= _SHORT_CHARS and part.end - part.start <= _SHORT_CHARS
        joins = group is not None and group.path == part.path and bool(group.names or not part.names) and both_short
        if group is not None and joins and part.end - group.start <= _GROUP_CHARS:
            group = replace(group, end=part.end, names=tuple(dict.fromkeys(group.names + part.names)))
            continue
        if group is not None:
            yield group
        group = part
    if group is not None:
        yield group
