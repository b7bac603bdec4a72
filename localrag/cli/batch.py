"""ask --batch: the questions of one file answered into another, with progress; it goes on where it was interrupted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from localrag.cli.batch_answers import Answers
from localrag.cli.batch_questions import Asked, Id, Questions, read_requests
from localrag.cli.text import console, note, safe
from localrag.decoding import SamplingParams
from localrag.errors import InterruptedRunError, LocalragError, UsageError
from localrag.session import Answer, Options, Request, Session

if TYPE_CHECKING:
    from localrag.engine.engine import Engine

_NUM_REPORTS = 10
"""Lines that tell how far it is, where there is no terminal to draw on."""


class Job:
    """One run over the questions of `source`, those left out that `out` holds answers to. UsageError if the files cannot serve."""

    def __init__(self, source: Path, out: Path, *, sampling: SamplingParams, options: Options, force: bool) -> None:
        if out.exists() and source.exists() and out.samefile(source):
            raise UsageError("--batch and --out are the same file.", hint="Give --out a file of its own.")
        self._source = source
        self._sampling = sampling
        self._options = options
        self._questions = Questions.scan(source, sampling, options)
        self._answers = Answers(out, self._questions, force=force)
        self._asked: dict[Id, Asked] = {}
        self._num_errors = 0
        self._first_error: LocalragError | None = None
        self._is_stopped = False
        self._progress = Progress(self._questions.num_lines, len(self._answers.done))

    @property
    def is_done(self) -> bool:
        return self._progress.num_done == self._questions.num_lines

    def run(self, session: Session) -> int:
        """Answer what is left; the exit code."""
        if self._progress.num_done:
            note(f"{self._progress.num_done} of {self._questions.num_lines} are answered already.")
        try:
            with self._progress:
                for known, outcome in session.batch(self._requests(), on_step=self._on_step):
                    if not isinstance(outcome, Answer) or outcome.finish_reason != "cancelled":
                        self._take(self._asked.pop(known), outcome)
        except (InterruptedRunError, KeyboardInterrupt):
            self._is_stopped = True
        if self._is_stopped:
            num_left = self._questions.num_lines - self._progress.num_done
            note(f"Interrupted: {num_left} of {self._questions.num_lines} are left; the same command goes on with them.")
            return InterruptedRunError.exit_code
        note(f"{self._progress.num_done - self._num_errors} of {self._questions.num_lines} are answered; {self._progress.speed}.")
        if self._first_error is not None:
            note(f"{self._num_errors} could not be answered; the first: {safe(self._first_error.message)}")
            return self._first_error.exit_code
        return 0

    def stop(self, engine: Engine) -> None:
        """End at the next step; what runs now is given up. Fit for a signal handler."""
        self._is_stopped = True
        engine.cancel_all()

    def _requests(self) -> Iterator[Request]:
        """The questions that are left; lines that cannot be asked are answered with what is wrong."""
        for asked in read_requests(self._source, self._sampling, self._options):
            request = asked.request
            if isinstance(request, UsageError):
                self._take(asked, request)
            elif asked.line in self._questions.repeated:
                self._take(asked, UsageError(f"Line {asked.line}: an earlier line has its id.", line=asked.line))
            elif self._questions.marks.get(request.id) != asked.mark:
                raise UsageError(f"{self._source} was changed while it was read.", hint="Run the same command again.")
            elif request.id not in self._answers.done:
                self._asked[request.id] = asked
                yield request

    def _take(self, asked: Asked, outcome: Answer | LocalragError) -> None:
        self._answers.write(asked, outcome)
        if isinstance(outcome, LocalragError):
            self._num_errors += 1
            self._first_error = self._first_error or outcome
        self._progress.advance()

    def _on_step(self, num_tokens: int) -> None:
        self._progress.add_tokens(num_tokens)
        if self._is_stopped:
            raise InterruptedRunError("Interrupted.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()


class Progress:
    """Done of all, tokens a second and the time left, on stderr: a bar on a terminal, a line for each tenth elsewhere."""

    def __init__(self, total: int, num_done: int) -> None:
        self.num_done = num_done
        self._total = total
        self._num_before = num_done
        self._num_tokens = 0
        self._started = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    @property
    def speed(self) -> str:
        return f"{self._num_tokens / max(1e-9, time.perf_counter() - self._started):.0f} tokens/s"

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        drawn = console(err=True)
        if drawn.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415  # weight

            columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}", markup=False), TimeRemainingColumn()
            self._bar = Progress(*columns, console=drawn, transient=True)
            self._task = self._bar.add_task("", total=self._total, completed=self.num_done)
            self._bar.start()
        return self

    def add_tokens(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._bar is not None:
            self._bar.update(self._task, description=self.speed)

    def advance(self) -> None:
        self.num_done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.num_done)
        elif self.num_done * _NUM_REPORTS // self._total > (self.num_done - 1) * _NUM_REPORTS // self._total:
            spent_s = time.perf_counter() - self._started
            left_s = spent_s * (self._total - self.num_done) / (self.num_done - self._num_before)
            note(f"{self.num_done} of {self._total} done, {self.speed}, about {_duration(left_s)} left")

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
