"""The engine's process, separate so that a crash of llama.cpp does not end the server. engine_process.py starts it.

The protocol is JSON lines. The first line to the engine has the options of the session to open. Then come requests:

    {"op": "ask" | "budget", "id", "messages": [{"role", "content"}], "kbs", "tools", "is_plain", "sampling", "options",
     "max_seconds"}
    {"op": "tokenize", "id", "text"}
    {"op": "cancel", "id"}

The engine first replies `{"ready": {…}}`, or `{"failed": {…}}` if the session cannot be opened. The replies to a request are
`{"id", "begun": {…}}` with the prompt, any number of `{"id", "text", "thought", "calls", "num_tokens", "logprobs"}`, and finally either
`{"id", "done": {…}}` or `{"id", "problem": [status, detail]}`. Standard error has log messages for people.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from localrag.engine.jobs import SERVE
from localrag.errors import LocalragError
from localrag.journal import allotments
from localrag.question import BudgetOptions, Given, Question, Search, ToolCalls
from localrag.report.page import item_style, shrink_multiple
from localrag.server.errors import problem_of
from localrag.session import Answer, Event, Prepared, Session, supplied
from localrag.settings import Settings
from localrag.text.sanitize import Redactor
from localrag.types import Hit, Message, SamplingParams, ToolCall, ToolSpec

MAX_LINE_BYTES = 256 << 20


def line_of(message: Mapping[str, Any]) -> bytes:
    """Encode a message as one line of JSON."""
    return json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def main() -> None:
    """Open the session that the first line describes, and answer requests until standard input ends."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # terminals, timeout and systemd signal the whole group; the server ends this process
        signal.signal(signum, signal.SIG_IGN)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output must not reach the pipe
    options = json.loads(sys.stdin.buffer.readline())
    try:
        worker = _Worker(options, lambda message: _send(out, message))
    except LocalragError as error:
        _send(out, {"failed": error.to_dict()})
        return
    worker.run(sys.stdin.buffer)


def _send(out: BinaryIO, message: Mapping[str, Any]) -> None:
    out.write(line_of(message))
    out.flush()


class _Worker:
    """Reads requests in one thread and runs them in another. `send` sends a reply to the server."""

    def __init__(self, options: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
        settings = settings_of(options)
        session = Session.open(
            options["model"],
            n_ctx=options["n_ctx"],
            chat_template=Path(options["chat_template"]) if options["chat_template"] else None,
            budget=options["budget"],
            name="serve",
            keep=options["keep"],
            settings=settings,
        )
        self._session = session
        self._redact = Redactor([settings.home])
        self._send = send
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        engine = session.engine
        engine.reserve_window(session.slot.n_ctx, SERVE)
        about = {
            "model": Path(engine.name).name,  # for a model named by its path, only the file name
            "slot": session.slot.to_dict(),
            "num_cells": engine.context.runner.num_cells if engine.context else 0,
        }
        send({"ready": about, "warnings": [self._redact(each) for each in session.warnings]})

    def run(self, source: BinaryIO) -> None:
        threading.Thread(target=self._hear, args=(source,), daemon=True).start()
        for event in self._session.run(self._arrivals(), policy=SERVE):
            if event.question is not None:
                self._reply(event.question.id, event)
        self._session.close()

    def _arrivals(self) -> Iterator[Question | None]:
        """Yield questions as they arrive, or None if none is waiting while others run. Ends when the server closes the pipe."""
        while True:
            try:
                message = self._heard.get(block=self._session.engine.is_idle)
            except queue.Empty:
                yield None
                continue
            if message is None:
                self._session.engine.cancel_all()
                return
            if (question := self._handle(message)) is not None:
                yield question

    def _hear(self, source: BinaryIO) -> None:
        for line in source:
            self._heard.put(json.loads(line))
        self._heard.put(None)

    def _handle(self, message: dict[str, Any]) -> Question | None:
        """Return the question of an "ask" message. Handle every other message and return None."""
        number = message["id"]
        try:
            if message["op"] == "ask":
                return question_of(message)
            if message["op"] == "cancel":
                self._session.cancel(number)
            elif message["op"] == "budget":
                self._send({"id": number, "done": self._budget(question_of(message))})
            else:
                self._send({"id": number, "done": {"token_ids": self._session.engine.tokenizer.encode(message["text"])}})
        except LocalragError as error:
            self._refuse(number, error)
        return None

    def _budget(self, question: Question) -> dict[str, Any]:
        prepared = self._session.prepare(question)
        return prompt_facts(prepared) | ({"warnings": prepared.warnings} if prepared.warnings else {})

    def _reply(self, number: int | str, event: Event) -> None:
        if event.prepared is not None:
            facts = {**prompt_facts(event.prepared), "nodes": nodes(event, event.prepared.prompt.hits)}
            self._send({"id": number, "begun": facts})
        elif event.error is not None:
            self._refuse(number, event.error)
        else:
            if event.text or event.thought or event.logprobs or event.calls:
                self._send_piece(number, event)
            if event.answer is not None:
                self._send({"id": number, "done": answer_facts(event, event.answer, self._redact)})

    def _send_piece(self, number: int | str, event: Event) -> None:
        logprobs = [[list(each.piece), each.logprob, [[list(piece), value] for piece, value in each.top]] for each in event.logprobs]
        num_tokens = event.num_tokens if event.answer is None else event.answer.completion_tokens
        piece = {"text": event.text, "thought": event.thought, "num_tokens": num_tokens, "logprobs": logprobs}
        self._send({"id": number, **piece, "calls": list(map(asdict, event.calls))})

    def _refuse(self, number: int | str, error: LocalragError) -> None:
        self._send({"id": number, "problem": problem_of(error).parts})


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Return the server's settings from the options on the first line."""
    models_file = options["models_file"]
    return Settings(
        home=Path(options["home"]),
        models_file=Path(models_file) if models_file else None,
        prefix_bytes=options["prefix_bytes"],
        learn=options["learn"],
    )


def question_of(message: Mapping[str, Any]) -> Question:
    """Build the question of an "ask" or "budget" message. UsageError for numbers out of range."""
    options, calls = message["options"], message["calls"]
    tools = tuple(ToolSpec(**each) for each in message["tools"])
    return Question(
        messages=tuple(map(_message, message["messages"])),
        sampling=SamplingParams(**{**message["sampling"], "stop": tuple(message["sampling"].get("stop", ()))}),
        search=Search(
            kbs=tuple(message["kbs"]),
            top_k=options.get("top_k"),
            evidence=options.get("evidence"),
            evidence_tokens=options.get("evidence_tokens"),
        ),
        given=Given(tools=tools, must_call=tuple(calls["choices"]) if tools and not calls["or_text"] else ()),
        budget=BudgetOptions(context_ratio=options.get("context_ratio"), ends_after_s=message.get("max_seconds")),
        calls=_tool_calls(calls) if tools else None,
        needs_question=options.get("needs_question", True),
        cite=options.get("cite"),
        unanswerable=options.get("unanswerable"),
        quote=options.get("quote", False),
        is_plain=message["is_plain"],
        id=message["id"],
    )


def _tool_calls(given: Mapping[str, Any]) -> ToolCalls:
    parallel = given.get("parallel", True)
    return ToolCalls(choices=tuple(given["choices"]), strict=tuple(given["strict"]), or_text=given["or_text"], parallel=parallel)


def _message(given: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(*each) for each in given.get("tool_calls", ()))
    return Message(given["role"], given["content"], tool_calls=calls, tool_call_id=given.get("tool_call_id", ""))


def prompt_facts(prepared: Prepared) -> dict[str, Any]:
    """Describe a prompt before it is evaluated: its ledger, and each section as a CSS flex item with one pixel per token."""
    budget = prepared.prompt.settled
    sections = allotments(budget)
    multiple = shrink_multiple(budget.window, sections)
    return {
        "prompt_tokens": prepared.prompt.ledger.prompt_tokens,
        "slot": prepared.slot.to_dict(),
        "sections": [{**asdict(each), "css": item_style(each, multiple)} for each in sections],
        "ledger": prepared.prompt.ledger.to_dict(),
        "evidence": supplied(prepared.prompt),
    }


def answer_facts(event: Event, answer: Answer, redact: Callable[[str], str]) -> dict[str, Any]:
    """Return the answer object with its sources as nodes. `redact` removes paths of this machine from warnings."""
    warnings = {"warnings": [redact(each) for each in answer.warnings]} if answer.warnings else {}
    speed = answer.timings.tokens_per_s(answer.completion_tokens)
    return {**answer.to_dict(), **warnings, "tokens_per_s": speed, "nodes": nodes(event, answer.hits)}


def nodes(event: Event, hits: Sequence[Hit]) -> list[dict[str, Any]]:
    """Return sources in the format of the KAITO RAG engine's `source_nodes`."""
    return [
        {
            "doc_id": event.documents[hit.label][0],
            "node_id": hit.label,
            "text": hit.chunk.text,
            "score": hit.score,
            "metadata": event.documents[hit.label][1],
        }
        for hit in hits
        if hit.label in event.documents
    ]


if __name__ == "__main__":
    main()
