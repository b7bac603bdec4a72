"""Knowledge bases: store documents and find passages in them.

Names are imported on first use, because most processes need few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localrag.kb.filters import FolderRule, Where
    from localrag.kb.ingest import IngestResult, ReembedResult, Tagging
    from localrag.kb.knowledge_base import KnowledgeBase, import_kb
    from localrag.kb.names import list_kbs, name_of, shown
    from localrag.kb.plan import IndexProgress, Plan
    from localrag.kb.retrieve import MODES, Mode
    from localrag.kb.verify import VerifyResult
    from localrag.kb.walk import SkippedFile

__all__ = [
    "MODES",
    "FolderRule",
    "IndexProgress",
    "IngestResult",
    "KnowledgeBase",
    "Mode",
    "Plan",
    "ReembedResult",
    "SkippedFile",
    "Tagging",
    "VerifyResult",
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
        "ReembedResult",
        "Tagging",
    ),
    "knowledge_base": (
        "KnowledgeBase",
        "import_kb",
    ),
    "names": (
        "list_kbs",
        "name_of",
        "shown",
    ),
    "plan": (
        "IndexProgress",
        "Plan",
    ),
    "retrieve": (
        "MODES",
        "Mode",
    ),
    "verify": ("VerifyResult",),
    "walk": ("SkippedFile",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"localrag.kb.{module}"), name)
    raise AttributeError(f"module 'localrag.kb' has no attribute {name!r}")
