"""What was asked or decided, and what became of its budget: one SQLite file in the home."""

from localrag.journal.councils import CouncilRow, StoredCouncil
from localrag.journal.records import Allotment, AskRecord, EvidenceRecord, SessionRow, StoredAsk, allotments
from localrag.journal.store import FILE_NAME, Journal
from localrag.journal.summaries import Summaries

__all__ = [
    "FILE_NAME",
    "Allotment",
    "AskRecord",
    "CouncilRow",
    "EvidenceRecord",
    "Journal",
    "SessionRow",
    "StoredAsk",
    "StoredCouncil",
    "Summaries",
    "allotments",
]
