"""Schemas for the tests of constrained output: random ones, a validator written apart from the code, and what a refusal must be."""

import json
import math
import random

import pytest

from localrag.engine.grammar import byte_vocabulary, grammar_of
from localrag.errors import UsageError

NAMES = ("a", "name", 'qu"ote', "back\\slash", "ключ", "日本", "🔥", "new\nline", "tab\t", "]", "[^", "{}", "#", "-", "nul\x00", "")
SCALARS = ("x", 'say "hi"', "line\nbreak", "nul\x00", "🔥é", 0, -7, 3.25, 1e22, True, False, None)


def random_schema(rng: random.Random, depth: int = 3) -> dict:  # noqa: PLR0911  # one for each kind
    """A schema that is supported, of small bounds."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "bounded"]
    kind = rng.choice([*kinds, "object", "object", "map", "array", "anyOf", "oneOf"] if depth else kinds)
    match kind:
        case "string":
            low = rng.randint(0, 4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}
        case "integer":
            low = rng.randint(-1200, 1200)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 3000)}
        case "bounded":
            low = rng.randint(-12, 12)
            return {"type": "number", "minimum": low, "maximum": low + rng.randint(0, 30)}
        case "enum":
            return {"enum": rng.sample(SCALARS, rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice(SCALARS), "description": "a constant"}
        case "object":
            names = rng.sample(NAMES, rng.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": False,
            }
        case "map":
            return {"type": "object", "additionalProperties": random_schema(rng, 0)}
        case "array":
            low = rng.randint(0, 2)
            return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "oneOf":
            return {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "boolean"}, {"const": rng.randint(0, 9)}]}
        case _:
            return {"type": kind}


def says(schema, text, *, or_text=False):
    """Whether an answer may be exactly this text."""
    matcher = byte_vocabulary().matcher(grammar_of(schema, or_text=or_text))
    for byte in [*text.encode(), 257]:
        if not matcher.allows(byte):
            return False
        matcher.accept(byte)
    return True


def refusal(schema) -> UsageError:
    """The error that a schema is refused with: one line of bounded length, which can be written as JSON."""
    with pytest.raises(UsageError) as caught:
        grammar_of(schema)
    assert len(caught.value.message.splitlines()) == 1
    assert len(caught.value.message) < 500
    json.dumps(caught.value.to_dict()).encode()
    return caught.value


def is_valid(value, schema, root=None) -> bool:
    """Whether a value read from JSON is valid under a schema, by the words of JSON Schema and not by those of the grammar."""
    root = schema if root is None else root
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(is_valid(value, each, root) for each in schema["anyOf"])
    if "oneOf" in schema:
        return sum(is_valid(value, each, root) for each in schema["oneOf"]) == 1
    if "const" in schema:
        return _equal(value, schema["const"])
    if "enum" in schema:
        return any(_equal(value, each) for each in schema["enum"])
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return any(_is_of(value, each, schema, root) for each in types)


def _equal(a, b) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _is_of(value, kind, schema, root) -> bool:  # noqa: PLR0911  # one for each kind
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "string":
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", float("inf"))
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer" | "number":
            fits = is_number and (kind == "number" or float(value).is_integer())
            above, below = schema.get("exclusiveMinimum", float("-inf")), schema.get("exclusiveMaximum", float("inf"))
            if not fits or math.isinf(value):  # -1e999 is JSON, which Python reads so
                return fits and not schema.keys() & {"minimum", "maximum"}
            return schema.get("minimum", value) <= value <= schema.get("maximum", value) and above < value < below
        case "array":
            sized = isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", float("inf"))
            return sized and all(is_valid(each, schema["items"], root) for each in value)
    if "properties" not in schema:
        return isinstance(value, dict) and all(is_valid(each, schema["additionalProperties"], root) for each in value.values())
    known = schema["properties"]
    return (
        isinstance(value, dict)
        and value.keys() <= known.keys()
        and all(name in value for name in schema.get("required", ()))
        and all(is_valid(each, known[name], root) for name, each in value.items())
    )
