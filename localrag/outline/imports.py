"""The imports of a file, from its syntax tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from localrag.outline.languages import first_child, parse, walk

if TYPE_CHECKING:
    from tree_sitter import Node

_MAX_IMPORTS = 10_000


def find_imports(text: str, language: str) -> list[str]:
    """The imports of a text in order, each once, at most 10,000; those inside functions included."""
    parsed = parse(text, language)
    if parsed is None:
        return []
    tree, data, _ = parsed
    reader = _READERS[language](data)
    names: dict[str, None] = {}

    def enter(node: Node) -> bool:
        if len(names) < _MAX_IMPORTS:
            names.update(dict.fromkeys(name for name in reader.read(node) if name))
        return len(names) < _MAX_IMPORTS

    walk(tree, enter)
    return list(names)[:_MAX_IMPORTS]


class _Reader(ABC):
    """Names from syntax nodes. Texts are cut from the bytes that were parsed: a node's own `text` is 100 times slower here."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @abstractmethod
    def read(self, node: Node) -> Iterator[str]:
        """The imports that this node itself makes, if any."""

    def text(self, node: Node | None) -> str:
        """A name without the white space that some languages allow within it; empty for one that is absurdly long."""
        if node is None or node.end_byte - node.start_byte > 1000:
            return ""
        return "".join(self.data[node.start_byte : node.end_byte].decode("utf-8", "replace").split())

    def field(self, node: Node, name: str) -> str:
        return self.text(node.child_by_field_name(name))

    def string(self, node: Node | None) -> str:
        """The contents of a string literal; "" for other nodes."""
        literal = node is not None and node.type in {"string", "interpreted_string_literal", "raw_string_literal"}
        return self.text(node)[1:-1] if literal else ""


class _Python(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "import_statement":
            yield from self.names(node)
        elif node.type == "future_import_statement":
            yield "__future__"
        elif node.type == "import_from_statement":
            module, names = self.field(node, "module_name"), list(self.names(node))
            if module.strip(".") or not names:
                yield module
            for name in names:
                yield f"{module}{name}" if module.endswith(".") else f"{module}.{name}"

    def names(self, node: Node) -> Iterator[str]:
        for name in node.children_by_field_name("name"):
            yield self.field(name, "name") if name.type == "aliased_import" else self.text(name)


class _JavaScript(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type in {"import_statement", "export_statement", "import_require_clause"}:
            yield self.string(node.child_by_field_name("source"))
        elif node.type == "call_expression" and self.field(node, "function") in {"require", "import"}:
            yield self.string(first_child(node.child_by_field_name("arguments")))


class _Go(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "import_spec":
            yield self.string(node.child_by_field_name("path"))


class _Rust(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "use_declaration":
            yield from self.used(node)
        elif node.type == "extern_crate_declaration" or (node.type == "mod_item" and node.child_by_field_name("body") is None):
            yield self.field(node, "name")

    def used(self, declaration: Node) -> Iterator[str]:
        """`use a::{b, c::{d, self}};` is a::b, a::c::d and a::c."""
        argument = declaration.child_by_field_name("argument")
        waiting = [] if argument is None else [("", argument)]
        for _ in range(_MAX_IMPORTS):
            if not waiting:
                return
            prefix, node = waiting.pop()
            if node.type in {"scoped_use_list", "use_list"}:
                inner = _joined(prefix, self.field(node, "path"))
                if len(inner) <= 1000:  # each level of braces makes it longer
                    names = (node.child_by_field_name("list") or node).named_children
                    waiting += [(inner, child) for child in reversed(names) if not child.type.endswith("_comment")]
                continue
            if node.type == "use_as_clause":
                node = node.child_by_field_name("path") or node
            name = self.text(first_child(node) if node.type == "use_wildcard" else node)
            yield prefix if name == "self" and prefix else _joined(prefix, name)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}::{name}" if prefix and name else prefix or name


class _Java(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "import_declaration":
            names = [child for child in node.named_children if child.type in {"scoped_identifier", "identifier"}]
            every = ".*" if any(child.type == "asterisk" for child in node.named_children) else ""
            yield from (self.text(name) + every for name in names)


class _C(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "preproc_include":
            path = node.child_by_field_name("path")
            if path is not None and path.type in {"string_literal", "system_lib_string"}:
                yield self.text(path)[1:-1]


class _CSharp(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "using_directive":
            yield self.text(node.named_child(node.named_child_count - 1) if node.named_child_count else None)


class _Ruby(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "call" and node.child_by_field_name("receiver") is None:
            method = self.field(node, "method")
            name = self.string(first_child(node.child_by_field_name("arguments")))
            if name and method in {"require", "require_relative", "load"}:
                yield name if method != "require_relative" or name.startswith(".") else f"./{name}"


class _Php(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "namespace_use_clause":
            yield self.text(first_child(node))
        elif node.type in {"require_expression", "require_once_expression", "include_expression", "include_once_expression"}:
            inner = first_child(node)
            yield self.text(inner)[1:-1] if inner is not None and inner.type in {"string", "encapsed_string"} else ""


class _Bash(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "command" and self.field(node, "name") in {"source", "."}:
            yield self.field(node, "argument").strip("\"'")


class _Kotlin(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "import":
            yield self.text(first_child(node)) + (".*" if self.text(node).endswith(".*") else "")


class _Scala(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "import_declaration":
            path = ".".join(self.text(part) for part in node.children_by_field_name("path") if part.is_named)
            selected = [child for child in node.named_children if child.type == "namespace_selectors"]
            names = [self.text(first_child(name) or name) for group in selected for name in group.named_children]
            yield from (f"{path}.{name}" for name in names if name not in {"", "*", "_"})
            if not names:
                yield path


class _Lua(_Reader):
    def read(self, node: Node) -> Iterator[str]:
        if node.type == "function_call" and self.field(node, "name") == "require":
            yield self.string(first_child(node.child_by_field_name("arguments")))


_READERS: dict[str, type[_Reader]] = {
    "python": _Python,
    "javascript": _JavaScript,
    "typescript": _JavaScript,
    "tsx": _JavaScript,
    "go": _Go,
    "rust": _Rust,
    "java": _Java,
    "c": _C,
    "cpp": _C,
    "c_sharp": _CSharp,
    "ruby": _Ruby,
    "php": _Php,
    "bash": _Bash,
    "kotlin": _Kotlin,
    "scala": _Scala,
    "lua": _Lua,
}
