"""JSON Schema → the tree of what may be written (json_tree.py), all of it bounded.

A subset of the language that is understood exactly. Every text that the tree stands for is valid under the schema; not every valid
text is in the tree (no further properties beside named ones, bounded lengths and digits, bounded depth where anything goes).
A keyword that changes validity and is not understood is an error and never passed over; annotations are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from localrag.engine.json_tree import Array, Integer, Literals, Map, Node, Number, Object, Property, Text, exclude, type_of, union_of
from localrag.errors import UsageError

MAX_DEPTH = 16
MAX_PROPERTIES = 64
MAX_OPTIONS = 16
MAX_VALUES = 256
MAX_ITEMS = 256
MAX_LENGTH = 8000
DEFAULT_LENGTH = 2000
MAX_ANY_PROPERTIES = 64
MAX_ANY_DEPTH = 3
"""Of objects and arrays within a value of which a schema says nothing."""
MAX_NODES = 2000
"""Of the tree, after every $ref was replaced by what it refers to."""
MAX_INTEGER = 10**15 - 1
"""Larger ones are not exact in every reader of JSON."""

_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_KEYWORDS = {
    "string": {"minLength", "maxLength"},
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_CHOICES = {"anyOf", "oneOf", "enum", "const"}
_KNOWN = set().union(*_KEYWORDS.values()) | _CHOICES | {"type", "$ref"} | _ANNOTATIONS


def refused(message: str, path: str, *, keyword: str | None = None) -> UsageError:
    """An error about the schema, on one line whatever the schema's own names hold."""
    shown = json.dumps(path)[1:-1]  # a name may hold line breaks
    shown = shown if len(shown) <= 160 else f"{shown[:80]}…{shown[-79:]}"
    return UsageError(f"The JSON schema cannot be used: {message} (at {shown}).", keyword=keyword, path=shown)


def parse(schema: Mapping[str, Any]) -> Node:
    """The tree of a schema as json.loads gives it. UsageError with the place and what is not supported there."""
    return _Parser(schema).node(schema, "#", 0, frozenset())


@dataclass(slots=True)
class _Parser:
    root: Mapping[str, Any]
    num_nodes: int = field(default=0, init=False)

    def node(self, schema: object, path: str, depth: int, refs: frozenset[str]) -> Node:
        schema, path, refs = self._resolved(schema, path, refs)
        self.num_nodes += 1
        if depth > MAX_DEPTH:
            raise refused(f"it is nested more than {MAX_DEPTH} deep", path)
        if self.num_nodes > MAX_NODES:
            raise refused(f"it has more than {MAX_NODES} parts, counted with every $ref replaced", path)
        used = schema.keys() - _ANNOTATIONS
        for unknown in sorted(used - _KNOWN):
            raise _unsupported(unknown, path)
        if not used:
            return _any(MAX_ANY_DEPTH)
        choice = sorted(used & _CHOICES)
        if not choice:
            return self._typed(schema, used, path, depth, refs)
        name = choice[0]
        for other in sorted(used - {name, "type"} if name in {"enum", "const"} else used - {name}):
            raise refused(f"{other} beside {name} is not supported", path, keyword=other)
        if name in {"enum", "const"}:
            return _literals(schema, name, path)
        return self._union(schema, name, path, depth, refs)

    def _resolved(self, schema: object, path: str, refs: frozenset[str]) -> tuple[dict[str, Any], str, frozenset[str]]:
        """The schema that a chain of $ref ends at, and its place."""
        while True:
            if not isinstance(schema, dict):
                raise refused("a schema must be a JSON object", path)
            if "$ref" not in schema:
                return schema, path, refs
            for other in sorted(schema.keys() - _ANNOTATIONS - {"$ref"}):
                raise (
                    refused(f"{other} beside $ref is not supported", path, keyword=other) if other in _KNOWN else _unsupported(other, path)
                )
            ref = schema["$ref"]
            _, section, name = ref.split("/", 2) if isinstance(ref, str) and ref.count("/") == 2 else ("", "", "")
            group = self.root.get(section) if section in {"$defs", "definitions"} and ref.startswith("#/") else None
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(group, dict) or name not in group:
                raise refused("$ref must name an entry of #/$defs", path, keyword="$ref")
            if ref in refs:
                raise refused("$ref is recursive, which is not supported", path, keyword="$ref")
            schema, refs, path = group[name], refs | {ref}, f"#/{section}/{name}"

    def _union(self, schema: dict[str, Any], name: str, path: str, depth: int, refs: frozenset[str]) -> Node:
        given = schema[name]
        if not isinstance(given, list) or not 1 <= len(given) <= MAX_OPTIONS:
            raise refused(f"{name} must be a list of 1 to {MAX_OPTIONS} schemas", path, keyword=name)
        nodes = [self.node(each, f"{path}/{name}/{i}", depth + 1, refs) for i, each in enumerate(given)]
        if name == "oneOf" and not all(exclude(a, b) for a, b in combinations(nodes, 2)):
            raise refused("the schemas of oneOf can overlap; anyOf is supported", path, keyword=name)
        return union_of(nodes)

    def _typed(self, schema: dict[str, Any], used: set[str], path: str, depth: int, refs: frozenset[str]) -> Node:
        if "type" not in used:
            raise refused("it needs a type, enum, const, anyOf, oneOf or $ref", path)
        types = _types(schema, path)
        for stray in sorted(used - {"type"} - set().union(*(_KEYWORDS[each] for each in types))):
            raise refused(f"{stray} has no meaning for type {'/'.join(types)}", path, keyword=stray)
        builders: dict[str, Callable[[], Node]] = {
            "string": lambda: Text(*_range(schema, ("minLength", "maxLength"), DEFAULT_LENGTH, MAX_LENGTH, path)),
            "integer": lambda: _integer(schema, path),
            "number": lambda: _number(schema, path),
            "boolean": lambda: Literals(("true", "false")),
            "null": lambda: Literals(("null",)),
            "array": lambda: self._array(schema, path, depth, refs),
            "object": lambda: self._object(schema, path, depth, refs),
        }
        return union_of([builders[each]() for each in types])

    def _array(self, schema: dict[str, Any], path: str, depth: int, refs: frozenset[str]) -> Array:
        fewest, most = _range(schema, ("minItems", "maxItems"), MAX_ITEMS, MAX_ITEMS, path)
        return Array(self.node(schema.get("items", {}), f"{path}/items", depth + 1, refs), fewest, most)

    def _object(self, schema: dict[str, Any], path: str, depth: int, refs: frozenset[str]) -> Object | Map:
        if "properties" not in schema and "required" not in schema and schema.get("additionalProperties") is not False:
            value = schema.get("additionalProperties", {})
            return Map(self.node({} if value is True else value, f"{path}/additionalProperties", depth + 1, refs), MAX_ANY_PROPERTIES)
        given, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(given, dict) or len(given) > MAX_PROPERTIES:
            raise refused(f"properties must be an object of at most {MAX_PROPERTIES} schemas", path, keyword="properties")
        if schema.get("additionalProperties", False) is not False:
            raise refused("additionalProperties beside properties must be false", path, keyword="additionalProperties")
        if not isinstance(required, list) or not all(isinstance(each, str) and each in given for each in required):
            raise refused("required must be a list of names of properties", path, keyword="required")
        return Object(
            tuple(
                Property(_encodable(name, path), self.node(each, f"{path}/properties/{name}", depth + 1, refs), name in required)
                for name, each in given.items()
            )
        )


def _any(depth: int) -> Node:
    """Any value, of so many levels of objects and arrays."""
    scalars: list[Node] = [Text(0, DEFAULT_LENGTH), Number(), Literals(("true", "false", "null"))]
    if not depth:
        return union_of(scalars)
    inner = _any(depth - 1)
    return union_of([*scalars, Map(inner, MAX_ANY_PROPERTIES), Array(inner, 0, MAX_ITEMS)])


def _unsupported(keyword: str, path: str) -> UsageError:
    shown = keyword if keyword.isprintable() and len(keyword) <= 40 else json.dumps(keyword[:40])
    return refused(f"{shown} is not supported", path, keyword=shown)


def _types(schema: dict[str, Any], path: str) -> list[str]:
    given = schema["type"]
    types = given if isinstance(given, list) else [given]
    if not types or len(types) > len(_KEYWORDS) or not all(isinstance(each, str) and each in _KEYWORDS for each in types):
        raise refused(f"type must be of {', '.join(sorted(_KEYWORDS))}", path, keyword="type")
    return list(dict.fromkeys(types))


def _range(schema: dict[str, Any], names: tuple[str, str], default: int, limit: int, path: str) -> tuple[int, int]:
    """A smallest and a greatest count. A smallest above the default moves the default."""
    for name in names:
        value = schema.get(name, 0)
        if type(value) is not int or not 0 <= value <= limit:
            raise refused(f"{name} must be a whole number of 0 to {limit}", path, keyword=name)
    low = schema.get(names[0], 0)
    high = schema.get(names[1], max(low, default))
    if low > high:
        raise refused(f"{names[0]} {low} is above {names[1]} {high}", path, keyword=names[0])
    return low, high


def _whole(schema: dict[str, Any], name: str, path: str) -> int | None:
    value = schema.get(name)
    if name not in schema:
        return None
    if type(value) is float and math.isfinite(value) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise refused(f"{name} is supported for whole numbers only", path, keyword=name)
    return value


def _integer(schema: dict[str, Any], path: str) -> Integer:
    lows = (_whole(schema, "minimum", path), _whole(schema, "exclusiveMinimum", path))
    highs = (_whole(schema, "maximum", path), _whole(schema, "exclusiveMaximum", path))
    low = max(-MAX_INTEGER, *(value + i for i, value in enumerate(lows) if value is not None), -MAX_INTEGER)
    high = min(MAX_INTEGER, *(value - i for i, value in enumerate(highs) if value is not None), MAX_INTEGER)
    if low > high:
        raise refused("no whole number is within its bounds and 15 digits", path)
    return Integer(low, high)


def _number(schema: dict[str, Any], path: str) -> Number:
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if name in schema:
            raise refused(f"{name} is supported for type integer only", path, keyword=name)
    low, high = _whole(schema, "minimum", path), _whole(schema, "maximum", path)
    if low is None and high is None:
        return Number()
    low, high = max(-MAX_INTEGER, -MAX_INTEGER if low is None else low), min(MAX_INTEGER, MAX_INTEGER if high is None else high)
    if low > high:
        raise refused("no number is within its bounds and 15 digits", path)
    return Number(low, high)


def _literals(schema: dict[str, Any], name: str, path: str) -> Literals:
    values = schema["enum"] if name == "enum" else [schema["const"]]
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_VALUES:
        raise refused(f"enum must be a list of 1 to {MAX_VALUES} values", path, keyword=name)
    types = _types(schema, path) if "type" in schema else list(_KEYWORDS)
    for value in values:
        kind = type_of(value)
        if kind is None or (isinstance(value, float) and not math.isfinite(value)):
            raise refused(f"{name} is supported for strings, numbers, booleans and null only", path, keyword=name)
        if kind not in types and not (kind == "integer" and "number" in types):
            raise refused(f"{name} holds a value that is not of its type", path, keyword=name)
        if isinstance(value, str):
            _encodable(value, path)
    return Literals(tuple(dict.fromkeys(json.dumps(value, ensure_ascii=False) for value in values)))


def _encodable(text: str, path: str) -> str:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise refused("a lone surrogate is no character", path)
    return text
