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
    from localrag.deliberation.verdict import Dissent, Verdict
    from localrag.engine.engine import Engine
    from localrag.engine.jobs import Policy
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
        UnanswerableError,
        UsageError,
    )
    from localrag.journal import Journal
    from localrag.kb import KnowledgeBase
    from localrag.kb.filters import FolderRule, Where
    from localrag.kb.ingest import IngestResult, ReembedResult, Tagging
    from localrag.kb.knowledge_base import RetrieveOptions
    from localrag.kb.plan import IndexProgress, Plan
    from localrag.kb.protocols import Feedback, Reranker, TextRow
    from localrag.kb.texts import Text, Texts
    from localrag.kb.verify import VerifyResult
    from localrag.kb.walk import FileEntry, SkippedFile
    from localrag.prompt import Demand, Prompt, PromptInputs
    from localrag.question import BudgetOptions, Given, Question, Search, Thread, ToolCalls, TopK
    from localrag.session import Answer, Event, Prepared, Retriever, Session
    from localrag.session.answer import Bypass, Pass
    from localrag.session.answerability import Answerability, Calibration
    from localrag.session.async_session import AsyncSession
    from localrag.session.chat import Chat
    from localrag.session.council_run import CouncilResult
    from localrag.session.council_run import council as council
    from localrag.session.history_window import Forgotten, Turn
    from localrag.session.query_rewrite import QueryRewrite
    from localrag.session.retrieval import EvidenceRule, Selection
    from localrag.settings import Learning, Settings
    from localrag.support import SentenceSupport, Support, SupportingSpan, UnsupportedClaim
    from localrag.text.tokens import Embedder
    from localrag.text.tool_calls import CallDelta
    from localrag.types import (
        Attachment,
        CallRules,
        Chunk,
        Citation,
        Completion,
        Hit,
        Memory,
        Message,
        ModelInfo,
        Proposal,
        Quote,
        SamplingParams,
        Slot,
        Timings,
        TokenLogprob,
        ToolCall,
        ToolSpec,
    )

__all__ = [
    "Answer",
    "Answerability",
    "AsyncSession",
    "Attachment",
    "Budget",
    "BudgetExceededError",
    "BudgetOptions",
    "BundleError",
    "Bypass",
    "Calibration",
    "CallDelta",
    "CallRules",
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
    "Event",
    "EvidenceRule",
    "Feedback",
    "FileEntry",
    "Flex",
    "FlexItem",
    "FolderRule",
    "Forgotten",
    "Given",
    "Hit",
    "IndexProgress",
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
    "Overflow",
    "Pass",
    "Percent",
    "Plan",
    "Policy",
    "Prepared",
    "Profile",
    "Prompt",
    "PromptInputs",
    "Proposal",
    "QueryRewrite",
    "Question",
    "Quote",
    "ReembedResult",
    "Reranker",
    "RetrieveOptions",
    "Retriever",
    "SamplingParams",
    "Search",
    "Section",
    "Selection",
    "SentenceSupport",
    "Session",
    "Settings",
    "Shortened",
    "SkippedFile",
    "Slot",
    "Support",
    "SupportingSpan",
    "Tagging",
    "TemplateError",
    "Text",
    "TextRow",
    "Texts",
    "Thread",
    "Tier",
    "TimeLimit",
    "TimeLimitError",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "ToolCalls",
    "ToolSpec",
    "TopK",
    "Turn",
    "UnanswerableError",
    "UnsupportedClaim",
    "UsageError",
    "Verdict",
    "VerifyResult",
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
    "deliberation.verdict": (
        "Dissent",
        "Verdict",
    ),
    "engine.engine": ("Engine",),
    "engine.memory": ("MemoryPlan",),
    "engine.jobs": ("Policy",),
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
        "UnanswerableError",
        "UsageError",
    ),
    "journal": ("Journal",),
    "kb": ("KnowledgeBase",),
    "kb.filters": (
        "FolderRule",
        "Where",
    ),
    "kb.ingest": (
        "IngestResult",
        "ReembedResult",
        "Tagging",
    ),
    "kb.knowledge_base": ("RetrieveOptions",),
    "kb.plan": (
        "IndexProgress",
        "Plan",
    ),
    "kb.protocols": (
        "Feedback",
        "Reranker",
        "TextRow",
    ),
    "kb.texts": (
        "Text",
        "Texts",
    ),
    "kb.verify": ("VerifyResult",),
    "kb.walk": (
        "FileEntry",
        "SkippedFile",
    ),
    "prompt": (
        "Demand",
        "Prompt",
        "PromptInputs",
    ),
    "question": (
        "BudgetOptions",
        "Given",
        "Question",
        "Search",
        "Thread",
        "ToolCalls",
        "TopK",
    ),
    "session": (
        "Answer",
        "Event",
        "Prepared",
        "Retriever",
        "Session",
    ),
    "session.answerability": (
        "Answerability",
        "Calibration",
    ),
    "session.async_session": ("AsyncSession",),
    "session.answer": (
        "Bypass",
        "Pass",
    ),
    "session.chat": ("Chat",),
    "session.council_run": (
        "CouncilResult",
        "council",
    ),
    "session.history_window": (
        "Forgotten",
        "Turn",
    ),
    "session.query_rewrite": ("QueryRewrite",),
    "session.retrieval": (
        "EvidenceRule",
        "Selection",
    ),
    "settings": (
        "Learning",
        "Settings",
    ),
    "support": (
        "SentenceSupport",
        "Support",
        "SupportingSpan",
        "UnsupportedClaim",
    ),
    "text.tokens": ("Embedder",),
    "text.tool_calls": ("CallDelta",),
    "types": (
        "Attachment",
        "CallRules",
        "Chunk",
        "Citation",
        "Completion",
        "Hit",
        "Memory",
        "Message",
        "ModelInfo",
        "Proposal",
        "Quote",
        "SamplingParams",
        "Slot",
        "Timings",
        "TokenLogprob",
        "ToolCall",
        "ToolSpec",
    ),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"localrag.{module}"), name)
    raise AttributeError(f"module 'localrag' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, of which most are not imported yet, for dir() and the completion of a shell."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
