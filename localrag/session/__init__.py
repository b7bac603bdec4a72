"""A question's way through the house: `Session.ask` is the walk, and every command is a way into it."""

from localrag.session.answers import Answer, Prepared, evidence, supplied
from localrag.session.batch import Outcome, Request
from localrag.session.finding import DEFAULT_TOP_K, TopK
from localrag.session.opening import (
    folder_rules,
    open_embedder,
    open_engine,
    open_knowledge_base,
    open_profile,
    open_reranker,
    opened_reranker,
    prepare_queries,
)
from localrag.session.options import Options
from localrag.session.walk import Session

__all__ = [
    "DEFAULT_TOP_K",
    "Answer",
    "Options",
    "Outcome",
    "Prepared",
    "Request",
    "Session",
    "TopK",
    "evidence",
    "folder_rules",
    "open_embedder",
    "open_engine",
    "open_knowledge_base",
    "open_profile",
    "open_reranker",
    "opened_reranker",
    "prepare_queries",
    "supplied",
]
