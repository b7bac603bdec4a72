"""Sentences that an answer may quote: each is exactly that of its source, whatever the source contains."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.citation import cite
from localrag.engine.echo import EchoTokenizer, open_echo
from localrag.engine.jobs import BATCH, SINGLE
from localrag.engine.llama import LlamaModel, LlamaTokenizer
from localrag.errors import UsageError
from localrag.prompt.quotes import Quotable, numbered_text, quotable
from localrag.question import Question
from localrag.session import Session
from localrag.types import Chunk, Hit
from tests import identities
from tests.gguf_files import write_vocab

HOSTILE = (
    *(
        "One. ",
        "Two! ",
        "Three?\n",
        "\n\n",
        "# Head\n",
        "- item\n",
        "| a | b |\n|---|---|\n",
        "```\n",
        '"Said." ',
        "„Ja.“ ",
        "。",
        "すし。",
        "é\u0301. ",
    ),
    *(
        "<|im_end|>",
        "<|im_start|>system\n",
        "<think>",
        "</think>",
        "[KB#7]",
        "[KB#1.1] ",
        "kb #9. ",
        "[12] ",
        "【KB#1】",
        "K\u200bB#1",
        "[none]",
    ),
    *("\r\n", "\x00", "\x1b[31m", "\u2028", "\ufeff", "🔥", "\U0010ffff", " ", "\t", "[", "]", '"', "x" * 40),
)
TEXTS = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=4)), min_size=1, max_size=14).map("".join).filter(str.strip)


def hit(text, number=1, start=100):
    return Hit(Chunk(number, 1, number, text, start, start + len(text), "guide/a.md", "Head"), 1.0)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return EchoTokenizer(), LlamaTokenizer(LlamaModel(write_vocab(tmp_path_factory.mktemp("vocab") / "tiny.gguf"), vocab_only=True))


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_what_may_be_quoted_is_exact_and_holds_no_markup(tokenizers, text):
    source = hit(text)
    sentences = [text[start:end] for start, end in quotable(source, source.chunk.text)]
    assert all(each == each.strip() and not cite(f"[KB#1] {each}", ())[1:] for each in sentences)
    for tokenizer in tokenizers:
        special = {token for _, token in (*tokenizer.special_texts, *tokenizer.tag_texts)}
        for label, token_ids in Quotable.of([(source, text)]).copies(tokenizer):
            sentence = sentences[int(label.rpartition(".")[2]) - 1]
            assert b"".join(tokenizer.piece(token) for token in token_ids).decode() == f' "{sentence}"'
            assert special.isdisjoint(token_ids)


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_the_prompt_shows_the_number_of_each_sentence_before_it(text):
    source = hit(text)
    shown = numbered_text(source)
    for number, (start, end) in enumerate(quotable(source, source.chunk.text), 1):
        assert shown.count(f"[KB#1.{number}] {text[start:end]}") == 1
    tags = re.findall(r"\[KB#[\d.]+\]", shown)
    assert tags == ["[KB#1]", *(f"[KB#1.{number}]" for number in range(1, len(tags)))]


def test_of_a_shortened_passage_only_whole_sentences_of_the_source_are_numbered():
    source = hit("Dry it. Then print it. Cool it slowly.")
    assert numbered_text(source, "Dry it. Then pri […] Cool it slowly.").startswith("[KB#1] [KB#1.1] Dry it. Then pri […] ")
    assert [source.chunk.text[slice(*each)] for each in quotable(source, "Dry it. […]\nCool it slowly.")] == ["Dry it.", "Cool it slowly."]


def test_a_truncated_passage_keeps_its_whole_sentences_quotable(session):
    source = hit("".join(f"Fact {n} of the long list is this one. " for n in range(60)))
    for max_tokens in (2200, 2500):
        answer = session.ask(Question.of("What?", hits=[source], quote=True, max_tokens=max_tokens, overflow=[("truncate", "evidence")]))
        [(start, end)] = [each.span for each in answer.quotes]
        assert answer.prompt.levels == {"KB#1": "truncated"}
        assert answer.text[start:end] == "Fact 0 of the long list is this one."
        assert 1 < len(answer.prompt.quotable.spans["KB#1"]) < 60


@pytest.fixture(scope="module")
def session():
    with open_echo() as engine:
        yield Session(engine, n_ctx=4096)


@given(TEXTS, st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_an_answer_tells_its_quotes_to_the_token_and_never_cuts_one(session, text, max_tokens):
    source = hit(text)
    pieces = []
    answer = session.ask(Question.of("What?", hits=[source], quote=True, max_tokens=max_tokens), on_text=pieces.append)
    data = answer.to_dict()
    identities.check(data, ["KB#1"] if answer.prompt.hits else [])
    assert answer.completion_tokens <= max_tokens
    assert "".join(pieces) == answer.text
    assert data["usage"]["copied_tokens"] == sum(len(answer.text[s:e].encode()) + 3 for s, e in (each.span for each in answer.quotes))
    for each in answer.quotes:
        start, end = each.span
        assert answer.text[start:end] == text[each.start - 100 : each.end - 100]
        assert any(f'] "{answer.text[start:end]}"' in piece for piece in pieces), "a quote comes as one piece"


def test_quotes_are_the_same_alone_and_beside_others(session):
    questions = [
        Question.of(f"What of {n}?", hits=[hit(f"Fact {n}. More.", n)], quote=True, max_tokens=200, id=str(n)) for n in range(1, 9)
    ]
    together = {each.question.id: each.answer for each in session.run(questions, policy=BATCH) if each.answer}
    alone = {each.question.id: each.answer for each in session.run(questions, policy=SINGLE) if each.answer}
    assert [together[each.id].text for each in questions] == [alone[each.id].text for each in questions]
    assert together["3"].text == 'You asked: What of 3? [KB#3.1] "Fact 3."'


@pytest.mark.parametrize("options", [{"json_schema": {"type": "object"}}, {"logprobs": 1}, {"quote": False}])
def test_an_answer_that_something_else_shapes_does_not_quote_and_its_prompt_has_no_numbers(session, options):
    prepared = session.prepare(Question.of("What?", **{"hits": [hit("Dry it.")], "quote": True, **options}))
    assert prepared.prompt.quotable is None
    assert "KB#1." not in "".join(part.part.text for part in prepared.prompt.parts)


def test_quotes_need_enforced_citations():
    with pytest.raises(UsageError, match="enforced"):
        Question.of("What?", quote=True, cite="free")
