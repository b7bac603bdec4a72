"""What keeps documents and finds passages in them."""

from localrag.kb.ingest import IngestResult, Progress
from localrag.kb.knowledge_base import KnowledgeBase, list_kbs
from localrag.kb.retrieve import MODES, Mode
from localrag.kb.walk import Skipped

__all__ = ["MODES", "IngestResult", "KnowledgeBase", "Mode", "Progress", "Skipped", "list_kbs"]
