"""raglite with DuckDB, as its README's "programmable RAG" has it: retrieve_context, add_context, rag.

Three things it fetches from the network by itself are given from the disk, for no program of this comparison may reach it:
- `llama-cpp-python/REPOSITORY/FILE` loads from the hub: the files of these names are opened here;
- sentences are split by a model from the hub (sat-1l-sm): here at full stops and line ends, which is less work than its own;
- DuckDB's extensions come from the packages duckdb-ext-vss and duckdb-ext-fts.
Its default search (vector_search, 10 chunks) uses no reranker, so none is loaded. `rag` has no limit for the answer and no temperature
(it takes a quarter of the window and 0.2): its answer is left after as many pieces as the others may write. The chat template is its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from adapter import Found, Take, Task, answered, chatted, counted, main

_DEFAULT_CHUNKS = 10  # of retrieve_context


def _config(task: Task) -> Any:
    from raglite import RAGLiteConfig

    _open_files_of_this_disk(task)
    Path(task.index).mkdir(parents=True, exist_ok=True)
    url = f"duckdb:///{Path(task.index) / 'raglite.db'}"
    try:
        import duckdb_ext
    except ImportError:
        pass  # DuckDB downloads its extensions, if it can
    else:
        url += f"?extension_directory={duckdb_ext.get_extension_dir()}"
    return RAGLiteConfig(
        db_url=url,
        llm=f"llama-cpp-python/disk/files/{Path(task.model).name}@{task.n_ctx}",
        embedder=f"llama-cpp-python/disk/files/{Path(task.embedder_gguf).name}@512",
        reranker=None,
    )


def _open_files_of_this_disk(task: Task) -> None:
    import llama_cpp

    files = {Path(each).name: each for each in (task.model, task.embedder_gguf)}

    def from_pretrained(repo_id: str, filename: str, **options: Any) -> Any:
        del repo_id
        return llama_cpp.Llama(model_path=files[filename], **options)

    llama_cpp.Llama.from_pretrained = staticmethod(from_pretrained)


def _sentences(text: str, *, max_len: int | None = None, **_: Any) -> list[str]:
    """Pieces that make up the text: up to a full stop with the space behind it, or a line's end; none is longer than `max_len`."""
    sentences: list[str] = []
    for piece in filter(None, re.findall(r"[^\n]*?(?:[.!?]+\s+|\n+|$)", text)):
        if sentences and not piece.strip():
            sentences[-1] += piece
        else:
            sentences.append(piece)
    return [each[k : k + (max_len or len(each))] for each in sentences for k in range(0, len(each), max_len or len(each))]


def index(task: Task) -> Found:
    import raglite._insert
    from raglite import Document, insert_documents

    raglite._insert.split_sentences = _sentences  # noqa: SLF001  # see above
    files = sorted(Path(task.documents).rglob("*.md"))
    config = _config(task)
    insert_documents([Document.from_path(file, config=config) for file in files], config=config)
    return {"num_documents": len(files)}


def ask(task: Task) -> Found:
    from raglite import add_context, rag, retrieve_context

    config = _config(task)

    def answer(question: str, take: Take) -> list[str]:
        spans = retrieve_context(question, num_chunks=task.top_k or _DEFAULT_CHUNKS, config=config)
        passages.append(["".join(chunk.body for chunk in span.chunks) for span in spans])
        for piece in rag([add_context(question, spans, config)], config=config):
            take(piece)
        return passages[-1]

    passages: list[list[str]] = []
    found = answered(task, answer, stops=False)
    for each, given in zip(found["answers"], passages, strict=True):
        each["passages"] = given
    return found


def search(task: Task) -> Found:
    from raglite import hybrid_search, retrieve_chunks, vector_search

    config = _config(task)
    ranked: dict[str, list[list[str]]] = {}
    for name, by in (("vector_search, its default", vector_search), ("hybrid_search", hybrid_search)):
        ranked[name] = []
        for question in task.questions:
            ids, _ = by(question, num_results=task.depth, config=config)
            files = {chunk.id: chunk.document.filename for chunk in retrieve_chunks(ids, config=config)}
            ranked[name].append([files[one] for one in ids])
    return {"ranked": ranked}


def _completed(config: Any, messages: list[dict[str, str]], limit: int) -> Any:
    from litellm import completion

    return completion(model=config.llm, messages=messages, max_tokens=limit, temperature=0.0)


def chat(task: Task) -> Found:
    config = _config(task)

    def answer(messages: list[dict[str, str]], limit: int) -> int:
        return int(_completed(config, messages, limit).usage.completion_tokens)

    return chatted(task, answer)


def count(task: Task) -> Found:
    """Its `_clip` and `_limit_chunkspans` count a message as len(json.dumps(message)) // 3."""
    from raglite._litellm import LlamaCppPythonLLM
    from raglite._rag import _get_token_counts

    config = _config(task)
    llama = LlamaCppPythonLLM.llm(config.llm)

    def send(messages: list[dict[str, str]]) -> None:
        llama.reset()  # the next prompt is not to go on from this one
        _completed(config, messages, 1)

    return counted(task, lambda messages: sum(_get_token_counts(messages)), send)


if __name__ == "__main__":
    main({"index": index, "ask": ask, "search": search, "chat": chat, "count": count})
