"""Grade the outcome of a question against the known answer: by words, numbers and sources, never by a model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import chain
from statistics import NormalDist, fmean
from typing import Any, Self

from localrag.citation import without_tags
from localrag.grading.questions import Question, Source
from localrag.types import Citation

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
"""Phrases of an answer that says that the sources do not answer the question. "n't" is read as "not"."""

_NUMBERS = ("prompt_tokens", "evaluated_tokens", "completion_tokens")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "citations": (list, tuple),
    "passages": (list, tuple),
    "seconds": (int, float),
    **dict.fromkeys(_NUMBERS, (int,)),
}


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage as it was supplied to the model: the label that cites it, the document it is of, and its words."""

    label: str
    source: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a question. `text` is the final answer without reasoning, `passages` are those that the model was shown.

    `prompt` is a digest of the tokens sent, if there was one prompt. `evaluated_tokens` are those of all prompts that were not reused from
    another prompt of the same question. Without an answer, `error` is the name of the error and `error_text` its message.
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
    error: str = ""
    error_text: str = ""

    def to_dict(self) -> dict[str, object]:
        """Fit for JSON. `error` and `error_text` are left out if empty."""
        data = asdict(self)
        return {name: value for name, value in data.items() if value or name not in ("error", "error_text")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the result of `to_dict`. Raises TypeError or KeyError for anything else."""
        given = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        for each in fields(cls):
            if each.name in given and not isinstance(given[each.name], _KINDS.get(each.name, (str,))):
                raise TypeError(f"{each.name} is a {type(given[each.name]).__name__}")
        given["citations"] = tuple(Citation(str(each["label"]), bool(each["supplied"])) for each in given.get("citations", ()))
        given["passages"] = tuple(Passage(*(str(each[name]) for name in Passage.__slots__)) for each in given.get("passages", ()))
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The grade of one answer. For a question that no page answers, all but `num_invented` and `is_refused` are False.

    `in_evidence`: the supplied passages hold the answer. `is_right`: the text holds it. `cites_holder`: a cited source holds it.
    `num_invented`: citations of passages that were not supplied. `is_refused`: the text says that the sources do not answer, and holds no
    right answer beside that.
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
    """Whether a text has one spelling of each group as separate words or numbers, ignoring case and labels of sources."""
    text = _plain(without_tags(text))
    return all(any(_pattern(each).search(text) for each in group) for group in answers)


def is_refusal(text: str, phrases: Iterable[str] = REFUSALS) -> bool:
    """Whether a text holds one of the phrases, ignoring case."""
    said = _written_out(text)
    return any(_pattern(_written_out(phrase)).search(said) for phrase in phrases)


def is_page(source: str, page: str) -> bool:
    """Whether a document of a knowledge base is the page that a question names by the end of its path."""
    return source == page or source.endswith(f"/{page}")


def _is_held(question: Question, source: Source, passages: Sequence[Passage]) -> bool:
    """Whether one passage of the page holds the whole answer; of pages that stand together, passages of each of them together."""
    if isinstance(source, str):
        return any(is_met(question.answers, each.text) for each in passages if is_page(each.source, source))
    texts = {page: [each.text for each in passages if is_page(each.source, page)] for page in source}
    return all(texts.values()) and is_met(question.answers, "\n".join(chain.from_iterable(texts.values())))


def _is_cited(source: Source, cited: Iterable[str]) -> bool:
    pages = (source,) if isinstance(source, str) else source
    return all(any(is_page(each, page) for each in cited) for page in pages)


@lru_cache(maxsize=4096)
def _pattern(spelling: str) -> re.Pattern[str]:
    """A pattern for a spelling. A number does not match inside a longer one, such as 75 in 0.75; a unit may follow it directly."""
    spelling = _plain(spelling)
    end = r"(?![.,]?\d)" if spelling[-1].isdigit() else r"(?!\w)"
    return re.compile(rf"(?<!\w)(?<!\d[.,]){re.escape(spelling)}{end}", re.IGNORECASE)


def _plain(text: str) -> str:
    """Text with one kind of minus and of space."""
    return re.sub(r"\s+", " ", re.sub("[−–‑]", "-", text))


def _written_out(text: str) -> str:
    """Text without contractions."""
    text = _plain(text).replace("’", "'").casefold()
    return text.replace("can't", "cannot").replace("can not", "cannot").replace("n't", " not")


_Z = NormalDist().inv_cdf(0.975)

Graded = tuple[Question, Outcome, Grade]


@dataclass(frozen=True, slots=True)
class Share:
    """`num` of `of`, with Wilson's 95 % confidence interval of the true share: 0 to 1 if `of` is 0."""

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
    """One way over all its questions. Failed questions count as not answered in every number; `errors` counts them by error. Seconds and
    tokens are means over the others.
    """

    way: str
    num_questions: int
    in_evidence: Share
    is_right: Share
    cites_holder: Share
    num_invented: int
    is_refused: Share
    """Among the questions that no page answers."""
    is_refused_wrongly: Share
    """Among the others."""
    mean_s: float
    mean_evaluated_tokens: float
    mean_completion_tokens: float
    errors: Mapping[str, int]

    @property
    def shares(self) -> dict[str, Share]:
        """By their names in JSON."""
        names = ("in_evidence", "is_right", "cites_holder", "is_refused", "is_refused_wrongly")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, object]:
        return {
            "way": self.way,
            "num_questions": self.num_questions,
            **{name: share.to_dict() for name, share in self.shares.items()},
            "num_invented": self.num_invented,
            "mean_s": round(self.mean_s, 3),
            "mean_evaluated_tokens": round(self.mean_evaluated_tokens, 1),
            "mean_completion_tokens": round(self.mean_completion_tokens, 1),
            "errors": dict(self.errors),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The number of questions that only one of two ways answers right, and the probability of so uneven a split by chance."""

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
    return Tally(
        way=way,
        num_questions=len(graded),
        in_evidence=_share(each.in_evidence for each in answerable),
        is_right=_share(each.is_right for each in answerable),
        cites_holder=_share(each.cites_holder for each in answerable),
        num_invented=sum(each.num_invented for _, _, each in graded),
        is_refused=_share(each.is_refused for each in others),
        is_refused_wrongly=_share(each.is_refused for each in answerable),
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
    """The two-sided p-value of a sign test: the probability of a split at least this uneven by chance."""
    total = num + other
    return min(1.0, 2 * sum(math.comb(total, k) for k in range(min(num, other) + 1)) / (1 << total))


def _share(values: Iterable[bool]) -> Share:
    found = list(values)
    return Share(sum(found), len(found))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
