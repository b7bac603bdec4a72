"""A question in a new process again, with as much evidence: by their defaults some programs send more of it, and evaluating it takes time.

For each question, what the other program evaluates is traced first; then localrag is given so many passages that its prompt has as many
tokens or more, as far as there are so many that are relevant, and both are measured in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.proof import material, traces
from benchmarks.proof.bench import Bench, Row, attempt, refusal
from benchmarks.proof.programs import OURS, Program
from benchmarks.proof.questions.asking import DOCUMENTS, cold
from benchmarks.proof.questions.indexing import ensure_index

_MOST_RUNS = 3
_DEPTHS = (*range(1, 41), 48, 56, 64)


def measure(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    """A row for each other program that searches and answers by itself."""
    ensure_index(bench, OURS, DOCUMENTS, material.HANDBOOK)
    rows: dict[str, Row] = {}
    for program in [each for each in programs if each.retrieves and each is not OURS]:
        rows[program.name] = attempt(bench, program) or ensure_index(bench, program, DOCUMENTS, material.HANDBOOK) or _row(bench, program)
        print(f"{program.label}: {rows[program.name]}", file=sys.stderr, flush=True)
    return rows


def _row(bench: Bench, program: Program) -> Row:
    runs: list[Row] = []
    beside: list[Row] = []
    for question in material.questions(min(bench.num_runs, _MOST_RUNS)):
        traced = bench.run(program, "ask", index=DOCUMENTS, questions=[question], max_tokens=1, trace=True)
        if reason := refusal(traced):
            return reason
        tokens = sum(map(len, traces.prompts(traced["evaluated"], has_limit=traced["keeps_to_limit"])))
        top_k, own_tokens = _as_many(bench, question, tokens)
        theirs, ours = cold(bench, program, question), cold(bench, OURS, question, top_k=top_k)
        for found in (theirs, ours):
            if reason := refusal(found):
                return reason
        runs.append(theirs | {"prompt_tokens": tokens})
        beside.append(ours | {"prompt_tokens": own_tokens, "top_k": top_k})
    return {"runs": runs, "beside": beside}


def _as_many(bench: Bench, question: str, tokens: int) -> tuple[int, int]:
    """The fewest passages with which our prompt has so many tokens, or all there are; and its tokens."""
    found = bench.run(OURS, "sizes", index=DOCUMENTS, questions=[question], limits=list(_DEPTHS))
    if reason := refusal(found):
        raise RuntimeError(f"localrag could not measure its prompts: {reason['cannot']}")
    sizes = list(zip(_DEPTHS, found["sizes"], strict=True))
    most = max(size for _, size in sizes)
    return next((depth, size) for depth, size in sizes if size >= min(tokens, most))
