"""A text as a syntax tree, within bounds, and a walk over it that no depth of nesting can overflow."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from localrag.outline.languages import GRAMMARS

if TYPE_CHECKING:
    from tree_sitter import Language, Node, Point, Tree

MAX_CHARS = 512 * 1024
"""The most that is parsed of a text, in characters: a source file that is longer is generated, or data."""
_SECOND_TRY_CHARS = 16 * 1024
_MAX_PARSE_S = 2.0
# CPU seconds. Real source of this length takes 0.1 to 0.5; error recovery is quadratic on some hostile input (200,000 quotes: 4.7 s).
_READ_BYTES = 64 * 1024
_BODIES = frozenset({"class_body", "enum_class_body", "function_body"})  # in Kotlin's grammar a body has no name


def parse(text: str, language: str) -> tuple[Tree, bytes, int] | None:
    """The tree of the beginning of a text, the bytes that its offsets count, and how many characters were parsed.

    All of the text up to MAX_CHARS is tried, then a short beginning; None if even that takes too long. The bytes are UTF-8 in which
    NUL, where lexers stop, is a space, and a lone surrogate is a question mark: characters stay as many as they were.
    """
    for limit in (MAX_CHARS, _SECOND_TRY_CHARS):
        num_chars = _whole_lines(text, limit)
        data = text[:num_chars].replace("\0", " ").encode("utf-8", "replace")
        tree = _parse(data, language)
        if tree is not None:
            return tree, data, num_chars
    return None


def walk(tree: Tree, enter: Callable[[Node], bool]) -> None:
    """Call `enter` with the nodes in the order of the text; what it returns false for is not entered."""
    cursor = tree.walk()
    while True:
        node = cursor.node
        if node is not None and enter(node) and cursor.goto_first_child():
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return


def first_child(node: Node | None) -> Node | None:
    """The first named child; None where there is none, for which the binding's own `named_child` raises."""
    return node.named_child(0) if node is not None and node.named_child_count else None


def body_of(node: Node) -> Node | None:
    """The body of a definition; None where it has none."""
    body = node.child_by_field_name("body")
    if body is None and node.named_child_count:
        last = node.named_child(node.named_child_count - 1)
        return last if last is not None and last.type in _BODIES else None
    return body


def _whole_lines(text: str, limit: int) -> int:
    if len(text) <= limit:
        return len(text)
    return text.rfind("\n", limit // 2, limit) + 1 or limit


def _parse(data: bytes, language: str) -> Tree | None:
    from tree_sitter import Parser  # noqa: PLC0415  # an extension module, wanted only here

    stop_at = time.thread_time() + _MAX_PARSE_S

    def read(offset: int, _point: Point) -> bytes:
        return data[offset : offset + _READ_BYTES]

    def gives_up(_offset: int, _has_error: bool) -> bool:  # noqa: FBT001  # tree-sitter's signature
        return time.thread_time() > stop_at

    try:
        return Parser(_language(language)).parse(read, encoding="utf8", progress_callback=gives_up)
    except ValueError:  # how the binding says that the callback stopped it
        return None


@cache
def _language(language: str) -> Language:
    from tree_sitter import Language  # noqa: PLC0415  # an extension module, wanted only here

    module, function = GRAMMARS[language]
    return Language(getattr(importlib.import_module(module), function)())
