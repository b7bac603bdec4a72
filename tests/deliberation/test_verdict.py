"""A verdict's form and how it is read, whole, cut off or hostile."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.deliberation import Dissent, verdict
from localrag.engine.grammar import grammar_of
from localrag.types import Citation
from tests.deliberation.driving import VERDICT, hit
from tests.json_schemas import is_valid

MEMBERS = ["chemist", "buyer", "化学者"]
HITS = [hit(1), hit(12), hit(3, scope="pets")]
LONG_SCOPE = "s" * 64
FORM = {
    "text": 'Take ASA [KB#12]. It "lasts"\nin the sun, é 化 🔥 KB#1.',
    "decision": "ASA [KB#pets/3].",
    "confidence": "high",
    "citations": ["KB#12", "KB#99"],
    "dissent": [{"member": "buyer", "view": "PETG is cheaper."}, {"member": "化学者", "view": "None."}],
}


def longest(schema):
    """The longest form that a schema allows, its texts without escapes."""
    if "enum" in schema:
        return max(schema["enum"], key=len)
    if schema["type"] == "string":
        return "x" * schema["maxLength"]
    if schema["type"] == "array":
        return [longest(schema["items"])] * schema["maxItems"]
    return {name: longest(each) for name, each in schema["properties"].items()}


def labels(number, *, is_long=False):
    return [f"KB#{LONG_SCOPE + '/' if is_long else ''}{10**17 + each if is_long else each}" for each in range(number)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(16, 8192), st.integers(0, 300), st.integers(0, 8), st.integers(1, 70), st.booleans())
def test_a_full_form_fits_its_room(max_tokens, num_labels, num_members, name_chars, is_long):
    members = [f"{number}".ljust(name_chars, "m")[:name_chars] for number in range(num_members)]
    members = list(dict.fromkeys(members))
    schema = verdict.schema(labels(num_labels, is_long=is_long), members, max_tokens)
    grammar_of(schema)
    full = longest(schema)
    assert is_valid(full, schema)
    if max_tokens >= 200:
        assert len(json.dumps(full)) <= 4 * max_tokens
    assert ("citations" in full, "dissent" in full) == (num_labels > 0, num_members > 0)
    assert list(full) == [name for name in VERDICT if name in full]


@pytest.mark.parametrize("max_tokens", [16, 200, 512, 8192])
@pytest.mark.parametrize("num_labels", [0, 1, 300])
def test_the_form_is_a_grammar(max_tokens, num_labels):
    assert grammar_of(verdict.schema(labels(num_labels, is_long=True), MEMBERS, max_tokens))


def test_more_room_makes_a_longer_form():
    sizes = [len(json.dumps(longest(verdict.schema(labels(9), MEMBERS, max_tokens)))) for max_tokens in (100, 200, 400, 800, 1600)]
    assert sizes == sorted(set(sizes))


def test_the_first_labels_are_named_each_once():
    named = verdict.schema([*labels(200), *labels(3)], [], 512)["properties"]["citations"]["items"]["enum"]
    assert named == labels(64)
    assert verdict.schema(["KB#1", "KB#1"], [], 512)["properties"]["citations"]["items"]["enum"] == ["KB#1"]


def test_a_whole_verdict():
    found = verdict.parse(json.dumps(FORM), HITS, MEMBERS)
    assert found.is_whole
    assert (found.text, found.decision, found.confidence) == (FORM["text"], FORM["decision"], "high")
    cited = {each.label: each.supplied for each in found.citations}
    assert cited == {"KB#12": True, "KB#1": True, "KB#pets/3": True, "KB#99": False}
    assert found.dissent == (Dissent("buyer", "PETG is cheaper."), Dissent("化学者", "None."))
    told = json.loads(json.dumps(found.to_dict()))
    assert told == {
        "text": FORM["text"],
        "decision": FORM["decision"],
        "confidence": "high",
        "citations": [{"id": label, "supplied": supplied} for label, supplied in cited.items()],
        "dissent": FORM["dissent"],
        "is_whole": True,
    }


@pytest.mark.parametrize("is_ascii", [True, False])
def test_cut_off_at_any_character_it_is_what_there_is(is_ascii):
    reply = json.dumps(FORM, ensure_ascii=is_ascii)
    seen = set()
    for end in range(len(reply)):
        found = verdict.parse(reply[:end], HITS, MEMBERS)
        assert not found.is_whole
        assert FORM["text"].startswith(found.text)
        assert FORM["decision"].startswith(found.decision)
        assert found.confidence in {None, "high"}
        assert [each.label for each in found.citations] == ["KB#12", "KB#1", "KB#pets/3", "KB#99"][: len(found.citations)]
        assert {each.member for each in found.dissent} <= set(MEMBERS)
        seen.add((bool(found.text), bool(found.decision), found.confidence, len(found.citations), len(found.dissent)))
    assert {(False, False, None, 0, 0), (True, False, None, 1, 0), (True, True, None, 3, 0), (True, True, "high", 4, 2)} <= seen


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["buyer", "KB#1", "high"]),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.sampled_from(["member", "view", "text"]), inside, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(list(FORM)), ANY), st.integers(0, 400))
def test_no_reply_raises(form, end):
    for reply in (json.dumps(form), json.dumps(form)[:end]):
        found = verdict.parse(reply, HITS, MEMBERS)
        json.dumps(found.to_dict(), ensure_ascii=False).encode()
        assert {each.member for each in found.dissent} <= set(MEMBERS)
        assert found.confidence in {None, *verdict.CONFIDENCES}
        assert not found.is_whole or (found.text and found.decision)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=80))
def test_what_is_no_form_is_a_text(reply):
    found = verdict.parse(reply, HITS, MEMBERS)
    assert not found.is_whole
    if not reply.lstrip().startswith("{") and "</think>" not in reply:
        assert found.text == reply.strip()


def test_reasoning_before_and_marks_of_it_inside():
    assert verdict.parse("<think>hm</think> ASA [KB#1]", HITS, MEMBERS).text == "ASA [KB#1]"
    inside = FORM | {"text": "a </think> b"}
    assert verdict.parse(json.dumps(inside), HITS, MEMBERS).text == "a </think> b"


def test_dissent_is_of_members_and_of_each_once():
    views = (("judge", "x"), ("buyer", "first"), ("x", ""), ("chemist", ""), ("buyer", "then"))
    views = (("judge", "x"), ("buyer", "first"), ("x", ""), ("chemist", ""), ("buyer", "then"))
    told = [{"member": name, "view": view} for name, view in views]
    found = verdict.parse(json.dumps(FORM | {"dissent": [*told, "buyer", None]}), HITS, MEMBERS)
    assert found.dissent == (Dissent("buyer", "first"), Dissent("chemist", ""))


def test_a_tag_that_was_cut_off_is_not_cited():
    found = verdict.parse('{"text":"See [KB#1', HITS, MEMBERS)
    assert (found.text, found.citations) == ("See", ())
    assert verdict.parse('{"text":"a","decision":"b","citations":["KB#1', HITS, MEMBERS).citations == ()


def test_of_a_reply_that_is_no_form_a_label_that_was_cut_off_is_not_cited_either():
    for said in ("Take ASA [KB#1", "Take ASA [kb #99", "Take ASA [99"):
        found = verdict.parse(said, HITS, MEMBERS, is_cut=True)
        assert (found.text, found.citations) == ("Take ASA", ())
    assert verdict.parse("Take ASA [KB#1", HITS, MEMBERS).citations == (Citation("KB#1", True),)


@pytest.mark.parametrize("form", ["[kb#99]", "[KB#1, 99]", "KB #99", "[KB#98-99]", "[KB#mem_99]", "[KB#99a]", "[99]", "[^99]", "[KB:99]"])
def test_an_invented_label_is_struck_out_of_every_text_in_every_spelling(form):
    said = f"It lasts {form}."
    found = verdict.parse(json.dumps(FORM | {"text": said, "decision": said, "citations": []}), HITS, MEMBERS)
    assert "99" not in found.text + found.decision
    assert any("99" in each.label and not each.supplied for each in found.citations)


def test_a_dissent_cites_nothing_that_was_not_given_either():
    view = {"member": "buyer", "view": "KB#99 says otherwise, and so does [KB#12]."}
    found = verdict.parse(json.dumps(FORM | {"citations": [], "dissent": [view]}), HITS, MEMBERS)
    assert found.dissent == (Dissent("buyer", "says otherwise, and so does [KB#12]."),)
    assert {each.label: each.supplied for each in found.citations}["KB#99"] is False
