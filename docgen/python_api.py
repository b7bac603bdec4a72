"""docs/reference/python.md: every name of `localrag.__all__`, with its signature and docstring as they are written."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, is_typeddict

import localrag
from docgen.sources import GENERATED, attributes, definition, signature
from localrag.session.council_run import council

_INTRODUCTION = f"""\
# Python

{GENERATED}

`import localrag` costs next to nothing: a name is imported when it is first used. Everything is typed (`py.typed`). This is the pipeline
of the command line, without the command line:

```python
from localrag import Question, Session

with Session.open("echo") as session:
    answer = session.ask(Question.of("How are you?", max_tokens=40))
print(answer.text, answer.ledger.entry("question").used)
```

Every error is a [`LocalragError`](#localragerror) with `message`, `hint`, `numbers` and `exit_code`.
"""
_USED = (
    *("Answer", "Budget", "Chat", "Chunk", "Citation", "Entry", "Hit", "KnowledgeBase", "Ledger", "LocalragError", "Percent"),
    *("Question", "SamplingParams", "CouncilResult", "Section", "Session", "Settings"),
)
"""Classes whose methods are listed too."""
_TYPES = "Types in the signatures above. Import them from `localrag`."


def page() -> str:
    parts, types = [_INTRODUCTION.strip()], []
    for name in localrag.__all__:
        thing = getattr(localrag, name)
        if name not in _USED and name != "council" and not inspect.isfunction(thing):
            types += _type(name, thing)
            continue
        parts += [f"## {name}", f"From `{_home(thing)}`."]
        if name == "council":
            parts += _function(council, "localrag.council")
        else:
            parts += _class(thing) if isinstance(thing, type) else _function(thing, name)
    parts += ["## Types", _TYPES, *types]
    return "\n\n".join(parts) + "\n"


def _type(name: str, thing: Any) -> Iterator[str]:  # noqa: ANN401  # a class, or another name of a type
    """A type that signatures name: its docstring, and what it is made of where it holds data."""
    yield f"### {name}"
    if not isinstance(thing, type):
        spelled = re.sub(r"(typing|localrag[.a-z_]*)[.](?=[A-Z])", "", str(thing))
        yield f"```text\n{name} = {spelled}\n```"
        return
    node = definition(thing)
    assert isinstance(node, ast.ClassDef)
    yield f"From `{thing.__module__}`. {_doc(node)}"
    if (dataclasses.is_dataclass(thing) or is_typeddict(thing)) and (fields := list(attributes(thing))):
        yield "\n".join(["```text", *(_field(each) for each, _ in fields), "```"])


def _home(thing: Any) -> str:  # noqa: ANN401  # a class, a function, or the package that is called as one
    return council.__module__ if inspect.ismodule(thing) else thing.__module__


def _function(function: Any, name: str) -> Iterator[str]:  # noqa: ANN401  # whatever its signature
    node = definition(function)
    assert isinstance(node, ast.FunctionDef)
    yield f"```text\n{signature(node, name, is_method=False)}\n```"
    yield _doc(node)


def _class(cls: type[Any]) -> Iterator[str]:
    """Its docstring, what it is made from, its fields and its public methods and properties."""
    node = definition(cls)
    assert isinstance(node, ast.ClassDef)
    yield _doc(node)
    is_data = dataclasses.is_dataclass(cls)
    made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if made is not None:
        yield f"```text\n{signature(made, cls.__name__, is_method=True)}\n```"
    if is_data and (fields := list(attributes(cls))):
        yield "\n".join(["```text", *(_field(each) for each, _ in fields), "```"])
        if told := [f"- `{ast.unparse(each.target)}`: {' '.join(doc.split())}" for each, doc in fields if doc]:
            yield "\n".join(told)
    rows: list[str] = []
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            rows += _member(each, cls.__name__)
    yield from rows


def _field(node: ast.AnnAssign) -> str:
    """`name: type = default`, with what makes the default of a field in its place."""
    value = node.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        given = {each.arg: each.value for each in value.keywords}
        value = given.get("default") or (ast.Call(given["default_factory"], [], []) if "default_factory" in given else None)
    default = "" if value is None else f" = {ast.unparse(value)}"
    return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{default}"


def _member(node: ast.FunctionDef, owner: str) -> Iterator[str]:
    """A method with its signature and docstring, or a property with its type."""
    marks = [ast.unparse(each) for each in node.decorator_list]
    yield f"### {owner}.{node.name}"
    if "property" in marks:
        yield f"```text\n{node.name}: {ast.unparse(node.returns) if node.returns is not None else 'object'}\n```"
    else:
        called = f"{owner}.{node.name}" if "classmethod" in marks else node.name
        yield f"```text\n{signature(node, called, is_method='staticmethod' not in marks)}\n```"
    if doc := _doc(node):
        yield doc


def _doc(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The docstring as Markdown: what is indented in it is an example."""
    return ast.get_docstring(node) or ""
