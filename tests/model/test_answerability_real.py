"""What the handbook does not answer is told so by the shipped calibration, at the shares that the docs give."""

import json
from pathlib import Path

import pytest

from localrag.question import Question
from localrag.session import Session
from localrag.session.answerability import SHIPPED

pytestmark = pytest.mark.model

QUESTIONS = Path(__file__).parents[2] / "benchmarks" / "handbook_questions.jsonl"


@pytest.fixture(scope="module")
def session(model_path, embedder, handbook):
    with Session.open(model_path, keep=False) as opened:
        opened.knowledge_bases, opened.embedder = (handbook,), embedder
        yield opened
        opened.knowledge_bases = ()  # others search it, too


def test_the_default_embedder_is_calibrated(embedder):
    assert embedder.fingerprint in SHIPPED


def test_the_shares_of_the_handbook(session):
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    refused = {True: [], False: []}
    for row in rows:
        _, assessed = session.retriever.assessed(Question.of(row["question"]), row["question"], top_k=4)
        refused[bool(row["answers"])].append(not assessed.is_likely)
    assert sum(refused[True]) <= 0.10 * len(refused[True])
    assert sum(refused[False]) >= 0.45 * len(refused[False])


def test_a_question_that_it_does_not_answer_costs_no_tokens(session):
    answer = session.ask(Question.of("Who won the football world cup in 1954?"))
    assert (answer.text, answer.abstained, answer.prompt_tokens) == ("The sources do not say.", True, 0)
    assert session.ask(Question.of("Hello!", max_tokens=8)).completion_tokens > 0
    answered = session.ask(Question.of("At what temperature is PLA annealed?", max_tokens=8))
    assert (answered.abstained, answered.completion_tokens) == (False, 8)
