"""Build a clustered index of vectors in a background process, so that a search compares only a few per cent of them.

The index is an inverted file (IVF) over float32 vectors: each vector is in the cluster of its nearest centroid, and a search probes the
nearest clusters. How many it must probe is measured against exact search at build time, on queries near the data. A graph (HNSW) is
faster to search, but it took 47 s to build for 100,000 vectors instead of a few seconds, and it cannot be mapped and verified piece by
piece. This is the only module that imports faiss.

    python -m localrag.kb.ann KB.SQLITE      run one build, at the lowest priority
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrag.kb.store import Store
from localrag.kb.vector_cache import Clusters, Ids, Places, VectorFile, Vectors, Version, open_file, publishing, scratch_file, write_file
from localrag.kb.vectors import APPROXIMATE_FROM, VectorIndex, newest_file, rows_of

MIN_RECALL = 0.97
"""Least recall@10 at build time. Above the promised 0.95, because the data may grow by a sixteenth before the next build."""

QUERY_SIMILARITY = 0.8
"""Cosine similarity of a trial query with its source vector, as between a good question and its answer."""

_TRAINING_ROWS = 40  # training vectors per centroid; faiss advises no fewer
_ITERATIONS = 8
_NUM_QUERIES = 256
_BLOCK_ROWS = 16_384  # rows to compare with all centroids at a time: 100 MB of products at 1M vectors
_NUM_NEAREST = 10

_running: dict[Path, subprocess.Popen[bytes]] = {}


def start_build(path: Path) -> None:
    """Start a process that builds the index of the knowledge base file `path` and outlives this one. At most one runs at a time.

    If the process cannot be started, a later search tries again.
    """
    running = _running.get(path)
    if running is not None and running.poll() is None:
        return
    with suppress(OSError):
        _running[path] = subprocess.Popen(
            [sys.executable, "-P", "-m", "localrag.kb.ann", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},  # idle threads sleep instead of spinning
        )


def build(store: Store, *, min_rows: int = APPROXIMATE_FROM) -> VectorFile | None:
    """Build and publish a clustered file of the store's current generation.

    Returns None if another process is building, or if a new file would not help. Building 1M x 384 needs about 500 MB of memory and 1.5 GB
    of disk. OSError and KnowledgeBaseError propagate.
    """
    folder = store.path.parent
    with publishing(folder) as allowed:
        if not allowed:
            return None
        with store.reading():
            embedder = store.embedder
            if embedder is None or store.num_chunks < min_rows:
                return None
            version = Version(store.generation, store.stamp(store.generation) or 0, *embedder)
            base = newest_file(store, version)
            if base is not None and base.centroids is not None and not _is_outdated(store, version, base):
                return None
            if base is None:  # a flat file, to search until the clusters are ready
                base = open_file(write_file(folder, version, rows_of(store, version.dim)))
            if base.version.generation == version.generation:
                source = base
            else:
                with scratch_file(folder, version, rows_of(store, version.dim)) as scratch:
                    source = open_file(scratch)
        clusters, order = cluster(source)
        return open_file(write_file(folder, version, _in_order(source, order), clusters))


def _is_outdated(store: Store, version: Version, base: VectorFile) -> bool:
    new = np.fromiter((one for one, _ in store.vectors(base.last_id)), dtype=np.int64)
    added = VectorFile(version, np.zeros((len(new), version.dim), dtype=np.float32), new)
    return VectorIndex(store, version, base, added).is_outdated


def cluster(source: VectorFile) -> tuple[Clusters, Places]:
    """Cluster the rows of a flat file. Return the clusters, and the row numbers in cluster order. Deterministic."""
    rng = np.random.default_rng(0)
    centroids = _train(source, rng)
    labels = np.concatenate([np.argmax(block @ centroids.T, axis=1) for block in _blocks(source)])
    num_rows = np.bincount(labels, minlength=len(centroids)).astype(np.int64)
    num_probes, recall = _calibrate(source, centroids, labels, rng)
    return Clusters(num_rows, centroids, num_probes, recall), np.argsort(labels, kind="stable")


def _train(source: VectorFile, rng: np.random.Generator) -> Vectors:
    import faiss  # noqa: PLC0415  # heavy, and not needed for a query

    num_centroids = max(1, min(len(source), round(1.5 * math.sqrt(len(source)))))
    num_samples = min(len(source), _TRAINING_ROWS * num_centroids)
    sample = source.rows(np.sort(rng.choice(len(source), num_samples, replace=False)))
    kmeans: Any = faiss.Kmeans(
        source.version.dim,
        num_centroids,
        niter=_ITERATIONS,
        spherical=True,
        seed=1,
        min_points_per_centroid=1,
        max_points_per_centroid=1000,
    )
    kmeans.train(sample)
    return np.ascontiguousarray(kmeans.centroids, dtype=np.float32).reshape(num_centroids, -1)


def _calibrate(source: VectorFile, centroids: Vectors, labels: Places, rng: np.random.Generator) -> tuple[int, float]:
    """Return the number of clusters to probe for MIN_RECALL, and the recall that this reaches.

    Search within a cluster is exact, so a vector is found if and only if its cluster is probed. One pass over all vectors therefore gives
    the recall for every number of probes.
    """
    near = source.rows(np.sort(rng.choice(len(source), min(len(source), _NUM_QUERIES), replace=False)))
    noise = rng.standard_normal(near.shape).astype(np.float32)
    noise *= math.tan(math.acos(QUERY_SIMILARITY)) / np.linalg.norm(noise, axis=1, keepdims=True)
    queries = (near + noise) / np.linalg.norm(near + noise, axis=1, keepdims=True)
    nearest_labels = labels[_nearest(source, queries)]
    by_nearness = np.argsort(-(queries @ centroids.T), axis=1)
    rank = np.argsort(by_nearness, axis=1)  # the rank of each cluster for each query
    needed = np.sort(np.take_along_axis(rank, nearest_labels, axis=1), axis=None) + 1
    num_probes = int(needed[math.ceil(MIN_RECALL * len(needed)) - 1])
    return num_probes, float(np.mean(needed <= num_probes))


def _nearest(source: VectorFile, queries: Vectors) -> Places:
    """Find the _NUM_NEAREST rows nearest to each query by exact search, in no order."""
    num = min(_NUM_NEAREST, len(source))
    scores = np.zeros((len(queries), 0), dtype=np.float32)
    places = np.zeros((len(queries), 0), dtype=np.int64)
    start = 0
    for block in _blocks(source):
        scores = np.hstack((scores, queries @ block.T))
        places = np.hstack((places, np.broadcast_to(np.arange(start, start + len(block)), (len(queries), len(block)))))
        best = np.argpartition(scores, scores.shape[1] - num, axis=1)[:, -num:] if scores.shape[1] > num else np.argsort(scores, axis=1)
        scores, places = np.take_along_axis(scores, best, axis=1), np.take_along_axis(places, best, axis=1)
        start += len(block)
    return places


def _blocks(source: VectorFile) -> Iterator[Vectors]:
    for start in range(0, len(source), _BLOCK_ROWS):
        yield source.rows(np.arange(start, min(len(source), start + _BLOCK_ROWS)))


def _in_order(source: VectorFile, order: Places) -> Iterator[tuple[Ids, NDArray[np.float32]]]:
    for start in range(0, len(order), _BLOCK_ROWS):
        places = order[start : start + _BLOCK_ROWS]
        yield source.ids[places], source.rows(places)


def main() -> None:
    if sys.platform != "win32":
        os.nice(19)
    store = Store(Path(sys.argv[1]))
    try:
        build(store)
    finally:
        store.close()


if __name__ == "__main__":
    main()
