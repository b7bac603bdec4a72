"""Requests that come at any time, answered side by side in one context: what a server runs beside its routes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

from localrag.errors import LocalragError
from localrag.prompt import PLAIN
from localrag.session.answer import Answer, Prepared
from localrag.session.opening import open_embedder, open_knowledge_bases
from localrag.types import Piece, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from localrag.engine.sequence import Sequence as Running
    from localrag.session.options import Options
    from localrag.session.session import Session
    from localrag.settings import Settings
    from localrag.text.tokens import Embedder
    from localrag.types import Hit, Message, ToolSpec

MAX_AT_ONCE = 8
CELLS_PER_FURTHER = 2048
"""Cells beside the first whole window for each further request at once, as far as memory holds them: most requests are short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `Session.ask` would be called with, and the knowledge bases that are asked. `id` tells it from others."""

    id: int
    messages: Sequence[Message]
    kbs: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: Options = field(default_factory=dict)  # type: ignore[assignment]  # a TypedDict of which no key is required
    is_plain: bool = False
    """Whether its one message is sent as it stands, without the model's template."""
    max_seconds: float | None = None
    """How long its answer may take, from when it is added on; the prompt is not made shorter for it, as that of Options is."""
    form_of_calls: Callable[[Sequence[ToolSpec]], Mapping[str, Any]] | None = None
    """The fields of `sampling` that hold an answer to calls of these tools: asked where the prompt has no room for all of them."""

    def sampling_for(self, prepared: Prepared) -> SamplingParams:
        """How an answer to the prompt is sampled: no longer than there is room for, and without calls of tools that were left out."""
        sampling = self.sampling.with_max_tokens(prepared.prompt.max_tokens)
        omitted = {name for entry in prepared.prompt.ledger.entries if entry.name == "tools" for name in entry.omitted}
        if self.form_of_calls is None or not omitted:
            return sampling
        return replace(sampling, **self.form_of_calls([tool for tool in self.options["tools"] if tool.name not in omitted]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What became of a question: its prompt, a piece of its answer or of what is thought first, or its end with an answer or an error."""

    id: int
    begun: Prepared | None = None
    text: str = ""
    thought: str = ""
    num_tokens: int = 0
    """How many were written so far."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens of the answer since the last event, if they were asked for."""
    answer: Answer | None = None
    documents: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Of each source in the prompt, by its label: the id and the metadata of its document."""
    error: LocalragError | None = None


@dataclass(slots=True, eq=False)
class _Job:
    question: Question
    session: Session
    prepared: Prepared
    running: Running
    opened: ExitStack
    num_told: int = 0
    """Logprobs that were in events."""


class Service:
    """Answers questions as they come. Used by one thread: `add`, `cancel` and `step` in turn.

    Knowledge bases are opened for each question, so what others index meanwhile is found. No model writes summaries here: what a
    question has no room for is cut or left out, as its ledger says. Without an `embedder`, that of the settings is opened when it is
    first needed.
    """

    def __init__(self, session: Session, settings: Settings, embedder: Embedder | None = None) -> None:
        self._session = session
        self._settings = settings
        self._embedder = embedder
        self._jobs: dict[int, _Job] = {}

    def open(self) -> Self:
        """Make the context. EngineError if memory holds none."""
        self._session.engine.reserve(self._num_cells(), num_sequences=MAX_AT_ONCE)
        return self

    def _num_cells(self) -> int:
        """A whole window, and as much beside it as fits if another whole window stays free for answers that are repeatable."""
        from localrag.engine.memory import Situation, plan  # noqa: PLC0415  # weight

        engine, n_ctx = self._session.engine, self._session.slot.n_ctx
        further = (MAX_AT_ONCE - 1) * min(n_ctx, CELLS_PER_FURTHER)
        while further and not plan(engine.info, 2 * n_ctx + further, MAX_AT_ONCE, situation=Situation(is_loaded=True)).fits:
            further //= 2
        return n_ctx + further

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    def prepare(self, question: Question) -> tuple[Session, Prepared, ExitStack]:
        """The prompt of a question, what it is asked with, and what is to be closed in the end. Errors as of Session.prepare."""
        with ExitStack() as opened:
            session = self._asked(question.kbs, opened)
            session.template = PLAIN if question.is_plain else None
            prepared = session.prepare(
                question.messages,
                max_tokens=question.sampling.max_tokens,
                think_tokens=question.sampling.room_to_think,
                **question.options,
            )
            return session, prepared, opened.pop_all()

    def _asked(self, kbs: tuple[str, ...], opened: ExitStack) -> Session:
        """The session over these knowledge bases."""
        session = copy.copy(self._session)
        session.knowledge_bases = tuple(open_knowledge_bases(kbs, settings=self._settings, opened=opened))
        if kbs and self._embedder is None:
            self._embedder = open_embedder(self._settings, for_queries=True)
        session.embedder = self._embedder if kbs else None
        return session

    def add(self, question: Question) -> Event:
        """Begin a question: its prompt is composed, and nothing evaluated yet. Errors as of Session.prepare and Engine.add."""
        started = time.perf_counter()
        session, prepared, opened = self.prepare(question)
        with ExitStack() as failed:
            failed.push(opened)
            composed = prepared.prompt
            begun = Event(id=question.id, begun=prepared, documents=_documents(composed.hits, session))
            sampling = question.sampling_for(prepared)
            deadline = prepared.deadline if question.max_seconds is None else started + question.max_seconds
            running = session.engine.add(
                list(composed.token_ids), sampling, deadline=deadline, breakpoints=composed.breakpoints, thinking=composed.thinking
            )
            self._jobs[running.seq_id] = _Job(question, session, prepared, running, failed.pop_all())
            return begun

    def cancel(self, question_id: int) -> None:
        """End a question at once; it has no more events. One that is not there was finished before."""
        for seq_id, job in list(self._jobs.items()):
            if job.question.id == question_id:
                self._session.engine.cancel(job.running)
                self._jobs.pop(seq_id).opened.close()

    def stop(self) -> None:
        """End all that is being written, from any thread; it comes to its end with `finish_reason` "cancelled"."""
        self._session.engine.cancel_all()

    def step(self) -> list[Event]:
        """Evaluate one batch of all that run."""
        return list(self._heard(self._session.engine.step()))

    def _heard(self, pieces: Iterable[Piece]) -> Iterable[Event]:
        for piece in pieces:
            job = self._jobs.get(piece.seq_id)
            if job is None:
                continue
            logprobs = _new_logprobs(job)
            if piece.text or piece.thought or (logprobs and piece.finish_reason is not None):
                job.num_told += len(logprobs)
                yield Event(
                    id=job.question.id,
                    text=piece.text,
                    thought=piece.thought,
                    num_tokens=len(job.running.completion_ids),
                    logprobs=logprobs,
                )
            if piece.finish_reason is not None:
                del self._jobs[piece.seq_id]
                yield self._end(job)

    def _end(self, job: _Job) -> Event:
        """Its answer, or what went wrong: a knowledge base that broke meanwhile is no matter of those that still run."""
        question, running = job.question, job.running
        with job.opened:
            try:
                if running.error is not None:
                    raise running.error
                answer = job.session.finish(job.prepared, running.completion(), question.messages, **question.options)
                return Event(id=question.id, answer=answer, documents=_documents(answer.hits, job.session))
            except LocalragError as error:
                return Event(id=question.id, error=error)

    def close(self) -> None:
        """End all that runs."""
        for job in self._jobs.values():
            self._session.engine.cancel(job.running)
            job.opened.close()
        self._jobs.clear()
        self._session.close()


def _new_logprobs(job: _Job) -> tuple[TokenLogprob, ...]:
    """Those that no event told, of tokens whose text is told now: a stop string that was cut off has none."""
    known, end = job.running.logprobs, len(job.running.text.encode())
    starts = accumulate((len(each.piece) for each in known[:-1]), initial=0) if known else ()
    return tuple(each for at, (each, start) in enumerate(zip(known, starts, strict=True)) if at >= job.num_told and start < end)


def _documents(hits: Sequence[Hit], session: Session) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """What was deleted since it was found is left out."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for kb in session.knowledge_bases:
        own = [hit for hit in hits if hit.chunk.kb == kb.name]
        names = kb.texts.names([hit.chunk.document_id for hit in own])
        found |= {hit.label: names[hit.chunk.document_id] for hit in own if hit.chunk.document_id in names}
    return found
