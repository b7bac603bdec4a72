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
from typing import TYPE_CHECKING, Literal

from localrag.kb.filters import Where
from localrag.kb.postgres.database import Database, raw, vector
from localrag.kb.query import Term
from localrag.text.terms import CJK, spaced, words

if TYPE_CHECKING:
    import pgvector

    from localrag.kb.vector_cache import Vectors

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


# Vectors

APPROXIMATE_FROM = 50_000
"""Chunks from which a graph pays off. On 2 busy cores the 100 nearest of 50,000 x 384 took 80 ms, and 28 ms with a graph, which
took 85 s to make; of 10,000 they took 18 ms and 9 ms."""

MIN_RECALL = 0.97
"""Least recall of the 10 nearest when measured; above the promised 0.95, because chunks are added until it is measured again."""

QUERY_SIMILARITY = 0.8
"""Cosine of a trial query with its source vector: like a good question and its answer."""

_MAX_DIM = 2000  # of a graph
_INDEX = "vectors_nearest"
_EF_SEARCH = (100, 200, 400, 800)  # tried one after another; 1000 is the most that pgvector takes
_MAX_EF_SEARCH = 1000
_NUM_QUERIES = 50
_NUM_NEAREST = 10
_ROUNDING = 1e-6
_GRAPH_BYTES = 600  # of a vector's place in the graph
_MAX_BUILD_KB = 2_000_000  # a graph that is not built in memory takes many times as long
_GREW = 1.25  # times as many chunks: the recall is measured again
_MORE_MEMORY = """SELECT set_config('maintenance_work_mem',
    greatest(%s::bigint, pg_size_bytes(current_setting('maintenance_work_mem')) / 1024)::text || 'kB', true)"""


class PostgresIndex:
    """Cosine similarity over the chunks of one generation. Use it inside `store.reading()`, at that generation."""

    def __init__(self, db: Database) -> None:
        self._db = db
        generation, self._dim, self._ef_search = db.rows("SELECT generation, dim, ef_search FROM state")[0]
        self.generation = int(generation)

    def search(self, query: Vectors, k: int, among: Sequence[int] | None = None) -> list[tuple[int, float]]:
        """Return the `k` chunks nearest to a vector of shape (dim,), as (chunk id, cosine similarity), best first, ties by id.

        With `among`, only these chunks are searched, exactly. Without, search is exact unless there is a graph: then it finds the share
        `state.recall` of the 10 nearest, as measured.
        """
        if k < 1:
            return []
        if among is None and self._ef_search is not None and 2 * k <= _MAX_EF_SEARCH:
            found = _graph_search(self._db, _sent(query), k, max(self._ef_search, 2 * k), self._dim)
            if len(found) == k:  # else it was cut short by what was removed since
                return found
        return _exact_search(self._db, _sent(query), k, None if among is None else [int(one) for one in among])

    def similarities(self, query: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """The cosine similarity of each of these chunks with a vector of shape (dim,); unknown ids are left out."""
        statement = "SELECT chunk_id, inner_product(embedding, %s) FROM vectors WHERE chunk_id = ANY(%s::bigint[])"
        rows = self._db.rows(statement, (_sent(query), [int(one) for one in ids]), binary=True)
        return {one: float(similarity) for one, similarity in rows}


def maintain_index(db: Database, schema: str, *, min_chunks: int = APPROXIMATE_FROM) -> None:
    """Make the graph once there are enough chunks, and measure it again once there are many more.

    A graph that does not reach MIN_RECALL is dropped. Nobody else may index meanwhile.
    """
    num_chunks = int(db.one("SELECT count(*) FROM vectors"))
    dim, num_measured = db.rows("SELECT dim, num_measured FROM state")[0]
    if dim is None or dim > _MAX_DIM or num_chunks < max(min_chunks, _GREW * (num_measured or 0)):
        return
    num_kb = min(_MAX_BUILD_KB, num_chunks * (4 * dim + _GRAPH_BYTES) // 1024)
    with db.writing(f"{schema} {_INDEX}"):  # what is noted of questions meanwhile need not wait
        db.rows(_MORE_MEMORY, (num_kb,))
        db.rows(f"CREATE INDEX IF NOT EXISTS {_INDEX} ON vectors USING hnsw ((embedding::vector({dim})) vector_ip_ops)")
    with db.reading():
        recalls = ((ef_search, _measured_recall(db, dim, ef_search)) for ef_search in _EF_SEARCH)
        ef_search, recall = next((each for each in recalls if each[1] >= MIN_RECALL), (None, None))
    with db.writing(schema):
        if ef_search is None:
            db.rows(f"DROP INDEX {_INDEX}")
        db.rows("UPDATE state SET ef_search = %s, recall = %s, num_measured = %s", (ef_search, recall, num_chunks))


def index_problems(db: Database, schema: str) -> list[str]:
    """Measure the graph again; remove it and name the problem if it finds too little."""
    dim, ef_search = db.rows("SELECT dim, ef_search FROM state")[0]
    if ef_search is None:
        return []
    with db.reading():
        recall = _measured_recall(db, dim, ef_search)
    if recall >= MIN_RECALL:
        return []
    with db.writing(f"{schema} {_INDEX}"):
        db.rows(f"DROP INDEX IF EXISTS {_INDEX}")
        db.rows("UPDATE state SET ef_search = NULL, recall = NULL, num_measured = NULL")
    return [f"{_INDEX}: it finds {100 * recall:.0f} of 100 nearest vectors"]


def _measured_recall(db: Database, dim: int, ef_search: int) -> float:
    """The share of the nearest that the graph finds, inside a transaction. Equally near ones count alike."""
    import numpy as np  # noqa: PLC0415  # heavy; a keyword search needs none

    first, last = db.rows("SELECT min(chunk_id), max(chunk_id) FROM vectors")[0]
    if first is None:
        return 1.0
    random = np.random.default_rng(0)
    found = wanted = 0
    for at in np.linspace(first, last, _NUM_QUERIES).astype(int).tolist():
        ((chosen,),) = db.rows("SELECT embedding FROM vectors WHERE chunk_id >= %s ORDER BY chunk_id LIMIT 1", (at,), binary=True)
        near = np.frombuffer(raw(chosen), dtype="<f4")
        noise = random.standard_normal(dim)
        noise -= noise @ near * near
        query = _sent(QUERY_SIMILARITY * near + np.sqrt(1 - QUERY_SIMILARITY**2) * noise / np.linalg.norm(noise))
        nearest = _exact_search(db, query, _NUM_NEAREST, None)
        least = nearest[-1][1] - _ROUNDING
        found += sum(similarity >= least for _, similarity in _graph_search(db, query, _NUM_NEAREST, ef_search, dim))
        wanted += len(nearest)
    return found / wanted


def _exact_search(db: Database, query: pgvector.Vector, k: int, among: list[int] | None) -> list[tuple[int, float]]:
    """Exact search: it calls the function, since the graph only serves the operator."""
    chosen, values = ("", []) if among is None else ("WHERE chunk_id = ANY(%s::bigint[])", [among])
    statement = (
        f"SELECT chunk_id, inner_product(embedding, %s) AS similarity FROM vectors {chosen} "  # noqa: S608  # no values in it
        "ORDER BY similarity DESC, chunk_id LIMIT %s"
    )
    return [(one, float(similarity)) for one, similarity in db.rows(statement, (query, *values, k), binary=True)]


def _graph_search(db: Database, query: pgvector.Vector, k: int, ef_search: int, dim: int) -> list[tuple[int, float]]:
    db.rows("SELECT set_config('hnsw.ef_search', %s, true), set_config('enable_seqscan', 'off', true)", (str(ef_search),))
    found = db.rows(
        f"SELECT chunk_id, -distance AS similarity FROM (SELECT chunk_id, embedding::vector({dim}) <#> %s AS distance FROM vectors "  # noqa: S608  # a number
        "ORDER BY distance LIMIT %s) nearest ORDER BY similarity DESC, chunk_id",
        (query, k),
        binary=True,
    )
    db.rows("SELECT set_config('enable_seqscan', 'on', true)")
    return [(one, float(similarity)) for one, similarity in found]


def _sent(query: Vectors) -> pgvector.Vector:
    import numpy as np  # noqa: PLC0415  # as above

    return vector(np.ascontiguousarray(query, dtype="<f4").tobytes())
