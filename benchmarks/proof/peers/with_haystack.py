"""Haystack: an indexing and a query pipeline as on its "Get started" page, with LlamaCppChatGenerator and the sentence-transformers
embedders of its integrations, over InMemoryDocumentStore saved to and loaded from disk.

Its defaults: passages of 200 words, the 10 nearest, whole documents in the prompt. Set: n_ctx, max_tokens, temperature 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapter import Cannot, Found, Take, Task, answered, chatted, counted, main

_STORE = "store.json"
_SYSTEM = """Given these documents, answer the question.

Documents:
{% for doc in documents %}
    {{ doc.content }}
{% endfor %}"""


def index(task: Task) -> Found:
    from haystack import Pipeline
    from haystack.components.converters import TextFileToDocument
    from haystack.components.preprocessors import DocumentSplitter
    from haystack.components.writers import DocumentWriter
    from haystack.document_stores.in_memory import InMemoryDocumentStore
    from haystack_integrations.components.embedders.sentence_transformers import SentenceTransformersDocumentEmbedder

    store = InMemoryDocumentStore()
    pipeline = Pipeline()
    pipeline.add_component("converter", TextFileToDocument())
    pipeline.add_component("splitter", DocumentSplitter())
    pipeline.add_component("embedder", SentenceTransformersDocumentEmbedder(model=task.embedder))
    pipeline.add_component("writer", DocumentWriter(store))
    pipeline.connect("converter", "splitter")
    pipeline.connect("splitter", "embedder")
    pipeline.connect("embedder", "writer")
    files = sorted(Path(task.documents).rglob("*.md"))
    pipeline.run({"converter": {"sources": files}})
    Path(task.index).mkdir(parents=True, exist_ok=True)
    store.save_to_disk(str(Path(task.index) / _STORE))
    return {"num_documents": len(files), "num_passages": store.count_documents()}


def _searching(task: Task, top_k: int | None) -> Any:
    """A pipeline from `embedder` to `retriever`."""
    from haystack import Pipeline
    from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
    from haystack.document_stores.in_memory import InMemoryDocumentStore
    from haystack_integrations.components.embedders.sentence_transformers import SentenceTransformersTextEmbedder

    store = InMemoryDocumentStore.load_from_disk(str(Path(task.index) / _STORE))
    wanted = {} if top_k is None else {"top_k": top_k}
    pipeline = Pipeline()
    pipeline.add_component("embedder", SentenceTransformersTextEmbedder(model=task.embedder, progress_bar=False))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, **wanted))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    return pipeline


def _generator(task: Task, max_tokens: int) -> Any:
    from haystack_integrations.components.generators.llama_cpp import LlamaCppChatGenerator

    return LlamaCppChatGenerator(
        model=task.model,
        n_ctx=task.n_ctx,
        model_kwargs={"verbose": False},
        generation_kwargs={"max_tokens": max_tokens, "temperature": 0.0},
    )


def ask(task: Task) -> Found:
    from haystack.components.builders import ChatPromptBuilder
    from haystack.dataclasses import ChatMessage

    template = [ChatMessage.from_system(_SYSTEM), ChatMessage.from_user("{{question}}")]
    pipeline = _searching(task, task.top_k)
    pipeline.add_component("prompt_builder", ChatPromptBuilder(template=template, required_variables="*"))
    pipeline.add_component("llm", _generator(task, task.max_tokens))
    pipeline.connect("retriever.documents", "prompt_builder.documents")
    pipeline.connect("prompt_builder.prompt", "llm.messages")

    def answer(question: str, take: Take) -> list[str]:
        asked = {
            "embedder": {"text": question},
            "prompt_builder": {"question": question},
            "llm": {"streaming_callback": lambda chunk: take(chunk.content or "")},
        }
        done = pipeline.run(asked, include_outputs_from={"retriever"})
        return [document.content for document in done["retriever"]["documents"]]

    return answered(task, answer)


def search(task: Task) -> Found:
    pipeline = _searching(task, task.depth)
    ranked = []
    for question in task.questions:
        documents = pipeline.run({"embedder": {"text": question}})["retriever"]["documents"]
        ranked.append([document.meta["file_path"] for document in documents])
    return {"ranked": {"InMemoryEmbeddingRetriever, its default": ranked}}


def _messages(chat: list[dict[str, str]]) -> list[Any]:
    from haystack.dataclasses import ChatMessage

    make = {"system": ChatMessage.from_system, "user": ChatMessage.from_user, "assistant": ChatMessage.from_assistant}
    return [make[each["role"]](each["content"]) for each in chat]


def chat(task: Task) -> Found:
    generator = _generator(task, 1)
    generator.warm_up()

    def answer(messages: list[dict[str, str]], limit: int) -> int:
        reply = generator.run(_messages(messages), generation_kwargs={"max_tokens": limit})["replies"][0]
        return int(reply.meta["usage"]["completion_tokens"])

    return chatted(task, answer)


def count(task: Task) -> Found:
    def none(_messages: list[dict[str, str]]) -> int:
        raise Cannot("counts nothing before it is sent")

    def send(messages: list[dict[str, str]]) -> None:
        generator = _generator(task, 1)  # a new one: the next prompt is not to go on from this one
        generator.run(_messages(messages))
        generator.close()

    return counted(task, none, send)


if __name__ == "__main__":
    main({"index": index, "ask": ask, "search": search, "chat": chat, "count": count})
