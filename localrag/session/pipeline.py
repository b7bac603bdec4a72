"""Prepare questions, run them on the engine, and turn the completions into answers. Events report each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import islice
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol

from localrag.engine.grammar import grammar_of_calls, is_text, schema_of_calls
from localrag.engine.jobs import SINGLE, Job, JobEvent, Policy
from localrag.errors import EngineError, InterruptedRunError, LocalragError, UnanswerableError
from localrag.question import DEFAULT_CITE, Question, ToolCalls
from localrag.session.answer import Answer, Prepared
from localrag.session.answerability import not_said
from localrag.text.tool_calls import CallDelta, CallReader
from localrag.types import CallRules, Completion, Hit, SamplingParams, Slot, TokenLogprob

if TYPE_CHECKING:
    from localrag.engine.engine import Engine

WINDOW_QUESTIONS = 256
"""Number of questions that are prepared and sorted together, and so are in memory at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of a question: its prompt is ready, a piece of its answer was written, or it ended with an answer or an error.

    `num_tokens` counts the tokens written so far. In a stream, the first and the last event of a question have `documents`, which maps the
    label of each source in the prompt to the id and metadata of its document. An event without a question gives control to the caller
    between steps.
    """

    question: Question | None = None
    prepared: Prepared | None = None
    text: str = ""
    thought: str = ""
    num_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    """Pieces of tool calls. They are not part of the text."""
    answer: Answer | None = None
    error: LocalragError | None = None
    documents: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        return self.answer is not None


class Answerer(Protocol):
    """The part of a session that the pipeline uses."""

    slot: Slot

    @property
    def engine(self) -> Engine: ...
    def scoped(self, question: Question, /) -> AbstractContextManager[Answerer]: ...
    def prepare(self, question: Question, /, *, write: bool = False) -> Prepared: ...
    def finish(self, prepared: Prepared, completion: Completion, /) -> Answer: ...
    def documents_of(self, hits: Sequence[Hit], /) -> Mapping[str, tuple[str, Mapping[str, Any]]]: ...


@dataclass(slots=True, eq=False)
class InFlight:
    """A running question, with the session that answers it. If `is_dropped`, no more events are sent for it."""

    question: Question
    session: Answerer
    prepared: Prepared
    opened: ExitStack
    job: Job
    reader: CallReader | None = None
    """Separates tool calls from text; None if the answer cannot have any."""
    is_dropped: bool = False


class Pipeline:
    """Answers questions under one policy. `in_flight` holds the running ones by id; see Session.run."""

    def __init__(self, session: Answerer, policy: Policy, in_flight: MutableMapping[str | int, InFlight]) -> None:
        self._session = session
        self._policy = policy
        self._in_flight = in_flight

    def events(self, questions: Iterable[Question | Prepared | None]) -> Iterator[Event]:
        if self._policy.is_stream:
            return self._stream(questions)
        return self._in_windows(each for each in questions if each is not None)

    def _in_windows(self, questions: Iterator[Question | Prepared]) -> Iterator[Event]:
        """Prepare and answer questions in windows. Those with a time limit run one at a time afterwards; it counts from their turn."""
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
        with ExitStack() as stack:
            jobs: list[Job] = []
            for question in questions:
                try:
                    flight = self._prepared(question, stack)
                except InterruptedRunError:
                    raise
                except LocalragError as error:
                    yield Event(question=_question_of(question), error=error)
                else:
                    yield Event(question=flight.question, prepared=flight.prepared)
                    if flight.prepared.abstains:
                        yield self._abstained(flight)
                    else:
                        jobs.append(flight.job)
            if jobs:
                yield from self._heard(jobs, deque())

    def _stream(self, questions: Iterable[Question | Prepared | None]) -> Iterator[Event]:
        pending_events: deque[Event] = deque()
        with ExitStack() as stack:

            def jobs() -> Iterator[Job | None]:
                for question in questions:
                    if question is None:
                        yield None
                        continue
                    try:
                        flight = self._prepared(question, stack)
                    except LocalragError as error:
                        pending_events.append(Event(question=_question_of(question), error=error))
                        yield None
                    else:
                        pending_events.append(_begun(flight))
                        if flight.prepared.abstains:
                            pending_events.append(self._abstained(flight))
                            yield None
                        else:
                            yield flight.job

            yield from self._heard(jobs(), pending_events)

    def _prepared(self, question: Question | Prepared, stack: ExitStack) -> InFlight:
        """Prepare a question to run. `stack` closes its resources at the latest."""
        own = stack.enter_context(ExitStack())
        session, arrived = own.enter_context(self._session.scoped(_question_of(question))), time.perf_counter()
        prepared = question if isinstance(question, Prepared) else session.prepare(question, write=not self._policy.is_stream)
        if prepared.abstains and prepared.question.unanswerable == "error":
            assert prepared.answerability is not None, "only then it abstains"
            assessed = prepared.answerability
            raise UnanswerableError(assessed.probability, assessed.threshold, [hit.label for hit in prepared.prompt.hits])
        composed, ends_after_s = prepared.prompt, prepared.question.budget.ends_after_s
        sampling, reader = _sampling_of(prepared, session.engine)
        job = Job(
            prompt_ids=list(composed.token_ids),
            sampling=sampling,
            deadline=prepared.deadline if ends_after_s is None else arrived + ends_after_s,
            breakpoints=composed.breakpoints,
            text_end=composed.text_end,
            thinking=composed.thinking,
            num_cells=composed.num_cells,
        )
        flight = InFlight(prepared.question, session, prepared, own, job, reader)
        job.tag = self._in_flight[prepared.question.id] = flight
        return flight

    def _heard(self, jobs: Iterable[Job | None], pending_events: deque[Event]) -> Iterator[Event]:
        """Run jobs and yield the events of their questions, after those already in `pending_events`."""
        with closing(self._session.engine.run(jobs, self._policy, window=self._session.slot.n_ctx)) as events:
            for event in events:
                while pending_events:
                    yield pending_events.popleft()
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
        text, calls = flight.reader.feed(event.text) if flight.reader else (event.text, [])
        return Event(
            question=flight.question,
            text=text,
            calls=tuple(calls),
            thought=event.thought,
            num_tokens=len(sequence.completion_ids),
            logprobs=event.logprobs,
        )

    def _abstained(self, flight: InFlight) -> Event:
        """The last event of a question that the sources do not answer. The model is not asked."""
        text = not_said(flight.question.messages[-1].content)
        completion = Completion(text=text, completion_ids=(), finish_reason="stop", prompt_tokens=0)
        return self._end(flight, JobEvent(job=flight.job, text=text, completion=completion))

    def _end(self, flight: InFlight, event: JobEvent) -> Event:
        """The last event of a question. If its knowledge base fails, only this question gets the error."""
        question = flight.question
        if self._in_flight.get(question.id) is flight:
            del self._in_flight[question.id]
        with flight.opened:
            if flight.is_dropped:
                return Event()
            try:
                if event.completion is None:
                    raise event.error or EngineError("An answer ended without a completion.")
                text, calls, completion = _read_to_end(flight.reader, event.text, event.completion)
                answer = flight.session.finish(flight.prepared, completion)
                answer = replace(answer, tool_calls=flight.reader.calls) if flight.reader and flight.reader.calls else answer
                documents = flight.session.documents_of(answer.hits) if self._policy.is_stream else {}
            except LocalragError as error:
                return Event(question=question, error=error)
            return Event(
                question=question,
                text=text,
                calls=calls,
                thought=event.thought,
                logprobs=event.logprobs,
                answer=answer,
                documents=documents,
            )


def _begun(flight: InFlight) -> Event:
    prepared = flight.prepared
    return Event(question=flight.question, prepared=prepared, documents=flight.session.documents_of(prepared.prompt.hits))


def _question_of(question: Question | Prepared) -> Question:
    return question.question if isinstance(question, Prepared) else question


def _is_timed(question: Question | Prepared) -> bool:
    return _question_of(question).budget.max_seconds is not None


def may_enforce_citations(prepared: Prepared) -> bool:
    """Whether the text of an answer may be held to the citations: there is evidence for the question, and no schema."""
    question, composed = prepared.question, prepared.prompt
    return (
        (question.quote or (question.cite or DEFAULT_CITE) == "enforced")
        and bool(composed.hits or question.thread.again)
        and (composed.thinking is None or composed.thinking.shows_beginning)
        and (question.calls is not None or is_free_text(question))
    )


def is_free_text(question: Question) -> bool:
    """Whether nothing but citations and quotes may shape the answer: no schema and no tools."""
    return question.sampling.json_schema is None and question.calls is None and not question.given.tools and not question.is_plain


def _read_to_end(reader: CallReader | None, text: str, completion: Completion) -> tuple[str, tuple[CallDelta, ...], Completion]:
    """Read the last piece of an answer. Return its text and calls, and the completion with the text without calls."""
    if reader is None:
        return text, (), completion
    said, calls = reader.feed(text)
    last, more = reader.finish()
    return said + last, (*calls, *more), replace(completion, text=reader.text)


def with_calls(question: Question) -> Question:
    """Return a question with the schema of the calls that its answer may make; unchanged if it has no tools or a form of its own."""
    tools, calls = question.given.tools, question.calls
    if not tools or question.sampling.json_schema is not None or (calls is None and question.is_plain):
        return question
    calls = calls or ToolCalls(choices=tuple(tool.name for tool in tools))
    schema = schema_of_calls([tool for tool in tools if tool.name in calls.choices], calls.strict)
    return replace(question, calls=calls, sampling=replace(question.sampling, json_schema=schema, or_text=calls.or_text))


def _sampling_of(prepared: Prepared, engine: Engine) -> tuple[SamplingParams, CallReader | None]:
    """The sampling of the answer, limited to the available room and without calls to tools that were left out of the prompt.

    The reader separates calls from text, if there may be any.
    """
    question, composed = prepared.question, prepared.prompt
    sampling, calls = question.sampling.with_max_tokens(composed.max_tokens), question.calls
    if may_enforce_citations(prepared):
        labels = tuple(dict.fromkeys(hit.label for hit in (*composed.hits, *composed.earlier)))
        sampling = replace(sampling, citations=labels, cites_first=question.cite_instruction is None)
        if composed.quotable is not None:
            sampling = replace(sampling, quotes=composed.quotable.copies(engine.tokenizer, sampling.stop))
    if calls is None:
        return sampling, None
    omitted = {name for entry in composed.ledger.entries if entry.name == "tools" for name in entry.omitted}
    specs = [tool for tool in question.given.tools if tool.name in calls.choices and tool.name not in omitted]
    if not specs:
        return replace(sampling, json_schema=None, or_text=False), None
    schema = schema_of_calls(specs, calls.strict) if omitted or sampling.json_schema is None else str(sampling.json_schema)
    markup = engine.template.call_markup
    markup = markup if calls.parallel else replace(markup, between=None)
    special_texts = engine.tokenizer.special_texts
    rules = CallRules(
        grammar=grammar_of_calls(schema, markup, special_texts, or_text=calls.or_text),
        shown_ids=markup.mark_ids(special_texts),
        written=markup.written,
        opener=markup.opener,
        opener_ids=markup.opener_ids((*special_texts, *engine.tokenizer.tag_texts)),
    )
    if not calls.or_text or markup.text or not markup.opener or (markup.is_anywhere and not rules.opener_ids):
        sampling = replace(sampling, citations=())  # there is no text, or no token that tells a call from it
    properties = {spec.name: spec.parameters.get("properties") or {} for spec in specs}
    reader = CallReader(markup, tuple(properties), lambda name, key: is_text(properties[name].get(key)), lambda: f"call_{token_hex(12)}")
    return replace(sampling, json_schema=schema, or_text=calls.or_text, call_rules=rules), reader
