"""What JSON may be written: a small tree, each node a set of JSON texts.

Schemas are read into it (json_schema.py), and grammars are written from it (grammar.py). No node refers to one above it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Literals:
    """One of these JSON texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A string of `shortest` to `longest` characters (code points)."""

    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Number:
    """Any number of bounded digits, or one from `low` to `high` without an exponent."""

    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Array:
    item: Node
    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Property:
    name: str
    value: Node
    is_required: bool


@dataclass(frozen=True, slots=True)
class Object:
    """These properties and no others, in this order."""

    properties: tuple[Property, ...]


@dataclass(frozen=True, slots=True)
class Map:
    """At most so many properties of any names, each with such a value. A name can come twice."""

    value: Node
    most: int


@dataclass(frozen=True, slots=True)
class Union:
    options: tuple[Node, ...]


Node = Literals | Text | Integer | Number | Array | Object | Map | Union


def union_of(nodes: list[Node]) -> Node:
    """One node for any of these; equal ones count once, and unions are opened, so that there is none in another."""
    options: dict[Node, None] = {}
    texts: dict[str, None] = {}
    for each in nodes:
        for node in each.options if isinstance(each, Union) else (each,):
            if isinstance(node, Literals):
                texts.update(dict.fromkeys(node.texts))
            else:
                options[node] = None
    every: tuple[Node, ...] = (*options, Literals(tuple(texts))) if texts else tuple(options)
    return every[0] if len(every) == 1 else Union(every)


def exclude(a: Node, b: Node) -> bool:
    """Whether no value can be of both. False when that is not plain to see."""
    if isinstance(a, Union) or isinstance(b, Union):
        pairs = [(x, y) for x in _options(a) for y in _options(b)]
        return all(exclude(x, y) for x, y in pairs)
    if isinstance(a, Object) and isinstance(b, Object):
        values = {each.name: each for each in b.properties}
        both = [(each, values[each.name]) for each in a.properties if each.name in values]
        return any(x.is_required and y.is_required and exclude(x.value, y.value) for x, y in both)
    if isinstance(a, Literals) and isinstance(b, Literals):
        x, y = ([json.loads(text) for text in each.texts] for each in (a, b))
        return not any(p == q and isinstance(p, bool) == isinstance(q, bool) for p in x for q in y)
    return not _kinds(a) & _kinds(b)


def _options(node: Node) -> tuple[Node, ...]:
    return node.options if isinstance(node, Union) else (node,)


def _kinds(node: Node) -> set[str]:
    if isinstance(node, Literals):
        kinds = {type_of(json.loads(text)) for text in node.texts}
        return {"number" if kind == "integer" else str(kind) for kind in kinds}
    names: dict[type, str] = {Text: "string", Integer: "number", Number: "number", Array: "array", Object: "object", Map: "object"}
    return {names[type(node)]}


def type_of(value: object) -> str | None:
    """JSON Schema's name for the type of a scalar; None for an object or an array."""
    names = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
    if isinstance(value, float):
        return "integer" if math.isfinite(value) and value.is_integer() else "number"
    return names.get(type(value))
