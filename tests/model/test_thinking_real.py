"""Thoughts with the real model. It does not reason, but behind a prompt that opens thoughts it takes what it writes for some."""

import pytest

from localrag.engine.loading import open_model
from localrag.journal import Journal
from localrag.question import Question
from localrag.session import Session
from localrag.session.chat import Chat
from localrag.types import SamplingParams
from tests import identities
from tests.chat_templates import THINKING_OPEN

pytestmark = pytest.mark.model

QUESTION = "Tell me all about the history of France, in many words."
"""What it says of that is longer than its thoughts may be."""
SAMPLING = SamplingParams(max_tokens=12, think_tokens=48)


@pytest.fixture(scope="module")
def engine(model_path):
    with open_model(model_path, name="smollm2-135m", chat_template=THINKING_OPEN) as opened:
        opened.draft_tokens = 0  # texts are compared, and batches are summed in another order
        yield opened


def check_forced(answer, engine):
    """It was thinking until its tokens for that were used up, and then it answered."""
    identities.check(answer.to_dict(), [])
    thinking = answer.prompt.thinking
    assert thinking.is_open
    assert b"".join(map(engine.tokenizer.piece, thinking.end_ids)) == b"\n</think>\n\n"
    assert (answer.reasoning_tokens, thinking.max_tokens) == (48, 48)
    assert answer.reasoning.strip()
    assert answer.text.strip()
    assert "think>" not in answer.reasoning + answer.text


def test_thoughts_are_ended_and_the_answer_follows(engine):
    session, thoughts, pieces = Session(engine, n_ctx=512), [], []
    answer = session.ask(Question.of(QUESTION, sampling=SAMPLING), on_text=pieces.append, on_thought=thoughts.append)
    check_forced(answer, engine)
    assert ("".join(pieces), "".join(thoughts).strip()) == (answer.text, answer.reasoning)
    again = session.ask(Question.of(QUESTION, sampling=SAMPLING))
    assert (again.text, again.reasoning) == (answer.text, answer.reasoning)
    kept = session.ask(Question.of(QUESTION, sampling=SamplingParams(max_tokens=12, think_tokens=0)))
    identities.check(kept.to_dict(), [])
    assert (kept.reasoning, kept.prompt.thinking) == ("", None)


def test_what_ended_the_thoughts_is_in_the_cells_with_the_rest(engine):
    """Given as a prompt, all of its tokens are there already, and evaluated afresh they lead to the same answer."""
    engine.share_contexts()
    answer = Session(engine, n_ctx=512).ask(Question.of(QUESTION, sampling=SAMPLING))
    check_forced(answer, engine)
    ids, thinking = list(answer.prompt.token_ids), answer.prompt.thinking
    engine.forget()
    written = list(engine.generate(ids, SAMPLING, thinking=thinking).completion_ids)
    assert tuple(written[48 - len(thinking.end_ids) : 48]) == thinking.end_ids
    assert engine.generate([*ids, *written[:-1]], SamplingParams(max_tokens=1)).cached_tokens >= len(ids) + len(written) - 2
    engine.forget()
    afresh = engine.generate([*ids, *written[:48]], SamplingParams(max_tokens=3))  # further on, near ties may fall otherwise
    assert (afresh.cached_tokens, list(afresh.completion_ids)) == (0, written[48:51])


def test_a_conversation_goes_on_without_its_thoughts(engine, tmp_path):
    with Journal.open(tmp_path) as journal:
        chat = Chat(Session(engine, n_ctx=1024, journal=journal, name="talk"), journal, journal.conversations.create("talk", {}))
        first = chat.say(Question.of(QUESTION, sampling=SAMPLING))
        second = chat.say(Question.of("Tell me all about the history of Spain, too.", sampling=SAMPLING))
    for answer in (first, second):
        check_forced(answer, engine)
    text = "".join(part.part.text for part in second.prompt.parts)
    assert first.text.strip() in text
    assert first.reasoning not in text
    assert first.prompt_tokens - 8 <= second.cached_tokens <= first.prompt_tokens
