"""Answers in llama.cpp that may call a tool or cite, in a vocabulary in which a token of its own begins a call."""

import pytest

from localrag.engine.loading import open_model
from localrag.question import Question
from localrag.session import Session
from localrag.types import Chunk, Hit, ToolSpec
from tests import identities
from tests.engine.call_templates import FAMILIES
from tests.reciting import write_reciting

HITS = [Hit(Chunk(1, 1, 0, "Nylon dries at 80 °C.", 0, 21, "nylon.md"), 1.0)]
PING = ToolSpec("ping", "Pings.", {"type": "object", "properties": {}, "additionalProperties": False})


@pytest.fixture
def session(tmp_path):
    """Opens a session with a model that recites `chain`."""
    opened = []

    def make(chain):
        path = write_reciting(tmp_path / "model.gguf", chain, controls=["<tool_call>", "</tool_call>"], template=FAMILIES["hermes"])
        opened.append(open_model(path, name="reciting"))
        return Session(opened[0], n_ctx=512)

    yield make
    for engine in opened:
        engine.close()


def question(**options):
    return Question.of("Why?", hits=HITS, tools=[PING], max_tokens=60, **options)


def test_a_text_cites_where_a_tool_could_be_called(session):
    opened = session({"Ċ": "Yes", "]": "Yes", "Yes": "<|im_end|>"})
    answer = opened.ask(question())
    identities.check(answer.to_dict(), ["KB#1"])
    assert (answer.text, answer.tool_calls) == ("[KB#1]Yes", ())
    assert opened.ask(question(cite="free")).text == "Yes"


def test_a_call_needs_no_citation(session):
    opened = session({"Ċ": "<tool_call>"})
    answer = opened.ask(question())
    assert [call.name for call in answer.tool_calls] == ["ping"]
    assert answer.text == ""
    assert not answer.citations


def test_a_call_can_follow_a_text_that_cites(session):
    opened = session({"Ċ": "Yes", "]": "Yes", "Yes": "<tool_call>"})
    answer = opened.ask(question())
    assert answer.text.strip() == "[KB#1]Yes"
    assert [call.name for call in answer.tool_calls] == ["ping"]
