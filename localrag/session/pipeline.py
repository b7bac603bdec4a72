"""Questions on their way through a session: prepared, run by the engine, answered. What happens to each is told by events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from localrag.engine.grammar import schema_of_calls
from localrag.engine.policy import SINGLE, Job, JobEvent, Policy
from localrag.errors import EngineError, InterruptedRunError, LocalragError
from localrag.question import Question
from localrag.session.answer import Answer, Prepared
from localrag.types import Completion, Hit, SamplingParams, Slot, TokenLogprob

if TYPE_CHECKING:
    from localrag.engine.engine import Engine

WINDOW_QUESTIONS = 256
"""Questions that are prepared and put in order together, and so are in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened to a question: its prompt is ready, a piece was written, or it ended with an answer or an error.

    `num_tokens` counts what was written so far. In a stream, the first and the last event of a question have `documents`: by the label of
    each source in the prompt, the id and the metadata of its document. An event without a question gives the caller control between steps.
    """

    question: Question | None = None
    prepared: Prepared | None = None
    text: str = ""
    thought: str = ""
    num_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    answer: Answer | None = None
    error: LocalragError | None = None
    documents: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)


class Answerer(Protocol):
    """A session, as the pipeline uses it."""

    slot: Slot

    @property
    def engine(self) -> Engine: ...
    def scoped(self, question: Question, /) -> AbstractContextManager[Answerer]: ...
    def prepare(self, question: Question, /, *, write: bool = False) -> Prepared: ...
    def finish(self, prepared: Prepared, completion: Completion, /) -> Answer: ...
    def documents_of(self, hits: Sequence[Hit], /) -> Mapping[str, tuple[str, Mapping[str, Any]]]: ...


@dataclass(slots=True, eq=False)
class InFlight:
    """A question whose prompt runs, with the session that answers it. One that `is_dropped` has no more events."""

    question: Question
    session: Answerer
    prepared: Prepared
    opened: ExitStack
    job: Job
    is_dropped: bool = False


class Pipeline:
    """Answers questions under one policy. `in_flight` holds those that run, by their ids; see Session.run."""

    def __init__(self, session: Answerer, policy: Policy, in_flight: MutableMapping[str | int, InFlight]) -> None:
        self._session = session
        self._policy = policy
        self._in_flight = in_flight

    def events(self, questions: Iterable[Question | Prepared | None]) -> Iterator[Event]:
        if self._policy.is_stream:
            return self._stream(questions)
        return self._in_windows(each for each in questions if each is not None)

    def _in_windows(self, questions: Iterator[Question | Prepared]) -> Iterator[Event]:
        """Prepare the questions of a window, then answer them; those with a time limit one after another, as it counts from their turn."""
        if not self._policy.sorts:
            for question in questions:
                yield from self._answered([question])
            return
        while window := list(islice(questions, WINDOW_QUESTIONS)):
            yield from self._answered([each for each in window if not _is_timed(each)])
            alone = Pipeline(self._session, SINGLE, self._in_flight)
            for question in filter(_is_timed, window):
                yield from alone.events([question.but(started_at=None) if isinstance(question, Question) else question])

    def _answered(self, questions: Iterable[Question | Prepared]) -> Iterator[Event]:
        with ExitStack() as opened:
            jobs: list[Job] = []
            for question in questions:
                try:
                    flight = self._prepared(question, opened)
                except InterruptedRunError:
                    raise
                except LocalragError as error:
                    yield Event(question=_question_of(question), error=error)
                else:
                    jobs.append(flight.job)
                    yield Event(question=flight.question, prepared=flight.prepared)
            if jobs:
                yield from self._heard(jobs, deque())

    def _stream(self, questions: Iterable[Question | Prepared | None]) -> Iterator[Event]:
        told: deque[Event] = deque()
        with ExitStack() as opened:

            def jobs() -> Iterator[Job | None]:
                for question in questions:
                    if question is None:
                        yield None
                        continue
                    try:
                        flight = self._prepared(question, opened)
                    except LocalragError as error:
                        told.append(Event(question=_question_of(question), error=error))
                        yield None
                    else:
                        told.append(_begun(flight))
                        yield flight.job

            yield from self._heard(jobs(), told)

    def _prepared(self, question: Question | Prepared, opened: ExitStack) -> InFlight:
        """A question with its prompt, ready to run; `opened` closes what it opens at the latest."""
        own = opened.enter_context(ExitStack())
        session, arrived = own.enter_context(self._session.scoped(_question_of(question))), time.perf_counter()
        prepared = question if isinstance(question, Prepared) else session.prepare(question, write=not self._policy.is_stream)
        composed, ends_after_s = prepared.prompt, prepared.question.budget.ends_after_s
        job = Job(
            prompt_ids=list(composed.token_ids),
            sampling=_sampling_of(prepared),
            deadline=prepared.deadline if ends_after_s is None else arrived + ends_after_s,
            breakpoints=composed.breakpoints,
            thinking=composed.thinking,
            num_cells=composed.num_cells,
        )
        flight = InFlight(prepared.question, session, prepared, own, job)
        job.tag = self._in_flight[prepared.question.id] = flight
        return flight

    def _heard(self, jobs: Iterable[Job | None], told: deque[Event]) -> Iterator[Event]:
        """Run jobs, and tell what happens to their questions. Events in `told` come first."""
        with closing(self._session.engine.run(jobs, self._policy, window=self._session.slot.n_ctx)) as events:
            for event in events:
                while told:
                    yield told.popleft()
                yield self._event(event)

    def _event(self, event: JobEvent) -> Event:
        if event.job is None:
            return Event()
        flight: InFlight = event.job.tag
        if event.completion is not None or event.error is not None:
            return self._end(flight, event)
        sequence = event.job.sequence
        if event.token_id is None or flight.is_dropped or sequence is None:
            return Event()
        return Event(
            question=flight.question,
            text=event.text,
            thought=event.thought,
            num_tokens=len(sequence.completion_ids),
            logprobs=event.logprobs,
        )

    def _end(self, flight: InFlight, event: JobEvent) -> Event:
        """The answer to a question, or what went wrong. A knowledge base that broke meanwhile does not stop the other questions."""
        question = flight.question
        if self._in_flight.get(question.id) is flight:
            del self._in_flight[question.id]
        with flight.opened:
            if flight.is_dropped:
                return Event()
            try:
                if event.completion is None:
                    raise event.error or EngineError("An answer ended without a completion.")
                answer = flight.session.finish(flight.prepared, event.completion)
                documents = flight.session.documents_of(answer.hits) if self._policy.is_stream else {}
            except LocalragError as error:
                return Event(question=question, error=error)
            return Event(
                question=question, text=event.text, thought=event.thought, logprobs=event.logprobs, answer=answer, documents=documents
            )


def answer_of(
    events: Iterator[Event],
    cancel: Callable[[], None],
    *,
    on_text: Callable[[str], None] | None = None,
    on_thought: Callable[[str], None] | None = None,
) -> Answer:
    """The answer to a single question; its error is raised. Ctrl-C calls `cancel`, and the answer ends early."""
    answer, is_interrupted = None, False
    while True:
        try:
            for event in events:  # to their end: what was evaluated is kept on disk after the last one
                if event.error is not None:
                    raise event.error
                if on_thought is not None and event.thought:
                    on_thought(event.thought)
                if on_text is not None and event.text:
                    on_text(event.text)
                answer = event.answer or answer
            break
        except KeyboardInterrupt:
            is_interrupted = True
            cancel()
    if answer is not None:
        return answer
    if is_interrupted:
        raise KeyboardInterrupt
    raise EngineError("A question ended without an answer.")


def _begun(flight: InFlight) -> Event:
    prepared = flight.prepared
    return Event(question=flight.question, prepared=prepared, documents=flight.session.documents_of(prepared.prompt.hits))


def _question_of(question: Question | Prepared) -> Question:
    return question.question if isinstance(question, Prepared) else question


def _is_timed(question: Question | Prepared) -> bool:
    return _question_of(question).budget.max_seconds is not None


def _sampling_of(prepared: Prepared) -> SamplingParams:
    """How the answer is sampled: no longer than there is room for, and without calls of tools that were left out of the prompt."""
    question, composed = prepared.question, prepared.prompt
    sampling, calls = question.sampling.with_max_tokens(composed.max_tokens), question.calls
    omitted = {name for entry in composed.ledger.entries if entry.name == "tools" for name in entry.omitted}
    if calls is None or not omitted:
        return sampling
    specs = [tool for tool in question.given.tools if tool.name in calls.choices and tool.name not in omitted]
    schema = schema_of_calls(specs, calls.strict) if specs else None
    return replace(sampling, json_schema=schema, or_text=calls.or_text and bool(specs))
