"""An answer that copies its evidence, with drafts and without."""

import pytest

from localrag.engine.loading import open_model
from localrag.question import Question
from localrag.session import Session
from localrag.types import Chunk, Hit, SamplingParams
from tests import identities

pytestmark = pytest.mark.model

TEXT = "The laminating press runs at 145 °C for exactly 12 minutes, and the boards cool under load until they reach 40 °C."
HITS = [Hit(Chunk(1, 1, 0, TEXT, 0, len(TEXT), "press.md"), 1.0)]
QUESTION = Question.of("How is the laminating press run? Repeat the whole sentence.", sampling=SamplingParams(max_tokens=64), hits=HITS)


@pytest.fixture(scope="module")
def session(model_path):
    with open_model(model_path, name="smollm2-135m") as engine:
        yield Session(engine, n_ctx=1024)


@pytest.mark.parametrize("most", [3, 8])
def test_an_answer_that_copies_its_evidence_accepts_drafts_and_cites(session, most):
    session.engine.draft_tokens = most
    pieces: list[str] = []
    answer = session.ask(QUESTION, on_text=pieces.append)
    identities.check(answer.to_dict(), ["KB#1"])
    assert "".join(pieces) == answer.text
    assert "145 °C" in answer.text
    assert 8 < answer.accepted_tokens <= answer.drafted_tokens
    usage = answer.to_dict()["usage"]
    assert (usage["drafted_tokens"], usage["accepted_tokens"]) == (answer.drafted_tokens, answer.accepted_tokens)
    assert answer.completion_tokens <= 64
    cells = session.engine.context.single
    assert len(cells.token_ids) == answer.prompt_tokens + answer.completion_tokens - 1 == session.engine.context.runner.num_tokens(0)


def test_without_drafts_nothing_is_counted(session):
    session.engine.draft_tokens = 0
    answer = session.ask(QUESTION)
    assert answer.drafted_tokens == answer.accepted_tokens == 0
    assert "drafted_tokens" not in answer.to_dict()["usage"]


def test_whether_to_draft_is_learned_while_answering(session):
    session.engine.draft_tokens = None
    answers = [session.ask(QUESTION) for _ in range(3)]
    assert sum(answer.drafted_tokens for answer in answers) >= 3, "a few are tried in any case"
    learned = session.engine.speed.to_dict()
    assert learned["draft3"][1] > 0
    assert sum(learned["guesses"][:6]) > 20
