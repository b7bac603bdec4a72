"""What keeps documents and finds passages in them."""

from localrag.kb.filters import FolderRule, Where
from localrag.kb.ingest import IngestResult, Plan, Progress, Tagging
from localrag.kb.knowledge_base import KnowledgeBase, import_kb, list_kbs, shown
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
    "shown",
]
