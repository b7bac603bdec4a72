"""Evidence that is twenty times the window or more: is there an error, is it cut and is that told, or is every token accounted for?

Each program that searches is asked for so many passages that they are far more than its window holds; one that does not is handed as much
text. What it then had evaluated is traced, and which of the passages it was offered stand in it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.proof import material, traces
from benchmarks.proof.bench import Bench, Row, attempt
from benchmarks.proof.programs import OURS, Program
from benchmarks.proof.questions.indexing import COLLECTION, ensure_index
from localrag.kb.evaluate import read_collection

WINDOW = 768
TIMES = 20
_MANY = 150  # abstracts of some 200 tokens
_LIMIT_S = 3600.0  # one program makes a prompt of each window's worth
_START = 60  # characters of a passage by which it is found again


def measure(bench: Bench, programs: Sequence[Program]) -> dict[str, Row]:
    if bench.collection is None:
        return {program.name: {"not_run": "no collection was given (--collection)"} for program in programs}
    documents = material.write_collection(bench.collection, bench.work, most=bench.max_documents)
    text = _too_much(bench)
    rows: dict[str, Row] = {}
    for program in programs:
        rows[program.name] = attempt(bench, program) or ensure_index(bench, program, COLLECTION, documents) or _asked(bench, program, text)
        print(f"{program.label}: {rows[program.name]}", file=sys.stderr, flush=True)
    return rows


def _too_much(bench: Bench) -> str:
    """Documents of the collection until they are as many tokens as so many windows hold."""
    assert bench.collection is not None
    texts: list[str] = []
    num_tokens = 0
    for _, title, text in read_collection(bench.collection).documents():
        texts.append(f"# {title}\n\n{text.strip()}")
        num_tokens += len(traces.tokens_of(texts[-1], bench.model, special=False))
        if num_tokens >= TIMES * WINDOW:
            break
    return "\n\n".join(texts)


def _asked(bench: Bench, program: Program, text: str) -> Row:
    by_hand = {} if program.retrieves else {"evidence": [text]}
    task = {"questions": [material.WIDE_QUESTION], "n_ctx": WINDOW, "max_tokens": 1, "top_k": _MANY, "trace": program.traced}
    found = bench.run(program, "ask", index=COLLECTION, limit_s=_LIMIT_S, **task, **by_hand)
    said = _said(found)
    evaluated = traces.prompts(found.get("evaluated", []), has_limit=found.get("keeps_to_limit", False))
    prompts = [len(each) for each in evaluated] or [each for each in found.get("prompt_tokens", []) if each]
    row: Row = {"window": WINDOW, "evaluated": prompts, "said": said}
    if "cannot" in found or "failed" in found:
        error = found.get("failed") or found["cannot"]
        return row | {"outcome": "error", "error": error}
    if program is OURS:
        return row | _ledger(found["object"], sum(prompts))
    passages = found["answers"][0]["passages"] or []
    text = "".join(traces.text_of(each, bench.model) for each in evaluated)
    wanted = sum(len(traces.tokens_of(each, bench.model, special=False)) for each in passages)
    row |= {"offered_passages": len(passages), "offered_tokens": wanted, "offered_windows": round(wanted / WINDOW, 1)}
    if text:
        row["passages_in_prompts"] = sum(" ".join(each.split())[:_START] in " ".join(text.split()) for each in passages)
    calls = len(prompts)
    return row | {"outcome": "several calls" if calls > 1 else "told" if said else "silent", "calls": calls}


def _ledger(answer: Row, evaluated: int) -> Row:
    """What our answer object accounts for; `is_exact`: its entries add up to what it says was sent, and to what llama.cpp evaluated."""
    ledger = answer["ledger"]
    evidence = [entry for entry in ledger["entries"] if entry["name"].startswith("evidence")]
    used = sum(entry["used"] for entry in ledger["entries"] if entry["name"] != "answer")
    wanted = sum(entry["wanted"] for entry in evidence)
    return {
        "outcome": "ledger",
        "offered_tokens": wanted,
        "offered_windows": round(wanted / WINDOW, 1),
        "passages_in_prompts": len(answer["evidence"]),
        "omitted": [label for entry in evidence for label in entry["omitted"]],
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "is_exact": used == answer["usage"]["prompt_tokens"] == evaluated,
    }


def _said(found: Row) -> list[str]:
    """Lines on stderr that speak of the window; a library's other chatter is none of it."""
    words = ("context", "window", "truncat", "exceed")
    lines = [line.strip() for line in found["ran"].err.splitlines()]
    return [line[:300] for line in lines if any(word in line.lower() for word in words)][:5]
