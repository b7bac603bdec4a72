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
    from localrag.budget import (
        Budget,
        Entry,
        Flex,
        FlexItem,
        Ledger,
        Overflow,
        Percent,
        Profile,
        Section,
        Shortened,
        Tier,
        TimeLimit,
        negotiate,
    )
    from localrag.council.verdict import Dissent, Verdict
    from localrag.decoding import Completion, SamplingParams, Timings, TokenLogprob
    from localrag.engine.engine import Engine
    from localrag.engine.memory import MemoryPlan
    from localrag.errors import (
        BudgetExceededError,
        BundleError,
        ConfigError,
        EngineError,
        InterruptedRunError,
        KnowledgeBaseBusyError,
        KnowledgeBaseError,
        KnowledgeBaseNotFoundError,
        LocalragError,
        ModelError,
        ModelFileError,
        ModelNotFoundError,
        TemplateError,
        TimeLimitError,
        UsageError,
    )
    from localrag.journal import Journal
    from localrag.kb import KnowledgeBase
    from localrag.kb.filters import FolderRule, Where
    from localrag.kb.ingest import IngestResult, Tagging
    from localrag.kb.knowledge_base import RetrieveOptions
    from localrag.kb.plan import Plan, Progress
    from localrag.kb.protocols import Feedback, Reranker, TextRow
    from localrag.kb.texts import Text, Texts
    from localrag.kb.verify import Verified
    from localrag.kb.walk import Found, Skipped
    from localrag.messages import Attachment, Memory, Message, Proposal, ToolSpec
    from localrag.model import ModelInfo, Slot
    from localrag.passages import Chunk, Citation, Hit
    from localrag.prompt import Demand, Prompt, PromptInputs
    from localrag.session import Answer, Options, Outcome, Prepared, Request, Retriever, Session, TopK
    from localrag.session.answer import Pass
    from localrag.session.chat import Chat
    from localrag.session.convening import convene as council
    from localrag.session.council_run import CouncilResult
    from localrag.session.query_rewrite import QueryRewrite
    from localrag.session.search_policy import Bypass
    from localrag.session.turns import Forgotten, Turn
    from localrag.settings import Learning, Settings
    from localrag.tokens import Embedder

__all__ = [
    "Answer",
    "Attachment",
    "Budget",
    "BudgetExceededError",
    "BundleError",
    "Bypass",
    "Chat",
    "Chunk",
    "Citation",
    "Completion",
    "ConfigError",
    "CouncilResult",
    "Demand",
    "Dissent",
    "Embedder",
    "Engine",
    "EngineError",
    "Entry",
    "Feedback",
    "Flex",
    "FlexItem",
    "FolderRule",
    "Forgotten",
    "Found",
    "Hit",
    "IngestResult",
    "InterruptedRunError",
    "Journal",
    "KnowledgeBase",
    "KnowledgeBaseBusyError",
    "KnowledgeBaseError",
    "KnowledgeBaseNotFoundError",
    "Learning",
    "Ledger",
    "LocalragError",
    "Memory",
    "MemoryPlan",
    "Message",
    "ModelError",
    "ModelFileError",
    "ModelInfo",
    "ModelNotFoundError",
    "Options",
    "Outcome",
    "Overflow",
    "Pass",
    "Percent",
    "Plan",
    "Prepared",
    "Profile",
    "Progress",
    "Prompt",
    "PromptInputs",
    "Proposal",
    "QueryRewrite",
    "Request",
    "Reranker",
    "RetrieveOptions",
    "Retriever",
    "SamplingParams",
    "Section",
    "Session",
    "Settings",
    "Shortened",
    "Skipped",
    "Slot",
    "Tagging",
    "TemplateError",
    "Text",
    "TextRow",
    "Texts",
    "Tier",
    "TimeLimit",
    "TimeLimitError",
    "Timings",
    "TokenLogprob",
    "ToolSpec",
    "TopK",
    "Turn",
    "UsageError",
    "Verdict",
    "Verified",
    "Where",
    "council",
    "negotiate",
]

_MODULES = {
    "budget": (
        "Budget",
        "Entry",
        "Flex",
        "FlexItem",
        "Ledger",
        "Overflow",
        "Percent",
        "Profile",
        "Section",
        "Shortened",
        "Tier",
        "TimeLimit",
        "negotiate",
    ),
    "council.verdict": ("Dissent", "Verdict"),
    "decoding": ("Completion", "SamplingParams", "Timings", "TokenLogprob"),
    "engine.engine": ("Engine",),
    "engine.memory": ("MemoryPlan",),
    "errors": (
        "BudgetExceededError",
        "BundleError",
        "ConfigError",
        "EngineError",
        "InterruptedRunError",
        "KnowledgeBaseBusyError",
        "KnowledgeBaseError",
        "KnowledgeBaseNotFoundError",
        "LocalragError",
        "ModelError",
        "ModelFileError",
        "ModelNotFoundError",
        "TemplateError",
        "TimeLimitError",
        "UsageError",
    ),
    "journal": ("Journal",),
    "kb": ("KnowledgeBase",),
    "kb.filters": ("FolderRule", "Where"),
    "kb.ingest": ("IngestResult", "Tagging"),
    "kb.knowledge_base": ("RetrieveOptions",),
    "kb.plan": ("Plan", "Progress"),
    "kb.protocols": ("Feedback", "Reranker", "TextRow"),
    "kb.texts": ("Text", "Texts"),
    "kb.verify": ("Verified",),
    "kb.walk": ("Found", "Skipped"),
    "messages": ("Attachment", "Memory", "Message", "Proposal", "ToolSpec"),
    "model": ("ModelInfo", "Slot"),
    "passages": ("Chunk", "Citation", "Hit"),
    "prompt": ("PromptInputs", "Prompt", "Demand"),
    "session": ("Answer", "Options", "Outcome", "Prepared", "Request", "Retriever", "Session", "TopK"),
    "session.answer": ("Pass",),
    "session.search_policy": ("Bypass",),
    "session.chat": ("Chat",),
    "session.query_rewrite": ("QueryRewrite",),
    "session.council_run": ("CouncilResult",),
    "session.turns": ("Forgotten", "Turn"),
    "settings": ("Learning", "Settings"),
    "tokens": ("Embedder",),
}


def __getattr__(name: str) -> object:
    if name == "council":
        return importlib.import_module("localrag.council")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"localrag.{module}"), name)
    raise AttributeError(f"module 'localrag' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, of which most are not imported yet, for dir() and the completion of a shell."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


class _Council(ModuleType):
    """The package localrag.council, called as the function of that name."""

    def __call__(self, *args: Any, **options: Any) -> CouncilResult:  # noqa: ANN401  # those of `convene`
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
