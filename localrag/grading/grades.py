"""Grade the outcome of a question against the known answer: by words, numbers and sources, never by a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import chain
from typing import Any, Self

from localrag.citation import without_tags
from localrag.grading.questions import Question, Source
from localrag.passages import Citation

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
