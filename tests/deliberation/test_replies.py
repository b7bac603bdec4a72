"""Replies in JSON: forms are read whatever they hold, also cut off; a judge's call is one of them."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.citation import without_cut_label
from localrag.deliberation import replies
from localrag.deliberation.replies import Form, read
from localrag.deliberation.roles import TOOLS
from localrag.engine.grammar import grammar_of
from tests.growth import check_linear
from tests.json_schemas import is_valid

TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=12) | st.sampled_from(['"', "\\", "\\u12", "{", "]", ",", "é\n", "[KB#1"])
DEEP = st.lists(st.fixed_dictionaries({"a": TEXT}), max_size=2)
FORMS = st.fixed_dictionaries({"text": TEXT, "list": st.lists(TEXT, max_size=3), "deep": DEEP})


@settings(max_examples=80, deadline=None, derandomize=True)
@given(FORMS, st.booleans(), st.booleans())
def test_every_beginning_of_a_form_is_read(values, is_ascii, is_spaced):
    reply = json.dumps(values, ensure_ascii=is_ascii, separators=None if is_spaced else (",", ":"))
    for end in range(len(reply) + 1):
        form = read(reply[:end])
        assert form.is_whole == (end == len(reply))
        assert values["text"].strip().startswith(form.text("text")) or form.cut != "text"
        assert form.texts("list") == [text.strip() for text in values["list"] if text.strip()][: len(form.texts("list"))]
        told = [each.text("a") for each in form.forms("deep") if "a" in each.values]
        assert told == [each["a"].strip() for each in values["deep"]][: len(told)]
        if form.cut:
            assert form.cut == "text"


def test_what_stood_before_the_cut_is_there():
    form = read('{"text":"a \\"b\\" c","list":["x","y')
    assert (form.text("text"), form.texts("list"), form.is_whole, form.cut) == ('a "b" c', ["x"], False, "")
    assert read('{"text":"half a sen').text("text") == "half a sen"
    assert read('{"text":"half a sen').cut == "text"
    assert read('{"text":"a","text2"').values == {"text": "a"}
    assert read('{"a":1} and more').values == {"a": 1}
    assert read('{"text":"\\ud83d').text("text") == ""


NO_FORMS = ("", " ", "text", "[1]", '"a"', "7", "null", "{]", '{"a"}', "{,", '{"a":NaN', "}", "[" * 10**5, '{"a":' * 10**5, "9" * 10**4)


@pytest.mark.parametrize("reply", NO_FORMS)
def test_what_is_no_form_is_an_empty_one(reply):
    form = read(reply)
    assert not form.is_whole
    assert form.text("text") == ""
    assert form.texts("list") == form.forms("deep") == []


def test_half_a_character_is_left_out():
    form = read('{"text":"a\\ud800b","list":["\\udfff"]}')
    assert form.text("text") == "ab"
    assert form.texts("list") == []


def test_values_of_another_kind_are_none():
    form = Form({"text": ["a"], "list": "abc", "deep": [1, "a", None, [], {"a": 1}]})
    assert (form.text("text"), form.texts("list"), [each.text("a") for each in form.forms("deep")]) == ("", [], [""])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("See [KB#1", "See"),
        ("See KB#", "See"),
        ("See ( KB#pets/1", "See"),
        ("See [KB#1]", "See [KB#1]"),
        ("KB#1 it is", "KB#1 it is"),
        ("", ""),
    ],
)
def test_a_tag_in_which_a_text_ends(text, left):
    assert without_cut_label(text) == left


@pytest.mark.parametrize("piece", ['"', "{", "[", ",", "\\", "\\u12", '"a",', "[],", '{"', '{"a":'])
def test_long_replies_take_as_long_as_their_length_says(piece):
    for start in ('{"text":', '{"text":"'):
        check_linear(lambda num, start=start: read(start + piece * num), 200_000 // len(piece))


CHOICES = [tools for size in range(1, len(TOOLS) + 1) for tools in itertools.combinations(TOOLS, size)]


def call(tool, text="x"):
    (argument,) = replies.tool_specs([tool])[0].parameters["properties"]
    return {"name": tool, "arguments": {argument: text}}


@pytest.mark.parametrize("tools", CHOICES)
def test_the_form_holds_each_tool_and_the_end(tools):
    schema = replies.call_schema(tools)
    assert grammar_of(schema)
    for tool in TOOLS:
        assert is_valid(call(tool), schema) == (tool in tools)
    assert is_valid({"name": "conclude", "arguments": {}}, schema)
    assert not is_valid({"name": "conclude"}, schema)
    assert [spec.name for spec in replies.tool_specs(tools)] == [*tools, "conclude"]
    json.dumps([spec.to_dict() for spec in replies.tool_specs(tools)])


@pytest.mark.parametrize("tool", TOOLS)
def test_a_call(tool):
    for reply in (json.dumps(call(tool)), f" {json.dumps(call(tool), indent=1)}\n", json.dumps(call(tool) | {"more": 1})):
        assert replies.parse_call(reply, [tool]) == replies.Call(tool, call(tool)["arguments"])
    (text,) = replies.parse_call(json.dumps(call(tool, "9" * 10_000)), TOOLS).arguments.values()
    assert len(text) == 10_000  # half an expression is another one: the tool says that it is too long


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_no_call(tool):
    whole = json.dumps(call(tool))
    assert replies.parse_call(whole, [each for each in TOOLS if each != tool]) is None
    assert all(replies.parse_call(whole[:end], TOOLS) is None for end in range(len(whole)))
    for text in ("", " ", "\n", 7, None, ["x"], {"a": "b"}, True):
        assert replies.parse_call(json.dumps(call(tool, text)), TOOLS) is None
    others = (
        "",
        "conclude",
        '{"name":"conclude","arguments":{}}',
        f'{{"name":"{tool}"}}',
        f'{{"name":"{tool}","arguments":"x"}}',
        "[" * 10**5,
    )
    assert all(replies.parse_call(reply, TOOLS) is None for reply in others)
    assert replies.parse_call(json.dumps({"name": [tool], "arguments": {}}), TOOLS) is None
    assert replies.parse_call(json.dumps({"name": tool, "arguments": {"other": "x"}}), TOOLS) is None
