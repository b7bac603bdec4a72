"""Answers from your own documents with local GGUF models: every token counted, fitted and accounted for.

    from localrag import Session

    with Session.open("smollm2-135m", kbs=["handbook"]) as session:
        answer = session.ask("At what temperature is PLA annealed?")
    print(answer.text, answer.ledger)

Names are imported when they are first used: to import localrag costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localrag.budget import Budget, Entry, Ledger, Percent, Section, negotiate
    from localrag.decoding import SamplingParams
    from localrag.errors import LocalragError
    from localrag.kb import KnowledgeBase
    from localrag.passages import Chunk, Citation, Hit
    from localrag.session import Answer, Session
    from localrag.settings import Settings

__all__ = [
    "Answer",
    "Budget",
    "Chunk",
    "Citation",
    "Entry",
    "Hit",
    "KnowledgeBase",
    "Ledger",
    "LocalragError",
    "Percent",
    "SamplingParams",
    "Section",
    "Session",
    "Settings",
    "negotiate",
]

_MODULES = {
    "budget": ("Budget", "Entry", "Ledger", "Percent", "Section", "negotiate"),
    "decoding": ("SamplingParams",),
    "errors": ("LocalragError",),
    "kb": ("KnowledgeBase",),
    "passages": ("Chunk", "Citation", "Hit"),
    "session": ("Answer", "Session"),
    "settings": ("Settings",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"localrag.{module}"), name)
    raise AttributeError(f"module 'localrag' has no attribute {name!r}")
