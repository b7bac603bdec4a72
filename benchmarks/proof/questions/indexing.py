"""A folder of documents, from the start of a process to an index on disk that can be searched: seconds, MiB in memory, MiB on disk."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.proof import material
from benchmarks.proof.bench import Bench, Row, attempt, refusal
from benchmarks.proof.programs import OURS, Program

COLLECTION = "collection"
_LIMIT_S = 3600.0
_MIB = 1 << 20


def measure(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    """One run each: it takes minutes. What was indexed before is removed first."""
    if bench.collection is None:
        return {program.name: {"not_run": "no collection was given (--collection)"} for program in programs}
    documents = material.write_collection(bench.collection, bench.work, most=bench.max_documents)
    rows: dict[str, Row] = {}
    for program in programs:
        rows[program.name] = _measured(bench, program, documents)
        print(f"{program.label}: {rows[program.name]}", file=sys.stderr, flush=True)
    ours = rows[OURS.name].get("runs")
    return {name: row | ({"beside": ours} if "runs" in row else {}) for name, row in rows.items()}


def _measured(bench: Bench, program: Program, documents: Path) -> Row:
    if absent := attempt(bench, program):
        return absent
    if not program.searches:
        return {"cannot": "it keeps no documents"}
    _remove(bench, program, COLLECTION)
    return _indexed(bench, program, COLLECTION, documents)


def _indexed(bench: Bench, program: Program, name: str, documents: Path) -> Row:
    """A row of one run. What did not come to its end is removed, also by Ctrl-C: an index that is there is taken for whole."""
    is_whole = False
    try:
        if program is OURS:
            ran = bench.localrag("index", str(documents), "--kb", name, limit_s=_LIMIT_S)
            found: Row = {"cannot": ran.complaint} if ran.returncode else {}
        else:
            found = bench.run(program, "index", index=name, documents=str(documents), limit_s=_LIMIT_S)
            ran = found.pop("ran")
        if reason := refusal(found):
            return reason
        is_whole = True
    finally:
        if not is_whole:
            _remove(bench, program, name)
    run = {"total_s": ran.total_s, "peak_mib": ran.peak_mib, "disk_mib": _size(_place(bench, program, name)) / _MIB}
    return found | {"num_files": len(list(documents.rglob("*.md"))), "runs": [run]}


def ensure_index(bench: Bench, program: Program, name: str, documents: Path) -> Row | None:
    """The documents are indexed once, for the questions that need them; what is there stays. A row that says why if they cannot be.

    A program that does not search has no index; neither does one that cannot make one: it is asked all the same, and tells.
    """
    if not program.searches or _place(bench, program, name).exists():
        return None
    print(f"{program.label}: indexing {name}", file=sys.stderr, flush=True)
    row = _indexed(bench, program, name, documents)
    return row if "cannot" in row else None


def _place(bench: Bench, program: Program, name: str) -> Path:
    return bench.home / "kb" / name if program is OURS else Path(bench.index(program, name))


def _remove(bench: Bench, program: Program, name: str) -> None:
    shutil.rmtree(_place(bench, program, name), ignore_errors=True)


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [each for each in place.rglob("*") if each.is_file()]
    return sum(file.stat().st_size for file in files)
