"""llama-cpp-python's `Llama.create_chat_completion`, as its README uses it; the chat template is the one in the file.

It does not search: evidence is put into the message by hand. Set: n_ctx, max_tokens, temperature 0 (its own defaults: 512, no limit, 0.2).
What its user can count beforehand is `Llama.tokenize` of the contents: the template's own tokens are not in it, and a special string in a
content is counted as text, though it becomes a control token when it is sent.
"""

from __future__ import annotations

from typing import Any

from adapter import Found, Take, Task, answered, as_text, chatted, counted, main


def _open(task: Task) -> Any:
    from llama_cpp import Llama

    return Llama(model_path=task.model, n_ctx=task.n_ctx, verbose=False)


def ask(task: Task) -> Found:
    llama = _open(task)

    def answer(question: str, take: Take) -> None:
        messages = [{"role": "user", "content": task.prompt(question)}]
        for chunk in llama.create_chat_completion(messages, max_tokens=task.max_tokens, temperature=0.0, stream=True):
            take(chunk["choices"][0]["delta"].get("content") or "")

    return answered(task, answer)


def chat(task: Task) -> Found:
    llama = _open(task)

    def answer(messages: list[dict[str, str]], limit: int) -> int:
        done = llama.create_chat_completion(messages, max_tokens=limit, temperature=0.0)
        return int(done["usage"]["completion_tokens"])

    return chatted(task, answer)


def count(task: Task) -> Found:
    llama = _open(task)

    def send(messages: list[dict[str, str]]) -> None:
        llama.reset()  # the next prompt is not to go on from this one
        llama.create_chat_completion(messages, max_tokens=1, temperature=0.0)

    return counted(task, lambda messages: len(llama.tokenize(as_text(messages).encode())), send)


if __name__ == "__main__":
    main({"ask": ask, "chat": chat, "count": count})
