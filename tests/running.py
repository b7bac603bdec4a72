"""Questions run under a policy, for tests that look at what comes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace

from localrag.engine.jobs import BATCH
from localrag.errors import LocalragError
from localrag.question import Question
from localrag.session import Answer, Event, Session


def batch(
    session: Session, questions: Iterable[Question], *, num_sequences: int = 8, on_event: Callable[[Event], None] = lambda _: None
) -> Iterator[tuple[str | int, Answer | LocalragError]]:
    """(id, answer or error) of each question of a batch, as they finish; `on_event` hears everything."""
    with closing(session.run(questions, policy=replace(BATCH, num_sequences=num_sequences))) as events:
        for event in events:
            on_event(event)
            outcome = event.answer or event.error
            if event.question is not None and outcome is not None:
                yield event.question.id, outcome
