"""Benchmark vector search in large stores: latency, recall compared with exact search, time to the first hit, and memory.

The vectors are a mixture of Gaussians on the unit sphere, one per hundred chunks (cosine to its center about 0.82). The queries are new
draws from the mixture. Each store is a real one in a temporary folder, and each quantity is measured in a separate process.

    python -m benchmarks.kb_search --sizes 1k,100k,1M

raglite and LlamaIndex with FAISS search the same vectors with the same queries, if an interpreter that has them is given. raglite requires
numpy below 2, so install them in a separate virtual environment:

    pip install raglite duckdb==1.4.4 duckdb-ext duckdb-ext-fts duckdb-ext-vss "pandas<3" llama-index-vector-stores-faiss faiss-cpu
    python -m benchmarks.kb_search --peers-python PEERS/bin/python

DuckDB needs pandas: without it, binding a vector to a statement took about a hundred times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import shared
from localrag.kb.store import Store
from localrag.kb.vector_cache import Ids, Vectors
from localrag.kb.vectors import VectorIndex, load_index

DIM = 384
NUM_QUERIES = 300
NUM_EXACT = 200  # queries whose true neighbours are looked for
PEERS = ("raglite", "llamaindex-flat", "llamaindex-hnsw")
_PEER_LIMIT_S = 900  # a step of a peer; at most
_BLOCK = 10_000
_SPREAD = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1k,100k,1M", help="chunks, such as 1k,100k,1M")
    parser.add_argument("--folder", type=Path, help="where the stores are made (5 GB at 1M); a temporary folder if not given")
    parser.add_argument("--peers-python", default=sys.executable, help="the interpreter that has raglite and LlamaIndex, if any has")
    parser.add_argument("--peers-limit", default="100k", help="the most chunks that peers are given")
    parser.add_argument("--one", nargs=3, metavar=("STEP", "SIZE", "FILE"), help="one step in this process; prints one JSON object")
    given = parser.parse_args()
    if given.one:
        step, size, file = given.one
        found = {"open": first_hit, "build": build, "search": search, "ten": search_ten}[step](int(size), Path(file))
        print(json.dumps(memory() | found))
        return
    rows, beside = [], []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for name in given.sizes.split(","):
            size, file = _number(name), Path(folder) / name / "kb.sqlite"
            start = time.perf_counter()
            fill(file, size)
            fill_s = time.perf_counter() - start
            rows += measure(size, name, file)
            fill_s += sum(float(str(row["made s"])) for row in rows if row["chunks"] == name)
            if size <= _number(given.peers_limit):
                beside += compare(size, name, file, fill_s, given.peers_python)
    shared.report_table("kb_search", rows)
    shared.report_table("kb_search_peers", beside)


def measure(size: int, name: str, file: Path) -> list[dict[str, object]]:
    """Our own numbers for each kind of index that a store of this size has."""
    rows = []
    for kind in ("flat", "clustered"):
        if kind == "flat":
            made = apart("open", size, file)  # makes the flat file
            row = {"chunks": name, "index": kind, "made s": made["first_hit_s"], "made peak MiB": made["peak_mib"]}
        else:
            made = apart("build", size, file)
            if not made["built"]:
                continue
            row = {"chunks": name, "index": kind, "made s": made["build_s"], "made peak MiB": made["peak_mib"]}
        warm, cold = apart("open", size, file), apart("open", size, file, cold=True)
        found = apart("search", size, file)
        rows.append(
            row
            | {"first hit ms": 1000 * warm["first_hit_s"], "cold ms": 1000 * cold["first_hit_s"], "own MiB": warm["own_mib"]}
            | {key: found[key] for key in ("p50 ms", "p95 ms", "recall@10", "recall@100", "in 100 ms", "in 1 % ms", "in 50 % ms")}
            | {"search own MiB": found["own_mib"], "mapped MiB": found["mapped_mib"]}
        )
        print(rows[-1], flush=True)
    return rows


def compare(size: int, name: str, file: Path, fill_s: float, python: str) -> list[dict[str, object]]:
    """A row for localrag and for each peer: the same vectors, texts and queries, the 10 nearest, ids and scores only."""
    asked = queries(size, NUM_QUERIES)
    nearest = true_nearest(size, asked[:NUM_EXACT], 10)
    folder = file.parent / "peers"
    folder.mkdir()
    np.save(folder / "queries.npy", asked)
    np.save(folder / "vectors.npy", np.concatenate(list(blocks(size))))
    (folder / "texts.json").write_text(json.dumps([text_of(one) for one in range(1, size + 1)]), encoding="utf-8")
    rows = []
    for program in ("localrag", *PEERS):
        found = apart("ten", size, file) | {"fill_s": fill_s} if program == "localrag" else peer(program, folder, python)
        row: dict[str, object] = {"chunks": name, "program": program}
        if "cannot" in found:
            row["note"] = found["cannot"]
        else:
            shares = [len(set(own) & set(true.tolist())) / 10 for own, true in zip(found["ids"], nearest, strict=False)]
            times = found["times_ms"]
            row |= {"fill s": found["fill_s"], "p50 ms": statistics.median(times), "p95 ms": statistics.quantiles(times, n=20)[-1]}
            row |= {"recall@10": statistics.mean(shares), "RSS MiB": found["rss_mib"]}
        rows.append(row)
        print(row, flush=True)
    return rows


def peer(program: str, folder: Path, python: str) -> dict[str, Any]:
    """What benchmarks/kb_peers.py found, with `ids` as ours count; {"cannot": why} where it found nothing."""
    found: dict[str, Any] = {}
    for step in ("fill", "search"):
        answer = folder / "answer.json"
        answer.unlink(missing_ok=True)
        command = [python, str(Path(__file__).with_name("kb_peers.py")), program, step, str(folder)]
        try:
            subprocess.run(command, capture_output=True, check=True, timeout=_PEER_LIMIT_S)
            found |= json.loads(answer.read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired:
            return {"cannot": f"{step}: not done after {_PEER_LIMIT_S} s"}
        except subprocess.CalledProcessError as error:
            return {"cannot": f"{step}: {(error.stderr.decode(errors='replace').strip().splitlines() or [str(error)])[-1]}"}
        except OSError as error:
            return {"cannot": f"{step}: {error}"}
        if "cannot" in found:
            return found
    return found | {"ids": [[row + 1 for row in rows] for rows in found["rows"]]}


def fill(file: Path, size: int) -> None:
    """A store of so many chunks, of one document for each ten thousand, all in one transaction."""
    store = Store(file, create=True)
    with store.writing():
        store.claim_embedder("0" * 64, DIM)
        db = store._db  # noqa: SLF001  # put_document would take minutes
        for number, vectors in enumerate(blocks(size)):
            db.execute(
                "INSERT INTO documents (id, path, source, sha256, num_bytes, title) VALUES (?, ?, ?, '', 0, '')",
                (number + 1, f"/{number}", f"{number}"),
            )
            ids = range(number * _BLOCK + 1, number * _BLOCK + len(vectors) + 1)
            db.executemany(
                "INSERT INTO chunks (id, document_id, ordinal, start, \"end\", heading, text) VALUES (?, ?, ?, 0, 0, '', ?)",
                ((one, number + 1, one, text_of(one)) for one in ids),
            )
            db.executemany("INSERT INTO vectors (chunk_id, vector) VALUES (?, ?)", zip(ids, (v.tobytes() for v in vectors), strict=True))
    store.close()


def text_of(chunk_id: int) -> str:
    """A sentence of examples/handbook; they come again and again."""
    return _sentences()[chunk_id % len(_sentences())]


@cache
def _sentences() -> list[str]:
    pages = sorted((shared.ROOT / "examples" / "handbook").rglob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return [sentence.strip() for sentence in re.split(r"(?<=[.!?])\s+|\n\n", text) if len(sentence) >= 40]


def blocks(size: int) -> Iterator[Vectors]:
    """The vectors of all chunks, 10,000 at a time; the chunk ids count from 1."""
    centres = _centres(size)
    for number, start in enumerate(range(0, size, _BLOCK)):
        yield _draw(centres, min(_BLOCK, size - start), np.random.default_rng((1, number)))


def queries(size: int, num: int) -> Vectors:
    return _draw(_centres(size), num, np.random.default_rng(2))


def _centres(size: int) -> Vectors:
    centres: Vectors = np.random.default_rng(0).standard_normal((max(1, size // 100), DIM), dtype=np.float32) / np.float32(DIM**0.5)
    return centres


def _draw(centres: Vectors, num: int, rng: np.random.Generator) -> Vectors:
    noise = rng.standard_normal((num, DIM), dtype=np.float32) * np.float32(_SPREAD / DIM**0.5)
    vectors = centres[rng.integers(len(centres), size=num)] + noise
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def apart(step: str, size: int, file: Path, *, cold: bool = False) -> dict[str, Any]:
    """A step in a process of its own; `cold`: what the system holds of the files in memory is let go before (Linux)."""
    if cold:
        os.sync()
        for part in file.parent.iterdir():
            with part.open("rb") as open_part:
                os.posix_fadvise(open_part.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-m", "benchmarks.kb_search", "--one", step, str(size), str(file)]
    done = subprocess.run(command, cwd=shared.ROOT, capture_output=True, text=True, check=True, timeout=3600)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def first_hit(size: int, file: Path) -> dict[str, float]:
    """From an open process without anything of a store to the first hits."""
    query = queries(size, 1)[0]
    start = time.perf_counter()
    store = Store(file)
    with store.reading():
        index = load_index(store)
        assert index is not None
        index.search(query, 100)
    took = time.perf_counter() - start
    store.close()
    return {"first_hit_s": took}


def build(_size: int, file: Path) -> dict[str, float]:
    from localrag.kb import ann  # noqa: PLC0415  # its memory counts here only

    store = Store(file)
    start = time.perf_counter()
    built = ann.build(store)
    took = time.perf_counter() - start
    store.close()
    return {"built": built is not None, "build_s": took}


def search(size: int, file: Path) -> dict[str, float]:
    """Latency of the 100 nearest, as retrieval asks for, of filtered searches, and how many of the true nearest are found."""
    asked = queries(size, NUM_QUERIES)
    rng = np.random.default_rng(3)
    found: dict[str, float] = {}
    with warm_index(file, asked) as index:
        times, answers = timed(index, asked, 100)
        found["p50 ms"], found["p95 ms"] = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        for name, num in (("in 100 ms", min(size, 100)), ("in 1 % ms", size // 100), ("in 50 % ms", size // 2)):
            among = np.sort(rng.choice(size, num, replace=False)) + 1
            found[name] = statistics.median(timed(index, asked[:15], 100, among)[0])
    memory_now = memory()
    nearest = true_nearest(size, asked[:NUM_EXACT], 100)
    for depth in (10, 100):
        shares = [len(set(own[:depth]) & set(true[:depth].tolist())) / depth for own, true in zip(answers, nearest, strict=False)]
        found[f"recall@{depth}"] = statistics.mean(shares)
    return memory_now | found


def search_ten(size: int, file: Path) -> dict[str, Any]:
    """As benchmarks/kb_peers.py measures: the milliseconds of each query, the ids it found, and MiB of this process (VmRSS)."""
    asked = queries(size, NUM_QUERIES)
    with warm_index(file, asked) as index:
        times, ids = timed(index, asked, 10)
    now = memory()
    return {"times_ms": times, "ids": ids, "rss_mib": now["own_mib"] + now["mapped_mib"]}


@contextmanager
def warm_index(file: Path, asked: Vectors) -> Iterator[VectorIndex]:
    """The index of a store, after some queries that do not count."""
    with closing(Store(file)) as store, store.reading():
        index = load_index(store)
        assert index is not None
        timed(index, asked[-20:], 10)
        yield index


def timed(index: VectorIndex, asked: Vectors, num: int, among: Ids | None = None) -> tuple[list[float], list[list[int]]]:
    """The milliseconds that each query for its `num` nearest takes, one after another, and the ids that it finds."""
    times, ids = [], []
    for query in asked:
        start = time.perf_counter()
        hits = index.search(query, num, among)
        times.append(1000 * (time.perf_counter() - start))
        ids.append([one for one, _ in hits])
    return times, ids


def true_nearest(size: int, asked: Vectors, num: int) -> np.ndarray:
    """The ids of the nearest chunks to each query, best first, by comparing all."""
    scores, ids = np.zeros((len(asked), 0), dtype=np.float32), np.zeros((len(asked), 0), dtype=np.int64)
    first = 1
    for vectors in blocks(size):
        scores = np.hstack((scores, asked @ vectors.T))
        ids = np.hstack((ids, np.broadcast_to(np.arange(first, first + len(vectors)), (len(asked), len(vectors)))))
        best = np.argsort(-scores, axis=1)[:, :num]
        scores, ids = np.take_along_axis(scores, best, axis=1), np.take_along_axis(ids, best, axis=1)
        first += len(vectors)
    return ids


def memory() -> dict[str, float]:
    """MiB: what this process holds itself now, what of files is mapped into it now, and the most that both were."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    own, mapped = (int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    return {"own_mib": own, "mapped_mib": mapped, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _number(text: str) -> int:
    return int(float(text.rstrip("kM")) * {"k": 1000, "M": 1_000_000}.get(text[-1], 1))


if __name__ == "__main__":
    main()
