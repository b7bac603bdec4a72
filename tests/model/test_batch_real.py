"""A batch with the real model: the same prompts as single asks. Texts may differ at near ties, as side by side sums are added up in
another order (FlashAttention over a cache that sequences share), so they are not compared.
"""

import pytest

from localrag.engine.loading import open_model
from localrag.question import Question
from localrag.session import Session
from localrag.types import SamplingParams
from tests import identities
from tests.running import batch

pytestmark = pytest.mark.model

QUESTIONS = ("What is the capital of France?", "How many days has a week?", "What colour is snow?", "Name a big animal.")


def test_a_batch_of_four_is_what_four_asks_are(model_path):
    sampling = SamplingParams(max_tokens=16)
    with open_model(model_path, name="smollm2-135m") as engine:
        session = Session(engine, n_ctx=512)
        found = dict(batch(session, [Question.of(each, id=each, sampling=sampling) for each in QUESTIONS]))
        assert set(found) == set(QUESTIONS)
        for question, answer in found.items():
            alone = session.ask(Question.of(question, sampling=sampling))
            identities.check(answer.to_dict(), [])
            assert answer.prompt_tokens == alone.prompt_tokens
            assert answer.prompt.token_ids == alone.prompt.token_ids
            assert answer.finish_reason in {"stop", "length"}
            assert answer.text.strip()
