"""The form of a judge's call, and how one is read. What the tools do is tested where they are."""

import itertools
import json

import pytest

from localrag.deliberation import calls
from localrag.deliberation.roles import TOOLS
from localrag.engine.grammar import grammar_of
from tests.json_schemas import is_valid

CHOICES = [tools for size in range(1, len(TOOLS) + 1) for tools in itertools.combinations(TOOLS, size)]


def call(tool, text="x"):
    (argument,) = calls.specs([tool])[0].parameters["properties"]
    return {"name": tool, "arguments": {argument: text}}


@pytest.mark.parametrize("tools", CHOICES)
def test_the_form_holds_each_tool_and_the_end(tools):
    schema = calls.schema(tools)
    assert grammar_of(schema)
    for tool in TOOLS:
        assert is_valid(call(tool), schema) == (tool in tools)
    assert is_valid({"name": "conclude", "arguments": {}}, schema)
    assert not is_valid({"name": "conclude"}, schema)
    assert [spec.name for spec in calls.specs(tools)] == [*tools, "conclude"]
    json.dumps([spec.to_dict() for spec in calls.specs(tools)])


@pytest.mark.parametrize("tool", TOOLS)
def test_a_call(tool):
    for reply in (json.dumps(call(tool)), f" {json.dumps(call(tool), indent=1)}\n", json.dumps(call(tool) | {"more": 1})):
        assert calls.parse(reply, [tool]) == calls.Call(tool, call(tool)["arguments"])
    (text,) = calls.parse(json.dumps(call(tool, "9" * 10_000)), TOOLS).arguments.values()
    assert len(text) == 10_000  # half an expression is another one: the tool says that it is too long


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_no_call(tool):
    whole = json.dumps(call(tool))
    assert calls.parse(whole, [each for each in TOOLS if each != tool]) is None
    assert all(calls.parse(whole[:end], TOOLS) is None for end in range(len(whole)))
    for text in ("", " ", "\n", 7, None, ["x"], {"a": "b"}, True):
        assert calls.parse(json.dumps(call(tool, text)), TOOLS) is None
    others = (
        "",
        "conclude",
        '{"name":"conclude","arguments":{}}',
        f'{{"name":"{tool}"}}',
        f'{{"name":"{tool}","arguments":"x"}}',
        "[" * 10**5,
    )
    assert all(calls.parse(reply, TOOLS) is None for reply in others)
    assert calls.parse(json.dumps({"name": [tool], "arguments": {}}), TOOLS) is None
    assert calls.parse(json.dumps({"name": tool, "arguments": {"other": "x"}}), TOOLS) is None
