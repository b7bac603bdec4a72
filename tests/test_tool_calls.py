"""How models write tool calls: learned from templates, written, held to by a grammar, and read in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.grammar import MAX_CALLS, byte_vocabulary, grammar_of_calls, is_text, schema_of_calls
from localrag.engine.template import JinjaChatTemplate
from localrag.text.tool_calls import HERMES, PLAIN, CallMarkup, CallReader, Fields
from localrag.types import Message, ToolCall, ToolSpec
from tests.chat_templates import CHATML, PATHS
from tests.engine.call_templates import CHANNELS, FAMILIES

SPECS = (
    ToolSpec(
        "get_weather",
        "",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "hours": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    ),
    ToolSpec("get", "", {"type": "object", "properties": {}}),
)
NAMES = tuple(spec.name for spec in SPECS)
SCHEMA = schema_of_calls(SPECS, ())
ONE = ToolCall("get_weather", {"city": 'Wien <b> "x"\n日本', "days": 2, "unit": "C", "hours": [1, 2]})
TWO = ToolCall("get", {})
SPACED = CallMarkup(start="<c>", named=" ", end="</c>", between="\n")
TALKING = CallMarkup(start="", named="\n", between=">>>", text="all\n")
MARKUPS = {"plain": PLAIN, "hermes": HERMES, "spaced": SPACED, "talking": TALKING}


@pytest.fixture(scope="module")
def learned():
    markups = dict(MARKUPS)
    for name, source in FAMILIES.items():
        with JinjaChatTemplate(source, time_limit_s=10) as template:
            markups[name] = template.call_markup
            assert template.knows_calls, name
    return markups


def reader(markup):
    properties = {spec.name: spec.parameters["properties"] for spec in SPECS}
    return CallReader(markup, NAMES, lambda name, key: is_text(properties[name].get(key)))


def read(markup, pieces):
    """Text, calls, and the calls put together from their pieces."""
    made, text, deltas = reader(markup), "", []
    for piece in pieces:
        said, more = made.feed(piece)
        text, deltas = text + said, deltas + more
    said, more = made.finish()
    text, deltas = text + said, deltas + more
    assert text == made.text
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    streamed = {}
    for delta in deltas:
        name, arguments = streamed.get(delta.index, ("", ""))
        streamed[delta.index] = (name + delta.name, arguments + delta.arguments)
    assert list(streamed.values()) == [(call.name, call.arguments) for call in made.calls]
    return text, [(call.name, call.parsed) for call in made.calls]


def allows(grammar, text):
    matcher = byte_vocabulary().matcher(grammar)
    for byte in text.encode():
        if not matcher.allows(byte):
            return False
        matcher.accept(byte)
    return bool(matcher.allowed()[257])


@pytest.mark.parametrize(
    ("name", "markup"),
    [
        ("hermes", HERMES),
        ("array", CallMarkup('{"name": "', '", "arguments": ', ', "id": "\ue001"}', "[TOOL_CALLS][", "]", ", ")),
        ("named", CallMarkup("[TOOL_CALLS]", "[ARGS]", between="")),
        ("llama", CallMarkup('{"name": "', '", "parameters": ', "}", between="")),
        ("text", CallMarkup("<function=", ">", "</function>", between="")),
        (
            "xml",
            CallMarkup(
                "<tool_call>\n<function=", ">", "\n</function>\n</tool_call>", between="\n",
                fields=Fields("\n<parameter=", ">\n", "\n</parameter>", ">\n", "\n</parameter>"),
            ),
        ),
        (
            "python",
            CallMarkup("", "(", ")", "<|tool_call_start|>[", "]<|tool_call_end|>", ", ", Fields("", "='", "'", "=", "", ", ")),
        ),
        ("counted", CallMarkup("<|call_begin|>functions.", ":\ue000<|args|>", "<|call_end|>", "<|calls_begin|>", "<|calls_end|>", "")),
    ],
)  # fmt: skip
def test_a_form_is_learned_from_what_the_template_writes(learned, name, markup):
    assert learned[name] == markup


def test_a_template_without_a_form_has_none():
    with JinjaChatTemplate(CHATML, time_limit_s=10) as template:
        assert (template.call_markup, template.knows_calls) == (PLAIN, False)
    with JinjaChatTemplate(CHATML + "{# <tool_call> #}", time_limit_s=10) as template:
        assert (template.call_markup, template.knows_calls) == (HERMES, True)


def test_calls_are_held_to_and_read_in_every_form(learned):
    for name, markup in learned.items():
        for calls in ([ONE], [TWO], [ONE, TWO]):
            if len(calls) > 1 and markup.between is None:
                continue
            text = markup.written(calls)
            expected = [(call.name, call.parsed) for call in calls]
            if name != "python":  # its texts cannot hold an apostrophe, and these have none
                assert "'" not in str(ONE.arguments)
            assert allows(grammar_of_calls(SCHEMA, markup), text), name
            assert allows(grammar_of_calls(SCHEMA, markup, or_text=True), text), name
            assert read(markup, [text]) == ("", expected), name
            assert read(markup, text) == ("", expected), name


def test_text_is_text_and_may_come_first_where_it_cannot_be_mistaken(learned):
    for name, markup in learned.items():
        grammar = grammar_of_calls(SCHEMA, markup, or_text=True)
        plain = "Hello <b> [x] there."
        assert allows(grammar, markup.text + plain), name
        assert read(markup, markup.text + plain) == (plain, []), name
        both = f"I look.\n\n{markup.written([TWO])}"
        if markup.is_anywhere:
            assert allows(grammar, both), name
            assert read(markup, both) == ("I look.", [("get", {})]), name
        assert not allows(grammar_of_calls(SCHEMA, markup), plain), name


def test_only_known_tools_and_their_parameters_can_be_called(learned):
    for name, markup in learned.items():
        grammar = grammar_of_calls(SCHEMA, markup)
        assert not allows(grammar, markup.written([ToolCall("delete", {})])), name
        assert not allows(grammar, markup.written([ToolCall("get_weather", {"days": 2})])), name
        assert not allows(grammar, markup.written([ToolCall("get_weather", {"city": "x", "days": "two"})])), name
        assert not allows(grammar, markup.written([ToolCall("get_weather", {"city": "x", "unit": "K"})])), name


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pieces_give_the_same(learned, data):
    markup = data.draw(st.sampled_from(sorted(learned.items(), key=str)))[1]
    text = data.draw(st.sampled_from(["", "I look. ", "<", "{"])) + markup.written([ONE, TWO])
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(markup, pieces) == read(markup, [text])


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80) | st.text(alphabet='<tool_call>{}" \n', max_size=80))
def test_nothing_that_is_written_is_lost_or_refused(text):
    for markup in MARKUPS.values():
        said, calls = read(markup, [text])
        assert calls or said.split() == text.removeprefix(markup.text).split()


def test_the_length_of_texts_and_the_number_of_calls_are_bounded(learned):
    spec = ToolSpec("say", "", {"type": "object", "properties": {"it": {"type": "string", "maxLength": 5}}, "required": ["it"]})
    schema = schema_of_calls([spec], ())
    for name, markup in learned.items():
        grammar = grammar_of_calls(schema, markup)
        assert allows(grammar, markup.written([ToolCall("say", {"it": "12345"})])), name
        assert not allows(grammar, markup.written([ToolCall("say", {"it": "123456"})])), name
    grammar = grammar_of_calls(SCHEMA, HERMES)
    assert allows(grammar, HERMES.written([TWO] * MAX_CALLS))
    assert not allows(grammar, HERMES.written([TWO] * (MAX_CALLS + 1)))


def test_a_call_in_a_channel_of_its_own():
    with JinjaChatTemplate(CHANNELS, time_limit_s=10) as template:
        markup = template.call_markup
        asked = [Message("user", "Hi")]
        bare, offered = (template.render(asked, tools, thinks=False)[-1].text for tools in ((), SPECS))
    assert bare.endswith("<|channel|>final<|message|>"), "it can only be text"
    assert offered.endswith("<|start|>assistant"), "the model chooses"
    text = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Wien"}'
    assert read(markup, text) == ("", [("get_weather", {"city": "Wien"})])
    assert read(markup, "<|channel|>final<|message|>Hello") == ("Hello", [])
    special = (("<|channel|>", 256), ("<|message|>", 257))
    assert markup.mark_ids(special) == {256, 257}
    matcher = byte_vocabulary().matcher(grammar_of_calls(SCHEMA, markup, special[:1], or_text=True))
    assert [token for token in range(257) if matcher.allows(token)] == [256]


def test_models_without_a_form_may_choose_that_of_hermes():
    grammar = grammar_of_calls(SCHEMA, PLAIN, or_text=True)
    text = HERMES.written([ONE, TWO])
    assert allows(grammar, text)
    assert read(PLAIN, text) == ("", [(ONE.name, ONE.parsed), (TWO.name, TWO.parsed)])
    assert not allows(grammar, "<tool_call>x")
    assert not allows(grammar_of_calls(SCHEMA, PLAIN), text)


def test_markup_of_a_call_that_is_cut_off_is_not_text():
    text = HERMES.written([TWO, TWO])
    for end in range(text.index("</tool_call>"), len(text)):
        said, calls = read(HERMES, text[:end])
        assert (said, calls[0]) == ("", ("get", {}))


def test_what_only_begins_like_a_call_is_text():
    for text in ("<tool_call>", '<tool_call>\n{"name": "delete"', "<tool", '<tool_call>\n{"name": "get_weather'):
        assert read(HERMES, text) == (text, [])


def test_control_tokens_are_tokens_of_the_grammar():
    markup = CallMarkup("<|im_start|>", "(", ")")
    special = (("<|im_start|>", 256), ("<|im_end|>", 257))
    assert markup.mark_ids(special) == {256}
    matcher = byte_vocabulary().matcher(grammar_of_calls(SCHEMA, markup, special))
    assert not matcher.allows(ord("<"))
    assert matcher.allows(256)


@pytest.mark.skipif(not PATHS, reason="needs the templates of ../shared/data/templates")
def test_forms_of_real_templates():
    known = {}
    for path in PATHS:
        with JinjaChatTemplate(path.read_text("utf-8"), bos_text="<s>", eos_text="</s>", time_limit_s=10) as template:
            known[path.stem] = template.knows_calls
            markup = template.call_markup
        text = markup.written([ONE])
        assert read(markup, text) == ("", [(ONE.name, ONE.parsed)]), path.stem
        assert allows(grammar_of_calls(SCHEMA, markup, or_text=True), text), path.stem
    assert sum(known.values()) >= 6, known
