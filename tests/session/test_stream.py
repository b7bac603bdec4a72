"""Answers for Python: events as they happen, Ctrl-C, and what a notebook shows."""

from dataclasses import replace

import pytest

from localrag.engine.echo import open_echo
from localrag.errors import BudgetExceededError
from localrag.question import Question
from localrag.session import Session
from localrag.types import Chunk, Citation, Hit

HITS = [Hit(Chunk(1, 1, 0, "It is <b>stiff</b>.", 0, 20, "a<script>.md", heading="A & B", place="line 1"), 0.5)]


@pytest.fixture
def session():
    with open_echo() as engine:
        yield Session(engine, n_ctx=2048)


def test_events_are_the_prompt_the_pieces_and_the_answer(session):
    first, *pieces, last = session.stream("Why?")
    assert first.prepared.prompt.token_ids
    assert all(each.question is not None for each in pieces)
    assert "".join(each.text for each in (*pieces, last)) == last.answer.text == "You asked: Why?"


def test_an_error_is_raised(session):
    with pytest.raises(BudgetExceededError):
        list(session.stream("x" * 5000))


def test_a_stream_that_is_left_ends_its_answer(session):
    for event in session.stream(Question.of("Say it 60 times: hello", max_tokens=1500)):
        if event.text:
            break
    assert session.engine.is_idle
    assert session.ask("How?").text == "You asked: How?"


def interrupting(_text):
    raise KeyboardInterrupt


def test_ctrl_c_is_raised_or_ends_the_answer(session):
    question = Question.of("Say it 60 times: hello", max_tokens=1500)
    with pytest.raises(KeyboardInterrupt):
        session.ask(question, on_text=interrupting)
    answer = session.ask(question, on_text=interrupting, keep_partial=True)
    assert answer.finish_reason == "cancelled"
    assert len(answer.text) < 100


def test_a_notebook_shows_text_sources_and_ledger_and_takes_nothing_for_markup(session):
    answer = session.ask(Question.of("Why <i>so</i>?", hits=HITS))
    assert answer.text == "You asked: Why <i>so</i>? [KB#1]"
    shown = answer._repr_html_()
    assert 'You asked: Why &lt;i&gt;so&lt;/i&gt;? [<mark title="a&lt;script&gt;.md line 1">KB#1</mark>]' in shown
    assert "<td><bdi>A &amp; B</bdi></td>" in shown
    assert f"Ledger: {sum(entry.used for entry in answer.ledger.entries):,} of 2,048 tokens" in shown
    assert not {"<i>", "<script>", "<b>"} & {shown[at : shown.index(">", at) + 1] for at, char in enumerate(shown) if char == "<"}
    invented = replace(answer, citations=(Citation("KB#1", supplied=False, spans=((26, 32),)),))
    assert "<del" in invented._repr_html_()


def test_a_notebook_says_that_there_are_no_sources_and_what_cut_the_answer_short(session):
    shown = session.ask(Question.of("Why?", max_tokens=4))._repr_html_()
    assert "Stopped at the limit of 4 tokens" in shown
    assert "This answer has no sources." in shown
