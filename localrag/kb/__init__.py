"""Knowledge bases: store documents and find passages in them.

Names are imported on first use: a question without a knowledge base, and the process that reads files, need few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localrag.kb.filters import FolderRule, Where
    from localrag.kb.ingest import IngestResult, Tagging
    from localrag.kb.knowledge_base import KnowledgeBase, import_kb, name_of, shown
    from localrag.kb.names import list_kbs
    from localrag.kb.plan import Plan, Progress
    from localrag.kb.retrieve import MODES, Mode
    from localrag.kb.verify import Verified
    from localrag.kb.walk import Skipped

__all__ = [
    "MODES",
    "FolderRule",
    "IngestResult",
    "KnowledgeBase",
    "Mode",
    "Plan",
    "Progress",
    "Skipped",
    "Tagging",
    "Verified",
    "Where",
    "import_kb",
    "list_kbs",
    "name_of",
    "shown",
]

_MODULES = {
    "filters": (
        "FolderRule",
        "Where",
    ),
    "ingest": (
        "IngestResult",
        "Tagging",
    ),
    "knowledge_base": (
        "KnowledgeBase",
        "import_kb",
        "name_of",
        "shown",
    ),
    "names": ("list_kbs",),
    "plan": (
        "Plan",
        "Progress",
    ),
    "retrieve": (
        "MODES",
        "Mode",
    ),
    "verify": ("Verified",),
    "walk": ("Skipped",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"localrag.kb.{module}"), name)
    raise AttributeError(f"module 'localrag.kb' has no attribute {name!r}")
