"""The grammar of citations: whole tags of the supplied sources, at least one, and no other spelling of a source."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.citation import cite
from localrag.engine.grammar import NO_TAG, byte_vocabulary, grammar_of_calls, grammar_of_citations, schema_of_calls, tags_of
from localrag.text.tool_calls import PLAIN, CallReader
from localrag.types import CallRules, ToolSpec

LABELS = ("KB#1", "KB#12", "KB#pets/12")
END = 257
ODD = "KkKＫbBｂ#＃﹟♯№:：[]［］【】〔〕()^1２ \t\\-/.,;x\x1c"
HOSTILE = ("KB#7", "kb #7", "[12]", "[^12]", "【KB#1】", "[KB 7]", "[KB#1, 7]", "[KB#1-7]", "[KB#123]", "KB:7", "K\u200bB#1", " [7†x]")
PIECES = st.one_of(st.sampled_from(tags_of(LABELS)), st.text(ODD, max_size=6), st.sampled_from(HOSTILE), st.text(max_size=3))


def accepts(text):
    """Whether the grammar accepts a whole text."""
    matcher = byte_vocabulary().matcher(grammar_of_citations(LABELS))
    for byte in text.encode():
        if not matcher.allows(byte):
            return False
        matcher.accept(byte)
    return matcher.allows(END)


def supplied_only(text):
    return all(each.label in LABELS for each in cite(text, ()))


@pytest.mark.parametrize("tag", tags_of(LABELS))
def test_every_supplied_tag_is_allowed_anywhere(tag):
    assert accepts(tag)
    assert accepts(f"It lasts {tag}, at 80 °C, and 512 KB of it.\n\n{tag}")


@pytest.mark.parametrize("text", ["", "It lasts.", *HOSTILE])
def test_no_text_without_a_tag_and_no_other_spelling(text):
    assert not accepts(text)
    assert accepts(f"[KB#1] {text}") is (text in ("", "It lasts.", "K\u200bB#1"))


@given(st.lists(PIECES, max_size=6))
@settings(max_examples=300)
def test_what_the_grammar_accepts_names_no_other_source(parts):
    text = "".join(parts)
    if accepts(text):
        assert supplied_only(text)
        assert any(tag in text for tag in tags_of(LABELS))


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("max_tokens", [*range(1, 40), 80])
def test_a_random_writer_never_leaves_a_tag_cut_or_an_answer_without_one(max_tokens, is_first):
    for seed in range(6):
        rng, written = random.Random(seed), b""
        matcher = byte_vocabulary().citing_matcher(LABELS, max_tokens, is_first=is_first)
        for _ in range(max_tokens):
            token = rng.choice((END, ord("["), ord("K"), *b"KB# 1]x.\n"))
            if not matcher.allows(token):
                token = int(rng.choice(matcher.allowed().nonzero()[0]))
            matcher.accept(token)
            if token == END:
                break
            written += bytes([token])
        text = written.decode("utf-8", "ignore")
        assert supplied_only(text)
        assert text.count("[") == sum(text.count(tag) for tag in tags_of(LABELS)), "a cut tag"
        assert ("[" in text) or max_tokens < max(map(len, tags_of(LABELS))), "no tag"
        assert not is_first or text.startswith(tuple(tags_of(LABELS))) or "[" not in text
        if is_first and text.startswith("[KB") and token == END:
            assert text.partition("]")[2].lstrip("\n .")[:1] not in ("", "["), "a bare tag"


def test_a_writer_who_would_end_without_a_tag_must_write_one():
    matcher = byte_vocabulary().citing_matcher(("KB#1",), 40)
    matcher.accept(ord("a"))
    assert not matcher.allows(END)
    assert set(matcher.allowed().nonzero()[0]) == {ord("[")}
    for byte in NO_TAG.encode():
        assert matcher.allows(byte)
        matcher.accept(byte)
    assert matcher.allows(END)


QUOTES = {"KB#1.1": tuple(b' "PLA"'), "KB#1.2": tuple(b' "At [80] degrees."'), "KB#12.1": tuple(b' "x"')}


@pytest.mark.parametrize("max_tokens", [*range(1, 60), 120])
def test_a_random_writer_never_cuts_a_quote_and_writes_each_once(max_tokens):
    for seed in range(12):
        rng, written, copied = random.Random(seed), b"", []
        matcher = byte_vocabulary().citing_matcher(LABELS, max_tokens, QUOTES.items())
        while len(written) < max_tokens:
            token = rng.choice((END, ord("["), *b"KB#12.]x"))
            if not matcher.allows(token):
                token = int(rng.choice(matcher.allowed().nonzero()[0]))
            matcher.accept(token)
            if token == END:
                break
            written += bytes([token])
            if copy := bytes(matcher.take_copied()):
                copied.append(written.rpartition(b"[")[2][:-1].decode())
                assert copy == bytes(QUOTES[copied[-1]])
                written += copy
        text = written.decode("utf-8", "ignore")
        assert len(written) <= max_tokens
        assert len(set(copied)) == len(copied)
        for label, token_ids in QUOTES.items():
            assert text.count(f"[{label}]") == copied.count(label) == text.count(f"[{label}]{bytes(token_ids).decode()}")


def test_only_the_engine_writes_quotation_marks_in_an_answer_that_may_quote():
    matcher = byte_vocabulary().citing_matcher(LABELS, 80, QUOTES.items())
    assert [mark for mark in "\"'x" if not matcher.allows(ord(mark))] == ['"']
    assert byte_vocabulary().citing_matcher(LABELS, 80).allows(ord('"'))


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
WEATHER = ToolSpec("weather", parameters=CITY)
RULES = CallRules(
    grammar_of_calls(schema_of_calls([WEATHER], ()), PLAIN, or_text=True),
    shown_ids=frozenset(),
    written=PLAIN.written,
    opener=PLAIN.opener,
)


def written_by(matcher, rng, preferred, max_tokens):
    """What a random writer with a preference writes under a grammar, and whether it ended."""
    text = b""
    for _ in range(max_tokens):
        token = rng.choice(preferred)
        if not matcher.allows(token):
            token = int(rng.choice(matcher.allowed().nonzero()[0]))
        matcher.accept(token)
        if token == END:
            return text.decode("utf-8", "ignore"), True
        text += bytes([token])
    return text.decode("utf-8", "ignore"), False


def test_an_answer_that_may_call_a_tool_calls_it_or_cites():
    kinds = set()
    for seed in range(60):
        rng = random.Random(seed)
        matcher = byte_vocabulary().calling_matcher(RULES, LABELS, 300, is_first=True)
        text, has_ended = written_by(matcher, rng, (END, *b'{"nweather:} [KB#1]x'), 300)
        if text.startswith("{"):
            reader = CallReader(PLAIN, ("weather",), lambda _name, _key: True, lambda: "id")
            reader.feed(text)
            reader.finish()
            assert not has_ended or [call.name for call in reader.calls] == ["weather"]
            kinds.add("call")
        else:
            assert text.startswith(tuple(tags_of(LABELS)))
            assert supplied_only(text)
            kinds.add("text")
    assert kinds == {"call", "text"}


def test_a_text_that_may_call_a_tool_cannot_become_a_call_later_or_end_without_a_tag():
    matcher = byte_vocabulary().calling_matcher(RULES, LABELS, 300)
    matcher.accept(ord("a"))
    assert not matcher.allows(END)
    for byte in b'{"name": "weather"} [KB#1':
        assert matcher.allows(byte)
        matcher.accept(byte)
    assert not matcher.allows(ord("3"))
    matcher.accept(ord("]"))
    assert matcher.allows(END)
