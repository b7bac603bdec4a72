"""Tokens as they are counted before a prompt is sent, beside the tokens that llama.cpp evaluates once it is: five prompts for each counter.

What is evaluated is recorded where llama.cpp is called (peers/tracing.py), with each program's own template around the same messages; only
xllamacpp, which brings its own llama.cpp, tells it itself. Beside the programs stand two rules of thumb that many have, measured against
what localrag evaluates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.proof import material, traces
from benchmarks.proof.bench import Bench, Row, attempt, refusal
from benchmarks.proof.programs import OURS, Program

_WAYS = {
    "localrag": "Session.prepare: the very ids that are sent",
    "create_chat_completion": "Llama.tokenize of the contents",
    "raglite": "len(json.dumps(message)) // 3",
    "llamaindex": "cl100k",
}
RULES: Mapping[str, Callable[[material.Chat], int]] = {
    "characters / 4": lambda chat: sum(len(message["content"]) for message in chat) // 4,
    "250 a message": lambda chat: 250 * len(chat),
}


def measure(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    """For each counter, {prompt: {"counted", "evaluated"}}."""
    chats = material.chats()
    rows: dict[str, Row] = {}
    for program in programs:
        rows[program.name] = _row(bench, program, chats)
        print(f"{program.label}: {rows[program.name]}", file=sys.stderr, flush=True)
    ours = rows[OURS.name].get("prompts")
    for rule, count in RULES.items() if ours else ():
        counts = {name: {"counted": count(chat), "evaluated": ours[name]["evaluated"]} for name, chat in chats.items()}
        rows[rule] = {"way": rule, "prompts": counts}
    return rows


def _row(bench: Bench, program: Program, chats: Mapping[str, material.Chat]) -> Row:
    if absent := attempt(bench, program):
        return absent
    # An embedder is no part of it, and neither is an index.
    found = bench.run(program, "count", index="none", chats=list(chats.values()))
    if reason := refusal(found):
        return reason
    evaluated = found.get("told") or [None if calls is None else _evaluated(calls) for calls in found["calls"]]
    prompts = {name: {"counted": counted, "evaluated": real} for name, counted, real in zip(chats, found["counts"], evaluated, strict=True)}
    if None in found["counts"] or None in evaluated:
        return {"cannot": found["reason"] or found["failed_to_send"], "prompts": prompts}
    return {"way": _WAYS.get(program.name, program.label), "prompts": prompts}


def _evaluated(calls: list[Row]) -> int:
    (prompt,) = traces.prompts(calls, has_limit=True)
    return len(prompt)
