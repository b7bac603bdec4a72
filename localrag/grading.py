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
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from pydantic import Field as Limits

from localrag.citation import without_tags
from localrag.errors import UsageError
from localrag.files import check_regular, read_lines, read_object
from localrag.types import Citation, Message

MAX_LINE_BYTES = 256 * 1024
MAX_QUESTIONS = 10_000
_LIKE = '{"id": "q1", "question": "…", "answers": [["…"]], "sources": ["…"]}'
_CONVERSATION_LIKE = '{"id": "c1", "messages": [{"role": "user", "content": "…"}], "relevant": ["…"]}'
_REFUSALS, _MESSAGES = "refusals", "messages"
_Item = TypeVar("_Item")
_Model = TypeVar("_Model", bound=BaseModel)

Source = str | tuple[str, ...]
"""A page with the whole answer in one passage, or several pages whose passages contain it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question. `answers` are groups of spellings: a right answer has one of each group.

    `sources` are alternatives, each the end of a path in the knowledge base. Without sources, no page answers the question.

    The last question of a conversation has the `messages` up to and including it, and may have the name of the `collection` that it is
    from. Its sources are documents relevant to it, and its answers are not known.
    """

    id: str
    question: str
    answers: tuple[tuple[str, ...], ...] = ()
    sources: tuple[Source, ...] = ()
    messages: tuple[Message, ...] = ()
    collection: str = ""
    is_judged: bool = True
    """Whether it is known if the documents answer the question."""

    @property
    def is_answerable(self) -> bool:
        return bool(self.answers or self.sources)

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


class _Turn(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, StringConstraints(max_length=MAX_LINE_BYTES)]  # a limit makes pydantic refuse lone surrogates


class _Conversation(BaseModel):
    """A conversation in the format of MTRAG. Keys that nothing here needs, such as the reference answer, are ignored."""

    model_config = ConfigDict(strict=True)

    id: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    messages: Annotated[list[_Turn], Limits(min_length=1, max_length=1000)]
    relevant: Annotated[list[_Page], Limits(max_length=1000)] = []
    collection: Annotated[str, StringConstraints(max_length=200)] = ""
    answerability: Literal["answerable", "partial", "unanswerable", "underspecified", "conversational", ""] = ""


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
        like = _CONVERSATION_LIKE if model is _Conversation else _LIKE
        raise UsageError(f"{place or 'it'}: {fault['msg'][:200]}.", hint=f"Write {like} on each line.") from None


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
        if _MESSAGES in row:
            self._add_conversation(number, _checked(_Conversation, row))
        elif _REFUSALS not in row:
            self._add(number, _checked(_Line, row))
        elif self.questions or self.refusals is not None:
            raise UsageError("refusals must be on the first line.")
        else:
            self.refusals = tuple(_checked(_Head, row).refusals)

    def _number(self, number: int, one: str) -> None:
        if (first := self._lines.setdefault(one, number)) != number:
            raise UsageError(f"its id {one!r} is already used on line {first}.", hint="Give each question a different id.")
        if len(self.questions) == MAX_QUESTIONS:
            raise UsageError(f"there are more than {MAX_QUESTIONS} questions.", hint="Split the file.")

    def _add_conversation(self, number: int, line: _Conversation) -> None:
        self._number(number, line.id)
        *_, last = line.messages
        if last.role != "user" or not last.content.strip():
            raise UsageError("its messages do not end with a question.", hint='The last message has the role "user" and a text.')
        if line.relevant and line.answerability == "unanswerable":
            raise UsageError("it is unanswerable but has relevant documents.", hint='Leave "relevant" empty.')
        self.questions.append(
            Question(
                id=line.id,
                question=last.content.strip(),
                sources=tuple(dict.fromkeys(line.relevant)),
                messages=tuple(Message(turn.role, turn.content) for turn in line.messages),
                collection=line.collection,
                is_judged=bool(line.relevant) or line.answerability == "unanswerable",
            )
        )

    def _add(self, number: int, line: _Line) -> None:
        self._number(number, line.id)
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

_NUMBERS = ("prompt_tokens", "evaluated_tokens", "completion_tokens", "evidence_tokens")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "citations": (list, tuple),
    "passages": (list, tuple),
    "support": (int, float, type(None)),
    "unsupported_claims": (list, tuple),
    "seconds": (int, float),
    "first_token_s": (int, float),
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
    reused from another prompt of the same question, `evidence_tokens` those of passages. `first_token_s` is the time to the
    first token. Both are 0 for a council. Without an answer, `error` is the name of the error and `error_text` its message.
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
    evidence_tokens: int = 0
    first_token_s: float = 0.0
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
    """The grade of one answer. For a question that no page answers, all but `num_invented` and `is_refused` are False. `is_right`
    is False if the right answer is not known.

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
    is_right = bool(question.answers) and is_met(question.answers, outcome.text)
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
    mean_first_token_s: float
    mean_prompt_tokens: float
    mean_evidence_tokens: float
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
            "mean_first_token_s": round(self.mean_first_token_s, 3),
            "mean_prompt_tokens": round(self.mean_prompt_tokens, 1),
            "mean_evidence_tokens": round(self.mean_evidence_tokens, 1),
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
        is_right=_share(each.is_right for question, _, each in graded if question.answers),
        cites_holder=_share(each.cites_holder for each in answerable),
        num_invented=sum(each.num_invented for _, _, each in graded),
        is_refused=_share(each.is_refused for each in others),
        is_refused_wrongly=_share(each.is_refused for each in answerable),
        mean_support=_mean(supports) if supports else None,
        is_supported=_share(not each.unsupported_claims for each in answered if each.support is not None),
        mean_s=_mean([each.seconds for each in answered]),
        mean_first_token_s=_mean([each.first_token_s for each in answered]),
        mean_prompt_tokens=_mean([each.prompt_tokens for each in answered]),
        mean_evidence_tokens=_mean([each.evidence_tokens for each in answered]),
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


MAX_RUN_LINE_BYTES = 16 * 1024 * 1024
NUM_RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 100
_TAIL = 0.025
_SHARES = ("in_evidence", "is_right", "cites_holder")
_MEANS = ("evidence_tokens", "prompt_tokens", "evaluated_tokens", "completion_tokens", "first_token_s", "seconds")


Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The lines of two runs about one question."""


@dataclass(frozen=True, slots=True)
class Run:
    """The lines of an --out file of `localrag eval`, by way and question id."""

    path: Path
    rows: Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """A measure of two runs on the same questions: `a` and `b` are its means, shares included.

    `low` to `high` is the 95 % confidence interval of `difference`, by a paired bootstrap with a fixed seed. `p_value` is of the exact
    McNemar test for a yes/no measure, for which `num_only_a` and `num_only_b` count the questions with a yes in one run only, and of the
    bootstrap for others.
    """

    measure: str
    num_pairs: int
    a: float
    b: float
    low: float
    high: float
    p_value: float
    is_mean: bool = True
    num_only_a: int = 0
    num_only_b: int = 0

    @property
    def difference(self) -> float:
        return self.b - self.a

    def to_dict(self) -> dict[str, object]:
        numbers = {name: round(getattr(self, name), 6) for name in ("a", "b", "difference", "low", "high", "p_value")}
        only = {} if self.is_mean else {"only_a": self.num_only_a, "only_b": self.num_only_b}
        return {"measure": self.measure, "num_pairs": self.num_pairs, **numbers, **only}


@dataclass(frozen=True, slots=True)
class PairedTests:
    """A way of one run and a way of another, compared by every measure that both have."""

    way: str
    other: str
    tests: Sequence[PairedTest]

    def to_dict(self) -> dict[str, object]:
        return {"way_a": self.way, "way_b": self.other, "tests": [each.to_dict() for each in self.tests]}


def read_run(path: Path) -> Run:
    """Read an --out file. Raises UsageError with the number of a line that an evaluation cannot have written."""
    check_regular(path, "Give an --out file of localrag eval.")
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for number, raw in read_lines(path, MAX_RUN_LINE_BYTES):
        try:
            row = {} if raw is None else read_object(raw, "the measures of a question")
        except UsageError:
            row = {}
        one, way, kind = row.get("id"), row.get("way"), _kind(row)
        if not isinstance(one, str) or not isinstance(way, str) or not kind:
            raise UsageError(
                f"Line {number} of {path} was not written by an evaluation.", hint="Give two --out files of localrag eval.", line=number
            )
        if one in rows.setdefault(way, {}):
            raise UsageError(f"Line {number} of {path} repeats {one[:80]!r} by {way[:80]!r}.", hint="Measure again.", line=number)
        rows[way][one] = row
    if not rows:
        raise UsageError(f"{path} has no answers.", hint="Give two --out files of localrag eval.")
    return Run(path, rows)


def _kind(row: Mapping[str, Any]) -> str:
    """Return "scores" for a line of a retrieval measurement, "grade" for an answer, "" for anything else."""

    def is_numbers(values: object, names: Iterable[str]) -> bool:
        return isinstance(values, dict) and all(isinstance(values.get(name), int | float) for name in names)

    scores = row.get("scores")
    if isinstance(scores, dict) and scores and is_numbers(scores, scores):
        return "scores"
    if not is_numbers(row.get("grade"), (*_SHARES, "is_refused", "num_invented")):
        return ""
    means = [name for name in _MEANS if name in row]
    return "grade" if isinstance(row.get("question"), str) and is_numbers(row, means) else ""


def compare_runs(a: Run, b: Run) -> list[PairedTests]:
    """Compare every way that both runs have, or the only way of each. Raises UsageError if the runs do not pair."""
    ways = [(way, way) for way in a.rows if way in b.rows]
    if len(a.rows) == len(b.rows) == 1:
        ways = list(zip(a.rows, b.rows, strict=True))
    if not ways:
        names = (", ".join(repr(way[:80]) for way in run.rows) for run in (a, b))
        raise UsageError("The files have no way in common: {} and {}.".format(*names), hint="Measure both in the same way.")
    return [PairedTests(way, other, _paired_tests(a, way, b, other)) for way, other in ways]


def _paired_tests(a: Run, way: str, b: Run, other: str) -> list[PairedTest]:
    pairs = _pairs(a, way, b, other)
    if _kind(pairs[0][0]) == "scores":
        names = [name for name in pairs[0][0]["scores"] if all(name in row["scores"] for pair in pairs for row in pair)]
        return [paired_test(name, [(float(one["scores"][name]), float(two["scores"][name])) for one, two in pairs]) for name in names]

    def by_grade(measure: str, name: str, pairs: Sequence[Pair]) -> list[PairedTest]:
        values = [(bool(one["grade"][name]), bool(two["grade"][name])) for one, two in pairs]
        return [paired_test(measure, values)] if values else []

    answerable = [pair for pair in pairs if all(row.get("answerable", True) for row in pair)]
    others = [pair for pair in pairs if not any(row.get("answerable", True) for row in pair)]
    tests = [test for name in _SHARES for test in by_grade(name, name, _with_answers(answerable) if name == "is_right" else answerable)]
    tests += by_grade("is_refused", "is_refused", others) + by_grade("is_refused_wrongly", "is_refused", answerable)
    tests.append(
        paired_test("num_invented", [(float(one["grade"]["num_invented"]), float(two["grade"]["num_invented"])) for one, two in pairs])
    )
    whole = [pair for pair in pairs if not any(row.get("error") for row in pair)]
    cited = [pair for pair in whole if all(isinstance(row.get("support"), int | float) for row in pair)]
    if cited:
        tests.append(paired_test("support", [(float(one["support"]), float(two["support"])) for one, two in cited]))
        claims = [tuple(bool(row.get("unsupported_claims")) for row in pair) for pair in cited]
        tests.append(paired_test("has_unsupported_claims", [(one, two) for one, two in claims]))
    names = [name for name in _MEANS if whole and all(name in row for pair in whole for row in pair)]
    return tests + [paired_test(name, [(float(one[name]), float(two[name])) for one, two in whole]) for name in names]


def _with_answers(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if all(row.get("has_answers", True) for row in pair)]


def _pairs(a: Run, way: str, b: Run, other: str) -> list[Pair]:
    ones, others = a.rows[way], b.rows[other]
    for run, own, theirs in ((b, others, ones), (a, ones, others)):
        if missing := [one for one in theirs if one not in own]:
            raise UsageError(
                f"{run.path} lacks {len(missing)} of the questions of the other file, such as {missing[0][:80]!r}.",
                hint="Measure both on the same questions.",
            )
    pairs = [(row, others[one]) for one, row in ones.items()]
    for one, two in pairs:
        if _kind(one) != _kind(two):
            raise UsageError("One file measures retrieval, the other answers.", hint="Compare files of the same command.")
        if one.get("question") != two.get("question"):
            raise UsageError(f"The files ask different questions as {one['id'][:80]!r}.", hint="Measure both on the same questions.")
    return pairs


def paired_test(measure: str, pairs: Sequence[tuple[float, float]]) -> PairedTest:
    """Test whether the second values differ from the first. Bools are a yes/no measure; there must be at least one pair."""
    is_mean = not all(isinstance(value, bool) for pair in pairs for value in pair)
    only_a, only_b = (sum(bool(pair[at]) and not pair[1 - at] for pair in pairs) for at in (0, 1))
    low, high, p_value = bootstrap([two - one for one, two in pairs])
    return PairedTest(
        measure=measure,
        num_pairs=len(pairs),
        a=fmean(one for one, _ in pairs),
        b=fmean(two for _, two in pairs),
        low=low,
        high=high,
        p_value=p_value if is_mean else sign_test(only_a, only_b),
        is_mean=is_mean,
        num_only_a=only_a,
        num_only_b=only_b,
    )


def bootstrap(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the 95 % percentile interval of the mean difference, and the two-sided p-value of no difference.

    The means are those of NUM_RESAMPLES samples with replacement. The seed is fixed, so the same input gives the same result.
    """
    import numpy as np  # noqa: PLC0415  # heavy

    values, rng = np.array(differences, dtype=np.float64), np.random.default_rng(0)
    samples = (rng.integers(0, len(values), (_RESAMPLES_AT_ONCE, len(values))) for _ in range(NUM_RESAMPLES // _RESAMPLES_AT_ONCE))
    means = np.concatenate([values[sample].mean(axis=1) for sample in samples])
    low, high = np.quantile(means, (_TAIL, 1 - _TAIL))
    tail = min((means <= 0).sum(), (means >= 0).sum())
    return float(low), float(high), min(1.0, 2 * (int(tail) + 1) / (NUM_RESAMPLES + 1))
