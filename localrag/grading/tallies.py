"""Add up the grades of one way of answering, and compare two ways on the same questions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from localrag.grading.grades import Grade, Outcome
from localrag.grading.questions import Question

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
