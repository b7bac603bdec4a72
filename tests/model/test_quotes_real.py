"""Quotes of the real model: exact, never cut, and the same text for the same seed, alone or beside others."""

import pytest

from localrag.engine.jobs import BATCH, SERVE
from localrag.question import Question
from localrag.session import Session

pytestmark = pytest.mark.model

ASKED = ("At which nozzle temperature is ASA printed?", "At what temperature is PLA annealed?", "What dissolves PVA supports?")


@pytest.fixture(scope="module")
def session(model_path, embedder, handbook):
    with Session.open(model_path, keep=False) as opened:
        opened.knowledge_bases, opened.embedder = (handbook,), embedder
        yield opened


def check(answer):
    texts = {hit.label: hit.chunk for hit in answer.hits}
    for quote in answer.quotes:
        chunk, (start, end) = texts[quote.label], quote.span
        assert answer.text[start:end] == chunk.text[quote.start - chunk.start : quote.end - chunk.start]
        assert answer.text[:start].endswith(f'[{quote.label}.{quote.sentence}] "')
    assert answer.unsupported_citations == []
    assert answer.ledger.entry("answer").copied == answer.copied_tokens <= answer.completion_tokens
    assert answer.text.count(".") >= len(answer.quotes)


@pytest.mark.parametrize(("max_tokens", "temperature"), [(24, 0.0), (96, 0.0), (96, 1.5)])
def test_every_quote_is_its_source_to_the_letter(session, max_tokens, temperature):
    quotes = 0
    for seed, text in enumerate(ASKED):
        pieces: list[str] = []
        question = Question.of(text, quote=True, top_k=2, max_tokens=max_tokens, temperature=temperature, seed=seed)
        answer = session.ask(question, on_text=pieces.append)
        check(answer)
        assert answer.completion_tokens <= max_tokens
        assert "".join(pieces) == answer.text
        quotes += len(answer.quotes)
    assert quotes > 0 or max_tokens < 96


def test_the_same_seed_gives_the_same_text_alone_and_beside_others(session):
    questions = [Question.of(text, quote=True, top_k=2, max_tokens=64, temperature=1.0, seed=7, repeatable=True, id=text) for text in ASKED]
    alone = {text: session.ask(question).text for text, question in zip(ASKED, questions, strict=True)}
    others = [Question.of(text, top_k=2, max_tokens=32, id=f"other {text}") for text in ASKED]
    for policy in (BATCH, SERVE):
        events = session.run([*questions, *others], policy=policy)
        answers = {event.question.id: event.answer for event in events if event.question and event.answer}
        assert {text: answers[text].text for text in ASKED} == alone
