"""Nearest vectors by pgvector: exact search, or, for many vectors, a graph (HNSW) whose recall is measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pgvector

from localrag.kb.postgres.database import Database, raw, vector
from localrag.kb.vector_cache import Vectors

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
            found = _followed(self._db, _sent(query), k, max(self._ef_search, 2 * k), self._dim)
            if len(found) == k:  # else it was cut short by what was removed since
                return found
        return _compared(self._db, _sent(query), k, None if among is None else [int(one) for one in among])

    def similarities(self, query: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """The cosine similarity of each of these chunks with a vector of shape (dim,); unknown ids are left out."""
        statement = "SELECT chunk_id, inner_product(embedding, %s) FROM vectors WHERE chunk_id = ANY(%s::bigint[])"
        rows = self._db.rows(statement, (_sent(query), [int(one) for one in ids]), binary=True)
        return {one: float(similarity) for one, similarity in rows}


def tend(db: Database, schema: str, *, min_chunks: int = APPROXIMATE_FROM) -> None:
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
        recalls = ((ef_search, _recall(db, dim, ef_search)) for ef_search in _EF_SEARCH)
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
        recall = _recall(db, dim, ef_search)
    if recall >= MIN_RECALL:
        return []
    with db.writing(f"{schema} {_INDEX}"):
        db.rows(f"DROP INDEX IF EXISTS {_INDEX}")
        db.rows("UPDATE state SET ef_search = NULL, recall = NULL, num_measured = NULL")
    return [f"{_INDEX}: it finds {100 * recall:.0f} of 100 nearest vectors"]


def _recall(db: Database, dim: int, ef_search: int) -> float:
    """The share of the nearest that the graph finds, inside a transaction. Equally near ones count alike."""
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
        nearest = _compared(db, query, _NUM_NEAREST, None)
        least = nearest[-1][1] - _ROUNDING
        found += sum(similarity >= least for _, similarity in _followed(db, query, _NUM_NEAREST, ef_search, dim))
        wanted += len(nearest)
    return found / wanted


def _compared(db: Database, query: pgvector.Vector, k: int, among: list[int] | None) -> list[tuple[int, float]]:
    """Exact search: it calls the function, since the graph only serves the operator."""
    chosen, values = ("", []) if among is None else ("WHERE chunk_id = ANY(%s::bigint[])", [among])
    statement = (
        f"SELECT chunk_id, inner_product(embedding, %s) AS similarity FROM vectors {chosen} "  # noqa: S608  # no values in it
        "ORDER BY similarity DESC, chunk_id LIMIT %s"
    )
    return [(one, float(similarity)) for one, similarity in db.rows(statement, (query, *values, k), binary=True)]


def _followed(db: Database, query: pgvector.Vector, k: int, ef_search: int, dim: int) -> list[tuple[int, float]]:
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
    return vector(np.ascontiguousarray(query, dtype="<f4").tobytes())
