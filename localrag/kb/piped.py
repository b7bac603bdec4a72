"""Text that is piped in with a question becomes evidence beside that of the knowledge bases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localrag.kb.chunking import TARGET_TOKENS, split_counted
from localrag.passages import Chunk, Hit
from localrag.terms import terms

SOURCE = "standard input"
SCOPE = "stdin"


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    text: str
    num_matches: int


def piped_hits(text: str, question: str, count: Callable[[str], int]) -> list[Hit]:
    """The whole text in chunks, those that share most words with the question first, ties in order of the text.

    `count` gives tokens of the model that will read them. The score is the share of the question's words that a chunk holds.
    Labels are `KB#stdin/1` and so on, in order of the text.
    """
    words = set(terms(question))
    pieces = [_Piece(start, piece, len(words & set(terms(piece)))) for start, piece in split_counted(text, count, TARGET_TOKENS)]
    hits = []
    for ordinal, piece in enumerate(pieces, start=1):
        chunk = Chunk(
            id=ordinal,
            document_id=0,
            ordinal=ordinal - 1,
            text=piece.text,
            start=piece.start,
            end=piece.start + len(piece.text),
            source=SOURCE,
            scope=SCOPE,
        )
        score = piece.num_matches / max(1, len(words))
        hits.append(Hit(chunk, score, {"words": score}))
    return sorted(hits, key=lambda hit: -hit.score)
