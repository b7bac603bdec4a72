"""One question in a new process on an index that is there, from its start to the first token and to the end; and another one behind it.

A program that searches does all of it by itself, in one script or command. One that does not is handed the passages that localrag found:
its row says what the model alone takes, and is not compared as a program that answers from documents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import shared
from benchmarks.proof import material
from benchmarks.proof.bench import MAX_TOKENS, N_CTX, Bench, Row, attempt, refusal
from benchmarks.proof.programs import OURS, Program
from benchmarks.proof.questions.indexing import ensure_index

DOCUMENTS = "handbook"
_PASSAGES = 4  # localrag's default
_WINDOW = ("--ctx", str(N_CTX), "--max-tokens", str(MAX_TOKENS))


def measure_cold(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    """Seconds from the start of a process, and MiB; each round another question, the same for all, and a first round that does not count.

    Before each ask localrag forgets what it kept of evaluated prompts. Beside it stands the same question asked again, which finds them.
    """

    def take(program: Program, question: str) -> Row:
        found = cold(bench, program, question)
        return found | {"again": _our_ask(bench, question)} if program is OURS else found

    return _in_turn(bench, programs, take)


def measure_warm(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    """Seconds from the call to the first token and to the end, of a second question in the process that answered a first one."""
    return _in_turn(bench, programs, lambda program, question: _warm(bench, program, question))


def _in_turn(bench: Bench, programs: Sequence[Program], take: Callable[[Program, str], Row]) -> dict[str, Row]:
    """Every program takes each question, each round begun by the next one; the first round does not count, and a trial has none such.

    A program that could not do one of the rounds has no numbers at all.
    """
    rows: dict[str, Row] = {}
    for program in programs:
        rows[program.name] = attempt(bench, program) or ensure_index(bench, program, DOCUMENTS, material.HANDBOOK) or {"runs": []}
    rounds = material.questions(bench.num_runs + 1)
    for number, question in list(enumerate(rounds))[bench.is_trial :]:
        for program in shared.order_of_round(programs, number):
            if "runs" not in rows[program.name]:
                continue
            found = take(program, question)
            print(f"{program.label}: {found}", file=sys.stderr, flush=True)
            if reason := refusal(found):
                rows[program.name] = reason
            elif number:
                rows[program.name]["runs"].append(found)
    return beside(rows)


def beside(rows: dict[str, Row]) -> dict[str, Row]:
    """Each row that has runs, with ours to compare it with."""
    ours = rows[OURS.name].get("runs")
    return {name: row | ({"beside": ours} if "runs" in row else {}) for name, row in rows.items()}


def cold(bench: Bench, program: Program, question: str, **task: Any) -> Row:  # noqa: ANN401  # see adapter.Task
    """One question in a new process. An answer without text has its first token at its end, and says that it is empty."""
    if program is OURS:
        bench.forget_prompts()
        return _our_ask(bench, question, **task)
    found = bench.run(program, "ask", index=DOCUMENTS, questions=[question], **by_hand(bench, program, [question]), **task)
    if refusal(found):
        return found
    return _timed(found["ran"], is_empty=not found["answers"][0]["num_pieces"])


def _our_ask(bench: Bench, question: str, top_k: int | None = None) -> Row:
    wanted = () if top_k is None else ("--top-k", str(top_k))
    ran = bench.localrag("ask", question, "--kb", DOCUMENTS, *_WINDOW, *wanted)
    if ran.returncode:
        return {"cannot": ran.complaint}
    return _timed(ran, is_empty=not ran.out.strip())


def _timed(ran: Any, *, is_empty: bool) -> Row:  # noqa: ANN401  # running.Ran
    return {"first_s": ran.total_s if is_empty else ran.first_s, "total_s": ran.total_s, "peak_mib": ran.peak_mib, "is_empty": is_empty}


def _warm(bench: Bench, program: Program, question: str) -> Row:
    asked = [question, material.SECOND_QUESTION]
    if program is OURS:
        bench.forget_prompts()
    found = bench.run(program, "ask", index=DOCUMENTS, questions=asked, **by_hand(bench, program, asked))
    if refusal(found):
        return found
    second = found["answers"][1]
    is_empty = not second["num_pieces"]
    return {"first_s": second["total_s" if is_empty else "first_s"], "total_s": second["total_s"], "is_empty": is_empty}


_EVIDENCE: dict[str, str] = {}


def by_hand(bench: Bench, program: Program, questions: Sequence[str]) -> Row:
    """For a program that does not search: the passages that localrag offers to a prompt with each question, as one text."""
    if program.retrieves:
        return {}
    if missing := [question for question in questions if question not in _EVIDENCE]:
        found = bench.run(OURS, "search", index=DOCUMENTS, questions=missing, depth=_PASSAGES)
        if reason := refusal(found):
            raise RuntimeError(f"localrag could not search: {reason['cannot']}")
        _EVIDENCE.update({question: "\n\n".join(texts) for question, texts in zip(missing, found["texts"], strict=True)})
    return {"evidence": [_EVIDENCE[question] for question in questions]}
