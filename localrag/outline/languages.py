"""The languages whose structure is read: file endings, grammars, and what the kinds of syntax nodes mean."""

from __future__ import annotations

from typing import Literal, cast

Role = Literal["import", "class", "function", "type", "field", "assign", "statement", "comment", "attribute", "wrap", "inside"]
"""What an outline makes of a syntax node; a node without a role is passed over with all that is in it.

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
    """Node kinds by role, turned round. What a parser could not make sense of can still hold whole definitions."""
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
"""language → node kind → role. The kinds are those of the grammars' own node-types.json."""
