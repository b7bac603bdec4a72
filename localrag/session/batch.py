"""Many questions at once: each prepared as if it were asked alone, ordered so that they share prefixes, answered side by side."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Protocol, Unpack

from localrag.engine.radix_tree import common_length
from localrag.errors import EngineError, InterruptedRunError, LocalragError, UsageError
from localrag.session.answer import Answer, Prepared
from localrag.types import Completion, SamplingParams

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.engine.sequence import Sequence
    from localrag.session.options import Options

MAX_SEQUENCES = 8
"""Answers that are written at once: more of them decode hardly faster on a CPU (measured), and each takes its cells."""
MOST_SLOWDOWN = 1.5
"""Without a GPU, prompts run side by side as long as their cells make a token of an answer at most so many times as slow: each is
weighed against the cells of all. What decoding side by side saves is used up beyond it (measured)."""
MOST_PROMPT = 2
"""Nor does it pay for a prompt with more tokens of its own than so many for each that its answer may have (measured)."""
WINDOW_REQUESTS = 256
"""Questions that are prepared and put in order together, and so are in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A question of a batch, and what `Session.ask` would be called with. `id` is whatever tells it from the others."""

    id: str | int
    question: str
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: Options = field(default_factory=dict)  # type: ignore[assignment]  # a TypedDict of which no key is required


Outcome = tuple[str | int, Answer | LocalragError]


@dataclass(slots=True, eq=False)
class _Job:
    """A request whose prompt is ready, and its sequence once it was begun."""

    request: Request
    prepared: Prepared
    token_ids: list[int]
    sequence: Sequence | None = None

    @property
    def is_repeatable(self) -> bool:
        return self.request.sampling.repeatable

    @property
    def num_cells(self) -> int:
        return self.prepared.prompt.num_cells


class Asker(Protocol):
    """What a batch needs of a session."""

    @property
    def engine(self) -> Engine: ...
    def prepare(self, question: str, *, max_tokens: int | None, think_tokens: int, write: bool, **options: Unpack[Options]) -> Prepared: ...
    def ask(self, question: str, *, sampling: SamplingParams, **options: Unpack[Options]) -> Answer: ...
    def finish(self, prepared: Prepared, completion: Completion, question: str, **options: Unpack[Options]) -> Answer: ...


class Batch:
    """One batch on its way. `outcomes` is what Session.batch gives; `on_step` hears of every step how many tokens were sampled."""

    def __init__(self, session: Asker, *, num_sequences: int = MAX_SEQUENCES, on_step: Callable[[int], None] = lambda _: None) -> None:
        if num_sequences < 1:
            raise UsageError(f"{num_sequences} answers at once are too few.", hint="Allow 1 or more.")
        self._session = session
        self._num_sequences = num_sequences
        self._on_step = on_step
        self._running: list[_Job] = []
        self._held: list[Sequence] = []
        self._num_cells = 0

    def outcomes(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Window by window: prepare all, sort by their tokens so that neighbours share what they begin with, answer."""
        requests = iter(requests)
        try:
            with self._session.engine.whole_prompts():  # answers are given when they have ended
                while window := list(islice(requests, WINDOW_REQUESTS)):
                    jobs = yield from self._prepare([request for request in window if not _is_timed(request)])
                    jobs.sort(key=lambda job: job.token_ids)
                    yield from self._answer(jobs)
                    for request in filter(_is_timed, window):
                        yield request.id, self._answered_alone(request)
        finally:
            self._cancel()

    def _prepare(self, window: list[Request]) -> Generator[Outcome, None, list[_Job]]:
        """What each is to be asked with; a request that cannot be asked is its own outcome. The engine is idle: it may write summaries."""
        jobs = []
        for request in window:
            self._on_step(0)
            try:
                prepared = self._session.prepare(
                    request.question,
                    max_tokens=request.sampling.max_tokens,
                    think_tokens=request.sampling.room_to_think,
                    write=True,
                    **request.options,
                )
            except LocalragError as error:
                if isinstance(error, InterruptedRunError):
                    raise
                yield request.id, error
            else:
                jobs.append(_Job(request, prepared, list(prepared.prompt.token_ids)))
        return jobs

    def _answered_alone(self, request: Request) -> Answer | LocalragError:
        """The answer to a question with a limit of time, which counts from here: beside others, nobody could say how long it takes."""
        self._on_step(0)
        options: Options = {**request.options, "started_at": time.perf_counter()}
        try:
            answer = self._session.ask(request.question, sampling=request.sampling, **options)
        except LocalragError as error:
            if isinstance(error, InterruptedRunError):
                raise
            return error
        self._on_step(answer.completion_tokens)
        return answer

    def _answer(self, jobs: list[_Job]) -> Iterator[Outcome]:
        """Answer them all; the place of one that is finished is taken at once."""
        self._reserve([job for job in jobs if not job.is_repeatable])
        engine, waiting, num_sampled = self._session.engine, deque(jobs), 0
        while waiting or self._running:
            yield from self._admit(waiting)
            self._on_step(num_sampled)
            num_sampled = sum(piece.token_id is not None for piece in engine.step())
            finished = [job for job in self._running if job.sequence is not None and job.sequence.is_finished]
            self._running = [job for job in self._running if job not in finished]
            if finished:
                self._forget(finished, waiting)
            for job in finished:
                yield job.request.id, self._answered(job)
        self._on_step(num_sampled)

    def _reserve(self, jobs: list[_Job]) -> None:
        """A context for as many of the largest as may run together and memory holds, and in any case for one."""
        from localrag.engine.memory import Situation, plan  # noqa: PLC0415  # weight: an ask alone needs none of it

        if not jobs:
            return
        info, situation = self._session.engine.info, Situation(is_loaded=True)
        needs = sorted((job.num_cells for job in jobs), reverse=True)[: self._num_sequences]
        while len(needs) > 1 and self._num_cells < sum(needs) and not plan(info, sum(needs), len(needs), situation=situation).fits:
            needs.pop()
        self._num_cells = max(self._num_cells, sum(needs))
        self._session.engine.reserve(self._num_cells, num_sequences=self._num_sequences)

    def _admit(self, waiting: deque[_Job]) -> Iterator[Outcome]:
        """Begin the next ones, in order, while there is a place and every cell that they can come to need, and it makes none slower.

        One whose schema the engine cannot keep to is its own outcome.
        """
        num_free = self._num_cells - sum(job.num_cells for job in self._running if not job.is_repeatable)
        while waiting and len(self._running) < self._num_sequences and self._has_place(waiting[0], num_free):
            job = waiting.popleft()
            sampling = job.request.sampling.with_max_tokens(job.prepared.prompt.max_tokens)
            try:
                job.sequence = self._session.engine.add(
                    job.token_ids, sampling, breakpoints=job.prepared.prompt.breakpoints, thinking=job.prepared.prompt.thinking
                )
            except UsageError as error:
                yield job.request.id, error
                continue
            self._running.append(job)
            num_free -= 0 if job.is_repeatable else job.num_cells

    def _has_place(self, job: _Job, num_free: int) -> bool:
        """Repeatable answers are written one after another; others need cells, and to be worth it."""
        if job.is_repeatable:
            return not any(each.is_repeatable for each in self._running)
        return job.num_cells <= num_free and self._pays(job)

    def _pays(self, job: _Job) -> bool:
        """Whether a prompt is better answered beside those that run than after them."""
        engine = self._session.engine
        made = engine.memory_plan
        beside = [each.token_ids for each in self._running if not each.is_repeatable]
        if not beside or made is None or made.gpu_layers:
            return True
        apart = [len(ids) - common_length(before, ids) for before, ids in pairwise([[], *beside, job.token_ids])]
        return apart[-1] <= MOST_PROMPT * job.prepared.prompt.max_tokens and sum(apart) <= engine.speed.depth_of(MOST_SLOWDOWN)

    def _forget(self, finished: Iterable[_Job], waiting: deque[_Job]) -> None:
        """Of what answered prompts hold, keep what the next one begins with: those behind it share no more, as they are in order."""
        self._held += [job.sequence for job in finished if job.sequence is not None]
        queued = [job.token_ids for job in self._running if job.sequence is not None and job.sequence.slot is None]
        self._held = self._session.engine.keep_for([*queued, *(job.token_ids for job in islice(waiting, 1))], self._held)

    def _answered(self, job: _Job) -> Answer | LocalragError:
        if job.sequence is None:
            raise EngineError("An answer ended that was never begun.")
        if job.sequence.error is not None:
            return job.sequence.error
        request = job.request
        return self._session.finish(job.prepared, job.sequence.completion(), request.question, **request.options)

    def _cancel(self) -> None:
        """Nothing of this batch goes on when it is left, by an error or because nobody wants the rest."""
        running, self._running = self._running, []
        self._session.engine.abandon(job.sequence for job in running if job.sequence is not None)


def _is_timed(request: Request) -> bool:
    return request.options.get("max_seconds") is not None
