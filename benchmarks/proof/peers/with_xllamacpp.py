"""xllamacpp: llama.cpp's own server inside the process, as its README uses it (`handle_chat_completions`).

It does not search: evidence is put into the message by hand. Set: n_ctx, max_tokens, temperature 0. It brings a llama.cpp of its own (its
wheel, built for AVX2), so that what it evaluates is told by the server itself (`usage.prompt_tokens`), not traced.
"""

from __future__ import annotations

from typing import Any

from adapter import Found, Take, Task, answered, chatted, main


def _open(task: Task) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = task.model
    params.n_ctx = task.n_ctx
    params.verbosity = -1
    return xllamacpp.Server(params)


def _send(server: Any, messages: list[dict[str, str]], limit: int, take: Take) -> dict[str, Any]:
    """Streams one answer; the last chunk's usage. What the server answers in place of chunks is an error."""
    last: dict[str, Any] = {}

    def on_chunk(chunk: Any) -> None:
        for each in chunk if isinstance(chunk, list) else [chunk]:
            if "error" in each or "code" in each:
                last["error"] = each.get("error", each)
                continue
            last.update({name: each[name] for name in ("usage", "timings") if each.get(name)})
            for choice in each.get("choices", []):
                take(choice.get("delta", {}).get("content") or "")

    request = {"messages": messages, "max_tokens": limit, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    server.handle_chat_completions(request, on_chunk)
    if "error" in last:
        raise RuntimeError(last["error"].get("message", str(last["error"])) if isinstance(last["error"], dict) else str(last["error"]))
    return last


def ask(task: Task) -> Found:
    server = _open(task)
    told: list[Any] = []

    def answer(question: str, take: Take) -> None:
        done = _send(server, [{"role": "user", "content": task.prompt(question)}], task.max_tokens, take)
        told.append(done.get("usage", {}).get("prompt_tokens"))

    return answered(task, answer) | {"prompt_tokens": told}


def chat(task: Task) -> Found:
    server = _open(task)

    def answer(messages: list[dict[str, str]], limit: int) -> int | None:
        written = _send(server, messages, limit, lambda _piece: None).get("usage", {}).get("completion_tokens")
        return None if written is None else int(written)

    return chatted(task, answer)


def count(task: Task) -> Found:
    server = _open(task)
    told = [_send(server, messages, 1, lambda _piece: None).get("usage", {}).get("prompt_tokens") for messages in task.chats]
    return {"counts": [None] * len(told), "reason": "counts nothing before it is sent: no tokenizer is exposed", "told": told}


if __name__ == "__main__":
    main({"ask": ask, "chat": chat, "count": count})
