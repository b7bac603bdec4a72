"""The full text of a server: index, search and check it.

PostgreSQL's parser takes hyphens, dots, slashes and signs as parts of words, addresses and numbers. So texts and queries alike are reduced
to words separated by spaces, in lower case and without accents.

PostgreSQL's rank ignores how rare a word is. But its rank of one word in one text tells how often the word occurs there, which gives a BM25
score like SQLite's; the length of a text is the number of its different words, compared with the mean of the matching texts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Literal

from localrag.kb.filters import Where
from localrag.kb.postgres.database import Database
from localrag.kb.query import Term
from localrag.text.terms import CJK, spaced, words

FullText = Literal["words", "characters"]
"""A column of `chunks`. Words are stemmed; characters are Chinese, Japanese or Korean, each a word by itself."""

FULL_TEXTS: tuple[FullText, ...] = ("words", "characters")

CONFIGURATION: dict[FullText, str] = {"words": "words", "characters": "simple"}

_ACCENTS = re.compile("[\u0300-\u036f]")
_MAX_WORD_CHARS = 255  # a word of 2 kB and more is an error in a query

_K1, _B = 1.2, 0.75  # as in SQLite's BM25

# PostgreSQL's rank of one word is 0.1 × 6/π² × (1 + 1/4 + 1/9 …), with as many summands as there are occurrences; what is missing of the
# whole sum after n of them is nearly 1 / (n + 1/2). A phrase counts once.
_OFTEN = """CASE WHEN numnode(query) = 1 THEN 1 / (1.644934 - least(1.62, 16.44934 * ts_rank({}, query)::float8)) - 0.5 ELSE 1 END"""


def plain(text: str) -> str:
    """The normalised words of a text, separated by spaces."""
    lower = text.lower()
    if not lower.isascii():
        lower = unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFD", lower)))
    return " ".join(word[:_MAX_WORD_CHARS] for word in words(lower))


def indexed(heading: str, text: str) -> tuple[str, str | None]:
    """The two indexed texts of a chunk; the second is None without CJK characters."""
    both = f"{heading}\n{text}"
    return plain(both), plain(spaced(both)) if CJK.search(both) else None


def compiled(term: Term, name: FullText) -> tuple[str, list[str]]:
    """An SQL expression for the tsquery of a term, and its values."""
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
    """A SELECT of the ids of matching documents, and its values."""
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
            "(id IN (SELECT document_id FROM entries WHERE entry = ANY(%s::bytea[]) GROUP BY document_id HAVING count(*) = %s) "
            "OR (source = %s AND id NOT IN (SELECT document_id FROM texts)))",
        )
        values += [where.entries(), len(where.equal), where.equal_source()]
    return f"SELECT id FROM documents WHERE {' AND '.join(parts) or 'true'}", values  # noqa: S608  # the parts above


def _like(glob: str) -> str:
    return re.sub(r"[\\%_]", r"\\\g<0>", glob).replace("*", "%").replace("?", "_")


def best(db: Database, name: FullText, terms: Sequence[Term], limit: int, where: Where | None) -> list[tuple[int, float]]:
    """(chunk id, score, higher is better) of the chunks that best match any of the terms; ties by id."""
    wanted, values = _wanted(name, terms)
    chosen, more = "", list[object]()
    if where:
        inside, more = passing(where)
        chosen = f"WHERE id IN (SELECT id FROM chunks WHERE document_id IN ({inside}))"  # noqa: S608  # no values in it
    statement = f"""WITH
        wanted (n, query) AS MATERIALIZED ({wanted}),
        held AS MATERIALIZED (
            SELECT n, id, {_OFTEN.format(name)} AS often, length({name})::float8 AS size FROM wanted JOIN chunks ON {name} @@ query
        ),
        counted AS (SELECT (SELECT count(*) FROM chunks)::float8 AS num, avg(size) AS mean FROM held),
        weights AS (
            SELECT n, ln(1 + (num - count(*) + 0.5::float8) / (count(*) + 0.5::float8)) AS weight
            FROM held CROSS JOIN counted GROUP BY n, num
        )
        SELECT id, sum(weight * often * {1 + _K1} / (often + {_K1} * ({1 - _B} + {_B} * size / mean)) ORDER BY n) AS score
        FROM held JOIN weights USING (n) CROSS JOIN counted {chosen} GROUP BY id ORDER BY score DESC, id LIMIT %s"""  # noqa: S608  # our own names
    return [(one, float(score)) for one, score in db.rows(statement, (*values, *more, limit))]


def holders(db: Database, name: FullText, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
    """For each term, the number of chunks that match it, and the ids of `among` that do."""
    if not terms:
        return []
    wanted, values = _wanted(name, terms)
    rows = db.rows(
        f"WITH wanted (n, query) AS MATERIALIZED ({wanted}) "  # noqa: S608  # our own names
        "SELECT count(id), array_agg(id) FILTER (WHERE id = ANY(%s::bigint[])) "
        f"FROM wanted LEFT JOIN chunks ON {name} @@ query GROUP BY n ORDER BY n",
        (*values, list(among)),
    )
    return [(num, found or []) for num, found in rows]


def is_sound(db: Database, name: FullText, texts: Iterator[list[tuple[int, str, str]]]) -> bool:
    """Whether a full-text index agrees with the chunks; `texts` are (chunk id, heading, text) of all, in batches."""
    changed = (
        f"SELECT 1 FROM unnest(%s::bigint[], %s::text[]) AS wanted (chunk_id, said) JOIN chunks ON id = chunk_id "  # noqa: S608  # our own names
        f"WHERE {name} IS DISTINCT FROM to_tsvector('{CONFIGURATION[name]}', said) LIMIT 1"
    )
    return not any(db.rows(changed, _said(name, rows)) for rows in texts)


def rebuild(db: Database, name: FullText, texts: Iterator[list[tuple[int, str, str]]]) -> None:
    """Rebuild a full-text index from the chunks."""
    for rows in texts:
        db.rows(
            f"UPDATE chunks SET {name} = to_tsvector('{CONFIGURATION[name]}', said) "  # noqa: S608  # our own names
            "FROM unnest(%s::bigint[], %s::text[]) AS wanted (chunk_id, said) WHERE id = chunk_id",
            _said(name, rows),
        )


def _wanted(name: FullText, terms: Sequence[Term]) -> tuple[str, list[str]]:
    """A list of (number, tsquery), and its values."""
    rows, values = [], list[str]()
    for number, term in enumerate(terms):
        query, some = compiled(term, name)
        rows.append(f"({number}, {query})")
        values += some
    return f"VALUES {', '.join(rows)}", values


def _said(name: FullText, rows: list[tuple[int, str, str]]) -> tuple[list[int], list[str | None]]:
    both = [indexed(heading, text) for _, heading, text in rows]
    return [one for one, _, _ in rows], [words if name == "words" else characters for words, characters in both]
