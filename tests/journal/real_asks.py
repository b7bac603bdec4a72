"""Records of real asks: the whole walk on the echo engine, over a real knowledge base."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from localrag.engine.echo import open_echo
from localrag.errors import BudgetExceededError
from localrag.journal import AskRecord
from localrag.kb import KnowledgeBase
from localrag.question import Question
from localrag.session import Session
from localrag.session.recorder import record_of
from localrag.types import SamplingParams
from tests import material
from tests.journal.asks import START
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.support import write_notes


def real_asks(folder, num: int, *, sessions: Sequence[str] = ("default",)) -> list[AskRecord]:
    """Asks on the echo engine about forty notes, in windows of all sizes, a minute apart; the echo cites what its question names."""
    rng, found = random.Random(12), []
    write_notes(folder / "notes", 40)
    with open_echo() as engine, KnowledgeBase.open(folder / "kb", "notes", create=True) as kb:
        kb.ingest([folder / "notes"], HashEmbedder())
        while len(found) < num:
            session = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=rng.choice([900, 1600, 3000, 8192]))
            question = f"What is the word of note {rng.randrange(5)}? " + rng.choice(["", material.text(rng, 6)])
            question += "".join(f" {hit.label}" for hit in session.retrieve(question, top_k=8)[:1] if rng.random() < 0.6)
            try:
                answer = session.ask(Question.of(question, top_k=8, sampling=SamplingParams(max_tokens=rng.choice([60, 200, 512]))))
            except BudgetExceededError:
                continue
            name = sessions[len(found) % len(sessions)]
            kept = record_of(answer, question=question, session=name, command="ask", strategy="prioritize")
            found.append(replace(kept, started_at=START + 60 * len(found)))
    return found
