"""The echo under a JSON schema."""

import json
import random

import pytest

from localrag.decoding import SamplingParams
from localrag.engine import echo_json
from localrag.engine.echo import open_echo
from localrag.errors import UsageError
from tests.json_schemas import is_valid, random_schema


@pytest.mark.parametrize("seed", range(300))
def test_what_it_writes_is_valid(seed):
    schema = random_schema(random.Random(seed))
    assert is_valid(json.loads(echo_json.write(json.dumps(schema), "You asked: hello")), schema)


def test_every_text_is_what_it_says():
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 40}, "list": {"type": "array", "items": {"enum": ["a", "b"]}}},
        "required": ["text"],
        "additionalProperties": False,
    }
    with open_echo() as echo:
        echo.reserve(512)
        prompt = [1, *b"user\nHello", 257]
        answer = echo.generate(prompt, SamplingParams(max_tokens=200, json_schema=schema))
    assert json.loads(answer.text)["text"].startswith("You asked: ")
    assert json.loads(answer.text)["list"] == ["a"]


def test_a_schema_that_is_not_supported_is_refused():
    with pytest.raises(UsageError):
        echo_json.write('{"not": {"type": "string"}}', "")
