"""Grade answers to questions with known answers: by words, numbers and sources, never by a model.

`read_questions` reads the questions from an untrusted file of JSON lines, `grade` compares an `Outcome` with one, `tally` adds
up the grades of one way of answering, and `compare` compares two ways on the same questions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from itertools import chain
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from pydantic import Field as Limits

from localrag.citation import without_tags
from localrag.errors import UsageError
from localrag.files import check_regular, read_lines, read_object
from localrag.types import Citation

MAX_LINE_BYTES = 256 * 1024
MAX_QUESTIONS = 10_000
_LIKE = '{"id": "q1", "question": "…", "answers": [["…"]], "sources": ["…"]}'
_REFUSALS = "refusals"
_Item = TypeVar("_Item")
_Model = TypeVar("_Model", bound=BaseModel)

Source = str | tuple[str, ...]
"""A page with the whole answer in one passage, or several pages whose passages contain it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question. `answers` are groups of spellings: a right answer has one of each group. Without answers, no page answers the
    question.

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
    """The questions of a file in order, and its refusal phrases, which replace REFUSALS; None if it has none."""

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
    """Read all questions of a file. Raises UsageError with the number of an invalid line, or of one that repeats an id."""
    check_regular(path, f"Give a file with {_LIKE} on each line.")
    reader = _Reader()
    for number, raw in read_lines(path, MAX_LINE_BYTES):
        try:
            reader.take(number, raw)
        except UsageError as error:
            message = f"Line {number} of {path.name} cannot be used: {error.message}"
            raise UsageError(message, hint=error.hint or f"See {path}.", line=number) from None
    if not reader.questions:
        raise UsageError(f"{path} has no questions.", hint=f"Write {_LIKE} on each line.")
    return QuestionFile(tuple(reader.questions), reader.refusals)


def spread(items: Sequence[_Item], num: int | None) -> list[_Item]:
    """Return `num` of the items at even distances, beginning with the first; None returns all."""
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
            raise UsageError("refusals must be on the first line.")
        else:
            self.refusals = tuple(_checked(_Head, row).refusals)

    def _add(self, number: int, line: _Line) -> None:
        if (first := self._lines.setdefault(line.id, number)) != number:
            raise UsageError(f"its id {line.id!r} is already used on line {first}.", hint="Give each question a different id.")
        if len(self.questions) == MAX_QUESTIONS:
            raise UsageError(f"there are more than {MAX_QUESTIONS} questions.", hint="Split the file.")
        if bool(line.answers) != bool(line.sources):
            there, lacking = ("answers", "sources") if line.answers else ("sources", "answers")
            hint = 'Name the pages that hold the answers; a question that no page answers has "answers": [] and no sources.'
            raise UsageError(f"it has {there} but no {lacking}.", hint=hint)
        sources = tuple(source if isinstance(source, str) else tuple(source) for source in line.sources)
        answers = tuple(tuple(group) for group in line.answers)
        self.questions.append(Question(id=line.id, question=line.question, answers=answers, sources=sources))


REFUSALS = (
    "sources do not",
    "source does not",
    "documents do not",
    "document does not",
    "passages do not",
    "passage does not",
    "text does not",
    "context does not",
    "handbook does not",
    "none of the sources",
    "no source",
    "not in the sources",
    "not in the source",
    "does not say",
    "do not say",
    "does not mention",
    "do not mention",
    "not mentioned",
    "no mention of",
    "does not specify",
    "do not specify",
    "not specified",
    "does not state",
    "do not state",
    "not stated",
    "not provided",
    "no information",
    "not enough information",
    "cannot answer",
    "cannot be answered",
    "cannot be determined",
    "unable to answer",
    "do not know",
)
"""Phrases that say that the sources do not answer the question. "n't" is read as "not"."""

_NUMBERS = ("prompt_tokens", "evaluated_tokens", "completion_tokens")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "citations": (list, tuple),
    "passages": (list, tuple),
    "support": (int, float, type(None)),
    "unsupported_claims": (list, tuple),
    "seconds": (int, float),
    **dict.fromkeys(_NUMBERS, (int,)),
}


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage supplied to the model: its label in citations, its document, and its text."""

    label: str
    source: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a question. `text` is the final answer without reasoning, `passages` are those that the model was shown.

    `prompt` is a digest of the tokens sent, if there was one prompt. `evaluated_tokens` counts prompt tokens that were not
    reused from another prompt of the same question. Without an answer, `error` is the name of the error and `error_text` its
    message.
    """

    text: str = ""
    citations: tuple[Citation, ...] = ()
    passages: tuple[Passage, ...] = ()
    prompt: str = ""
    finish_reason: str = ""
    seconds: float = 0.0
    prompt_tokens: int = 0
    evaluated_tokens: int = 0
    completion_tokens: int = 0
    support: float | None = None
    """Mean support score of the cited sentences (localrag/support.py); None if there are none."""
    unsupported_claims: tuple[str, ...] = ()
    error: str = ""
    error_text: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the outcome as JSON. `error` and `error_text` are left out if empty."""
        data = asdict(self)
        return {name: value for name, value in data.items() if value or name not in ("error", "error_text")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the result of `to_dict`. Raises TypeError or KeyError for anything else."""
        values = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        for each in fields(cls):
            if each.name in values and not isinstance(values[each.name], _KINDS.get(each.name, (str,))):
                raise TypeError(f"{each.name} is a {type(values[each.name]).__name__}")
        values["citations"] = tuple(Citation(str(each["label"]), bool(each["supplied"])) for each in values.get("citations", ()))
        values["unsupported_claims"] = tuple(map(str, values.get("unsupported_claims", ())))
        values["passages"] = tuple(Passage(*(str(each[name]) for name in Passage.__slots__)) for each in values.get("passages", ()))
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The grade of one answer. For a question that no page answers, all but `num_invented` and `is_refused` are False.

    `in_evidence`: the supplied passages contain the answer. `is_right`: the text contains it. `cites_holder`: a cited source
    contains it. `num_invented`: citations of passages that were not supplied. `is_refused`: the text says that the sources do
    not answer, and contains no right answer.
    """

    in_evidence: bool
    is_right: bool
    cites_holder: bool
    num_invented: int
    is_refused: bool

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def grade(question: Question, outcome: Outcome, refusals: Sequence[str] = REFUSALS) -> Grade:
    places = {passage.label: passage.source for passage in outcome.passages}
    cited = {places[each.label] for each in outcome.citations if each.supplied and each.label in places}
    is_right = question.is_answerable and is_met(question.answers, outcome.text)
    return Grade(
        in_evidence=any(_is_held(question, source, outcome.passages) for source in question.sources),
        is_right=is_right,
        cites_holder=any(_is_cited(source, cited) for source in question.sources),
        num_invented=sum(not each.supplied for each in outcome.citations),
        is_refused=not is_right and is_refusal(outcome.text, refusals),
    )


def is_met(answers: Sequence[Sequence[str]], text: str) -> bool:
    """Tell whether a text has one spelling of each group as separate words or numbers, ignoring case and source labels."""
    text = _plain(without_tags(text))
    return all(any(_pattern(each).search(text) for each in group) for group in answers)


def is_refusal(text: str, phrases: Iterable[str] = REFUSALS) -> bool:
    """Tell whether a text contains one of the phrases, ignoring case."""
    plain_text = _written_out(text)
    return any(_pattern(_written_out(phrase)).search(plain_text) for phrase in phrases)


def is_page(source: str, page: str) -> bool:
    """Tell whether a document of a knowledge base is the page that a question names by the end of its path."""
    return source == page or source.endswith(f"/{page}")


def _is_held(question: Question, source: Source, passages: Sequence[Passage]) -> bool:
    """Tell whether one passage of the page contains the whole answer, or passages of all pages of a group together."""
    if isinstance(source, str):
        return any(is_met(question.answers, each.text) for each in passages if is_page(each.source, source))
    texts = {page: [each.text for each in passages if is_page(each.source, page)] for page in source}
    return all(texts.values()) and is_met(question.answers, "\n".join(chain.from_iterable(texts.values())))


def _is_cited(source: Source, cited: Iterable[str]) -> bool:
    pages = (source,) if isinstance(source, str) else source
    return all(any(is_page(each, page) for each in cited) for page in pages)


@lru_cache(maxsize=4096)
def _pattern(spelling: str) -> re.Pattern[str]:
    """Return a pattern for a spelling. A number does not match inside a longer one, such as 75 in 0.75; a unit may follow it directly."""
    spelling = _plain(spelling)
    end = r"(?![.,]?\d)" if spelling[-1].isdigit() else r"(?!\w)"
    return re.compile(rf"(?<!\w)(?<!\d[.,]){re.escape(spelling)}{end}", re.IGNORECASE)


def _plain(text: str) -> str:
    """Reduce all kinds of minus signs and spaces to one."""
    return re.sub(r"\s+", " ", re.sub("[−–‑]", "-", text))


def _written_out(text: str) -> str:
    """Write out contractions."""
    text = _plain(text).replace("’", "'").casefold()
    return text.replace("can't", "cannot").replace("can not", "cannot").replace("n't", " not")


_Z = NormalDist().inv_cdf(0.975)

Graded = tuple[Question, Outcome, Grade]


@dataclass(frozen=True, slots=True)
class Share:
    """`num` of `of`, with Wilson's 95 % confidence interval of the true share (0 to 1 if `of` is 0)."""

    num: int
    of: int

    @property
    def value(self) -> float:
        return self.num / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.of:
            return 0.0, 1.0
        spread = _Z * math.sqrt(self.value * (1 - self.value) / self.of + _Z**2 / (4 * self.of**2))
        middle, whole = self.value + _Z**2 / (2 * self.of), 1 + _Z**2 / self.of
        return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)

    def to_dict(self) -> dict[str, object]:
        low, high = self.interval
        return {"num": self.num, "of": self.of, "low": round(low, 4), "high": round(high, 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """One way of answering over all its questions. Failed questions count as not answered in every number; `errors` counts them by
    error. Seconds and tokens are means over the others.
    """

    way: str
    num_questions: int
    in_evidence: Share
    is_right: Share
    cites_holder: Share
    num_invented: int
    is_refused: Share
    """Among questions that no page answers."""
    is_refused_wrongly: Share
    """Among questions that a page answers."""
    mean_support: float | None
    """Over the answers that cite a passage; None if there are none."""
    is_supported: Share
    """Answers without unsupported claims, among those that cite a passage."""
    mean_s: float
    mean_evaluated_tokens: float
    mean_completion_tokens: float
    errors: Mapping[str, int]

    @property
    def shares(self) -> dict[str, Share]:
        """The shares by their JSON names."""
        names = ("in_evidence", "is_right", "cites_holder", "is_refused", "is_refused_wrongly")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, object]:
        return {
            "way": self.way,
            "num_questions": self.num_questions,
            **{name: share.to_dict() for name, share in self.shares.items()},
            "num_invented": self.num_invented,
            "mean_support": None if self.mean_support is None else round(self.mean_support, 4),
            "is_supported": self.is_supported.to_dict(),
            "mean_s": round(self.mean_s, 3),
            "mean_evaluated_tokens": round(self.mean_evaluated_tokens, 1),
            "mean_completion_tokens": round(self.mean_completion_tokens, 1),
            "errors": dict(self.errors),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The number of questions that only one of two ways answers right, and the probability that chance alone gives so uneven a split."""

    way: str
    other: str
    num_only_way: int
    num_only_other: int

    @property
    def p_value(self) -> float:
        return sign_test(self.num_only_way, self.num_only_other)

    def to_dict(self) -> dict[str, object]:
        return {
            "way": self.way,
            "other": self.other,
            "right_only_in_way": self.num_only_way,
            "right_only_in_other": self.num_only_other,
            "p_value": round(self.p_value, 4),
        }


def tally(way: str, graded: Sequence[Graded]) -> Tally:
    answerable = [each for question, _, each in graded if question.is_answerable]
    others = [each for question, _, each in graded if not question.is_answerable]
    answered = [outcome for _, outcome, _ in graded if not outcome.error]
    supports = [outcome.support for outcome in answered if outcome.support is not None]
    return Tally(
        way=way,
        num_questions=len(graded),
        in_evidence=_share(each.in_evidence for each in answerable),
        is_right=_share(each.is_right for each in answerable),
        cites_holder=_share(each.cites_holder for each in answerable),
        num_invented=sum(each.num_invented for _, _, each in graded),
        is_refused=_share(each.is_refused for each in others),
        is_refused_wrongly=_share(each.is_refused for each in answerable),
        mean_support=_mean(supports) if supports else None,
        is_supported=_share(not each.unsupported_claims for each in answered if each.support is not None),
        mean_s=_mean([each.seconds for each in answered]),
        mean_evaluated_tokens=_mean([each.evaluated_tokens for each in answered]),
        mean_completion_tokens=_mean([each.completion_tokens for each in answered]),
        errors=dict(sorted(Counter(outcome.error for _, outcome, _ in graded if outcome.error).items())),
    )


def compare(way: str, graded: Sequence[Graded], other: str, others: Sequence[Graded]) -> Comparison:
    """Compare two ways on the questions that both were asked, matched by id."""
    theirs = {question.id: each.is_right for question, _, each in others}
    pairs = [(each.is_right, theirs[question.id]) for question, _, each in graded if question.id in theirs]
    return Comparison(way, other, sum(one and not two for one, two in pairs), sum(two and not one for one, two in pairs))


def sign_test(num: int, other: int) -> float:
    """Return the two-sided p-value of a sign test: the probability of a split at least this uneven by chance."""
    total = num + other
    return min(1.0, 2 * sum(math.comb(total, k) for k in range(min(num, other) + 1)) / (1 << total))


def _share(values: Iterable[bool]) -> Share:
    outcomes = list(values)
    return Share(sum(outcomes), len(outcomes))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
