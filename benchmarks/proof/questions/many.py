"""Many answers in one go: 32 questions about the same documents, and a council of three with its judge."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from benchmarks.proof import material
from benchmarks.proof.bench import N_CTX, Bench, Row, attempt, refusal
from benchmarks.proof.programs import OURS, Program
from benchmarks.proof.questions.asking import DOCUMENTS, by_hand
from benchmarks.proof.questions.indexing import ensure_index

NUM_QUESTIONS = 32
NUM_TOKENS = 32
TASK = "What is best for parts at 80 °C: PETG or ABS?"
_LIMIT_S = 3600.0


def measure_batch(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    """Seconds from the start of a process to the last of 32 answers of at most 32 tokens. One run: it takes minutes."""
    number = 3 if bench.is_trial else NUM_QUESTIONS
    asked = material.questions(number)
    rows: dict[str, Row] = {}
    for program in programs:
        row = attempt(bench, program) or ensure_index(bench, program, DOCUMENTS, material.HANDBOOK)
        rows[program.name] = row or (_our_batch(bench, asked) if program is OURS else _batch(bench, program, asked))
        print(f"{program.label}: {rows[program.name]}", file=sys.stderr, flush=True)
    return _beside(rows)


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
    ours = ensure_index(bench, OURS, DOCUMENTS, material.HANDBOOK) or bench.run(
        OURS, "chat", index=DOCUMENTS, chats=[[{"role": "user", "content": TASK}]], limits=[0]
    )
    if own := refusal(ours):
        return {program.name: own for program in programs}
    prompts = [each["messages"] for each in ours["prompts"]]
    rows: dict[str, Row] = {OURS.name: {"runs": [{"total_s": ours["wall_s"]}]}}
    for program in [each for each in programs if each is not OURS]:
        rows[program.name] = attempt(bench, program) or _by_hand(bench, program, prompts, ours["num_tokens"])
        print(f"{program.label}: {rows[program.name]}", file=sys.stderr, flush=True)
    return _beside(rows)


def _by_hand(bench: Bench, program: Program, prompts: list[material.Chat], limits: list[int]) -> Row:
    found = bench.run(program, "chat", index=DOCUMENTS, chats=prompts, limits=limits, limit_s=_LIMIT_S)
    if reason := refusal(found):
        return reason
    return {"runs": [{"total_s": found["wall_s"]}], "note": "no council of its own"}


def _beside(rows: dict[str, Row]) -> dict[str, Row]:
    ours = rows[OURS.name].get("runs")
    return {name: row | ({"beside": ours} if "runs" in row else {}) for name, row in rows.items()}
