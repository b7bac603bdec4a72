"""A document that holds the control strings of the model's template: do they become control tokens of the prompt?

Each program is asked about an index of that document alone, and about one of the same document without the strings. The control tokens
that are evaluated should be the same: what is more came out of the document's text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.proof import material, traces
from benchmarks.proof.bench import Bench, Row, attempt, refusal
from benchmarks.proof.programs import Program
from benchmarks.proof.questions.indexing import ensure_index


def measure(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    folders = material.hostile_folders(bench.work)
    rows: dict[str, Row] = {}
    for program in programs:
        row = attempt(bench, program)
        for name, folder in folders.items():
            row = row or ensure_index(bench, program, name, folder)
        rows[program.name] = row or _row(bench, program)
        print(f"{program.label}: {rows[program.name]}", file=sys.stderr, flush=True)
    return rows


def _row(bench: Bench, program: Program) -> Row:
    texts = {"hostile": material.hostile_text(), "harmless": material.without_control_strings(material.hostile_text())}
    if not program.traced:
        return _told(bench, program, texts)
    controls = {traces.tokens_of(string, bench.model, special=True)[0] for string in material.CONTROL_STRINGS}
    found: dict[str, list[int]] = {}
    seen: dict[str, bool] = {}
    for name, text in texts.items():
        answer = _ask(bench, program, name, text)
        if reason := refusal(answer):
            return reason
        sent = traces.prompts(answer["evaluated"], has_limit=answer["keeps_to_limit"])
        found[name] = [token for prompt in sent for token in prompt if token in controls]
        seen[name] = any(material.HOSTILE_FACT in traces.text_of(prompt, bench.model) for prompt in sent)
    if not all(seen.values()):
        return {"cannot": "the document was not in its prompt"}
    return {
        "control_tokens": {name: len(tokens) for name, tokens in found.items()},
        "out_of_text": len(found["hostile"]) - len(found["harmless"]),
        "ids": sorted(set(found["hostile"])),
    }


def _told(bench: Bench, program: Program, texts: dict[str, str]) -> Row:
    """By the counts that a program tells: a string that is a control token counts one, and as text it counts several."""
    told = {}
    for name, text in texts.items():
        answer = _ask(bench, program, name, text)
        if reason := refusal(answer):
            return reason
        told[name] = answer["prompt_tokens"][0]
    more = told["hostile"] - told["harmless"]
    differences = {
        special: len(traces.tokens_of(texts["hostile"], bench.model, special=special))
        - len(traces.tokens_of(texts["harmless"], bench.model, special=special))
        for special in (True, False)
    }
    num_strings = sum(texts["hostile"].count(string) for string in material.CONTROL_STRINGS)
    became = abs(more - differences[True]) < abs(more - differences[False])
    return {"out_of_text": num_strings if became else 0, "told": told, "differences": list(differences.values())}


def _ask(bench: Bench, program: Program, name: str, text: str) -> Row:
    by_hand = {} if program.retrieves else {"evidence": [text]}
    question = material.HOSTILE_QUESTION
    return bench.run(program, "ask", index=name, questions=[question], max_tokens=1, trace=program.traced, **by_hand)
