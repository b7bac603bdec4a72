"""What every adapter does in the same way: it takes one task, has a program carry it out, and writes what was found.

An adapter is a script that imports nothing of localrag and runs in the interpreter in which its program is installed:

    PYTHON with_NAME.py TASK.json

The answer's text goes to standard output as it comes, piece by piece and flushed, so that whoever started the process sees its first
token when a person would; all else that a library prints goes to stderr. What was found is written as JSON to the file that the task
names: numbers and texts, or {"cannot": "why"} in one line, which becomes a line of the table.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Found = dict[str, Any]
Take = Callable[[str], None]
"""Is called with each piece of an answer as it comes."""


class Cannot(Exception):  # noqa: N818  # it is an answer, not an accident
    """The program has no way to do this, or this model leaves it none; the text says why."""


class Enough(Exception):  # noqa: N818
    """The answer is as long as it may get, and the program itself knows no limit."""


@dataclass(frozen=True)
class Task:
    """What is to be done; the same for every program. Paths are strings: this is read from JSON."""

    step: str
    answer: str
    model: str
    embedder: str
    embedder_gguf: str
    index: str
    documents: str = ""
    questions: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    """For a program that does not search: the text that each question is about."""
    chats: list[list[dict[str, str]]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    """The longest answer to each chat, in tokens."""
    n_ctx: int = 8192
    max_tokens: int = 64
    top_k: int | None = None
    """Passages for each question; None: what the program takes by itself."""
    depth: int = 100
    trace: bool = False
    """What llama.cpp evaluates is recorded. Never where time counts."""

    def given(self, question: str) -> str:
        """The evidence by hand of a question."""
        return dict(zip(self.questions, self.evidence, strict=True))[question]

    def prompt(self, question: str) -> str:
        """A question with its evidence by hand, for a program that does not search."""
        return f"Answer the question from this evidence.\n\n{self.given(question)}\n\nQuestion: {question}"


class Output:
    """Standard output, which is the answer's alone."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
        sys.stdout.flush()
        os.dup2(2, 1)

    def write(self, piece: str) -> None:
        self._out.write(piece)
        self._out.flush()


def main(steps: dict[str, Callable[[Task], Found]]) -> None:
    """Carries out the task that the command line names."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    found: Found
    try:
        if task.step not in steps:
            raise Cannot("it has no such step")  # noqa: TRY301
        _OUTPUT.append(Output())
        if task.trace:
            import tracing

            tracing.begin()
        found = steps[task.step](task)
        if task.trace:
            found["evaluated"] = tracing.calls()
    except Cannot as why:
        found = {"cannot": str(why)}
    except ImportError as error:
        found = {"cannot": f"not installed: {error}"}
    except Exception as error:  # noqa: BLE001  # whatever a library raises is a line in the table
        found = {"failed": _one_line(error)}
        if task.trace:
            found["evaluated"] = tracing.calls()
    written = Path(f"{task.answer}.new")
    written.write_text(json.dumps(found), encoding="utf-8")
    written.replace(task.answer)


_OUTPUT: list[Output] = []


def _one_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}"


def answered(task: Task, answer: Callable[[str, Take], list[str] | None], *, stops: bool = True) -> Found:
    """Each question in turn: seconds from the call to the first piece and to the end, the text, and the passages if they are known.

    `stops`: the program keeps to `max_tokens` itself. Else its answer is left when it has so many pieces; a piece is a token as a rule.
    """
    answers = []
    for question in task.questions:
        pieces: list[str] = []
        started, first_s, passages = time.perf_counter(), 0.0, None

        def take(piece: str, pieces: list[str] = pieces, started: float = started) -> None:
            nonlocal first_s
            if not piece:
                return
            first_s = first_s or time.perf_counter() - started
            pieces.append(piece)
            _OUTPUT[0].write(piece)
            if not stops and len(pieces) >= task.max_tokens:
                raise Enough

        with contextlib.suppress(Enough):
            passages = answer(question, take)
        total_s = time.perf_counter() - started
        text = "".join(pieces)
        passages = [task.given(question)] if task.evidence else passages
        answers.append({"first_s": first_s, "total_s": total_s, "text": text, "num_pieces": len(pieces), "passages": passages})
    return {"answers": answers, "keeps_to_limit": stops}


def chatted(task: Task, answer: Callable[[list[dict[str, str]], int], int | None]) -> Found:
    """Each chat in turn, in one process; `answer` gives back how many tokens were written, where the program says so."""
    started = time.perf_counter()
    tokens = [answer(chat, limit) for chat, limit in zip(task.chats, task.limits, strict=True)]
    return {"wall_s": time.perf_counter() - started, "num_tokens": tokens}


def counted(task: Task, count: Callable[[list[dict[str, str]]], int], send: Callable[[list[dict[str, str]]], None]) -> Found:
    """For each chat, what the program counts before it is sent, and what is evaluated once it is. `count` may raise Cannot."""
    import tracing

    counts: list[int | None] = []
    evaluated: list[Any] = []
    reason, failed = "", ""
    for chat in task.chats:
        try:
            counts.append(count(chat))
        except Cannot as why:
            counts.append(None)
            reason = str(why)
        tracing.begin()
        try:
            send(chat)
            evaluated.append(tracing.calls())
        except Exception as error:  # noqa: BLE001  # a prompt that its window does not hold
            evaluated.append(None)
            failed = _one_line(error)
    return {"counts": counts, "reason": reason, "failed_to_send": failed, "calls": evaluated}


def as_text(chat: list[dict[str, str]]) -> str:
    """The contents of a chat, for a counter that takes a text."""
    return "\n".join(message["content"] for message in chat)
