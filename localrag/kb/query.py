"""A question as full-text search sees it: words, quoted phrases, prefixes, and runs of Chinese, Japanese and Korean.

Text of a question never becomes syntax: what goes into an FTS5 expression is letters and digits inside quotation marks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localrag.kb.schema import CJK
from localrag.terms import MAX_TERMS, STOP_WORDS, terms, words

MAX_PHRASE_WORDS = 12
"""A longer quotation is taken word by word: it would hardly stand within one chunk as it is written."""

_QUOTED = re.compile(r'"([^"]+)"|“([^“”]+)”|„([^„“”]+)[“”]|«([^«»]+)»|「([^「」]+)」|『([^『』]+)』')
_PREFIX = re.compile(r"(?<![\w*])(\w{2,})\*(?![\w*])")
_RUN = re.compile(f"({CJK.pattern}+)")
_TRIGRAM = 3

_SUFFIXES = ("ing", "ed", "es", "ation", "ness", "ment", "ly")
_MIN_STEM = 3


@dataclass(frozen=True, slots=True)
class Query:
    """FTS5 expressions, each for one thing that is looked for: those for the words of chunks, and those for their trigrams."""

    keyword: tuple[str, ...] = ()
    trigram: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keyword or self.trigram)


def parse(text: str) -> Query:
    """What is looked for; at most MAX_TERMS things, stop words set aside unless they stand in a phrase.

    `"two words"` in quotation marks of any kind are looked for as they follow each other, `word*` as the beginning of a word. Chinese,
    Japanese and Korean have no spaces between words: a run of three characters or more is looked for by any three that follow each
    other, a shorter one at the beginning of a clause.
    """
    keyword: dict[str, None] = {}
    trigram: dict[str, None] = {}
    rest = unicodedata.normalize("NFC", text).lower()
    for quoted, phrase in list(_phrases(rest)):
        rest = rest.replace(quoted, " ", 1)
        if CJK.search(phrase) and len(phrase) >= _TRIGRAM:
            trigram[_exactly(phrase)] = None
        else:
            keyword[_exactly(phrase)] = None
    keyword |= {_beginning(" ".join(words(match[1]))): None for match in _PREFIX.finditer(rest) if words(match[1])}
    has_cjk = CJK.search(rest) is not None
    for term in terms(_PREFIX.sub(" ", rest)):
        if not has_cjk:
            keyword[_exactly(term)] = None
            continue
        for part in filter(None, _RUN.split(term)):
            if not CJK.match(part):
                keyword[_exactly(part)] = None
            elif len(part) < _TRIGRAM:
                keyword[_exactly(part) + "*"] = None
            if len(part) >= _TRIGRAM:  # a word of another script, too: it may stand amid such a run
                pieces = _trigrams(part) if CJK.match(part) else [part]
                trigram |= {_exactly(piece): None for piece in pieces}
    return Query(tuple(keyword)[:MAX_TERMS], tuple(trigram)[:MAX_TERMS])


def any_of(expressions: Sequence[str]) -> str:
    """The expression that any of these matches."""
    return " OR ".join(expressions)


def _phrases(text: str) -> Iterator[tuple[str, str]]:
    """What stands in quotation marks, with and without them, where it is more than one word and not too long."""
    for match in _QUOTED.finditer(text):
        found = words(next(filter(None, match.groups())))
        if 1 < len(found) <= MAX_PHRASE_WORDS or (len(found) == 1 and CJK.search(found[0])):
            yield match[0], " ".join(found)


def _exactly(text: str) -> str:
    return f'"{text}"'


def _beginning(text: str) -> str:
    """Words are stored by their stems: where a prefix reaches into a suffix, the stem is shorter than the prefix."""
    stems = {
        text[: -len(tail)] for suffix in _SUFFIXES for end in range(1, len(suffix) + 1) if text.endswith(tail := suffix[:end])
    } - STOP_WORDS
    exact = sorted(stem for stem in stems if len(stem) >= _MIN_STEM and " " not in text)
    return " OR ".join([f"{_exactly(text)}*", *map(_exactly, exact)])


def _trigrams(run: str) -> list[str]:
    return [run[at : at + _TRIGRAM] for at in range(len(run) - _TRIGRAM + 1)]
