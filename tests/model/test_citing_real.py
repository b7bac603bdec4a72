"""Answers whose citations are enforced: none is invented, each answer has one, and the same seed gives the same text."""

import itertools

import pytest

from localrag.question import Question
from localrag.session import Session

pytestmark = pytest.mark.model

ASKED = ("Which plastic lasts outdoors?", "At what temperature is PLA annealed?", "What dissolves PVA supports?")


@pytest.fixture(scope="module")
def session(model_path, embedder, handbook):
    with Session.open(model_path, keep=False) as opened:
        opened.knowledge_bases, opened.embedder = (handbook,), embedder
        yield opened
        opened.knowledge_bases = ()  # others search it, too


@pytest.mark.parametrize("text", ASKED)
def test_every_answer_cites_and_none_invents(session, text):
    for seed, (temperature, max_tokens) in enumerate(itertools.product([0.0, 1.5], [9, 20, 64])):
        question = Question.of(text, cite="enforced", top_k=2, max_tokens=max_tokens, temperature=temperature, seed=seed)
        answer = session.ask(question)
        assert answer.unsupported_citations == []
        assert answer.citations or "[none]" in answer.text, answer.text
        assert answer.text.count("[") == answer.text.count("]"), "a cut tag"


def test_the_same_seed_gives_the_same_text_and_the_stream_is_the_whole(session):
    question = Question.of(ASKED[0], cite="enforced", top_k=2, max_tokens=48, temperature=1.0, seed=7, repeatable=True)
    pieces: list[str] = []
    first = session.ask(question, on_text=pieces.append)
    assert "".join(pieces) == first.text
    assert session.ask(question).text == first.text


def test_a_free_answer_is_that_of_the_model(session):
    free = session.ask(Question.of(ASKED[0], cite="free", top_k=2, max_tokens=48))
    assert free.prompt.token_ids == session.ask(Question.of(ASKED[0], cite="enforced", top_k=2, max_tokens=48)).prompt.token_ids


def test_the_support_of_an_answer_has_similarities_and_real_places(session, handbook):
    answer = session.ask(Question.of(ASKED[1], cite="enforced", top_k=2, max_tokens=48))
    support = answer.support
    assert support == answer.support
    cited = [each for each in support.sentences if each.labels]
    assert cited, answer.text
    assert {*cited[0].contributions} == {"words", "cosine"}, "the search has loaded the embedder"
    assert cited[0].score > 0.5, "a model of this size copies"
    hits = {hit.label: hit.chunk for hit in answer.hits}
    for each in cited:
        chunk = hits[each.span.label]
        assert chunk.text[each.span.start - chunk.start : each.span.end - chunk.start] == each.span.text
    assert [each["score"] for each in answer.to_dict()["support"]] == [each.score and round(each.score, 4) for each in support.sentences]
