"""Questions that arrive over time and are answered side by side, with the echo engine."""

import sqlite3
from contextlib import closing

from localrag.engine.echo import open_echo
from localrag.engine.jobs import SERVE
from localrag.kb import KnowledgeBase
from localrag.question import Question
from localrag.session import Session
from localrag.settings import Settings
from tests.kb.hash_embedder import HashEmbedder


def test_a_knowledge_base_that_breaks_while_answers_are_written_ends_its_own_question_alone(tmp_path):
    settings = Settings(home=tmp_path / "home")
    (tmp_path / "guide").mkdir()
    (tmp_path / "guide" / "oven.md").write_text("# Oven\n\nThe oven dries nylon.\n", encoding="utf-8")
    with KnowledgeBase.open(settings.kb_dir, "guide", create=True) as kb:
        kb.ingest([tmp_path / "guide"], HashEmbedder())
        file = kb.path
    with open_echo() as engine:
        engine.reserve_window(4096, SERVE)
        session = Session(engine, embedder=HashEmbedder(), n_ctx=4096, settings=settings)
        asked = [Question.of("Which oven dries nylon?", id=1, kbs="guide"), Question.of("Why?", id=2, kbs=())]
        prepared, ended = {}, {}
        for event in session.run([*asked], policy=SERVE):
            if event.prepared is not None:
                prepared[event.question.id] = event
                if event.question.id == 2:
                    with closing(sqlite3.connect(file)) as db:
                        db.execute("DROP TABLE documents")
            if event.answer is not None or event.error is not None:
                ended[event.question.id] = event
    assert [hit.chunk.source for hit in prepared[1].prepared.prompt.hits] == ["guide/oven.md"]
    assert "cannot be used" in ended[1].error.message
    assert ended[2].answer.text == "You asked: Why?"


def test_a_question_that_is_cancelled_has_no_more_events_and_the_others_go_on():
    with open_echo() as engine:
        engine.reserve_window(4096, SERVE)
        session, told = Session(engine, n_ctx=4096), []
        for event in session.run([Question.of(f"Question {number}?", id=number) for number in range(3)], policy=SERVE):
            if event.question is not None:
                told.append((event.question.id, event.answer))
                if event.question.id == 1 and event.num_tokens == 3:
                    session.cancel(1)
    assert [answer.text for known, answer in told if answer is not None] == ["You asked: Question 0?", "You asked: Question 2?"]
    assert sum(known == 1 for known, _ in told) == 1 + 3


def test_one_that_cannot_be_asked_is_an_error_and_the_stream_goes_on():
    with open_echo() as engine:
        engine.reserve_window(400, SERVE)
        session = Session(engine, n_ctx=400)
        asked = [None, Question.of("why " * 400, id="long"), None, Question.of("Why?", id="short")]
        ended = {event.question.id: event for event in session.run(asked, policy=SERVE) if event.answer or event.error}
    assert ended["long"].error.exit_code == 5
    assert ended["short"].answer.text == "You asked: Why?"
