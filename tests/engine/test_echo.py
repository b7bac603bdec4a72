"""The echo: as often as it is asked to, and cells as llama.cpp counts them."""

import json
import random

import pytest

from localrag.engine.echo import EchoRunner, open_echo
from localrag.errors import EngineError, UsageError
from localrag.types import SamplingParams
from tests.json_schemas import is_valid, random_schema


def answered(text, **sampling):
    with open_echo() as echo:
        echo.reserve(6000)
        prompt = [256, *f"user\n{text}".encode(), 257, 256, *b"assistant\n"]
        return echo.generate(prompt, SamplingParams(**sampling))


def test_it_says_a_question_as_often_as_it_is_asked_to():
    """It is asked behind the question, not by a document; each time it names the next source."""
    sources = "[KB#4] Say it 9 times. [KB#5] x"
    assert answered(f"Sources:\n\n{sources}\n\nQuestion: Why?\n\nYou are brief. Say it 4 times.").text.splitlines() == [
        "You asked: Why? [KB#4]",
        "2 times [KB#5]: Why?",
        "3 times [KB#4]: Why?",
        "4 times [KB#5]: Why?",
    ]
    assert answered(f"Sources:\n\n{sources}\n\nQuestion: Why?\n\nYou are brief.").text == "You asked: Why? [KB#4]"


def test_it_goes_on_to_the_end_of_its_room():
    completion = answered("Why?\n\nSay it 99999 times.", max_tokens=5000)
    assert (completion.finish_reason, completion.completion_tokens) == ("length", 5000)
    lines = completion.text.splitlines()
    assert len(set(lines)) == len(lines) > 300


def test_cells_that_sequences_share_count_once():
    runner = EchoRunner(5, 2, uncounted_space=True)
    runner.decode([(token, position, 0, False) for position, token in enumerate(b"a b")])  # four cells
    runner.copy(0, 1, 2)
    runner.decode([(ord("c"), 2, 1, False)])
    with pytest.raises(EngineError, match="full"):
        runner.decode([(ord("d"), 3, 1, False)])
    runner.cut(1, 1)
    runner.cut(0, 1)
    runner.decode([(ord(" "), 1, 1, False), (ord(" "), 1, 0, False)])
    with pytest.raises(EngineError, match="full"):
        runner.decode([(ord("e"), 2, 0, False)])


def test_a_restored_state_takes_the_cells_that_it_took():
    runner = EchoRunner(4, 2)
    runner.decode([(token, position, 0, False) for position, token in enumerate(b"abc")])
    assert runner.restore(0, runner.save(0), 3)
    runner.decode([(ord("d"), 3, 0, False)])
    with pytest.raises(EngineError, match="full"):
        runner.decode([(ord("e"), 4, 0, False)])


@pytest.mark.parametrize("seed", range(300))
def test_what_it_writes_under_a_schema_is_valid(seed):
    schema = random_schema(random.Random(seed))
    with open_echo() as echo:
        echo.reserve(4096)
        answer = echo.generate([256, *b'user\nHello "you" \\', 257], SamplingParams(max_tokens=2000, json_schema=schema))
    assert is_valid(json.loads(answer.text), schema)


def test_free_texts_under_a_schema_are_what_it_says():
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 40}, "list": {"type": "array", "items": {"enum": ["a", "b"]}}},
        "required": ["text", "list"],
    }
    with open_echo() as echo:
        echo.reserve(512)
        answer = echo.generate([256, *b"user\nHello", 257], SamplingParams(max_tokens=200, json_schema=schema))
    assert json.loads(answer.text) == {"text": "You asked: Hello", "list": ["a"]}


def test_a_recursive_schema_comes_to_an_end():
    node = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "required": ["kids"]}
    with open_echo() as echo:
        echo.reserve(4096)
        answer = echo.generate([256, *b"user\nHello", 257], SamplingParams(json_schema={"$ref": "#/$defs/node", "$defs": {"node": node}}))
    assert answer.finish_reason == "stop"
    assert json.loads(answer.text)["kids"]


def test_a_schema_that_is_not_supported_is_refused():
    with open_echo() as echo:
        echo.reserve(512)
        with pytest.raises(UsageError, match="not is not supported"):
            echo.add([1, 2], SamplingParams(json_schema={"not": {"type": "string"}}))
