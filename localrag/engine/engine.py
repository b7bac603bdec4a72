"""The engine: a model with the single loop that runs all prompts: admit, step, collect."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from localrag.engine.core import EngineCore
from localrag.engine.jobs import SINGLE, Job, JobEvent, Policy, last_event
from localrag.errors import LocalragError, UsageError
from localrag.text.thinking import Thinking
from localrag.text.tokens import common_length
from localrag.types import Completion, Piece, SamplingParams

MAX_SLOWDOWN = 1.5
"""Maximum slowdown per generated token, without a GPU, at which another prompt of a batch is admitted: attention scans the cells of all
sequences. Beyond this factor, batching saves nothing (measured)."""
MAX_PROMPT_SHARE = 2
"""Maximum number of unshared prompt tokens per answer token at which batching a prompt pays off (measured)."""
_ROUND_CELLS = 1024
"""Contexts for single prompts are rounded up to a multiple of this many cells, so that they need not grow with every turn of a chat."""
_END = object()


class Driver:
    """Runs jobs under one policy. Use it once; `events` is a generator, and closing it cancels running jobs."""

    def __init__(self, engine: EngineCore, policy: Policy, *, window: int | None = None, reserves: bool = True) -> None:
        """Without `reserves`, use the existing context. See Engine.run for `window`."""
        self._engine = engine
        self._policy = policy
        self._window = window
        self._reserves = reserves
        self._running: list[Job] = []

    def events(self, jobs: Iterable[Job | None]) -> Generator[JobEvent]:
        engine = self._engine
        try:
            with engine.whole_prompts(whole=not self._policy.is_interactive):
                yield from self._stream(jobs) if self._policy.is_stream else self._finite([job for job in jobs if job is not None])
        finally:
            engine.abandon(job.sequence for job in self._running if job.sequence is not None)

    # --- known jobs ---

    def _finite(self, jobs: list[Job]) -> Iterator[JobEvent]:
        if self._policy.sorts:
            jobs.sort(key=lambda job: job.prompt_ids)
        waiting = deque(jobs)
        if self._reserves:
            self._reserve(jobs)
        if self._policy.keeps == "shared":
            self._engine.keep_for([job.prompt_ids for job in jobs])
        started = time.perf_counter()
        with self._disk_cache(jobs):
            while waiting or self._running:
                yield from self._admit(waiting, started)
                yield from self._step(waiting)

    def _reserve(self, jobs: Sequence[Job]) -> None:
        """Reserve a context for the jobs that may run together, and at least for the largest one."""
        common = sorted((job.num_cells for job in jobs if not job.sampling.repeatable), reverse=True)
        if self._policy.is_interactive and jobs:
            repeatable = not common
            most = max(job.num_cells for job in jobs)
            rounded = -(-most // _ROUND_CELLS) * _ROUND_CELLS
            self._engine.reserve(
                most if self._window is None else max(most, min(self._window, rounded)),
                num_sequences=self._policy.num_sequences,
                repeatable=repeatable,
            )
        elif common:
            self._engine.reserve_for(common, self._policy)

    def _admit(self, waiting: deque[Job], started: float) -> Iterator[JobEvent]:
        """Start the next jobs, in order, as long as there is a free slot, enough cells, and no undue slowdown."""
        context = self._engine.context
        in_use = sum(job.num_cells for job in self._running if not job.sampling.repeatable)
        num_free = (0 if context is None else context.runner.num_cells) - in_use
        while waiting and self._has_place(waiting[0], num_free):
            job = waiting.popleft()
            try:
                self._begin(job)
            except UsageError as error:
                yield JobEvent(job=job, error=error)
                continue
            if self._policy.on_disk == "breakpoint" and job.sequence is not None:
                job.sequence.added_at = started  # include the time to read from disk
            num_free -= 0 if job.sampling.repeatable else job.num_cells

    def _begin(self, job: Job) -> None:
        job.sequence = self._engine.add(
            job.prompt_ids,
            job.sampling,
            deadline=job.deadline,
            breakpoints=job.breakpoints,
            text_end=job.text_end,
            watched=job.watched,
            thinking=job.thinking,
        )
        self._running.append(job)

    def _has_place(self, job: Job, num_free: int) -> bool:
        """Whether a job can start. Repeatable answers run one at a time; other jobs need cells and, in a batch, must pay off."""
        if not self._policy.sorts:
            return True  # the scheduler queues them
        if len(self._running) >= self._policy.num_sequences:
            return False
        if job.sampling.repeatable:
            return not any(each.sampling.repeatable for each in self._running)
        return job.num_cells <= num_free and self._pays(job)

    def _pays(self, job: Job) -> bool:
        """Whether it is faster to run a prompt next to the running ones than after them."""
        engine = self._engine
        plan = engine.memory_plan
        others = [each.prompt_ids for each in self._running if not each.sampling.repeatable]
        if not others or plan is None or plan.gpu_layers:
            return True
        apart = [len(ids) - common_length(before, ids) for before, ids in pairwise([[], *others, job.prompt_ids])]
        most = MAX_PROMPT_SHARE * job.sampling.num_answer_tokens
        return apart[-1] <= most and sum(apart) <= engine.speed.depth_of(MAX_SLOWDOWN)

    @contextmanager
    def _disk_cache(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Read the prompts' prefix from the disk cache, and store it there if it took long to evaluate."""
        if self._policy.on_disk == "breakpoint" and len(jobs) == 1:
            with self._engine.resuming(jobs[0]):
                yield
        elif self._policy.on_disk == "prefix" and jobs:
            first = jobs[0].prompt_ids
            length = min((common_length(first, job.prompt_ids) for job in jobs[1:]), default=0)
            with self._engine.sharing(first[:length]):
                yield
        else:
            yield

    # --- arriving jobs ---

    def _stream(self, jobs: Iterable[Job | None]) -> Iterator[JobEvent]:
        """Run jobs as they arrive. The iterator yields None if none is waiting, and blocks while nothing runs."""
        source, is_open = iter(jobs), True
        while is_open or self._running:
            job = next(source, _END) if is_open else None
            if isinstance(job, Job):
                yield self._queued(job)  # give the caller control before waiting for the next job
                continue
            is_open = is_open and job is None
            yield JobEvent(job=None)
            if self._running:
                yield from self._step(deque())

    def _queued(self, job: Job) -> JobEvent:
        try:
            self._begin(job)
        except LocalragError as error:
            return JobEvent(job=job, error=error)
        return JobEvent(job=job)

    # --- steps ---

    def _step(self, waiting: deque[Job]) -> Iterator[JobEvent]:
        try:
            pieces = self._engine.step()
        except KeyboardInterrupt:
            yield from self._interrupted()
            if waiting or not self._policy.is_interactive:
                raise
            return
        yield from self._collect(pieces, waiting)
        if not pieces:
            yield JobEvent(job=None)

    def _interrupted(self) -> Iterator[JobEvent]:
        """End every running job with the text that it has."""
        sequences = [job.sequence for job in self._running if job.sequence is not None and not job.sequence.is_finished]
        yield from self._collect([self._engine.end(sequence, "cancelled") for sequence in sequences], deque())

    def _collect(self, pieces: Iterable[Piece], waiting: deque[Job]) -> Iterator[JobEvent]:
        by_id = {job.sequence.seq_id: job for job in self._running if job.sequence is not None}
        events = [self._event(by_id[piece.seq_id], piece) for piece in pieces if piece.seq_id in by_id]
        finished = [job for job in self._running if job.sequence is not None and job.sequence.is_finished]
        self._running = [job for job in self._running if job not in finished]
        if finished and self._policy.keeps == "next":
            self._keep_next(finished, waiting)
        elif finished and self._policy.keeps == "shared":
            self._engine.hold(job.sequence for job in finished if job.sequence is not None)
        yield from events

    def _event(self, job: Job, piece: Piece) -> JobEvent:
        assert job.sequence is not None, "it runs"
        logprobs = job.new_logprobs() if piece.text or piece.thought or piece.finish_reason is not None else ()
        job.num_logprobs_told += len(logprobs)
        is_end = piece.finish_reason is not None
        error = job.sequence.error
        return JobEvent(
            job=job,
            text=piece.text,
            thought=piece.thought,
            token_id=piece.token_id,
            logprobs=logprobs,
            completion=job.sequence.completion() if is_end and error is None else None,
            error=error if is_end else None,
        )

    def _keep_next(self, finished: Iterable[Job], waiting: deque[Job]) -> None:
        """Evict everything except the prefix of the next prompt. Prompts are sorted, so later ones share no longer prefix."""
        self._engine.hold(job.sequence for job in finished if job.sequence is not None)
        queued = [job.prompt_ids for job in self._running if job.sequence is not None and job.sequence.slot is None]
        self._engine.keep_for([*queued, *([waiting[0].prompt_ids] if waiting else [])])


_MEASURED_PROMPTS, _MEASURED_ANSWER = (32, 96, 96, 96), 9
_MEASURED_TEXT = "The quick brown fox jumps over the lazy dog, and the dog goes on sleeping in the warm sun. " * 8


class Engine(EngineCore):
    """A model that runs prompts. `run` drives them under a policy, `generate` runs a single one to its end."""

    def run(self, jobs: Iterable[Job | None], policy: Policy = SINGLE, *, window: int | None = None) -> Generator[JobEvent]:
        """Run prompts under a policy: admit them, step, and yield events until all have ended.

        The last event of a job has a completion or an error. In a stream, `jobs` yields None if none is waiting, and blocks while the
        engine is idle. The context of a single prompt is rounded up to at most `window` cells. Closing the iterator cancels running jobs.
        Ctrl-C ends interactive jobs as "cancelled"; otherwise KeyboardInterrupt is raised after their events.
        """
        return Driver(self, policy, window=window).events(jobs)

    def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        on_text: Callable[[str], None] | None = None,
        *,
        deadline: float | None = None,
        breakpoints: tuple[int, ...] = (),
        thinking: Thinking | None = None,
        on_thought: Callable[[str], None] | None = None,
    ) -> Completion:
        """Run one prompt to its end in the reserved context. Ctrl-C ends it as "cancelled", with the text so far.

        `on_text` receives each piece of the answer, `on_thought` each piece of the reasoning before it. `deadline`, `breakpoints` and
        `thinking` are as in `add`.
        """
        job = Job(prompt_ids=prompt_ids, sampling=sampling, deadline=deadline, breakpoints=breakpoints, thinking=thinking)
        events = Driver(self, SINGLE, reserves=False).events([job])
        completion = last_event(events, self.cancel_all, on_text=on_text, on_thought=on_thought).completion
        assert completion is not None, "it is the last event"
        return completion

    def measure_speed(self) -> None:
        """Measure the speed for planning, if it is not known yet, by timing short prompts and answers. Takes about a second.

        Does nothing while answers run, since they measure it. Raises EngineError for a file without weights.
        """
        ids = self.tokenizer.encode(_MEASURED_TEXT)
        for num_tokens in _MEASURED_PROMPTS:  # the first one warms up the model
            if self.speed.is_known or not self.is_idle:
                return
            self.reserve(max(_MEASURED_PROMPTS) + _MEASURED_ANSWER)
            if self.generate(ids[:num_tokens], SamplingParams(max_tokens=_MEASURED_ANSWER)).finish_reason == "cancelled":
                raise KeyboardInterrupt
