"""LlamaIndex: VectorStoreIndex over FaissVectorStore, LlamaCPP and HuggingFaceEmbedding, as its starter tutorial and the pages of these
integrations have them.

Its defaults: passages of 1,024 tokens by cl100k, the 2 nearest, "compact" synthesis (as many calls of the model as the window by its own
count needs). LlamaCPP sends its prompts as they are: a chat template would come from a tokenizer on the hub, which is not reached here.
Set: context_window, max_new_tokens, temperature 0, streaming (its own: 3900, 256, 0.1, none).
"""

from __future__ import annotations

from typing import Any

from adapter import Found, Take, Task, answered, chatted, counted, main


def _embedder(task: Task) -> Any:
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding

    return HuggingFaceEmbedding(model_name=task.embedder)


def _model(task: Task, max_tokens: int) -> Any:
    from llama_index.llms.llama_cpp import LlamaCPP

    return LlamaCPP(
        model_path=task.model,
        temperature=0.0,
        max_new_tokens=max_tokens,
        context_window=task.n_ctx,
        model_kwargs={},
        generate_kwargs={},
        verbose=False,
    )


def index(task: Task) -> Found:
    import faiss
    from llama_index.core import Settings, SimpleDirectoryReader, StorageContext, VectorStoreIndex
    from llama_index.vector_stores.faiss import FaissVectorStore

    Settings.embed_model = _embedder(task)
    documents = SimpleDirectoryReader(task.documents, recursive=True).load_data()
    store = FaissVectorStore(faiss_index=faiss.IndexFlatL2(384))  # of the embedder
    context = StorageContext.from_defaults(vector_store=store)
    made = VectorStoreIndex.from_documents(documents, storage_context=context)
    made.storage_context.persist(persist_dir=task.index)
    return {"num_documents": len(documents), "num_passages": store.client.ntotal}


def _index(task: Task) -> Any:
    from llama_index.core import Settings, StorageContext, load_index_from_storage
    from llama_index.vector_stores.faiss import FaissVectorStore

    Settings.embed_model = _embedder(task)
    store = FaissVectorStore.from_persist_dir(task.index)
    return load_index_from_storage(StorageContext.from_defaults(vector_store=store, persist_dir=task.index))


def ask(task: Task) -> Found:
    from llama_index.core import Settings

    Settings.llm = _model(task, task.max_tokens)
    wanted = {} if task.top_k is None else {"similarity_top_k": task.top_k}
    engine = _index(task).as_query_engine(streaming=True, **wanted)

    def answer(question: str, take: Take) -> list[str]:
        response = engine.query(question)
        for piece in response.response_gen:
            take(piece)
        return [node.get_content() for node in response.source_nodes]

    return answered(task, answer)


def search(task: Task) -> Found:
    retriever = _index(task).as_retriever(similarity_top_k=task.depth)
    ranked = [[node.metadata["file_name"] for node in retriever.retrieve(question)] for question in task.questions]
    return {"ranked": {"VectorStoreIndex, its default": ranked}}


def _messages(chat: list[dict[str, str]]) -> list[Any]:
    from llama_index.core.llms import ChatMessage

    return [ChatMessage(role=each["role"], content=each["content"]) for each in chat]


def chat(task: Task) -> Found:
    model = _model(task, 1)

    def answer(messages: list[dict[str, str]], limit: int) -> None:
        model.generate_kwargs["max_tokens"] = limit
        model.chat(_messages(messages))

    return chatted(task, answer)


def count(task: Task) -> Found:
    """Its prompt helper counts by `get_tokenizer()`, cl100k (PromptHelper, TokenCounter), what it is about to send."""
    from llama_index.core.utilities.token_counting import TokenCounter

    model, counter = _model(task, 1), TokenCounter()

    def send(messages: list[dict[str, str]]) -> None:
        model._model.reset()  # noqa: SLF001  # the next prompt is not to go on from this one
        model.chat(_messages(messages))

    return counted(task, lambda messages: counter.get_string_tokens(model.messages_to_prompt(_messages(messages))), send)


if __name__ == "__main__":
    main({"index": index, "ask": ask, "search": search, "chat": chat, "count": count})
