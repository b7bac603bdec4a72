"""A question as full-text search sees it: words, quoted phrases, prefixes, and runs of Chinese, Japanese and Korean.

Text of a question never becomes syntax: what is looked for is letters, marks and digits, which each store puts into its own language
(localrag/kb/fts5.py for SQLite, localrag/kb/postgres/full_text.py for PostgreSQL).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from localrag.kb.schema import CJK, spaced
from localrag.terms import MAX_TERMS, STOP_WORDS, terms, words

MAX_PHRASE_WORDS = 12
"""A longer quotation is taken word by word: it would hardly stand within one chunk as it is written."""

_QUOTED = re.compile(r'"([^"]+)"|“([^“”]+)”|„([^„“”]+)[“”]|«([^«»]+)»|「([^「」]+)」|『([^『』]+)』')
_PREFIX = re.compile(r"(?<![\w*])(\w{2,})\*(?![\w*])")
_RUN = re.compile(f"({CJK.pattern}+)")

_SUFFIXES = ("ing", "ed", "es", "ation", "ness", "ment", "ly")
_MIN_STEM = 3


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that is looked for: words in lower case that follow each other, one space between two.

    With `is_prefix` the last of them is the beginning of a word, and each of `stems` counts as well: a store that keeps words by their
    stems has kept a shorter one where the prefix reaches into a suffix.
    """

    text: str
    is_prefix: bool = False
    stems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Query:
    """What is looked for among the words of chunks, and among their Chinese, Japanese and Korean characters, each of which is a word."""

    keyword: tuple[Term, ...] = ()
    characters: tuple[Term, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keyword or self.characters)


def parse(text: str) -> Query:
    """What is looked for; at most MAX_TERMS things, stop words set aside unless they stand in a phrase.

    `"two words"` in quotation marks of any kind are looked for as they follow each other, `word*` as the beginning of a word. Chinese,
    Japanese and Korean have no spaces between words: a run of characters is looked for by any two that follow each other.
    """
    keyword: dict[Term, None] = {}
    characters: dict[Term, None] = {}
    rest = unicodedata.normalize("NFC", text).lower()
    for quoted, phrase in list(_phrases(rest)):
        rest = rest.replace(quoted, " ", 1)
        if CJK.search(phrase):
            characters[Term(_words_of(phrase))] = None
        else:
            keyword[Term(phrase)] = None
    keyword |= {_beginning(" ".join(words(match[1]))): None for match in _PREFIX.finditer(rest) if words(match[1])}
    has_cjk = CJK.search(rest) is not None
    for term in terms(_PREFIX.sub(" ", rest)):
        for part in filter(None, _RUN.split(term)):
            if CJK.match(part):
                characters |= {Term(" ".join(pair)): None for pair in _pairs(part)}
                continue
            keyword[Term(part)] = None
            if has_cjk:  # it may stand amid such a run
                characters[Term(part)] = None
    return Query(tuple(keyword)[:MAX_TERMS], tuple(characters)[:MAX_TERMS])


def _phrases(text: str) -> Iterator[tuple[str, str]]:
    """What stands in quotation marks, with and without them, where it is more than one word and not too long."""
    for match in _QUOTED.finditer(text):
        found = words(next(filter(None, match.groups())))
        if 1 < len(found) <= MAX_PHRASE_WORDS or (len(found) == 1 and CJK.search(found[0])):
            yield match[0], " ".join(found)


def _beginning(text: str) -> Term:
    stems = {
        text[: -len(tail)] for suffix in _SUFFIXES for end in range(1, len(suffix) + 1) if text.endswith(tail := suffix[:end])
    } - STOP_WORDS
    return Term(text, is_prefix=True, stems=tuple(sorted(stem for stem in stems if len(stem) >= _MIN_STEM and " " not in text)))


def _words_of(phrase: str) -> str:
    return " ".join(spaced(phrase).split())


def _pairs(run: str) -> list[str]:
    return [run[at : at + 2] for at in range(len(run) - 1)] or [run]
