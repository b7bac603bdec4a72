"""How well each finds what people judged relevant, with the same embedder: nDCG@10, Recall@10, Recall@100 and MRR by ir-measures.

Each searches what it indexed itself, by its default; a document stands where the first of its passages does. So what is compared is a
program's cutting, ranking and fusion, and not its embedder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.proof import material
from benchmarks.proof.bench import Bench, Row, attempt, refusal
from benchmarks.proof.programs import Program
from benchmarks.proof.questions.indexing import COLLECTION, ensure_index
from localrag.kb.evaluate import MEASURES, NUM_DOCUMENTS, Collection, measures, read_collection

_DEPTH = 400  # passages, so that there are 100 documents
_LIMIT_S = 3600.0


def measure(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    if bench.collection is None:
        return {program.name: {"not_run": "no collection was given (--collection)"} for program in programs}
    documents = material.write_collection(bench.collection, bench.work, most=bench.max_documents)
    collection = read_collection(bench.collection, max_queries=20 if bench.is_trial else None)
    rows: dict[str, Row] = {}
    for program in programs:
        rows[program.name] = (
            _absent(bench, program) or ensure_index(bench, program, COLLECTION, documents) or _found(bench, program, collection)
        )
        print(f"{program.label}: {rows[program.name]}", file=sys.stderr, flush=True)
    return rows


def _absent(bench: Bench, program: Program) -> Row | None:
    return attempt(bench, program) or (None if program.searches else {"cannot": "it does not search"})


def _found(bench: Bench, program: Program, collection: Collection) -> Row:
    asked = list(collection.queries.values())
    found = bench.run(program, "search", index=COLLECTION, questions=asked, depth=_DEPTH, limit_s=_LIMIT_S)
    if reason := refusal(found):
        return reason
    ways = {}
    for way, lists in found["ranked"].items():
        run = {query: ranking(files) for query, files in zip(collection.queries, lists, strict=True)}
        reached = measures(collection.qrels, run)
        ways[way] = {MEASURES[name]: round(value, 4) for name, value in reached.items()}
    return {"ways": ways, "num_queries": len(asked)}


def ranking(files: Sequence[str]) -> dict[str, float]:
    """The documents of ranked files ID.md, each where it comes first, as ir-measures takes them: higher is better."""
    ids = list(dict.fromkeys(file.removesuffix(".md") for file in files))[:NUM_DOCUMENTS]
    return {one: float(len(ids) - place) for place, one in enumerate(ids)}
