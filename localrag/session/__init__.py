"""A question's way through the house: `Session.ask` is the walk, and every command is a way into it."""

from localrag.session.answer import Answer, Prepared, evidence, supplied
from localrag.session.batch import Outcome, Request
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
from localrag.session.options import Options, TopK
from localrag.session.retrieval import DEFAULT_TOP_K, Retriever
from localrag.session.session import Session

__all__ = [
    "DEFAULT_TOP_K",
    "Answer",
    "Options",
    "Outcome",
    "Prepared",
    "Request",
    "Retriever",
    "Session",
    "TopK",
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
