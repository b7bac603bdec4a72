"""localrag beside its peers: measured, kept, and drawn.

    scripts/bench proof                       everything: some three hours on 2 cores, and before that half an hour for environments
    scripts/bench proof cold counting         these questions
    scripts/bench proof cold --only raglite   this program, with localrag beside it; the other rows stay as they are
    scripts/bench proof --trial               the machinery: one run, few documents, kept apart; its numbers say nothing
    scripts/bench proof --render              only the table and the plots, from what is kept

What is measured is kept in results/proof, a file a question, and a table (table.md) and plots are made of it. Environments and indexes are
made once, below build/proof. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import shared
from benchmarks.proof import render, results
from benchmarks.proof.bench import MAX_TOKENS, N_CTX, Bench, Row
from benchmarks.proof.environments import NotRun
from benchmarks.proof.programs import PROGRAMS, Program, named
from benchmarks.proof.questions import asking, counting, even, indexing, many, markup, overflow, retrieval

QUESTIONS: dict[str, Callable[[Bench, Sequence[Program]], dict[str, Row]]] = {
    "index": indexing.measure,  # first: others search what it makes
    "retrieval": retrieval.measure,
    "overflow": overflow.measure,
    "markup": markup.measure,
    "counting": counting.measure,
    "cold": asking.measure_cold,
    "even": even.measure,
    "warm": asking.measure_warm,
    "council": many.measure_council,
    "batch": many.measure_batch,
}
_COLLECTION = shared.ROOT.parent / "shared" / "data" / "cranfield"
_TRIAL = 50


def main() -> None:
    parser = _parser()
    given = parser.parse_args()
    if strange := [each for each in given.questions if each not in QUESTIONS]:
        parser.error(f"there is no question {strange[0]!r}; there are {', '.join(QUESTIONS)}")
    folder = results.FOLDER.with_name("proof-trial") if given.trial else results.FOLDER
    if not given.render:
        measure(given, folder)
    for made in render.write(folder, given.out or folder):
        print(f"written to {made}")


def measure(given: argparse.Namespace, folder: Path) -> None:
    """Each question in turn; its rows are kept as soon as they are there."""
    collection = given.collection if given.collection is not None and given.collection.is_dir() else None
    bench = Bench(
        folder=given.folder.absolute(),
        num_runs=1 if given.trial else given.runs,
        collection=collection,
        max_documents=_TRIAL if given.trial else None,
    )
    programs = named(given.only)
    machine = {**shared.machine(), "programs": installed(bench, programs)}
    facts = {"runs": bench.num_runs, "n_ctx": N_CTX, "max_tokens": MAX_TOKENS, "model": bench.model.name, "embedder": bench.embedder.name}
    for question in given.questions or QUESTIONS:
        print(f"== {question}", file=sys.stderr, flush=True)
        rows = QUESTIONS[question](bench, programs)
        results.keep(question, rows, machine=machine, facts=facts, folder=folder)


def installed(bench: Bench, programs: Sequence[Program]) -> Row:
    """Their versions; why not, for a program that cannot be had."""
    found: Row = {}
    for program in programs:
        try:
            found[program.name] = bench.versions(program)
        except NotRun as why:
            found[program.name] = f"not run: {why}"
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(QUESTIONS)}; else all")
    names = [program.name for program in PROGRAMS]
    parser.add_argument("--only", action="append", default=[], choices=names, metavar="NAME", help=f"of {', '.join(names)}; again for more")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of cold, warm, council and batch (default 5)")
    parser.add_argument("--collection", type=Path, default=_COLLECTION, help="a folder in BEIR's layout, for index and retrieval")
    parser.add_argument(
        "--folder", type=Path, default=shared.ROOT / "build" / "proof", help="environments and indexes (default build/proof)"
    )
    parser.add_argument("--trial", action="store_true", help=f"one run and {_TRIAL} documents, kept apart in results/proof-trial")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, help="where the table and the plots go (default: beside what was measured)")
    return parser


if __name__ == "__main__":
    main()
