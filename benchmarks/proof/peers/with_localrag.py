"""localrag through the doors that its users have: the `localrag` command, run in this process where it is traced, and Session.

The model and the embedder are the default ones of models.toml, which are the files that the others are given; an index is a knowledge base.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from typing import Any

from adapter import Cannot, Found, Take, Task, answered, counted, main


def _run(*words: str) -> dict[str, Any]:
    """A command's JSON; Cannot with its error if it has none."""
    from localrag.cli import main as localrag

    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = localrag([*words, "--json"])
    found: dict[str, Any] = json.loads(out.getvalue())
    if code:
        raise Cannot(f"exit code {code}: {found['error']['message']}")
    return found


def ask(task: Task) -> Found:
    """Several questions are asked of one session; with `trace`, one question by the command, whose whole answer object is given back."""
    if task.trace:
        return _ask_by_command(task)
    from localrag import Question, Session

    with Session.open(kbs=[task.index], n_ctx=task.n_ctx) as session:

        def answer(question: str, take: Take) -> list[str]:
            done = session.ask(Question.of(question, max_tokens=task.max_tokens), on_text=take)
            return [hit.chunk.text for hit in done.hits]

        return answered(task, answer)


def _ask_by_command(task: Task) -> Found:
    started = time.perf_counter()
    wanted = [] if task.top_k is None else ["--top-k", str(task.top_k)]
    window = ["--ctx", str(task.n_ctx), "--max-tokens", str(task.max_tokens)]
    found = _run("ask", task.questions[0], "--kb", task.index, *window, *wanted, "--no-keep")
    answer = {"text": found["answer"], "total_s": time.perf_counter() - started, "first_s": 0.0, "num_pieces": 0, "passages": None}
    return {"answers": [answer], "keeps_to_limit": True, "object": found}


def search(task: Task) -> Found:
    """Sources, best first, and the text of the passages that an ask would be offered."""
    from localrag import Session

    with Session.open("echo", kbs=[task.index]) as session:
        (kb,) = session.knowledge_bases
        hits = [kb.retrieve(question, session.embedder, k=task.depth) for question in task.questions]
    ranked = [[hit.chunk.source.rpartition("/")[2] for hit in found] for found in hits]
    return {"ranked": {"hybrid, its default": ranked}, "texts": [[hit.chunk.text for hit in found] for found in hits]}


def chat(task: Task) -> Found:
    """A council by its name; what it was asked to decide is the first chat's text. Also the prompts, for those who have no council."""
    import localrag

    events: list[dict[str, Any]] = []
    (message,) = task.chats[0]
    sat = localrag.council(message["content"], kbs=[task.index], keep=False, on_event=events.append)
    end = next(each for each in events if each["event"] == "end")
    prompts = []
    for _, answer in sat.answers:
        parts = [each.part for each in answer.prompt.parts if not each.part.is_markup]
        system = "".join(part.text for part in parts if part.section == "system").strip()
        user = "".join(part.text for part in parts if part.section != "system").strip()
        head = [{"role": "system", "content": system}] if system else []
        prompts.append({"messages": [*head, {"role": "user", "content": user}], "num_tokens": answer.completion_tokens})
    loading_s = sum(each["load_s"] for each in end["loads"])
    return {"wall_s": end["total_s"] - loading_s, "num_tokens": [each["num_tokens"] for each in prompts], "prompts": prompts}


def sizes(task: Task) -> Found:
    """The tokens of a question's prompt with so many passages, for each of `limits`; nothing is evaluated."""
    from localrag import Question, Session

    with Session.open(kbs=[task.index], n_ctx=task.n_ctx, vocab_only=True, keep=False) as session:
        prepared = [session.prepare(Question.of(task.questions[0], max_tokens=task.max_tokens, top_k=limit)) for limit in task.limits]
    return {"sizes": [each.prompt.ledger.prompt_tokens for each in prepared]}


def count(task: Task) -> Found:
    """`Session.prepare` counts; `Session.ask` evaluates."""
    from localrag import Message, Question, Session

    with Session.open(n_ctx=task.n_ctx, keep=False) as session:

        def messages(chat: list[dict[str, str]]) -> list[Message]:
            return [Message(each["role"], each["content"]) for each in chat]

        def count_before(chat: list[dict[str, str]]) -> int:
            return session.prepare(Question.of(messages(chat), max_tokens=1)).prompt.ledger.prompt_tokens

        def send(chat: list[dict[str, str]]) -> None:
            session.engine.forget()  # the next prompt is not to go on from this one
            session.ask(Question.of(messages(chat), max_tokens=1))

        return counted(task, count_before, send)


if __name__ == "__main__":
    main({"ask": ask, "search": search, "chat": chat, "sizes": sizes, "count": count})
