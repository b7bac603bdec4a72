"""Schemas: what is supported is read, and what is not is one clear error that says where."""

import json

import pytest

from localrag.decoding import SamplingParams
from localrag.engine.grammar import grammar_of
from localrag.errors import UsageError
from tests.json_schemas import refusal

SIMPLE = {"type": "object", "properties": {"a": {"type": "null"}}}
UNSUPPORTED = [
    ({"type": "string", "pattern": "^(a+)+$"}, "pattern is not supported", "#"),
    ({"type": "string", "format": "date"}, "format is not supported", "#"),
    ({"type": "object", "properties": {"a": {"not": {}}}}, "not is not supported", "#/properties/a"),
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "uniqueItems is not supported", "#"),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 257}, "maxItems must be", "#"),
    ({"type": "array", "items": 3}, "a schema must be a JSON object", "#/items"),
    ({"type": "object", "properties": []}, "properties must be an object", "#"),
    ({"type": "object", "required": ["a"]}, "required must be a list of names", "#"),
    ({"type": "object", "additionalProperties": 3}, "a schema must be a JSON object", "#/additionalProperties"),
    ({**SIMPLE, "additionalProperties": True}, "additionalProperties beside properties must be false", "#"),
    ({**SIMPLE, "additionalProperties": {"type": "null"}}, "additionalProperties beside properties must be false", "#"),
    ({**SIMPLE, "required": ["b"]}, "required must be a list of names", "#"),
    ({"type": "object", "properties": {str(i): {"type": "null"} for i in range(65)}}, "at most 64", "#"),
    ({"type": "string", "minLength": 5, "maxLength": 4}, "minLength 5 is above maxLength 4", "#"),
    ({"type": "string", "maxLength": True}, "maxLength must be", "#"),
    ({"type": "string", "maxLength": 10**400}, "maxLength must be", "#"),
    ({"type": "integer", "minimum": 0.5}, "minimum is supported for whole numbers", "#"),
    ({"type": "integer", "minimum": 4, "exclusiveMaximum": 4}, "no whole number", "#"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf is not supported", "#"),
    ({"type": "number", "exclusiveMinimum": 0}, "exclusiveMinimum is supported for type integer", "#"),
    ({"type": "null", "maxLength": 3}, "maxLength has no meaning", "#"),
    ({"type": "file"}, "type must be of", "#"),
    ({"type": []}, "type must be of", "#"),
    ({"enum": []}, "enum must be a list of 1", "#"),
    ({"enum": [[1]]}, "strings, numbers, booleans and null", "#"),
    ({"enum": ["x"], "type": "integer"}, "not of its type", "#"),
    ({"enum": ["x"], "minLength": 1}, "minLength beside enum", "#"),
    ({"anyOf": [{"type": "null"}] * 17}, "anyOf must be a list of 1 to 16", "#"),
    ({"anyOf": [{"type": "null"}], "type": "null"}, "type beside anyOf", "#"),
    ({"anyOf": [True]}, "must be a JSON object", "#/anyOf/0"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf can overlap", "#"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf can overlap", "#"),
    ({"allOf": [SIMPLE]}, "allOf is not supported", "#"),
    ({"$ref": "#/$defs/x"}, "$ref must name", "#"),
    ({"$ref": "https://example.org/x"}, "$ref must name", "#"),
    ({"$ref": "#"}, "$ref must name", "#"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "recursive", "#/$defs/x"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}}, "recursive", "#/$defs/x/items"),
    ({"$ref": "#/$defs/x", "minLength": 3, "$defs": {"x": {"type": "string"}}}, "minLength beside $ref", "#"),
    ({"minimum": 3}, "needs a type", "#"),
]


@pytest.mark.parametrize(("schema", "message", "path"), UNSUPPORTED)
def test_what_is_not_supported_is_named_with_its_place(schema, message, path):
    error = refusal(schema)
    assert message in error.message
    assert error.numbers["path"] == path


def test_annotations_are_passed_over():
    notes = {"title": "T", "description": "d\0", "default": [1], "examples": [{}], "$schema": "s", "$id": "i", "$comment": "c"}
    assert grammar_of({"type": "null", **notes}) == grammar_of({"type": "null"})


def test_one_of_is_supported_where_it_is_plain_that_one_fits():
    def made(kind):
        return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}

    assert "cat" in grammar_of({"oneOf": [made("cat"), made("dog"), {"type": "null"}]})
    refusal({"oneOf": [made("cat"), {**made("dog"), "required": []}]})
    assert grammar_of({"oneOf": [{"const": True}, {"const": 1}]})


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
def test_what_is_no_json_is_refused_at_once(schema):
    with pytest.raises(UsageError, match="JSON schema"):
        SamplingParams(json_schema=schema)
