"""txtai: Textractor, Embeddings and RAG as in its rag_quickstart.py, with a .gguf file as the model.

Its defaults: sections of a document as passages, the 3 nearest, all of them in the prompt. The quick start's docling backend is for PDF and
Office files and fetches models of its own; without a backend plain files are read as they are. Set: n_ctx, maxlength, temperature 0
(its own: the training context, 512, llama-cpp-python's 0.2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapter import Cannot, Found, Take, Task, answered, chatted, counted, main

_TEMPLATE = """
  Answer the following question using the provided context.

  Question:
  {question}

  Context:
  {context}
"""
_DEFAULT_CONTEXT = 3  # of RAG


def index(task: Task) -> Found:
    from txtai import Embeddings
    from txtai.pipeline import Textractor

    textractor = Textractor(sections=True)
    files = sorted(Path(task.documents).rglob("*.md"))
    chunks = [(file.name, chunk) for file in files for chunk in textractor(str(file))]
    embeddings = Embeddings(content=True, path=task.embedder)
    embeddings.index(chunks)
    embeddings.save(task.index)
    return {"num_documents": len(files), "num_passages": len(chunks)}


def _embeddings(task: Task) -> Any:
    from txtai import Embeddings

    embeddings = Embeddings()
    embeddings.load(task.index)
    return embeddings


def ask(task: Task) -> Found:
    from txtai import RAG

    embeddings = _embeddings(task)
    rag = RAG(
        embeddings,
        task.model,
        system="You are a friendly assistant",
        template=_TEMPLATE,
        output="flatten",
        context=task.top_k,
        n_ctx=task.n_ctx,
    )

    def answer(question: str, take: Take) -> list[str] | None:
        for piece in rag(question, maxlength=task.max_tokens, stream=True, temperature=0.0):
            take(piece)
        if not task.trace:
            return None
        return [row["text"] for row in embeddings.search(question, task.top_k or _DEFAULT_CONTEXT)]

    return answered(task, answer)


def search(task: Task) -> Found:
    embeddings = _embeddings(task)
    ranked = [[row["id"] for row in embeddings.search(question, task.depth)] for question in task.questions]
    return {"ranked": {"Embeddings, its default": ranked}}


def _model(task: Task) -> Any:
    from txtai import LLM

    return LLM(task.model, n_ctx=task.n_ctx)


def chat(task: Task) -> Found:
    model = _model(task)

    def answer(messages: list[dict[str, str]], limit: int) -> None:
        model(messages, maxlength=limit, temperature=0.0)

    return chatted(task, answer)


def count(task: Task) -> Found:
    model = _model(task)

    def none(_messages: list[dict[str, str]]) -> int:
        raise Cannot("counts nothing before it is sent")

    def send(messages: list[dict[str, str]]) -> None:
        model.generator.llm.reset()  # the next prompt is not to go on from this one
        model(messages, maxlength=1, temperature=0.0)

    return counted(task, none, send)


if __name__ == "__main__":
    main({"index": index, "ask": ask, "search": search, "chat": chat, "count": count})
