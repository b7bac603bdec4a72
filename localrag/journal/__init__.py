"""What was asked, and what became of its budget: one SQLite file in the home."""

from localrag.journal.records import Allotment, AskRecord, EvidenceRecord, SessionRow, StoredAsk, allotments
from localrag.journal.store import FILE_NAME, Journal
from localrag.journal.summaries import Summaries

__all__ = ["FILE_NAME", "Allotment", "AskRecord", "EvidenceRecord", "Journal", "SessionRow", "StoredAsk", "Summaries", "allotments"]
