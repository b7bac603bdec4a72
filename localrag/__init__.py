"""Answers from your own documents with local GGUF models: every token counted, fitted and accounted for.

    from localrag import Session

    with Session.open("smollm2-135m", kbs=["handbook"]) as session:
        answer = session.ask("At what temperature is PLA annealed?")
    print(answer.text, answer.ledger)

Names are imported when they are first used: to import localrag costs nothing.

`localrag.council` is both a package and a function: `localrag.council("Which plastic lasts outdoors?", kbs=["handbook"])` has a
council decide (session/convening.py), and `from localrag.council.flow import deliberate` is its flow.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localrag.budget import Budget, Entry, Ledger, Percent, Section, negotiate
    from localrag.decoding import SamplingParams
    from localrag.errors import LocalragError
    from localrag.kb import KnowledgeBase
    from localrag.passages import Chunk, Citation, Hit
    from localrag.session import Answer, Session
    from localrag.session.chat import Chat
    from localrag.session.convening import convene as council
    from localrag.session.sitting import Sat
    from localrag.settings import Settings

__all__ = [
    "Answer",
    "Budget",
    "Chat",
    "Chunk",
    "Citation",
    "Entry",
    "Hit",
    "KnowledgeBase",
    "Ledger",
    "LocalragError",
    "Percent",
    "SamplingParams",
    "Sat",
    "Section",
    "Session",
    "Settings",
    "council",
    "negotiate",
]

_MODULES = {
    "budget": ("Budget", "Entry", "Ledger", "Percent", "Section", "negotiate"),
    "decoding": ("SamplingParams",),
    "errors": ("LocalragError",),
    "kb": ("KnowledgeBase",),
    "passages": ("Chunk", "Citation", "Hit"),
    "session": ("Answer", "Session"),
    "session.chat": ("Chat",),
    "session.sitting": ("Sat",),
    "settings": ("Settings",),
}


def __getattr__(name: str) -> object:
    if name == "council":
        return importlib.import_module("localrag.council")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"localrag.{module}"), name)
    raise AttributeError(f"module 'localrag' has no attribute {name!r}")


class _Council(ModuleType):
    """The package localrag.council, called as the function of that name."""

    def __call__(self, *args: Any, **options: Any) -> Sat:  # noqa: ANN401  # those of `convene`
        """Have a council decide a task; see `localrag.session.convening.convene`."""
        from localrag.session.convening import convene  # noqa: PLC0415  # weight

        return convene(*args, **options)


class _Localrag(ModuleType):
    """This package. Whoever imports localrag.council or a part of it sets that attribute here, and it has to be callable then too."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "council" and isinstance(value, ModuleType):
            value.__class__ = _Council
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Localrag
