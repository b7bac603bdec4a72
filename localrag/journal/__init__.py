"""The journal: asks with their ledgers, council runs, conversations and memories, in one SQLite file in the home."""

from localrag.journal.conversations import (
    DEFAULT_IMPORTANCE,
    ConversationRow,
    Conversations,
    Ending,
    Memories,
    StoredMemory,
    StoredTurn,
    TurnMatch,
    TurnState,
)
from localrag.journal.councils import CouncilRow, Councils, StoredCouncil
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
    "Journal",
    "Memories",
    "SessionRow",
    "StoredAsk",
    "StoredCouncil",
    "StoredMemory",
    "StoredTurn",
    "Summaries",
    "TurnMatch",
    "TurnState",
    "allotments",
]
