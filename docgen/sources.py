"""What only the source of a class says: the docstrings below its attributes, and its signatures as they are written."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

GENERATED = "<!-- Written by scripts/reference from the code: change that, not this page. -->"


def definition(thing: type[Any] | Callable[..., Any]) -> ast.ClassDef | ast.FunctionDef:
    """The syntax tree of a class or a function."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    return node


def attributes(cls: type[Any]) -> Iterator[tuple[ast.AnnAssign, str]]:
    """The public annotated attributes of a class itself, in their order, each with the docstring below it, or ""."""
    body = definition(cls).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            yield node, _text(after)


def attribute_docs(cls: type[Any]) -> dict[str, str]:
    """The docstring below each attribute of a class and of what it inherits from, where there is one."""
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if each.__module__.startswith("localrag."):
            docs |= {node.target.id: text for node, text in attributes(each) if text and isinstance(node.target, ast.Name)}
    return docs


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def signature(node: ast.FunctionDef, name: str, *, is_method: bool, max_chars: int = 100) -> str:
    """`name(parameters) -> type`, on one line where that has room, else one parameter a line."""
    parts = list(_parameters(node.args))[1 if is_method else 0 :]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= max_chars:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def _parameters(args: ast.arguments) -> Iterator[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(positional, defaults, strict=True):
        yield _parameter(arg, default)
    if args.vararg is not None:
        yield f"*{_parameter(args.vararg, None)}"
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(arg, default)
    if args.kwarg is not None:
        yield f"**{_parameter(args.kwarg, None)}"


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(arg.annotation)}" if arg.annotation is not None else ""
    given = "" if default is None else f"{' = ' if kind else '='}{ast.unparse(default)}"
    return f"{arg.arg}{kind}{given}"
