"""The process that holds the engine, so that what ends llama.cpp does not end the server. engine_process.py starts and hears it."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from localrag.errors import LocalragError
from localrag.journal import allotments
from localrag.report.page import item_style, shrink_multiple
from localrag.server.errors import problem_of
from localrag.server.tools import schema_of_calls
from localrag.server.wire import line_of
from localrag.session import Answer, Options, Prepared, Session, supplied
from localrag.session.redact import Redactor
from localrag.session.serving import Event, Question, Service
from localrag.settings import Settings
from localrag.types import Hit, Message, SamplingParams, ToolSpec


def main() -> None:
    """Open what the first line asks for, and answer until standard input ends."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group by a terminal, timeout and systemd: the server ends this one
        signal.signal(signum, signal.SIG_IGN)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody else writes to the pipe
    wanted = json.loads(sys.stdin.buffer.readline())
    try:
        worker = _Worker(wanted, lambda message: _send(out, message))
    except LocalragError as error:
        _send(out, {"failed": error.to_dict()})
        return
    worker.run(sys.stdin.buffer)


def _send(out: BinaryIO, message: Mapping[str, Any]) -> None:
    out.write(line_of(message))
    out.flush()


class _Worker:
    """Hears in one thread and works in another; `send` takes what the server is told."""

    def __init__(self, wanted: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
        settings = settings_of(wanted)
        session = Session.open(
            wanted["model"],
            n_ctx=wanted["n_ctx"],
            chat_template=Path(wanted["chat_template"]) if wanted["chat_template"] else None,
            budget=wanted["budget"],
            name="serve",
            keep=wanted["keep"],
            settings=settings,
        )
        self._session = session
        self._hush = Redactor([settings.home])
        self._send = send
        self._service = Service(session, settings).open()
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        engine = session.engine
        about = {
            "model": Path(engine.name).name,  # of one that is named by its path, no more than its file
            "slot": session.slot.to_dict(),
            "num_cells": engine.context.runner.num_cells if engine.context else 0,
        }
        send({"ready": about, "warnings": [self._hush(each) for each in session.warnings]})

    def run(self, source: BinaryIO) -> None:
        threading.Thread(target=self._hear, args=(source,), daemon=True).start()
        while True:
            try:
                message = self._heard.get(block=not self._service.num_running)
            except queue.Empty:
                for event in self._service.step():
                    self._tell(event)
                continue
            if message is None:
                self._service.close()
                return
            self._take(message)

    def _hear(self, source: BinaryIO) -> None:
        for line in source:
            self._heard.put(json.loads(line))
        self._heard.put(None)

    def _take(self, message: dict[str, Any]) -> None:
        number = message["id"]
        try:
            if message["op"] == "ask":
                self._tell(self._service.add(question_of(message)))
            elif message["op"] == "cancel":
                self._service.cancel(number)
            elif message["op"] == "budget":
                self._send({"id": number, "done": self._budget(question_of(message))})
            else:
                self._send({"id": number, "done": {"token_ids": self._session.engine.tokenizer.encode(message["text"])}})
        except LocalragError as error:
            self._refuse(number, error)

    def _budget(self, question: Question) -> dict[str, Any]:
        _, prepared, opened = self._service.prepare(question)
        with opened:
            return composed(prepared) | ({"warnings": prepared.warnings} if prepared.warnings else {})

    def _tell(self, event: Event) -> None:
        if event.begun is not None:
            begun = {**composed(event.begun), "nodes": nodes(event, event.begun.prompt.hits)}
            self._send({"id": event.id, "begun": begun})
        elif event.answer is not None:
            self._send({"id": event.id, "done": told(event, event.answer, self._hush)})
        elif event.error is not None:
            self._refuse(event.id, event.error)
        else:
            logprobs = [[list(each.piece), each.logprob, [[list(piece), value] for piece, value in each.top]] for each in event.logprobs]
            self._send({"id": event.id, "text": event.text, "thought": event.thought, "num_tokens": event.num_tokens, "logprobs": logprobs})

    def _refuse(self, number: int, error: LocalragError) -> None:
        self._send({"id": number, "problem": problem_of(error).parts})


def settings_of(wanted: Mapping[str, Any]) -> Settings:
    """Those of the server that wants it."""
    models_file = wanted["models_file"]
    return Settings(
        home=Path(wanted["home"]),
        models_file=Path(models_file) if models_file else None,
        prefix_bytes=wanted["prefix_bytes"],
        learn=wanted["learn"],
    )


def question_of(message: Mapping[str, Any]) -> Question:
    """UsageError for numbers that cannot be."""
    given = message["options"]
    options = Options()
    if given.get("context_ratio") is not None:
        options["context_ratio"] = given["context_ratio"]
    if given.get("top_k") is not None:
        options["top_k"] = given["top_k"]
    if given.get("needs_question") is False:
        options["needs_question"] = False
    if message["tools"]:
        options["tools"] = [ToolSpec(**each) for each in message["tools"]]
        if not message["calls"]["or_text"]:
            options["must_call"] = message["calls"]["choices"]
    return Question(
        id=message["id"],
        messages=[Message(each["role"], each["content"]) for each in message["messages"]],
        kbs=tuple(message["kbs"]),
        sampling=SamplingParams(**{**message["sampling"], "stop": tuple(message["sampling"].get("stop", ()))}),
        options=options,
        is_plain=message["is_plain"],
        max_seconds=message.get("max_seconds"),
        form_of_calls=partial(_form_of_calls, **message["calls"]) if message["tools"] else None,
    )


def _form_of_calls(sent: Sequence[ToolSpec], *, choices: Sequence[str], strict: Sequence[str], or_text: bool) -> dict[str, Any]:
    """The fields of SamplingParams that hold an answer to a call of the tools that were sent."""
    specs = [spec for spec in sent if spec.name in choices]
    return {"json_schema": schema_of_calls(specs, strict) if specs else None, "or_text": or_text and bool(specs)}


def composed(prepared: Prepared) -> dict[str, Any]:
    """A prompt before it is evaluated: its ledger, and each section of it as a CSS flex item that takes as many pixels as it has tokens."""
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


def told(event: Event, answer: Answer, hush: Callable[[str], str]) -> dict[str, Any]:
    """The answer object, and its sources as nodes. `hush` takes paths of this machine out of warnings."""
    warnings = {"warnings": [hush(each) for each in answer.warnings]} if answer.warnings else {}
    speed = answer.timings.tokens_per_s(answer.completion_tokens)
    return {**answer.to_dict(), **warnings, "tokens_per_s": speed, "nodes": nodes(event, answer.hits)}


def nodes(event: Event, hits: Sequence[Hit]) -> list[dict[str, Any]]:
    """Sources as OpenAI's clients of the KAITO RAG engine know them."""
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
