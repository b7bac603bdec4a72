"""A file and the words it holds, read once for all factors."""

from __future__ import annotations

import math
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from localrag.outline import language_of, outline
from localrag.terms import terms, words

MAX_WORD_CHARS = 64
"""A longer run of letters is data, not a word that a person would look for."""

_NAMING = frozenset(("heading", "class", "function", "type"))
_HEAD_END = re.compile(r"[({\n]")  # before it stands the name, after it parameters and bodies
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# The longest ending that leaves four letters goes. So does an "e", "y" or "s": cache and caching, query and queries, token and tokens meet.
_STEM = re.compile(
    r"([a-z]{4,}?)(?:i[zs](?:ations?|ers?|es?|ed|ing)|ations?|ators?|at(?:es?|ed|ing)|ings?|ions?|ies|ers?|ed|es|ly|e|s|y)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class File:
    """A file to score. `path` is its label, with / or \\ between folders; `modified` is in seconds since the epoch, None if unknown."""

    path: str
    text: str
    modified: float | None = None


class Rating(NamedTuple):
    """What one factor says of one file: `value` is 0 to 1, and `details` what it was computed from, fit for JSON."""

    value: float
    details: Mapping[str, object]


class Profile:
    """What the factors need to know of a file. `path` is normalised: / between folders, no `.` and no `..` that can be resolved."""

    def __init__(self, file: File) -> None:
        self.label = file.path
        self.path = normalised(file.path)
        self.text = file.text
        self.modified = file.modified

    @cached_property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @cached_property
    def stem(self) -> str:
        """The name up to its first dot: `view` for `view.spec.ts`. A hidden file's own dot does not count."""
        return self.name[:1] + self.name[1:].partition(".")[0]

    @cached_property
    def counts(self) -> Counter[str]:
        """`count_words` of the text."""
        return _stemmed(self._words)

    @cached_property
    def naming_counts(self) -> Counter[str]:
        """The same of what names things: the path, headings, and the names of the classes, functions and types that are defined."""
        pieces = (piece.text for piece in outline(self.text, language_of(self.name)) if piece.kind in _NAMING)
        return count_words("\n".join([self.path, *(_HEAD_END.split(text, maxsplit=1)[0] for text in pieces)]))

    @property
    def num_words(self) -> int:
        return self._words.total()

    @cached_property
    def _words(self) -> Counter[str]:
        return _counted(self.text)


def normalised(path: str) -> str:
    """A path label in one form, so that `./a//b.py`, `a\\b.py` and `a/b.py` are one file."""
    return posixpath.normpath(path.replace("\\", "/")) if path else ""


def task_terms(task: str) -> dict[str, str]:
    """The words of a task that are looked for: stem → the word as the task has it. An identifier counts whole and in its parts."""
    found: dict[str, str] = {}
    for word in terms(f"{_HUMP.sub(' ', task)} {task}"):
        found.setdefault(stem(word), word)
    return found


@lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """An English word in lower case without its ending: enough for "negotiation" to meet "negotiate", applied to both sides alike.

    Words with other than ASCII letters, and short ones, stay as they are.
    """
    match = _STEM.fullmatch(word)
    if match is None:
        return word
    bare = match[1]
    return bare[:-1] if bare[-1] == bare[-2] and bare[-1] not in "aeiou" else bare  # running meets run


def idf(num_files: int, num_holding: int) -> float:
    """The weight of a word by BM25's inverse document frequency, which is never 0 or less."""
    return math.log1p((num_files - num_holding + 0.5) / (num_holding + 0.5))


def count_words(text: str) -> Counter[str]:
    """How often each word stands in a text, by its stem; a word inside an identifier counts as a word too."""
    return _stemmed(_counted(text))


def _counted(text: str) -> Counter[str]:
    return Counter(words(unicodedata.normalize("NFC", text)))


def _stemmed(counted: Counter[str]) -> Counter[str]:
    stems: Counter[str] = Counter()
    for word, num in counted.items():
        if len(word) <= MAX_WORD_CHARS:
            for one in {stem(part.lower()) for part in (word, *_HUMP.split(word))}:
                stems[one] += num
    return stems
