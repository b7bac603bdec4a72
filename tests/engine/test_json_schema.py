"""JSON schemas: what can be enforced becomes a grammar, and what cannot is one clear error that says where."""

import json

import pytest

from localrag.engine.grammar import MAX_INTEGER, grammar_of
from localrag.errors import UsageError
from localrag.types import SamplingParams
from tests.json_schemas import refusal, says

SIMPLE = {"type": "object", "properties": {"a": {"type": "null"}}}
NAMED = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}
TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
UNSUPPORTED = [
    ({"type": "object", "properties": {"a": {"not": {}}}}, "not is not supported", "#/properties/a"),
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "uniqueItems is not supported", "#"),
    ({"$defs": {"x": {"if": {}}}, "$ref": "#/$defs/x"}, "if is not supported", "#/$defs/x"),
    ({"type": "array", "items": 3}, "schema must be an object", None),
    ({"type": "object", "properties": []}, "properties must be an object", None),
    ({"required": "a"}, "required", None),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a'", None),
    ({**SIMPLE, "required": ["b"]}, "required property 'b'", None),
    ({"type": "string", "minLength": 5, "maxLength": 4}, "greater than maxLength", None),
    ({"type": "string", "maxLength": 10**400}, "JSON schema", None),
    ({"type": "integer", "minimum": 4, "exclusiveMaximum": 4}, "exclusiveMaximum", None),
    ({"type": "file"}, "Invalid type", None),
    ({"enum": ["x"], "type": "integer"}, "incompatible", None),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", None),
    ({"$ref": "https://example.org/x"}, "not present", None),
    ({"$ref": "#/$defs/x"}, "x", None),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "no text is valid", None),
    ({"type": "string", "pattern": "(?=a)b"}, "look-ahead", None),
    ({"type": "string", "pattern": r"(a)\1"}, "backreferences", None),
]


@pytest.mark.parametrize(("schema", "message", "path"), UNSUPPORTED)
def test_an_unenforceable_schema_is_refused_by_name(schema, message, path):
    error = refusal(schema)
    assert message in error.message
    assert error.numbers.get("path") == path


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "format": "date-time"}, '"2026-11-24T10:00:00Z"', '"yesterday"'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2024-02-30"'),
        ({"type": "string", "format": "uuid"}, '"c56a4180-65aa-42ec-a945-5fd21dec0538"', '"c56a"'),
        ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, '"AB-12"', '"ab-12"'),
        ({"type": "string", "pattern": "^(a+)+$"}, '"aaaa"', '"b"'),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2}, '[1, "a"]', "[1]"),
        ({"allOf": [NAMED, {"type": "object", "properties": {"b": {"type": "null"}}}]}, '{"k":"a","b":null}', '{"b":null}'),
        ({"$ref": "#/$defs/t", "$defs": {"t": TREE}}, '{"v": 1, "kids": [{"v": 2, "kids": []}]}', '{"v": "1"}'),
        ({"oneOf": [NAMED, {**NAMED, "properties": {"k": {"const": "b"}}}]}, '{"k":"b"}', '{"k":"c"}'),
        ({"enum": [[1], {"a": None}]}, '{"a":null}', "[2]"),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1.5}, "1.25", "1.5"),
        ({"type": "integer", "multipleOf": 3}, "9", "10"),
        ({"type": "string", "format": "password"}, '"x"', "1"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, '"🔥é"', '"🔥"'),
        ({"type": ["string", "null"]}, "null", "1"),
    ],
)
def test_a_schema_is_enforced(schema, valid, invalid):
    assert says(schema, valid)
    assert not says(schema, invalid)


def test_unnamed_properties_are_written_only_where_the_schema_asks_for_them():
    other = '{"a":null,"b":1}'
    assert says(SIMPLE, '{"a":null}')
    assert not says(SIMPLE, other)
    assert says({**SIMPLE, "additionalProperties": True}, other)
    assert says({**SIMPLE, "patternProperties": {"^b$": {"type": "integer"}}}, other)
    assert says({"type": "object"}, other)
    assert says({**SIMPLE, "anyOf": [{"required": ["b"]}]}, other)  # the named ones are spread over several schemas


def test_integers_stay_within_what_every_reader_holds_exactly():
    assert says({"type": "integer"}, str(MAX_INTEGER))
    assert not says({"type": "integer"}, str(MAX_INTEGER + 1))
    assert not says({"type": "integer", "minimum": 0}, "-1")


def test_digits_come_to_an_end_where_something_else_may_follow():
    digits = "1" * 40
    assert not says({"type": "number"}, f"0.{digits}")
    assert says({"type": "number"}, f"0.{digits[:15]}")
    assert says({"type": "string"}, f'"{digits}"')
    assert says({"type": "string", "pattern": "^[0-9]{40}$"}, f'"{digits}"')


def test_white_space_is_bounded():
    assert says(SIMPLE, '{"a": null}')
    assert not says(SIMPLE, '{"a":  null}')
    assert not says(SIMPLE, '{ "a":null}')


def test_options_of_the_grammar_library_in_a_schema_change_nothing():
    loose = {**SIMPLE, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    assert grammar_of(loose) == grammar_of(SIMPLE)
    assert "not" in refusal({"not": {}, "x-guidance": {"lenient": True}}).message


def test_annotations_are_passed_over():
    notes = {"title": "T", "description": "d\0", "default": [1], "examples": [{}], "$schema": "s", "$comment": "c", "deprecated": True}
    assert says({"type": "null", **notes}, "null")


def test_a_schema_is_held_as_text_and_is_part_of_what_makes_a_run():
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    params = SamplingParams(json_schema=schema)
    assert params.json_schema == '{"type":"object","properties":{"b":{"type":"null"},"a":{"type":"null"}}}'
    assert hash(params) == hash(SamplingParams(json_schema=json.dumps(schema)))
    assert params.with_max_tokens(3).json_schema == params.json_schema
    assert SamplingParams().json_schema is None


def circle():
    made = {"type": "array"}
    made["items"] = made
    return made


@pytest.mark.parametrize(
    "schema",
    [
        "[]",
        "{",
        "null",
        '{"const": NaN}',
        {"const": float("inf")},
        {"const": "\ud800"},
        {"const": 10**5000},
        {"const": {1}},
        circle(),
        "x" * 200_000,
    ],
)
def test_a_schema_that_is_not_json_is_refused_at_once(schema):
    with pytest.raises(UsageError, match="JSON schema"):
        SamplingParams(json_schema=schema)
