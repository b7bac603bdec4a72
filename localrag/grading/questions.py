"""Read questions with known answers from an untrusted file of JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from pydantic import Field as Limits

from localrag.errors import UsageError
from localrag.files import check_regular, read_lines, read_object

MAX_LINE_BYTES = 256 * 1024
MAX_QUESTIONS = 10_000
_LIKE = '{"id": "q1", "question": "…", "answers": [["…"]], "sources": ["…"]}'
_REFUSALS = "refusals"
_Item = TypeVar("_Item")
_Model = TypeVar("_Model", bound=BaseModel)

Source = str | tuple[str, ...]
"""A page with the whole answer in one passage, or pages whose passages hold it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question. `answers` are groups of spellings: a right answer has one of each group. Without any, no page answers the question.

    `sources` are alternatives, each the end of a path in the knowledge base.
    """

    id: str
    question: str
    answers: tuple[tuple[str, ...], ...] = ()
    sources: tuple[Source, ...] = ()

    @property
    def is_answerable(self) -> bool:
        return bool(self.answers)

    @property
    def pages(self) -> set[str]:
        """All pages named in `sources`."""
        return {page for source in self.sources for page in ((source,) if isinstance(source, str) else source)}


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """The questions of a file in order, and its phrases of refusals that replace REFUSALS; None if it has none."""

    questions: tuple[Question, ...]
    refusals: tuple[str, ...] | None = None


_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500)]
_Page = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=4000)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    question: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=10_000)]
    answers: Annotated[list[Annotated[list[_Text], Limits(min_length=1, max_length=100)]], Limits(max_length=100)]
    sources: Annotated[list[_Page | Annotated[list[_Page], Limits(min_length=1, max_length=100)]], Limits(max_length=100)] = []


class _Head(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    refusals: Annotated[list[_Text], Limits(min_length=1, max_length=1000)]


def read_questions(path: Path) -> QuestionFile:
    """Read all questions of a file. Raises UsageError with the number of an invalid line, or one that repeats an id."""
    check_regular(path, f"Give a file with {_LIKE} on each line.")
    reader = _Reader()
    for number, raw in read_lines(path, MAX_LINE_BYTES):
        try:
            reader.take(number, raw)
        except UsageError as error:
            said = f"Line {number} of {path.name} cannot be used: {error.message}"
            raise UsageError(said, hint=error.hint or f"See {path}.", line=number) from None
    if not reader.questions:
        raise UsageError(f"{path} holds no question.", hint=f"Write {_LIKE} on each line.")
    return QuestionFile(tuple(reader.questions), reader.refusals)


def spread(items: Sequence[_Item], num: int | None) -> list[_Item]:
    """`num` of the items at even distances, beginning with the first; all for None."""
    if num is None or num >= len(items):
        return list(items)
    return [items[at * len(items) // num] for at in range(num)]


def _checked(model: type[_Model], row: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(row)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(each)[:80] for each in fault["loc"])
        raise UsageError(f"{place or 'it'}: {fault['msg'][:200]}.", hint=f"Write {_LIKE} on each line.") from None


@dataclass(slots=True)
class _Reader:
    """Collects the lines of a file."""

    questions: list[Question] = field(default_factory=list)
    refusals: tuple[str, ...] | None = None
    _lines: dict[str, int] = field(default_factory=dict)

    def take(self, number: int, raw: bytes | None) -> None:
        if raw is None:
            raise UsageError(f"it is longer than {MAX_LINE_BYTES // 1024} KiB.")
        row = read_object(raw, _LIKE)
        if _REFUSALS not in row:
            self._add(number, _checked(_Line, row))
        elif self.questions or self.refusals is not None:
            raise UsageError("refusals stand on the first line, or nowhere.")
        else:
            self.refusals = tuple(_checked(_Head, row).refusals)

    def _add(self, number: int, line: _Line) -> None:
        if (first := self._lines.setdefault(line.id, number)) != number:
            raise UsageError(f"its id {line.id!r} is that of line {first} as well.", hint="Give each question an id of its own.")
        if len(self.questions) == MAX_QUESTIONS:
            raise UsageError(f"there are more than {MAX_QUESTIONS} questions.", hint="Split the file.")
        if bool(line.answers) != bool(line.sources):
            there, lacking = ("answers", "sources") if line.answers else ("sources", "answers")
            hint = 'Name the pages that hold the answers; a question that no page answers has "answers": [] and no sources.'
            raise UsageError(f"it has {there} and no {lacking}.", hint=hint)
        sources = tuple(source if isinstance(source, str) else tuple(source) for source in line.sources)
        answers = tuple(tuple(group) for group in line.answers)
        self.questions.append(Question(id=line.id, question=line.question, answers=answers, sources=sources))
