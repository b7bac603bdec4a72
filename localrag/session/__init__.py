"""The pipeline from a question to an answer (session.py), and what is built on it: chats, councils and evaluation."""

from localrag.session.answer import Answer, Prepared, evidence, supplied
from localrag.session.opening import (
    folder_rules,
    open_embedder,
    open_engine,
    open_knowledge_base,
    open_knowledge_bases,
    open_profile,
    open_reranker,
    opened_reranker,
    prepare_queries,
)
from localrag.session.pipeline import Event
from localrag.session.retrieval import DEFAULT_TOP_K, Retriever
from localrag.session.session import Session

__all__ = [
    "DEFAULT_TOP_K",
    "Answer",
    "Event",
    "Prepared",
    "Retriever",
    "Session",
    "evidence",
    "folder_rules",
    "open_embedder",
    "open_engine",
    "open_knowledge_base",
    "open_knowledge_bases",
    "open_profile",
    "open_reranker",
    "opened_reranker",
    "prepare_queries",
    "supplied",
]
