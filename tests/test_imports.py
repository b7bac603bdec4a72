"""No module imports itself through others, imports for type checkers included: a circle of types is a circle for a reader."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, names):
    """Modules of the project that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from members & names
            if not members <= names:
                yield node.module


def circles(graph):
    """Strongly connected components of two or more modules (Tarjan)."""
    index, low, stack, components = {}, {}, [], []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph.get(module, ()):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                components.append(sorted(component))

    for module in graph:
        if module not in index:
            visit(module)
    return sorted(components)


def test_there_are_no_circles():
    paths = {name_of(path): path for path in (ROOT / "localrag").rglob("*.py")}
    graph = {name: sorted({*imports(path, paths.keys())} - {name}) for name, path in paths.items()}
    assert sum(map(len, graph.values())) > 500  # imports are found
    assert circles(graph) == []


def test_a_circle_is_found():
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c"]]
