"""Searching the full text of a server, and keeping it to what the chunks say.

PostgreSQL's own rank does not know how rare a word is. What it says of one word in one text gives back how often the word stands there, and
with that the score is BM25, as SQLite's; a text's length is the number of its different words, compared with the mean of those that match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localrag.kb.filters import Where
from localrag.kb.postgres.database import Database
from localrag.kb.postgres.full_text import CONFIGURATION, FullText, compiled, indexed, passing
from localrag.kb.query import Term

_K1, _B = 1.2, 0.75  # as in SQLite's BM25

# PostgreSQL's rank of one word is 0.1 × 6/π² × (1 + 1/4 + 1/9 …), with as many summands as there are occurrences; what is missing of the
# whole sum after n of them is nearly 1 / (n + 1/2). A phrase counts once.
_OFTEN = """CASE WHEN numnode(query) = 1 THEN 1 / (1.644934 - least(1.62, 16.44934 * ts_rank({}, query)::float8)) - 0.5 ELSE 1 END"""


def best(db: Database, name: FullText, terms: Sequence[Term], limit: int, where: Where | None) -> list[tuple[int, float]]:
    """(chunk id, score, higher for better) of the chunks that match any of these terms best; ties by id."""
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
    """For each term, how many chunks match it, and which of these do."""
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
    """Whether a full text says what the chunks say; `texts` are (chunk id, heading, text) of all, some at a time."""
    changed = (
        f"SELECT 1 FROM unnest(%s::bigint[], %s::text[]) AS wanted (chunk_id, said) JOIN chunks ON id = chunk_id "  # noqa: S608  # our own names
        f"WHERE {name} IS DISTINCT FROM to_tsvector('{CONFIGURATION[name]}', said) LIMIT 1"
    )
    return not any(db.rows(changed, _said(name, rows)) for rows in texts)


def rebuild(db: Database, name: FullText, texts: Iterator[list[tuple[int, str, str]]]) -> None:
    """Makes a full text say what the chunks say."""
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
