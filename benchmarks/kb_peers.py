"""Run one step of a library that localrag's search is compared with, in a separate process and, if needed, a separate interpreter.

Imports nothing from localrag. FOLDER holds vectors.npy (float32, unit length, one row per chunk), texts.json and queries.npy. A step writes
its numbers, or {"cannot": "reason"}, as one line to FOLDER/ANSWER.json. It needs neither a model nor the network: the vectors are
precomputed, and raglite's DuckDB extensions come from the packages duckdb-ext-vss and duckdb-ext-fts, if installed.

    PYTHON benchmarks/kb_peers.py PROGRAM fill|search FOLDER     (PROGRAM: raglite, llamaindex-flat, llamaindex-hnsw)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

K = 10
_WARM_UP = 20
_DOCUMENT_CHUNKS = 100  # raglite's: its documents are rows of their own

Floats = NDArray[np.float32]
Query = Callable[[Floats], list[int]]


def main() -> None:
    program, step, name = sys.argv[1:]
    folder = Path(name)
    # litellm would fetch a list of prices, and raglite makes a folder in the home.
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "XDG_DATA_HOME": str(folder / "data")}
    try:
        opened = {"raglite": Raglite, "llamaindex-flat": LlamaIndex, "llamaindex-hnsw": LlamaIndexGraph}[program](folder)
        found = fill(opened, folder) if step == "fill" else search(opened, folder)
    except ImportError as error:
        found = {"cannot": f"not installed: {error}"}
    except Exception as error:  # noqa: BLE001  # whatever a library raises is a line in the table
        found = {"cannot": next(iter(str(error).splitlines()), "") or repr(error)}
    (folder / "answer.json").write_text(json.dumps(found), encoding="utf-8")


def fill(program: Raglite | LlamaIndex, folder: Path) -> dict[str, Any]:
    """Seconds from vectors and texts in memory to a store on disk that can be searched."""
    vectors, texts = np.load(folder / "vectors.npy"), json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    start = time.perf_counter()
    program.fill(vectors, texts)
    return {"fill_s": time.perf_counter() - start}


def search(program: Raglite | LlamaIndex, folder: Path) -> dict[str, Any]:
    """The milliseconds of each query, the rows it found, best first, and MiB of this process (VmRSS) after them."""
    queries = np.load(folder / "queries.npy")
    query = program.open()
    for one in queries[-_WARM_UP:]:
        query(one)
    times, rows = [], []
    for one in queries:
        start = time.perf_counter()
        rows.append(query(one))
        times.append(1000 * (time.perf_counter() - start))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {"times_ms": times, "rows": rows, "rss_mib": int(status["VmRSS"].split()[0]) / 1024}


class Raglite:
    """raglite with DuckDB, its HNSW index and its defaults, less the reranker.

    The rows are written as its `insert_documents` writes them; that function itself would cut and embed the text.
    """

    def __init__(self, folder: Path) -> None:
        import litellm  # noqa: PLC0415
        from raglite import RAGLiteConfig  # noqa: PLC0415

        url = f"duckdb:///{folder / 'raglite.db'}"
        try:
            import duckdb_ext  # noqa: PLC0415
        except ImportError:
            pass  # DuckDB downloads its extensions, if it can
        else:
            url += f"?extension_directory={duckdb_ext.get_extension_dir()}"
        dim = np.load(folder / "queries.npy", mmap_mode="r").shape[1]
        litellm.register_model({"given": {"output_vector_size": dim, "litellm_provider": "openai", "mode": "embedding"}})
        self._config = RAGLiteConfig(db_url=url, embedder="given", llm="none", reranker=None)

    def fill(self, vectors: Floats, texts: list[str]) -> None:
        from raglite._database import Chunk, ChunkEmbedding, Document, create_database_engine  # noqa: PLC0415
        from sqlalchemy import text as sql  # noqa: PLC0415
        from sqlmodel import Session  # noqa: PLC0415

        with Session(create_database_engine(self._config), expire_on_commit=False) as session:
            for first in range(0, len(texts), _DOCUMENT_CHUNKS):
                document = Document.from_text("", id=f"d{first}", filename=f"{first}.md")
                session.add(document)
                for row in range(first, min(first + _DOCUMENT_CHUNKS, len(texts))):
                    # Its own id would be a hash; the row's number is what we want back.
                    session.add(Chunk(id=str(row), document_id=document.id, index=row - first, headings="", body=texts[row], metadata_={}))
                    session.add(ChunkEmbedding(chunk_id=str(row), embedding=vectors[row]))
                session.flush()
                session.expunge_all()
            session.commit()
            session.execute(sql("PRAGMA create_fts_index('chunk', 'id', 'body', overwrite = 1);"))
            session.execute(sql("PRAGMA hnsw_compact_index('vector_search_chunk_index');"))
            session.commit()
            session.execute(sql("CHECKPOINT;"))

    def open(self) -> Query:
        from raglite import vector_search  # noqa: PLC0415

        return lambda vector: [int(one) for one in vector_search(vector, num_results=K, config=self._config)[0]]


class LlamaIndex:
    """LlamaIndex's VectorStoreIndex over its FaissVectorStore. Exact; a query gives ids and scores, without the nodes' text."""

    def __init__(self, folder: Path) -> None:
        import faiss  # noqa: F401, PLC0415
        from llama_index.vector_stores.faiss import FaissVectorStore  # noqa: PLC0415

        self._folder = folder / type(self).__name__
        self._store: Any = FaissVectorStore

    def empty(self, dim: int) -> object:
        import faiss  # noqa: PLC0415

        return faiss.IndexFlatIP(dim)

    def fill(self, vectors: Floats, texts: list[str]) -> None:
        from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex  # noqa: PLC0415
        from llama_index.core.schema import TextNode  # noqa: PLC0415

        dim = vectors.shape[1]
        context = StorageContext.from_defaults(vector_store=self._store(faiss_index=self.empty(dim)))
        nodes = [TextNode(id_=str(row), text=text, embedding=vectors[row].tolist()) for row, text in enumerate(texts)]
        VectorStoreIndex(nodes, storage_context=context, embed_model=MockEmbedding(embed_dim=dim))  # never asked: all have vectors
        context.persist(persist_dir=str(self._folder))

    def open(self) -> Query:
        from llama_index.core import MockEmbedding, StorageContext, load_index_from_storage  # noqa: PLC0415
        from llama_index.core.vector_stores import VectorStoreQuery  # noqa: PLC0415

        store = self._store.from_persist_dir(str(self._folder))
        context = StorageContext.from_defaults(vector_store=store, persist_dir=str(self._folder))
        index: Any = load_index_from_storage(context, embed_model=MockEmbedding(embed_dim=1))

        def query(vector: Floats) -> list[int]:
            found = index.vector_store.query(VectorStoreQuery(query_embedding=vector.tolist(), similarity_top_k=K))
            return [int(one) for one in found.ids]

        return query


class LlamaIndexGraph(LlamaIndex):
    """The same over faiss's graph of 32 neighbours."""

    def empty(self, dim: int) -> object:
        import faiss  # noqa: PLC0415

        index = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction, index.hnsw.efSearch = 40, 64
        return index


if __name__ == "__main__":
    main()
