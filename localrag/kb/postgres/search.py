"""Search on a PostgreSQL server: full text with BM25 scores, and nearest vectors with pgvector.

PostgreSQL's parser treats hyphens, dots, slashes and signs as parts of words, addresses and numbers. Texts and queries are therefore both
reduced to lower-case words without accents, separated by spaces.

PostgreSQL's rank ignores how rare a word is. But the rank of a single word in a text reveals its term frequency, which is enough for a BM25
score like SQLite's. The length of a text is its number of distinct words, compared with the mean of the matching texts.

Vector search is exact or, for many vectors, follows an HNSW graph whose recall is measured.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from localrag.kb.filters import Where
from localrag.kb.postgres.database import Database, raw, vector
from localrag.kb.query import Term, Variant, has_phrase, variants
from localrag.kb.store import LANGUAGES
from localrag.text.languages import stemmed
from localrag.text.terms import CJK, spaced, words

if TYPE_CHECKING:
    import pgvector

    from localrag.kb.vector_cache import Vectors

FullText = Literal["words", "characters"]
"""A text-search column of `chunks`. Words are stemmed; each Chinese, Japanese or Korean character counts as a word."""

FULL_TEXTS: tuple[FullText, ...] = ("words", "characters")

CONFIGURATION: dict[FullText, str] = {"words": "words", "characters": "simple"}

Body = tuple[int, str, str, str]
"""(chunk id, heading, text, language) of a chunk to index."""

_MATCHES = """{} @@ query AND (scope = 'all' OR (scope = 'stems') = (language != ''))
    AND (language = '' OR other_ids IS NULL OR id = ANY(other_ids))"""
"""Whether a chunk matches a row of `_queries`. `other_ids` are the chunks in other languages than English that have a phrase."""

_ACCENTS = re.compile("[\u0300-\u036f]")
_MAX_WORD_CHARS = 255  # PostgreSQL rejects a query with a word of 2 kB or more

_K1, _B = 1.2, 0.75  # as in SQLite's BM25

# PostgreSQL's rank of a word with n occurrences is 0.1 × 6/π² × (1 + 1/4 + 1/9 + … + 1/n²). The rest of the infinite sum is nearly
# 1 / (n + 1/2), which gives n. A phrase counts as one occurrence.
_OFTEN = """CASE WHEN numnode(query) = 1 THEN 1 / (1.644934 - least(1.62, 16.44934 * ts_rank({}, query)::float8)) - 0.5 ELSE 1 END"""


def plain(text: str) -> str:
    """Normalise a text to words separated by spaces."""
    lower = text.lower()
    if not lower.isascii():
        lower = unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFD", lower)))
    return " ".join(word[:_MAX_WORD_CHARS] for word in words(lower))


def indexed(heading: str, text: str, language: str) -> tuple[str, str | None]:
    """Return the two texts of a chunk to index: words or their stems, and characters (None if the chunk has no CJK characters)."""
    both = f"{heading}\n{text}"
    return plain(stemmed(both, language)), plain(spaced(both)) if CJK.search(both) else None


def _compiled(variant: Variant, name: FullText) -> tuple[str, list[str]]:
    """Return an SQL expression for the tsquery of a form of a term, and its values."""
    exactly = f"phraseto_tsquery('{CONFIGURATION[name]}', %s::text)"
    text = plain(variant.text)
    if not (variant.is_prefix and text):
        return exactly, [text]
    before, _, last = text.rpartition(" ")
    beginning, value = "to_tsquery('simple', %s::text)", f"'{last}':*"  # words contain no quotation marks
    return (f"({exactly} <-> {beginning})", [before, value]) if before else (beginning, [value])


def passing(where: Where) -> tuple[str, list[object]]:
    """Return a SELECT of the ids of matching documents, and its values."""
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
    """Return (chunk id, BM25 score) of the chunks that best match any of the terms, best first, ties by id. Higher is better."""
    queries, values = _queries(db, name, terms, is_counted_together=False)
    selection, filter_values = "", list[object]()
    if where:
        matching, filter_values = passing(where)
        selection = f"WHERE id IN (SELECT id FROM chunks WHERE document_id IN ({matching}))"  # noqa: S608  # no values in it
    statement = f"""WITH
        queries (n, query, scope, other_ids) AS MATERIALIZED ({queries}),
        held AS MATERIALIZED (
            SELECT n, id, {_OFTEN.format(name)} AS often, length({name})::float8 AS size FROM queries JOIN chunks ON {_MATCHES.format(name)}
        ),
        counted AS (SELECT (SELECT count(*) FROM chunks)::float8 AS num, avg(size) AS mean FROM held),
        weights AS (
            SELECT n, ln(1 + (num - count(*) + 0.5::float8) / (count(*) + 0.5::float8)) AS weight
            FROM held CROSS JOIN counted GROUP BY n, num
        )
        SELECT id, sum(weight * often * {1 + _K1} / (often + {_K1} * ({1 - _B} + {_B} * size / mean)) ORDER BY n) AS score
        FROM held JOIN weights USING (n) CROSS JOIN counted {selection} GROUP BY id ORDER BY score DESC, id LIMIT %s"""  # noqa: S608  # our own names
    return [(one, float(score)) for one, score in db.rows(statement, (*values, *filter_values, limit))]


def holders(db: Database, name: FullText, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return for each term the number of chunks that match it, and the ids in `among` that do."""
    if not terms:
        return []
    queries, values = _queries(db, name, terms, is_counted_together=True)
    rows = db.rows(
        f"WITH queries (n, query, scope, other_ids) AS MATERIALIZED ({queries}) "  # noqa: S608  # our own names
        "SELECT count(DISTINCT id), array_agg(DISTINCT id) FILTER (WHERE id = ANY(%s::bigint[])) "
        f"FROM queries LEFT JOIN chunks ON {_MATCHES.format(name)} GROUP BY n ORDER BY n",
        (*values, list(among)),
    )
    return [(num, ids or []) for num, ids in rows]


def is_sound(db: Database, name: FullText, texts: Iterator[list[Body]]) -> bool:
    """Whether a full-text index agrees with the chunks. `texts` yields the bodies of all chunks, in batches."""
    changed = (
        f"SELECT 1 FROM unnest(%s::bigint[], %s::text[]) AS expected (chunk_id, body) JOIN chunks ON id = chunk_id "  # noqa: S608  # our own names
        f"WHERE {name} IS DISTINCT FROM to_tsvector('{CONFIGURATION[name]}', body) LIMIT 1"
    )
    return not any(db.rows(changed, _bodies(name, rows)) for rows in texts)


def rebuild(db: Database, name: FullText, texts: Iterator[list[Body]]) -> None:
    """Rebuild a full-text index from the chunks."""
    for rows in texts:
        db.rows(
            f"UPDATE chunks SET {name} = to_tsvector('{CONFIGURATION[name]}', body) "  # noqa: S608  # our own names
            "FROM unnest(%s::bigint[], %s::text[]) AS expected (chunk_id, body) WHERE id = chunk_id",
            _bodies(name, rows),
        )


def set_language(db: Database, document_id: int, language: str) -> None:
    """Record the language of a document at its chunks, and index those again that had another."""
    statement = "UPDATE chunks SET language = %s WHERE document_id = %s AND language != %s RETURNING id, heading, text, language"
    changed = db.rows(statement, (language, document_id, language))
    if changed:
        rebuild(db, "words", iter([[(chunk_id, heading, text, new) for chunk_id, heading, text, new in changed]]))


def _queries(db: Database, name: FullText, terms: Sequence[Term], *, is_counted_together: bool) -> tuple[str, list[object]]:
    """Return a VALUES list of (number, tsquery, scope, other_ids), and its values: a row for each form of each term.

    The forms of a term have one number if they are counted together. Otherwise each has its own, and with it its own weight in BM25.
    """
    languages = [row[0] for row in db.rows(LANGUAGES)] if name == "words" else []
    forms = [(number, term, variant) for number, term in enumerate(terms) for variant in variants(term, languages)]
    rows, values = [], list[object]()
    for place, (number, term, variant) in enumerate(forms):
        query, query_values = _compiled(variant, name)
        other_ids = _with_phrase(db, term, query, query_values) if languages and term.is_phrase else None
        rows.append(f"({number if is_counted_together else place}, {query}, '{variant.scope}', %s::bigint[])")
        values += [*query_values, other_ids]
    return f"VALUES {', '.join(rows)}", values


def _with_phrase(db: Database, term: Term, query: str, values: list[str]) -> list[int]:
    """Return the chunks in other languages than English that have a phrase, of those that match its stems."""
    rows = db.rows(f"SELECT id, heading, text FROM chunks WHERE language != '' AND words @@ {query}", values)  # noqa: S608  # our own names
    return [one for one, heading, text in rows if has_phrase(term.text, heading, text)]


def _bodies(name: FullText, rows: list[Body]) -> tuple[list[int], list[str | None]]:
    both = [indexed(heading, text, language) for _, heading, text, language in rows]
    return [one for one, *_ in rows], [words if name == "words" else characters for words, characters in both]


# Vectors

APPROXIMATE_FROM = 50_000
"""Number of chunks from which a graph pays off. On 2 busy cores, finding the 100 nearest of 50,000 x 384 took 80 ms, and 28 ms with a
graph, which took 85 s to build. For 10,000 chunks it took 18 ms and 9 ms."""

MIN_RECALL = 0.97
"""Least measured recall@10. Above the promised 0.95, because chunks are added until it is measured again."""

QUERY_SIMILARITY = 0.8
"""Cosine similarity of a trial query with its source vector, as between a good question and its answer."""

_MAX_DIM = 2000  # pgvector's limit for a graph
NEAREST = "vectors_nearest"
_EF_SEARCH = (100, 200, 400, 800)  # values to try in turn; pgvector's maximum is 1000
_MAX_EF_SEARCH = 1000
_NUM_QUERIES = 50
_NUM_NEAREST = 10
_ROUNDING = 1e-6
_GRAPH_BYTES = 600  # size of a node of the graph
_MAX_BUILD_KB = 2_000_000  # building a graph outside memory takes many times as long
_GREW = 1.25  # growth factor after which recall is measured again
_MORE_MEMORY = """SELECT set_config('maintenance_work_mem',
    greatest(%s::bigint, pg_size_bytes(current_setting('maintenance_work_mem')) / 1024)::text || 'kB', true)"""


class PostgresIndex:
    """Cosine similarity search over the chunks of one generation. Use it inside `store.reading()`, at that generation."""

    def __init__(self, db: Database) -> None:
        self._db = db
        generation, self._dim, self._ef_search = db.rows("SELECT generation, dim, ef_search FROM state")[0]
        self.generation = int(generation)

    def search(self, query: Vectors, k: int, among: Sequence[int] | None = None) -> list[tuple[int, float]]:
        """Return the `k` chunks nearest to a vector of shape (dim,), as (chunk id, cosine similarity), best first, ties by id.

        With `among`, only these chunks are searched, exactly. Without `among`, search is exact unless there is a graph; then its measured
        recall@10 is `state.recall`.
        """
        if k < 1:
            return []
        if among is None and self._ef_search is not None and 2 * k <= _MAX_EF_SEARCH:
            hits = _graph_search(self._db, _sent(query), k, max(self._ef_search, 2 * k), self._dim)
            if len(hits) == k:  # otherwise removed chunks took up the search
                return hits
        return _exact_search(self._db, _sent(query), k, None if among is None else [int(one) for one in among])

    def similarities(self, query: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """Return the cosine similarity of each of these chunks with a vector of shape (dim,). Unknown ids are left out."""
        statement = "SELECT chunk_id, inner_product(embedding, %s) FROM vectors WHERE chunk_id = ANY(%s::bigint[])"
        rows = self._db.rows(statement, (_sent(query), [int(one) for one in ids]), binary=True)
        return {one: float(similarity) for one, similarity in rows}


def maintain_index(db: Database, schema: str, *, min_chunks: int = APPROXIMATE_FROM) -> None:
    """Build the graph once there are enough chunks, and measure its recall again once there are many more.

    A graph that does not reach MIN_RECALL is dropped. The caller holds the index lock.
    """
    num_chunks = int(db.one("SELECT count(*) FROM vectors"))
    dim, num_measured = db.rows("SELECT dim, num_measured FROM state")[0]
    if dim is None or dim > _MAX_DIM or num_chunks < max(min_chunks, _GREW * (num_measured or 0)):
        return
    num_kb = min(_MAX_BUILD_KB, num_chunks * (4 * dim + _GRAPH_BYTES) // 1024)
    with db.writing(f"{schema} {NEAREST}"):  # a lock of its own, so that feedback can be written during the build
        db.rows(_MORE_MEMORY, (num_kb,))
        db.rows(f"CREATE INDEX IF NOT EXISTS {NEAREST} ON vectors USING hnsw ((embedding::vector({dim})) vector_ip_ops)")
    with db.reading():
        recalls = ((ef_search, _measured_recall(db, dim, ef_search)) for ef_search in _EF_SEARCH)
        ef_search, recall = next((measured for measured in recalls if measured[1] >= MIN_RECALL), (None, None))
    with db.writing(schema):
        if ef_search is None:
            db.rows(f"DROP INDEX {NEAREST}")
        db.rows("UPDATE state SET ef_search = %s, recall = %s, num_measured = %s", (ef_search, recall, num_chunks))


def index_problems(db: Database, schema: str) -> list[str]:
    """Measure the recall of the graph again. If it is too low, remove the graph and return the problem."""
    dim, ef_search = db.rows("SELECT dim, ef_search FROM state")[0]
    if ef_search is None:
        return []
    with db.reading():
        recall = _measured_recall(db, dim, ef_search)
    if recall >= MIN_RECALL:
        return []
    with db.writing(f"{schema} {NEAREST}"):
        db.rows(f"DROP INDEX IF EXISTS {NEAREST}")
        db.rows("UPDATE state SET ef_search = NULL, recall = NULL, num_measured = NULL")
    return [f"{NEAREST}: it finds only {100 * recall:.0f} of 100 nearest vectors"]


def _measured_recall(db: Database, dim: int, ef_search: int) -> float:
    """Measure recall@10 of the graph, inside a transaction. Vectors at the same distance are interchangeable."""
    import numpy as np  # noqa: PLC0415  # heavy; a keyword search needs none

    first, last = db.rows("SELECT min(chunk_id), max(chunk_id) FROM vectors")[0]
    if first is None:
        return 1.0
    random = np.random.default_rng(0)
    num_found = num_nearest = 0
    for at in np.linspace(first, last, _NUM_QUERIES).astype(int).tolist():
        ((embedding,),) = db.rows("SELECT embedding FROM vectors WHERE chunk_id >= %s ORDER BY chunk_id LIMIT 1", (at,), binary=True)
        near = np.frombuffer(raw(embedding), dtype="<f4")
        noise = random.standard_normal(dim)
        noise -= noise @ near * near
        query = _sent(QUERY_SIMILARITY * near + np.sqrt(1 - QUERY_SIMILARITY**2) * noise / np.linalg.norm(noise))
        nearest = _exact_search(db, query, _NUM_NEAREST, None)
        least = nearest[-1][1] - _ROUNDING
        num_found += sum(similarity >= least for _, similarity in _graph_search(db, query, _NUM_NEAREST, ef_search, dim))
        num_nearest += len(nearest)
    return num_found / num_nearest


def _exact_search(db: Database, query: pgvector.Vector, k: int, among: list[int] | None) -> list[tuple[int, float]]:
    """Search exactly. Calling the function instead of the operator bypasses the graph."""
    selection, values = ("", []) if among is None else ("WHERE chunk_id = ANY(%s::bigint[])", [among])
    statement = (
        f"SELECT chunk_id, inner_product(embedding, %s) AS similarity FROM vectors {selection} "  # noqa: S608  # no values in it
        "ORDER BY similarity DESC, chunk_id LIMIT %s"
    )
    return [(one, float(similarity)) for one, similarity in db.rows(statement, (query, *values, k), binary=True)]


def _graph_search(db: Database, query: pgvector.Vector, k: int, ef_search: int, dim: int) -> list[tuple[int, float]]:
    db.rows("SELECT set_config('hnsw.ef_search', %s, true), set_config('enable_seqscan', 'off', true)", (str(ef_search),))
    rows = db.rows(
        f"SELECT chunk_id, -distance AS similarity FROM (SELECT chunk_id, embedding::vector({dim}) <#> %s AS distance FROM vectors "  # noqa: S608  # a number
        "ORDER BY distance LIMIT %s) nearest ORDER BY similarity DESC, chunk_id",
        (query, k),
        binary=True,
    )
    db.rows("SELECT set_config('enable_seqscan', 'on', true)")
    return [(one, float(similarity)) for one, similarity in rows]


def _sent(query: Vectors) -> pgvector.Vector:
    import numpy as np  # noqa: PLC0415  # as above

    return vector(np.ascontiguousarray(query, dtype="<f4").tobytes())
