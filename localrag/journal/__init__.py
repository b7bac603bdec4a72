"""What was asked or decided, and what became of its budget: one SQLite file in the home."""

from localrag.journal.conversations import ConversationRow, Conversations, Ending, Found, StoredTurn, TurnState
from localrag.journal.councils import CouncilRow, Councils, StoredCouncil
from localrag.journal.memories import DEFAULT_IMPORTANCE, Memories, StoredMemory
from localrag.journal.store import FILE_NAME, Allotment, AskRecord, EvidenceRecord, Journal, SessionRow, StoredAsk, Summaries, allotments

__all__ = [
    "DEFAULT_IMPORTANCE",
    "FILE_NAME",
    "Allotment",
    "AskRecord",
    "ConversationRow",
    "Conversations",
    "CouncilRow",
    "Councils",
    "Ending",
    "EvidenceRecord",
    "Found",
    "Journal",
    "Memories",
    "SessionRow",
    "StoredAsk",
    "StoredCouncil",
    "StoredMemory",
    "StoredTurn",
    "Summaries",
    "TurnState",
    "allotments",
]
