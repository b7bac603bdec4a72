"""The token examples of the chat completion algorithm, each as it comes out here: from a body to a ledger."""

from __future__ import annotations

import pytest

from localrag.engine.echo import open_echo
from localrag.errors import BudgetExceededError
from localrag.kb import KnowledgeBase
from localrag.kb.texts import Text
from localrag.server.chat_request import read
from localrag.server.engine_worker import question_of
from localrag.session import Session
from tests.kb.hash_embedder import HashEmbedder

WINDOW = 8192
PASSAGE = 200
"""More tokens than the longest passage: a section that has this much room left could take another one."""
DETAIL = [{"role": "user", "content": "Explain KAITO in detail"}]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """An index that holds more about KAITO than a window can."""
    texts = [Text.of(f"KAITO part {at} explains detail {at}. " + f"word{at} " * 14, {}, text_id=f"d{at}") for at in range(120)]
    with KnowledgeBase.open(tmp_path_factory.mktemp("kb"), "docs_index", create=True) as kb, open_echo() as engine:
        kb.texts.put(texts, HashEmbedder())
        yield Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=WINDOW)


def ledger(session, messages, **body):
    message = read({"messages": messages, "index_name": "docs_index", **body}, has_index=lambda _: True).to_message()
    question = question_of({**message, "id": 1})
    prepared = session.prepare(question.but(kbs=None))
    found = prepared.prompt.ledger
    assert found.prompt_tokens + found.entry("answer").allotted <= WINDOW
    return found


def most_of_evidence(found, ratio):
    """That share of the window, less what cannot be cut."""
    return int(ratio * (WINDOW - sum(each.used for each in found.entries if each.name in ("template", "system", "question"))))


def test_example_1_no_max_tokens_specified(session):
    """Without a ratio, only what comes near the best is sent, as in localrag ask."""
    found = ledger(session, DETAIL)
    assert 0 < found.entry("evidence").used < 5 * PASSAGE
    assert found.entry("answer").allotted == WINDOW - found.prompt_tokens


def test_example_2_conservative_max_tokens(session):
    """A limit of the answer changes no evidence. A ratio is the most of it."""
    found = ledger(session, DETAIL, max_tokens=100)
    assert found.entry("answer").allotted == 100
    assert found.entry("evidence").used == ledger(session, DETAIL).entry("evidence").used
    for ratio in (0.2, 0.5, 0.8):
        given = ledger(session, DETAIL, max_tokens=100, context_token_ratio=ratio)
        assert most_of_evidence(given, ratio) - PASSAGE < given.entry("evidence").used <= most_of_evidence(given, ratio)


def test_example_3_excessive_max_tokens(session):
    found = ledger(session, [{"role": "user", "content": "Explain KAITO"}], max_tokens=8000)
    assert found.entry("answer").wanted == 8000
    assert found.entry("answer").allotted == WINDOW - found.prompt_tokens
    assert found.entry("evidence").used > 0


def test_the_token_budget_example(session):
    """8,192, a conversation of 500, max_tokens 1,000, a ratio of 0.6: there 600 for documents and 400 for the answer; here 60 %, 1,000."""
    conversation = [{"role": "system", "content": "s" * 450}, *DETAIL]
    found = ledger(session, conversation, max_tokens=1000, context_token_ratio=0.6)
    assert sum(each.used for each in found.entries if each.name != "evidence") == pytest.approx(500, abs=20)
    most = most_of_evidence(found, 0.6)
    assert most - PASSAGE < found.entry("evidence").used <= most
    assert found.entry("answer").allotted == 1000


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_the_context_fill_ratio(session, ratio):
    found = ledger(session, DETAIL, context_token_ratio=ratio)
    most = most_of_evidence(found, ratio)
    assert most - PASSAGE < found.entry("evidence").used <= most


def test_the_context_window_check(session):
    with pytest.raises(BudgetExceededError):
        ledger(session, [{"role": "user", "content": "KAITO " + "x" * WINDOW}])


def test_zero_context_handling(session):
    """A conversation that leaves no room for documents is answered all the same."""
    found = ledger(session, [{"role": "system", "content": "s" * (WINDOW - 200)}, *DETAIL], max_tokens=50)
    assert "evidence" not in [each.name for each in found.entries if each.used]
    assert found.entry("answer").allotted == 50


def test_what_does_not_fit_is_left_out_and_named(session):
    evidence = ledger(session, DETAIL, context_token_ratio=0.2).entry("evidence")
    assert evidence.omitted
    assert evidence.used <= evidence.allotted
