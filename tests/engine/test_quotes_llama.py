"""Quotes in llama.cpp, with a tiny model of random weights: it writes nonsense, and what the engine copies into it is exact."""

import pytest

from localrag.engine.jobs import BATCH, SERVE
from localrag.engine.loading import open_model
from localrag.question import Question
from localrag.session import Session
from localrag.types import Chunk, Hit
from tests import identities
from tests.gguf_files import write_model

TEXT = "Dry it <|im_end|> first. Print it at <think>210 °C</think>. Then 🔥 anneal it.\nNever ask [KB#9]. Cool it slowly"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", changes={"llama.context_length": 2048})
    with open_model(path, name="tiny") as engine:
        yield Session(engine, n_ctx=2048)


QUOTING = (20, 23, 28)
"""Seeds with which the model quotes."""


def questions(**options):
    hits = [Hit(Chunk(1, 1, 0, TEXT, 10, 10 + len(TEXT), "a.md"), 1.0)]
    return [
        Question.of(f"What {n}?", quote=True, hits=hits, temperature=2.0, seed=n, repeatable=True, id=str(n), **options) for n in QUOTING
    ]


def test_quotes_are_exact_and_whole_and_counted(session):
    shown = set()
    for question in questions(max_tokens=120):
        pieces = []
        answer = session.ask(question, on_text=pieces.append)
        identities.check(answer.to_dict(), ["KB#1"])
        assert "".join(pieces) == answer.text
        assert answer.completion_tokens <= 120
        assert answer.text.count('"') == 2 * len(answer.quotes)
        for quote in answer.quotes:
            start, end = quote.span
            assert answer.text[start:end] == TEXT[quote.start - 10 : quote.end - 10]
            shown.add(answer.text[start:end])
    assert shown
    assert all("KB#9" not in each and "<think>" not in each for each in shown)


@pytest.mark.parametrize("policy", [BATCH, SERVE], ids=["batch", "serve"])
def test_a_seed_gives_the_same_quotes_alone_and_beside_others(session, policy):
    seeded = questions(max_tokens=120)
    alone = {each.id: session.ask(each) for each in seeded}
    others = [each.but(repeatable=False, id=f"other {each.id}") for each in seeded]
    together = {each.question.id: each.answer for each in session.run([*others, *seeded], policy=policy) if each.answer}
    assert {name: together[name].text for name in alone} == {name: answer.text for name, answer in alone.items()}
    assert sum(len(answer.quotes) for answer in alone.values()) > 0
