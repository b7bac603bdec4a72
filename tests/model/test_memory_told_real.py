"""The memory plan in the answer object of the default model."""

import pytest

from localrag.question import Question
from localrag.session import Session
from localrag.types import SamplingParams
from tests import identities

pytestmark = pytest.mark.model


def test_the_answer_object_tells_what_was_planned(home, model_path):
    with Session.open(str(model_path), keep=False) as session:
        assert session.engine.memory_plan is None
        answer = session.ask(Question.of("What is glass?", sampling=SamplingParams(max_tokens=4))).to_dict()
        info = session.engine.info
    identities.check(answer, [])
    memory = answer["memory"]
    assert memory["weights_bytes"] == info.file_size
    assert memory["kv_bytes"] == memory["num_cells"] * info.kv_bytes_per_token
    assert memory["num_cells"] >= answer["usage"]["total_tokens"]
    assert (memory["kv_type"], memory["num_sequences"]) == ("f16", 1)
    assert memory["weights_bytes"] + memory["kv_bytes"] < memory["predicted_bytes"] < memory["available_bytes"]
