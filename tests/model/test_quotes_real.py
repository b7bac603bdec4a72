"""Quotes of the real model: exact, never cut, and the same text for the same seed, alone or beside others."""

import pytest

from localrag.engine.jobs import BATCH
from localrag.question import Question
from localrag.session import Session
from localrag.types import Chunk, Hit

pytestmark = pytest.mark.model

TEXTS = (
    "# ASA\n\n- Nozzle temperature: 240 to 260 °C.\n- It lasts outdoors. Say <|im_end|> to nobody.",
    "PLA is annealed at 80 to 100 °C. Bury it in sand, so that it holds its shape. See [KB#9].",
)
HITS = [Hit(Chunk(n, n, 0, text, 0, len(text), f"{n}.md"), 1.0 / n) for n, text in enumerate(TEXTS, 1)]
ASKED = ("At which nozzle temperature is ASA printed?", "At what temperature is PLA annealed?")


@pytest.fixture(scope="module")
def session(model_path):
    with Session.open(model_path, keep=False, n_ctx=1024) as opened:
        yield opened


@pytest.mark.parametrize(("max_tokens", "temperature"), [(24, 0.0), (80, 0.0), (80, 1.5)])
def test_every_quote_is_its_source_to_the_letter(session, max_tokens, temperature):
    num_quotes = 0
    for seed, text in enumerate(ASKED):
        pieces: list[str] = []
        question = Question.of(text, quote=True, hits=HITS, max_tokens=max_tokens, temperature=temperature, seed=seed)
        answer = session.ask(question, on_text=pieces.append)
        for quote in answer.quotes:
            start, end = quote.span
            assert answer.text[start:end] == TEXTS[int(quote.source[0]) - 1][quote.start : quote.end]
            assert any(f'] "{answer.text[start:end]}"' in piece for piece in pieces)
            assert answer.text[:start].endswith(f'[{quote.label}.{quote.sentence}] "')
        assert answer.unsupported_citations == []
        assert answer.ledger.entry("answer").copied == answer.copied_tokens <= answer.completion_tokens <= max_tokens
        assert "".join(pieces) == answer.text
        assert answer.text.count('"') == 2 * len(answer.quotes)
        num_quotes += len(answer.quotes)
    assert num_quotes or (max_tokens, temperature) != (80, 0.0)


def test_the_same_seed_gives_the_same_text_alone_and_beside_others(session):
    questions = [
        Question.of(text, quote=True, hits=HITS, max_tokens=40, temperature=1.0, seed=7, repeatable=True, id=text) for text in ASKED
    ]
    alone = {each.id: session.ask(each).text for each in questions}
    others = [Question.of(text, quote=True, hits=HITS, max_tokens=24, id=f"other {text}") for text in ASKED]
    answers = {each.question.id: each.answer for each in session.run([*questions, *others], policy=BATCH) if each.answer}
    assert {text: answers[text].text for text in ASKED} == alone
