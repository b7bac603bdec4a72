"""ask --batch: read questions from a JSON Lines file, check each line on its own, and write the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from localrag.cli.files import STANDARD_OUTPUT, ResultFile
from localrag.cli.terminal import console, emit, note
from localrag.engine.jobs import BATCH
from localrag.errors import InterruptedRunError, LocalragError, UsageError, counted
from localrag.files import check_regular, read_lines, read_object
from localrag.question import Question
from localrag.session import Answer, Event, Session
from localrag.session.retrieval import MAX_DEPTH
from localrag.settings import MAX_TEXT_BYTES
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.engine.engine import Engine


Id = str | int

MAX_ID_CHARS = 1000
_LIKE = '{"id": 1, "question": "…"}'
_SAMPLING = {"max_tokens": (int,), "seed": (int,), "temperature": (int, float)}
_OPTIONS = {"system": (str,), "top_k": (int, str), "context_ratio": (int, float), "evidence": (str,), "evidence_tokens": (int,)}
_KINDS: dict[str, tuple[type, ...]] = {"id": (str, int), "question": (str,), **_SAMPLING, **_OPTIONS}
_OPTIONAL = (*_SAMPLING, *_OPTIONS)
_KIND_NAMES = {
    (str,): "a string",
    (int,): "an integer",
    (int, float): "a number",
    (str, int): "a string or an integer",
    (int, str): "an integer or fit",
}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of IN: its number from 1, its id if it has a valid one, and its question or the error in it. `mark` is a hash of the
    line's content, to detect changes.
    """

    line: int
    id: Id | None
    mark: str
    question: Question | UsageError
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Unknown keys of the line, copied to the answer."""


def read_questions(path: Path, template: Question) -> Iterator[BatchLine]:
    """Yield every non-blank line of IN. `template` holds the default options."""
    for number, raw in read_lines(path, MAX_TEXT_BYTES):
        if raw is None:
            yield BatchLine(
                number, None, "", UsageError(f"Line {number} is longer than {MAX_TEXT_BYTES // 1024 // 1024} MiB.", line=number)
            )
        else:
            yield _parse_line(number, raw, template)


def _parse_line(number: int, raw: bytes, template: Question) -> BatchLine:
    question_id: Id | None = None
    row: dict[str, Any] = {}
    try:
        row = read_object(raw, _LIKE)
        question_id = _id(row)
        question = _question(question_id, row, template)
    except UsageError as error:
        return BatchLine(number, question_id, "", UsageError(f"Line {number}: {error.message}", hint=error.hint, line=number), _extra(row))
    content = json.dumps({key: row[key] for key in sorted(row)}, separators=(",", ":"))
    return BatchLine(number, question_id, blake2b(content.encode(), digest_size=8).hexdigest(), question, _extra(row))


def _extra(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in _KINDS}


def _id(row: Mapping[str, Any]) -> Id:
    value = row.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError("the id must be a string or an integer." if "id" in row else "the id is missing.")
    if isinstance(value, str) and not 0 < len(value) <= MAX_ID_CHARS:
        raise UsageError(f"the id has {len(value)} characters, but must have 1 to {MAX_ID_CHARS}.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UsageError("a numeric id must fit in 63 bits.")
    return value


def _question(question_id: Id, row: Mapping[str, Any], template: Question) -> Question:
    for key, value in row.items():
        kinds = _KINDS.get(key)
        if kinds is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UsageError(f"{key} must be {_KIND_NAMES[kinds]}, not {json.dumps(value)[:80]}.")
    if "question" not in row:
        raise UsageError("the question is missing.")
    top_k = row.get("top_k", "fit")
    if top_k != "fit" and not (isinstance(top_k, int) and 1 <= top_k <= MAX_DEPTH):
        raise UsageError(f"top_k is {json.dumps(top_k)[:80]}, but must be 1 to {MAX_DEPTH}, or fit.")
    if not 0 <= row.get("context_ratio", 0) <= 1:
        raise UsageError(f"context_ratio is {row['context_ratio']}, but must be 0 to 1.")
    options = {key: row[key] for key in (*_SAMPLING, "top_k", "context_ratio", "evidence", "evidence_tokens") if key in row}
    system = row.get("system") or next((each.content for each in template.messages if each.role == "system"), None)
    messages = Question.of(row["question"], system=system).messages
    return replace(template, messages=messages, id=question_id).but(repeatable=template.sampling.repeatable or "seed" in row, **options)


@lru_cache(maxsize=1000)
def _resembling(key: str) -> list[str]:
    """Return the option that an unknown key probably misspells, if any."""
    import difflib  # noqa: PLC0415  # only for lines with unknown keys

    return difflib.get_close_matches(key[:80], _OPTIONAL, n=1, cutoff=0.8)


@dataclass(slots=True)
class Questions:
    """A summary of IN: the number of lines, the mark of each valid line by id, and the lines that repeat an earlier id."""

    num_lines: int = 0
    marks: dict[Id, str] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    unused: dict[str, str] = field(default_factory=dict)
    """Unknown keys that resemble an option, mapped to that option."""

    @classmethod
    def scan(cls, path: Path, template: Question) -> Self:
        """Scan IN, keeping only ids and marks in memory. UsageError unless IN is a readable regular file."""
        check_regular(path, "A batch needs a regular file, so that it can resume after an interruption.")
        questions = cls()
        for line in read_questions(path, template):
            questions.num_lines += 1
            questions.unused |= {key: near[0] for key in line.extra if (near := _resembling(key))}
            if line.id is not None and isinstance(line.question, Question):
                if line.id in questions.marks:
                    questions.repeated.add(line.line)
                else:
                    questions.marks[line.id] = line.mark
        return questions


RESERVED_KEYS = frozenset({"answer", "request", "line", "error", "reasoning", "memory", "bypass", "rewriting", "input"})
"""Keys that only some lines of OUT have. A question's own key of the same name goes below "input" in every line."""


class Answers(ResultFile):
    """The OUT file of a batch. `done` holds the ids with answers. Error lines are dropped, so that their questions are retried."""

    run: ClassVar[str] = "batch"

    def __init__(self, path: Path, questions: Questions, *, force: bool) -> None:
        """UsageError if another batch is writing to the file, or if it holds other lines or answers to other questions.

        With `force`, answers to questions missing from IN are kept, and changed questions are asked again.
        """
        self.done: set[Id] = set()
        self._questions = questions
        self._force = force
        super().__init__(path)

    def write(self, line: BatchLine, outcome: Answer | LocalragError) -> None:
        self.append(answer_line(line, outcome))

    def is_line(self, row: object) -> bool:
        return _kind(row) != "other"

    def is_kept(self, number: int, row: dict[str, Any]) -> bool:
        if _kind(row) == "error":
            return False
        mark = self._questions.marks.get(row["id"])
        if mark == row["request"]:
            self.done.add(row["id"])
        elif not self._force:
            difference = "is not in this batch" if mark is None else "has changed"
            raise UsageError(
                f"Line {number} of {self.path} answers question {json.dumps(row['id'])[:80]}, which {difference}.",
                hint="Use another --out, or --force to keep answers to other questions and re-ask changed ones.",
                line=number,
            )
        return mark is None or mark == row["request"]


class PrintedAnswers:
    """Prints the answers of a batch on standard output as they finish. There are no answers from an earlier run."""

    def __init__(self) -> None:
        self.done: set[Id] = set()

    def write(self, line: BatchLine, outcome: Answer | LocalragError) -> None:
        emit(answer_line(line, outcome))

    def close(self) -> None:
        """Do nothing: standard output belongs to the process."""


def answer_line(line: BatchLine, outcome: Answer | LocalragError) -> dict[str, object]:
    """Return a line of OUT: the answer object or the error, plus the unknown keys of the question's line.

    Keys that the answer uses itself are copied below "input" instead, so that neither value is lost.
    """
    if isinstance(outcome, Answer):
        row: dict[str, object] = {"id": line.id, "request": line.mark, **outcome.to_dict()}
    else:
        row = {"id": line.id, "line": line.line, "error": outcome.to_dict()}
    conflicts = {key: value for key, value in line.extra.items() if key in RESERVED_KEYS or key in row}
    copied = {key: value for key, value in line.extra.items() if key not in conflicts}
    return row | copied | ({"input": conflicts} if conflicts else {})


def _kind(row: object) -> str:
    """Classify a line of OUT: "answer", "error", or "other" for a line that no batch wrote."""
    if not isinstance(row, dict) or "id" not in row or isinstance(row["id"], bool):
        return "other"
    if isinstance(row.get("error"), dict) and isinstance(row.get("line"), int) and isinstance(row["id"], str | int | None):
        return "error"
    return "answer" if isinstance(row["id"], str | int) and isinstance(row.get("request"), str) and "answer" in row else "other"


_NUM_REPORTS = 10
"""Number of progress lines in a run without a terminal."""


class BatchRun:
    """A run over the questions of `source`, skipping those with answers in `out`. UsageError if the files are unsuitable."""

    def __init__(self, source: Path, out: Path, template: Question, *, force: bool) -> None:
        if out.exists() and source.exists() and out.samefile(source):
            raise UsageError("--batch and --out are the same file.", hint="Use another file for --out.")
        self._source = source
        self._template = template
        self._questions = Questions.scan(source, template)
        for key, near in self._questions.unused.items():
            note(f"Warning: {safe(key)!r} is not a known key, so it is only copied to the answer. Did you mean {near!r}?")
        self._answers = PrintedAnswers() if out == STANDARD_OUTPUT else Answers(out, self._questions, force=force)
        self._asked: dict[Id, BatchLine] = {}
        self._num_errors = 0
        self._first_error: LocalragError | None = None
        self._is_stopped = False
        self._progress = Progress(self._questions.num_lines, len(self._answers.done))

    @property
    def is_done(self) -> bool:
        return self._progress.num_done == self._questions.num_lines

    def run(self, session: Session) -> int:
        """Answer the remaining questions and return the exit code."""
        if self._progress.num_done:
            note(f"{self._progress.num_done} of {self._questions.num_lines} questions are already answered.")
        try:
            with self._progress:
                for event in session.run(self._left(), policy=BATCH):
                    self._hear(event)
        except (InterruptedRunError, KeyboardInterrupt):
            self._is_stopped = True
        if self._is_stopped:
            num_left = self._questions.num_lines - self._progress.num_done
            how = "" if isinstance(self._answers, PrintedAnswers) else " Run the same command to continue."
            note(f"Interrupted: {num_left} of {self._questions.num_lines} questions are left.{how}")
            return InterruptedRunError.exit_code
        num_answered = self._progress.num_done - self._num_errors
        note(f"Answered {num_answered} of {counted(self._questions.num_lines, 'question')} at {self._progress.speed}.")
        if self._first_error is not None:
            note(f"{self._num_errors} failed. First error: {safe(self._first_error.message)}")
            return self._first_error.exit_code
        return 0

    def stop(self, engine: Engine) -> None:
        """Stop at the next step and discard unfinished answers. Safe to call from a signal handler."""
        self._is_stopped = True
        engine.cancel_all()

    def _left(self) -> Iterator[Question]:
        """Yield the unanswered questions. Invalid lines get an error as their answer."""
        for line in read_questions(self._source, self._template):
            question = line.question
            if isinstance(question, UsageError):
                self._take(line, question)
            elif line.line in self._questions.repeated:
                self._take(line, UsageError(f"Line {line.line}: an earlier line has the same id.", line=line.line))
            elif self._questions.marks.get(question.id) != line.mark:
                raise UsageError(f"{self._source} changed while it was read.", hint="Run the same command again.")
            elif question.id not in self._answers.done:
                self._asked[question.id] = line
                yield question

    def _take(self, line: BatchLine, outcome: Answer | LocalragError) -> None:
        self._answers.write(line, outcome)
        if isinstance(outcome, LocalragError):
            self._num_errors += 1
            self._first_error = self._first_error or outcome
        self._progress.advance()

    def _hear(self, event: Event) -> None:
        if self._is_stopped:
            raise InterruptedRunError("Interrupted.")
        if event.question is None:
            return
        outcome = event.error or event.answer
        if outcome is not None:
            if not isinstance(outcome, Answer) or outcome.finish_reason != "cancelled":
                self._take(self._asked.pop(event.question.id), outcome)
        elif event.prepared is None:
            self._progress.add_tokens(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()


class Progress:
    """Progress on stderr: questions done, tokens per second and time left. A bar on a terminal, otherwise one line per 10 %."""

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
        out = console(err=True)
        if out.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415  # weight

            columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}", markup=False), TimeRemainingColumn()
            self._bar = Progress(*columns, console=out, transient=True)
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
