"""A question as full-text search sees it: words, quoted phrases, prefixes, and runs of Chinese, Japanese and Korean.

The text of a question never becomes syntax: terms are letters, marks and digits only, which each store writes in its own query language
(localrag/kb/store.py for SQLite, localrag/kb/postgres/full_text.py for PostgreSQL).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from localrag.terms import CJK, MAX_TERMS, STOP_WORDS, spaced, terms, words

MAX_PHRASE_WORDS = 12
"""A longer quotation is searched word by word: it would hardly stand in one chunk as written."""

_QUOTED = re.compile(r'"([^"]+)"|“([^“”]+)”|„([^„“”]+)[“”]|«([^«»]+)»|「([^「」]+)」|『([^『』]+)』')
_PREFIX = re.compile(r"(?<![\w*])(\w{2,})\*(?![\w*])")
_RUN = re.compile(f"({CJK.pattern}+)")

_SUFFIXES = ("ing", "ed", "es", "ation", "ness", "ment", "ly")
_MIN_STEM = 3


@dataclass(frozen=True, slots=True)
class Term:
    """A search term: consecutive words in lower case, separated by single spaces.

    With `is_prefix` the last word is the beginning of a word, and each of `stems` matches as well: a store that indexes words by their
    stems holds a shorter one if the prefix reaches into a suffix.
    """

    text: str
    is_prefix: bool = False
    stems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Query:
    """Search terms for the words of chunks, and for their Chinese, Japanese and Korean characters, each of which is a word."""

    keyword: tuple[Term, ...] = ()
    characters: tuple[Term, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keyword or self.characters)


def parse(text: str) -> Query:
    """Parse a question into at most MAX_TERMS terms of each kind, without stop words outside of phrases.

    `"two words"` in quotation marks of any kind are a phrase, `word*` is a prefix. Chinese, Japanese and Korean have no spaces between
    words: a run of characters is searched by its pairs.
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
    """(with quotation marks, without) of each quotation of 2 to MAX_PHRASE_WORDS words, or of one CJK word."""
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
