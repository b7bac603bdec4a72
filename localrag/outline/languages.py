"""The known languages: file endings, grammars, roles of syntax nodes, and syntax trees.

Parsing is bounded, and no depth of nesting can overflow a walk over a tree.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from tree_sitter import Language, Node, Point, Tree

Role = Literal["import", "class", "function", "type", "field", "assign", "statement", "comment", "attribute", "wrap", "inside"]
"""The role of a syntax node in an outline; a node without a role is skipped with everything in it.

`class`: its head, then what is in it. `function`: its head. `type`: all of it if short, else its head and what is in it.
`field`: its first line. `assign`: the head of the function that is assigned, else a field. `statement` (python): an assignment is a
field, a string a docstring. `wrap`: holds one definition, which begins where the wrapper does. `inside`: holds definitions.
"""

SUFFIXES = {
    suffix: language
    for language, suffixes in {
        "python": ".py .pyi .pyw",
        "javascript": ".js .mjs .cjs .jsx",
        "typescript": ".ts .mts .cts",
        "tsx": ".tsx",
        "go": ".go",
        "rust": ".rs",
        "java": ".java",
        "c": ".c .h",
        "cpp": ".cc .cpp .cxx .c++ .hh .hpp .hxx .h++ .ipp .inl",
        "c_sharp": ".cs",
        "ruby": ".rb .rake .gemspec",
        "php": ".php",
        "bash": ".sh .bash",
        "kotlin": ".kt .kts",
        "scala": ".scala .sc",
        "lua": ".lua",
        "markdown": ".md .markdown .mdown .mkd",
    }.items()
    for suffix in suffixes.split()
}
LANGUAGES = tuple(dict.fromkeys(SUFFIXES.values()))

GRAMMARS = {
    "python": ("tree_sitter_python", "language"),
    "javascript": ("tree_sitter_javascript", "language"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "go": ("tree_sitter_go", "language"),
    "rust": ("tree_sitter_rust", "language"),
    "java": ("tree_sitter_java", "language"),
    "c": ("tree_sitter_c", "language"),
    "cpp": ("tree_sitter_cpp", "language"),
    "c_sharp": ("tree_sitter_c_sharp", "language"),
    "ruby": ("tree_sitter_ruby", "language"),
    "php": ("tree_sitter_php", "language_php"),
    "bash": ("tree_sitter_bash", "language"),
    "kotlin": ("tree_sitter_kotlin", "language"),
    "scala": ("tree_sitter_scala", "language"),
    "lua": ("tree_sitter_lua", "language"),
}
"""language → (module, the function in it that gives the grammar)"""


def _roles(**kinds: str) -> dict[str, Role]:
    """node kind → role, from kinds by role. A part that a parser does not understand (ERROR) can still hold whole definitions."""
    roles: dict[str, Role] = {"ERROR": "inside"}
    roles.update({kind: cast("Role", role) for role, names in kinds.items() for kind in names.split()})
    return roles


_PYTHON = _roles(**{
    "import": "import_statement import_from_statement future_import_statement",
    "class": "class_definition",
    "function": "function_definition",
    "type": "type_alias_statement",
    "statement": "expression_statement",
    "comment": "comment",
    "wrap": "decorated_definition",
    "inside": "module block if_statement elif_clause else_clause try_statement except_clause finally_clause with_statement",
})  # fmt: skip
_JAVASCRIPT = _roles(**{
    "import": "import_statement",
    "class": "class_declaration class",
    "function": "function_declaration generator_function_declaration method_definition",
    "field": "field_definition",
    "assign": "lexical_declaration variable_declaration assignment_expression",
    "comment": "comment",
    "wrap": "export_statement expression_statement",
    "inside": "program class_body",
})  # fmt: skip
_TYPESCRIPT = _JAVASCRIPT | _roles(**{
    "class": "abstract_class_declaration internal_module module",
    "function": "function_signature method_signature abstract_method_signature call_signature construct_signature",
    "type": "interface_declaration type_alias_declaration enum_declaration",
    "field": "public_field_definition property_signature index_signature",
    "wrap": "ambient_declaration",
    "inside": "statement_block interface_body object_type",
})  # fmt: skip
_GO = _roles(**{
    "import": "package_clause import_declaration",
    "function": "function_declaration method_declaration method_elem",
    "type": "type_declaration",
    "field": "const_declaration var_declaration field_declaration",
    "comment": "comment",
    "inside": "source_file type_spec struct_type interface_type field_declaration_list",
})  # fmt: skip
_RUST = _roles(**{
    "import": "use_declaration extern_crate_declaration",
    "class": "trait_item impl_item mod_item foreign_mod_item",
    "function": "function_item function_signature_item macro_definition",
    "type": "struct_item enum_item union_item type_item associated_type",
    "field": "const_item static_item field_declaration enum_variant",
    "comment": "line_comment block_comment",
    "attribute": "attribute_item",
    "inside": "source_file declaration_list field_declaration_list enum_variant_list",
})  # fmt: skip
_JAVA = _roles(**{
    "import": "package_declaration import_declaration",
    "class": "class_declaration interface_declaration enum_declaration record_declaration annotation_type_declaration",
    "function": "method_declaration constructor_declaration compact_constructor_declaration annotation_type_element_declaration",
    "field": "field_declaration constant_declaration enum_constant",
    "comment": "line_comment block_comment",
    "inside": "program class_body interface_body enum_body enum_body_declarations annotation_type_body",
})  # fmt: skip
_C = _roles(**{
    "import": "preproc_include",
    "function": "function_definition",
    "type": "struct_specifier union_specifier enum_specifier type_definition",
    "field": "declaration preproc_def preproc_function_def field_declaration enumerator",
    "comment": "comment",
    "inside": "translation_unit preproc_ifdef preproc_if preproc_else preproc_elif linkage_specification declaration_list"
    " field_declaration_list enumerator_list",
})  # fmt: skip
_CPP = _C | _roles(**{
    "class": "class_specifier struct_specifier namespace_definition concept_definition",
    "type": "alias_declaration",
    "field": "using_declaration",
    "wrap": "template_declaration",
})  # fmt: skip
_C_SHARP = _roles(**{
    "import": "using_directive extern_alias_directive",
    "class": "namespace_declaration file_scoped_namespace_declaration class_declaration interface_declaration struct_declaration"
    " record_declaration",
    "function": "method_declaration constructor_declaration destructor_declaration operator_declaration"
    " conversion_operator_declaration indexer_declaration delegate_declaration",
    "type": "enum_declaration",
    "field": "field_declaration property_declaration event_field_declaration event_declaration enum_member_declaration",
    "comment": "comment",
    "inside": "compilation_unit declaration_list enum_member_declaration_list preproc_if preproc_else preproc_elif",
})  # fmt: skip
_RUBY = _roles(**{
    "class": "class module singleton_class",
    "function": "method singleton_method",
    "field": "assignment",
    "comment": "comment",
    "inside": "program body_statement",
})  # fmt: skip
_PHP = _roles(**{
    "import": "namespace_use_declaration",
    "class": "namespace_definition class_declaration interface_declaration trait_declaration",
    "function": "method_declaration function_definition",
    "type": "enum_declaration",
    "field": "const_declaration property_declaration enum_case",
    "comment": "comment",
    "inside": "program declaration_list enum_declaration_list compound_statement",
})  # fmt: skip
_BASH = _roles(
    function="function_definition",
    field="variable_assignment declaration_command",
    comment="comment",
    inside="program",
)
_KOTLIN = _roles(**{
    "import": "package_header import",
    "class": "class_declaration object_declaration companion_object",
    "function": "function_declaration secondary_constructor",
    "type": "type_alias",
    "field": "property_declaration enum_entry",
    "comment": "line_comment block_comment",
    "inside": "source_file class_body enum_class_body",
})  # fmt: skip
_SCALA = _roles(**{
    "import": "import_declaration",
    "class": "package_clause package_object class_definition object_definition trait_definition enum_definition",
    "function": "function_definition function_declaration",
    "type": "type_definition",
    "field": "val_definition var_definition val_declaration var_declaration enum_case_definitions",
    "comment": "comment block_comment",
    "inside": "compilation_unit template_body enum_body extension_definition",
})  # fmt: skip
_LUA = _roles(
    function="function_declaration",
    assign="assignment_statement variable_declaration",
    comment="comment",
    inside="chunk",
)

ROLES = {
    "python": _PYTHON,
    "javascript": _JAVASCRIPT,
    "typescript": _TYPESCRIPT,
    "tsx": _TYPESCRIPT,
    "go": _GO,
    "rust": _RUST,
    "java": _JAVA,
    "c": _C,
    "cpp": _CPP,
    "c_sharp": _C_SHARP,
    "ruby": _RUBY,
    "php": _PHP,
    "bash": _BASH,
    "kotlin": _KOTLIN,
    "scala": _SCALA,
    "lua": _LUA,
}
"""language → node kind → role. Node kinds are as in each grammar's node-types.json."""

MAX_CHARS = 512 * 1024
"""Most characters of a text to parse: a longer source file is generated, or data."""
_SECOND_TRY_CHARS = 16 * 1024
_MAX_PARSE_S = 2.0
# CPU seconds. Real source of this length takes 0.1 to 0.5; error recovery is quadratic on some hostile input (200,000 quotes: 4.7 s).
_READ_BYTES = 64 * 1024
_BODIES = frozenset({"class_body", "enum_class_body", "function_body"})  # in Kotlin's grammar a body has no name


def parse(text: str, language: str) -> tuple[Tree, bytes, int] | None:
    """Parse the beginning of a text: its tree, the bytes that offsets count, and the number of characters parsed.

    First all of the text up to MAX_CHARS is tried, then a short beginning; None if even that takes too long. The bytes are UTF-8 with a
    space for NUL, where lexers stop, and a question mark for a lone surrogate, so that the number of characters stays the same.
    """
    for limit in (MAX_CHARS, _SECOND_TRY_CHARS):
        num_chars = _whole_lines(text, limit)
        data = text[:num_chars].replace("\0", " ").encode("utf-8", "replace")
        tree = _parse(data, language)
        if tree is not None:
            return tree, data, num_chars
    return None


def walk(tree: Tree, enter: Callable[[Node], bool]) -> None:
    """Call `enter` with the nodes in the order of the text; a node is only entered if it returns true."""
    cursor = tree.walk()
    while True:
        node = cursor.node
        if node is not None and enter(node) and cursor.goto_first_child():
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return


def first_child(node: Node | None) -> Node | None:
    """Return the first named child, or None (`named_child` of the binding would raise)."""
    return node.named_child(0) if node is not None and node.named_child_count else None


def body_of(node: Node) -> Node | None:
    """The body of a definition, or None."""
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
    from tree_sitter import Parser  # noqa: PLC0415  # an extension module, needed only here

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
    from tree_sitter import Language  # noqa: PLC0415  # an extension module, needed only here

    module, function = GRAMMARS[language]
    return Language(getattr(importlib.import_module(module), function)())
