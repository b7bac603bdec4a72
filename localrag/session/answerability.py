"""How likely the sources answer a question, and what to say if they do not.

The probability is a logistic regression on two numbers of the search: how near the best passage comes, and how far it is ahead of the
fifth. `fit` learns it from questions whose answerability is known, `CalibrationFile` stores it for each embedder. The model that answers
takes no part (docs/measured.md has what was measured and left out).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from localrag.errors import UsageError
from localrag.files import JsonCache
from localrag.text.terms import CJK, STOP_WORDS, words
from localrag.types import Hit

NUM_COMPARED = 8
"""Number of passages to search for, however few are sent."""
LEAD_OVER = 5
"""The lead of the best passage is measured over this one, by relevance."""

MAX_WRONG = 0.08
"""Share of answerable questions that a calibration may refuse. Other collections than its own need a reserve to stay below 0.10."""
MIN_QUESTIONS = 10
"""Least number of questions of each kind to calibrate with."""
MAX_KEPT = 32
_PENALTY = 1.0
"""Ridge penalty on the weights of standardised features. It keeps them finite when a few questions are separated perfectly."""
_MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class Features:
    """What the search says about a question: `nearest` is the best relevance, `lead` its distance to the LEAD_OVER-th; both 0 to 1."""

    nearest: float
    lead: float

    @classmethod
    def of(cls, hits: Sequence[Hit]) -> Self:
        """Measure the first NUM_COMPARED hits of a search. A passage that was not found has a relevance of 0."""
        relevances = sorted((hit.relevance or 0.0 for hit in hits[:NUM_COMPARED]), reverse=True)
        nearest, other = (relevances[at] if at < len(relevances) else 0.0 for at in (0, LEAD_OVER - 1))
        return cls(nearest, nearest - other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerability:
    """The probability (0 to 1) that the sources answer a question. Below `threshold`, they do not.

    It is the logistic function of the sum of `contributions`.
    """

    threshold: float
    contributions: Mapping[str, float]

    @property
    def probability(self) -> float:
        return _logistic(sum(self.contributions.values()))

    @property
    def is_likely(self) -> bool:
        return self.probability >= self.threshold

    def to_dict(self) -> dict[str, object]:
        contributions = {name: round(value, 4) for name, value in self.contributions.items()}
        return {"probability": round(self.probability, 4), "threshold": round(self.threshold, 4), "contributions": contributions}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The weights of a logistic regression on Features, and the probability below which a question counts as unanswerable."""

    bias: float
    nearest: float
    lead: float
    threshold: float

    def assess(self, hits: Sequence[Hit]) -> Answerability:
        """Return the answerability of a question from the hits of its search, best first, each text once."""
        features = Features.of(hits)
        parts = {"bias": self.bias, "nearest": self.nearest * features.nearest, "lead": self.lead * features.lead}
        return Answerability(threshold=self.threshold, contributions=parts)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Read what `asdict` wrote. Raises ValueError for anything else."""
        names = cls.__slots__
        if not isinstance(data, dict) or set(data) != set(names):
            raise ValueError("an object with the fields of a calibration is needed")
        if not all(type(data[name]) in {int, float} and abs(data[name]) < _MAX_WEIGHT for name in names):
            raise ValueError("a number is out of bounds")
        return cls(**{name: float(data[name]) for name in names})


SHIPPED: Mapping[str, Calibration] = {
    # all-MiniLM-L6-v2
    "4208a88f08ceba7412a38321f3a3437e9b336be9ec663d5ebffe2de1dacf61f1": Calibration(bias=-3.93, nearest=8.84, lead=6.34, threshold=0.70),
}
"""Calibrations by the fingerprint of the embedder, fitted to the development part of MTRAG and to the handbook's questions."""


class CalibrationFile:
    """The file `answerability.json` in the home: the calibration of each embedder that `localrag eval --calibrate` has measured."""

    def __init__(self, home: Path | None) -> None:
        self._kept = JsonCache(None if home is None else home / "answerability.json", most=MAX_KEPT)

    def calibration(self, fingerprint: str) -> Calibration | None:
        """Return the calibration for an embedder: its own, or the shipped one. None if there is neither."""
        try:
            return Calibration.from_dict(self._kept.read().get(fingerprint))
        except ValueError:
            return SHIPPED.get(fingerprint)

    def save(self, fingerprint: str, calibration: Calibration) -> None:
        self._kept.put(fingerprint, asdict(calibration))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A question whose answerability is known."""

    features: Features
    is_answerable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """What a threshold does: the shares of answerable questions that are refused, and of unanswerable ones that are caught."""

    threshold: float
    refused_wrongly: float
    caught: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A calibration and how well it separates: on its own samples (`curve`), and on samples that it was not fitted to (`auc`, `unseen`)."""

    calibration: Calibration
    num_answerable: int
    num_unanswerable: int
    auc: float
    unseen: Refusals
    curve: tuple[Refusals, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit(samples: Sequence[Sample], *, num_folds: int = 5) -> Fit:
    """Fit a calibration by Newton's method, and cross-validate it. The threshold refuses at most MAX_WRONG of the answerable samples.

    Raises UsageError with fewer than MIN_QUESTIONS samples of either kind.
    """
    num_answerable = sum(each.is_answerable for each in samples)
    num_others = len(samples) - num_answerable
    if min(num_answerable, num_others) < MIN_QUESTIONS:
        raise UsageError(
            f"A calibration needs {MIN_QUESTIONS} questions that the sources answer and {MIN_QUESTIONS} that they do not, "
            f"not {num_answerable} and {num_others}.",
            hint='A question that no page answers has "answers": [] and no sources.',
        )
    ordered = sorted(samples, key=lambda each: each.is_answerable)  # every fold gets its share of both kinds
    unseen: list[tuple[float, bool]] = []
    outcomes: list[tuple[bool, bool]] = []
    for fold in range(num_folds):
        held_out = ordered[fold::num_folds]
        calibration = _fitted([each for at, each in enumerate(ordered) if at % num_folds != fold])
        probabilities = [(_probability(calibration, each), each.is_answerable) for each in held_out]
        unseen += probabilities
        outcomes += [(probability < calibration.threshold, is_answerable) for probability, is_answerable in probabilities]
    calibration = _fitted(samples)
    own = [(_probability(calibration, each), each.is_answerable) for each in samples]
    return Fit(
        calibration=calibration,
        num_answerable=num_answerable,
        num_unanswerable=num_others,
        auc=area(unseen),
        unseen=_refusals(calibration.threshold, outcomes),
        curve=tuple(refusals(own, at) for at in sorted([*(at / 10 for at in range(1, 10)), calibration.threshold])),
    )


def area(scored: Sequence[tuple[float, bool]]) -> float:
    """Return the AUC: the share of pairs of an answerable and an unanswerable question in which the former has the higher score."""
    yes, no = ([score for score, is_answerable in scored if is_answerable is kind] for kind in (True, False))
    return sum((one > other) + (one == other) / 2 for one in yes for other in no) / (len(yes) * len(no))


def refusals(scored: Sequence[tuple[float, bool]], threshold: float) -> Refusals:
    """Return what a threshold does to scored questions, given as (probability, is_answerable)."""
    return _refusals(threshold, [(probability < threshold, is_answerable) for probability, is_answerable in scored])


def _refusals(threshold: float, outcomes: Sequence[tuple[bool, bool]]) -> Refusals:
    wrongly, caught = ([is_refused for is_refused, is_answerable in outcomes if is_answerable is kind] for kind in (True, False))
    return Refusals(threshold=threshold, refused_wrongly=sum(wrongly) / len(wrongly), caught=sum(caught) / len(caught))


def _fitted(samples: Sequence[Sample]) -> Calibration:
    """Minimise the log loss with a ridge penalty by Newton's method, and set the threshold."""
    import numpy as np  # noqa: PLC0415  # heavy

    raw = np.array([[each.features.nearest, each.features.lead] for each in samples])
    mean, spread = raw.mean(axis=0), np.maximum(raw.std(axis=0), 1e-9)
    inputs = np.column_stack([np.ones(len(samples)), (raw - mean) / spread])
    targets = np.array([each.is_answerable for each in samples], dtype=float)
    penalty = np.diag([1e-9, _PENALTY, _PENALTY])
    weights = np.zeros(3)
    for _ in range(50):
        probabilities = 1 / (1 + np.exp(-inputs @ weights))
        gradient = inputs.T @ (probabilities - targets) + penalty @ weights
        hessian = (inputs.T * (probabilities * (1 - probabilities))) @ inputs + penalty
        step = np.linalg.solve(hessian, gradient)
        weights -= step
        if float(np.abs(step).max()) < 1e-9:
            break
    nearest, lead = (float(each) for each in weights[1:] / spread)
    bias = float(weights[0]) - nearest * float(mean[0]) - lead * float(mean[1])
    calibration = Calibration(bias=bias, nearest=nearest, lead=lead, threshold=0.0)
    answerable = sorted(_probability(calibration, each) for each in samples if each.is_answerable)
    return Calibration(bias=bias, nearest=nearest, lead=lead, threshold=answerable[int(MAX_WRONG * len(answerable))])


def _probability(calibration: Calibration, sample: Sample) -> float:
    return _logistic(calibration.bias + calibration.nearest * sample.features.nearest + calibration.lead * sample.features.lead)


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, value))))


UNCALIBRATED = (
    "Whether the sources answer the question is unknown, because the embedder is not calibrated. To calibrate it: "
    "localrag eval --qa FILE.jsonl --kb NAME --calibrate"
)
"""The warning if a question wants to be refused and cannot be."""

NOT_SAID: Mapping[str, str] = {
    "": "The sources do not say.",
    "cs": "Zdroje to neuvádějí.",
    "da": "Kilderne siger det ikke.",
    "de": "Die Quellen sagen dazu nichts.",
    "el": "Οι πηγές δεν το αναφέρουν.",
    "es": "Las fuentes no lo dicen.",
    "fi": "Lähteet eivät kerro sitä.",
    "fr": "Les sources ne le disent pas.",
    "hu": "A források ezt nem mondják meg.",
    "it": "Le fonti non lo dicono.",
    "ja": "資料には記載がありません。",
    "ko": "자료에 나와 있지 않습니다.",
    "nl": "De bronnen zeggen dat niet.",
    "no": "Kildene sier det ikke.",
    "pl": "Źródła tego nie podają.",
    "pt": "As fontes não o dizem.",
    "ro": "Sursele nu spun acest lucru.",
    "ru": "В источниках об этом не говорится.",
    "sv": "Källorna säger det inte.",
    "tr": "Kaynaklar bunu söylemiyor.",
    "zh": "资料中没有说明。",
}
"""Language → how to say that the sources do not answer. "" is English, which is also used for all others."""

_SCRIPTS = (("ja", "\u3040", "\u30ff"), ("ko", "\uac00", "\ud7a3"), ("zh", "\u4e00", "\u9fff"))

_GREETINGS = frozenset(
    """hello hi hey thanks thank bye goodbye good morning afternoon evening night ok okay great
    hallo guten tag morgen abend danke dir schön tschüss servus moin bonjour bonsoir salut merci beaucoup hola buenos buenas días tardes
    noches gracias muchas adiós ciao buongiorno buonasera grazie mille olá oi bom boa dia tarde noite obrigado obrigada goedemorgen
    goedendag dank bedankt dag привет здравствуйте спасибо добрый день 你好 您好 谢谢 谢谢你 こんにちは ありがとう おはよう 안녕 안녕하세요
    감사합니다""".split()  # noqa: SIM905  # a word list reads better as words
)


def not_said(question: str) -> str:
    """Return "The sources do not say." in the language of the question."""
    for language, first, last in _SCRIPTS:
        if any(first <= char <= last for char in question):
            return NOT_SAID[language]
    from localrag.text.languages import language_of  # noqa: PLC0415  # weight

    return NOT_SAID.get(language_of([question]), NOT_SAID[""])


def is_small_talk(text: str) -> bool:
    """Whether a message asks nothing that sources could answer: it consists of greetings, thanks and stop words, as "Hello!" does."""
    lowered = text.lower()
    if CJK.search(lowered):
        return "".join(words(lowered)) in _GREETINGS
    return all(word in _GREETINGS or word in STOP_WORDS for word in words(lowered))
