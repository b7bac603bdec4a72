"""Many answers in one go: 32 questions about the same documents, and a council of three with its judge."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from benchmarks import shared
from benchmarks.proof import material
from benchmarks.proof.bench import N_CTX, Bench, Row, attempt, refusal
from benchmarks.proof.programs import OURS, Program
from benchmarks.proof.questions.asking import DOCUMENTS, beside, by_hand
from benchmarks.proof.questions.indexing import ensure_index

NUM_QUESTIONS = 32
NUM_TOKENS = 32
TASK = "What is best for parts at 80 °C: PETG or ABS?"
_LIMIT_S = 3600.0
_LONG_S = 240.0
"""What takes a program longer is measured once."""


def measure_batch(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    """Seconds from the start of a process to the last of 32 answers of at most 32 tokens."""
    asked = material.questions(3 if bench.is_trial else NUM_QUESTIONS)

    def take(program: Program) -> Row:
        if missing := attempt(bench, program) or ensure_index(bench, program, DOCUMENTS, material.HANDBOOK):
            return missing
        return _our_batch(bench, asked) if program is OURS else _batch(bench, program, asked)

    return beside(_in_turn(bench, programs, take))


def _in_turn(bench: Bench, programs: Sequence[Program], take: Callable[[Program], Row]) -> dict[str, Row]:
    """One run of each program after the other, each round begun by the next one; who needs long takes part in the first round only."""
    rows: dict[str, Row] = {}
    for number in range(bench.num_runs):
        for program in shared.order_of_round(programs, number):
            runs = rows.get(program.name, {}).get("runs", [])
            if program.name in rows and (not runs or runs[0]["total_s"] > _LONG_S):
                continue
            row = take(program)
            print(f"{program.label}: {row}", file=sys.stderr, flush=True)
            rows[program.name] = row | {"runs": runs + row["runs"]} if "runs" in row else row
    return rows


def _our_batch(bench: Bench, asked: Sequence[str]) -> Row:
    source, out = bench.work / OURS.name / "batch.jsonl", bench.work / OURS.name / "answers.jsonl"
    source.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": str(number), "question": question}) for number, question in enumerate(asked)]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    out.unlink(missing_ok=True)
    bench.forget_prompts()
    limits = ("--ctx", str(N_CTX), "--max-tokens", str(NUM_TOKENS))
    ran = bench.localrag("ask", "--batch", str(source), "--out", str(out), "--kb", DOCUMENTS, *limits, limit_s=_LIMIT_S)
    if ran.returncode:
        return {"cannot": ran.complaint}
    return {"runs": [{"total_s": ran.total_s, "peak_mib": ran.peak_mib}]}


def _batch(bench: Bench, program: Program, asked: Sequence[str]) -> Row:
    given = by_hand(bench, program, asked)
    found = bench.run(program, "ask", index=DOCUMENTS, questions=list(asked), max_tokens=NUM_TOKENS, limit_s=_LIMIT_S, **given)
    if reason := refusal(found):
        return reason
    return {"runs": [{"total_s": found["ran"].total_s, "peak_mib": found["ran"].peak_mib}]}


def measure_council(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    """Seconds of the default council with its judge on the handbook, from its task to its verdict, the loading of the model left out.

    No other program has a council. The others get the texts of our prompts in the same order, and may answer each in as many tokens as
    ours took; they neither search, nor check, nor hold an answer to a form.
    """
    ours = ensure_index(bench, OURS, DOCUMENTS, material.HANDBOOK) or _sit(bench)
    if own := refusal(ours):
        return {program.name: own for program in programs}
    prompts, limits = [each["messages"] for each in ours["prompts"]], ours["num_tokens"]

    def take(program: Program) -> Row:
        if program is not OURS:
            return attempt(bench, program) or _by_hand(bench, program, prompts, limits)
        found = _sit(bench)
        return refusal(found) or {"runs": [{"total_s": found["wall_s"]}]}

    return beside(_in_turn(bench, programs, take))


def _sit(bench: Bench) -> Row:
    bench.forget_prompts()
    return bench.run(OURS, "chat", index=DOCUMENTS, chats=[[{"role": "user", "content": TASK}]], limits=[0])


def _by_hand(bench: Bench, program: Program, prompts: list[material.Chat], limits: list[int]) -> Row:
    found = bench.run(program, "chat", index=DOCUMENTS, chats=prompts, limits=limits, limit_s=_LIMIT_S)
    if reason := refusal(found):
        return reason
    return {"runs": [{"total_s": found["wall_s"]}], "note": "no council of its own"}
