"""An answer compared with the one that is known: by words, numbers and sources, and never by a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain

from localrag.grading.outcomes import Outcome, Passage
from localrag.grading.questions import Question, Source
from localrag.passages import CITATION

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
"""An answer that holds one of these says that the sources do not hold what was asked for. "n't" is read as "not"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Of one answer. Of a question that no page answers, only `num_invented` and `is_refused` can be anything but False or 0.

    `in_evidence`: what was supplied holds the answer. `is_right`: so does what was said. `cites_holder`: a citation is of a source that
    holds it. `num_invented`: citations of what was not supplied. `is_refused`: it is said that the sources do not answer, and nothing
    right beside it.
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
    """Whether a text has one spelling of each group, in whatever case, as words and numbers of their own; labels of sources aside."""
    text = _plain(CITATION.sub(" ", text))
    return all(any(_pattern(each).search(text) for each in group) for group in answers)


def is_refusal(text: str, phrases: Iterable[str] = REFUSALS) -> bool:
    """Whether a text holds one of the phrases, in whatever case."""
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
    """A number is no part of a longer one, such as 75 of 0.75; a unit may stick to it."""
    spelling = _plain(spelling)
    end = r"(?![.,]?\d)" if spelling[-1].isdigit() else r"(?!\w)"
    return re.compile(rf"(?<!\w)(?<!\d[.,]){re.escape(spelling)}{end}", re.IGNORECASE)


def _plain(text: str) -> str:
    """With one kind of minus and of space."""
    return re.sub(r"\s+", " ", re.sub("[−–‑]", "-", text))


def _written_out(text: str) -> str:
    """Without contractions."""
    text = _plain(text).replace("’", "'").casefold()
    return text.replace("can't", "cannot").replace("can not", "cannot").replace("n't", " not")
