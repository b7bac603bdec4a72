"""Questions that are answered side by side, on the echo engine: what becomes of one is no matter of the others."""

import sqlite3
from contextlib import closing

from localrag.engine.echo import open_echo
from localrag.kb import KnowledgeBase
from localrag.session import Session
from localrag.session.serving import Question, Service
from localrag.settings import Settings
from localrag.types import Message
from tests.kb.hash_embedder import HashEmbedder


def test_a_knowledge_base_that_breaks_while_answers_are_written_ends_its_own_question_alone(tmp_path):
    settings = Settings(home=tmp_path / "home")
    (tmp_path / "guide").mkdir()
    (tmp_path / "guide" / "oven.md").write_text("# Oven\n\nThe oven dries nylon.\n", encoding="utf-8")
    with KnowledgeBase.open(settings.kb_dir, "guide", create=True) as kb:
        kb.ingest([tmp_path / "guide"], HashEmbedder())
        file = kb.path
    with open_echo() as engine:
        service = Service(Session(engine, n_ctx=4096), settings, HashEmbedder()).open()
        begun = service.add(Question(id=1, messages=[Message("user", "Which oven dries nylon?")], kbs=("guide",))).begun
        service.add(Question(id=2, messages=[Message("user", "Why?")]))
        assert [hit.chunk.source for hit in begun.prompt.hits] == ["guide/oven.md"]
        with closing(sqlite3.connect(file)) as db:
            db.execute("DROP TABLE documents")
        ends = {}
        while service.num_running:
            ends |= {event.id: event for event in service.step() if event.answer or event.error}
    assert "cannot be used" in ends[1].error.message
    assert ends[2].answer.text == "You asked: Why?"
