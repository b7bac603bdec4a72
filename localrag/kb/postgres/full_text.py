"""Text and what is looked for in it, in the language of PostgreSQL's full text.

Its parser takes hyphens, dots, slashes and signs for parts of words, addresses and numbers. It is therefore given words with spaces
between them, in lower case and without accents, on both sides alike.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from localrag.kb.filters import Where
from localrag.kb.query import Term
from localrag.kb.schema import CJK, spaced
from localrag.terms import words

FullText = Literal["words", "characters"]
"""A column of `chunks`. Words are reduced to their stems; characters are Chinese, Japanese or Korean, each a word by itself."""

FULL_TEXTS: tuple[FullText, ...] = ("words", "characters")

CONFIGURATION: dict[FullText, str] = {"words": "words", "characters": "simple"}

_ACCENTS = re.compile("[\u0300-\u036f]")
_MAX_WORD_CHARS = 255  # a word of 2 kB and more is an error in a query


def plain(text: str) -> str:
    """The words of a text as they are compared, a space between two."""
    lower = text.lower()
    if not lower.isascii():
        lower = unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFD", lower)))
    return " ".join(word[:_MAX_WORD_CHARS] for word in words(lower))


def indexed(heading: str, text: str) -> tuple[str, str | None]:
    """What goes into the two full texts of a chunk."""
    both = f"{heading}\n{text}"
    return plain(both), plain(spaced(both)) if CJK.search(both) else None


def compiled(term: Term, name: FullText) -> tuple[str, list[str]]:
    """An SQL expression, and its values, for the tsquery of a term."""
    exactly = f"phraseto_tsquery('{CONFIGURATION[name]}', %s::text)"
    text = plain(term.text)
    if not (term.is_prefix and text):
        return exactly, [text]
    before, _, last = text.rpartition(" ")
    parts, values = ["to_tsquery('simple', %s::text)"], [f"'{last}':*"]  # a quotation mark is no part of a word
    if before:
        parts, values = [f"({exactly} <-> {parts[0]})"], [before, *values]
    stems = [plain(stem) for stem in term.stems]
    return " || ".join([*parts, *[exactly] * len(stems)]), [*values, *stems]


def passing(where: Where) -> tuple[str, list[object]]:
    """A SELECT of the ids of the documents that pass, and its values."""
    parts: list[str] = []
    values: list[object] = []
    for key, globs in where.globs():
        patterns = [_like(glob) for glob in globs]
        if key == "source":
            parts.append("folded LIKE ANY (%s)")
            values.append(patterns)
        else:
            parts.append("id IN (SELECT document_id FROM fields WHERE key = %s AND folded LIKE ANY (%s))")
            values += [key, patterns]
    if where.equal:
        parts.append(
            "id IN (SELECT document_id FROM entries WHERE entry = ANY(%s::bytea[]) GROUP BY document_id HAVING count(*) = %s)",
        )
        values += [where.entries(), len(where.equal)]
    return f"SELECT id FROM documents WHERE {' AND '.join(parts) or 'true'}", values  # noqa: S608  # the parts above


def _like(glob: str) -> str:
    return re.sub(r"[\\%_]", r"\\\g<0>", glob).replace("*", "%").replace("?", "_")
