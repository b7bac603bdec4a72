"""The level "detailed": the pieces of an outline that matter most, as many as fit."""

from __future__ import annotations

from localrag.outline import Piece, outline
from localrag.summary.fitting import Count

_RANKS = {"heading": 0, "class": 0, "function": 0, "omitted": 0, "type": 1, "import": 2, "text": 2, "table": 2, "doc": 3, "list": 3}
_LAST_RANK = 4
_GAP = " …"
_MAX_MISSES = 50
"""Pieces that did not fit, before the others are taken not to fit either."""


def outlined(text: str, language: str | None, limit: int, count: Count) -> str:
    """The outline of a text in at most `limit` tokens, in order; "…" stands where something between two pieces was left out.

    Headings and the heads of definitions come first, then types, imports and first sentences, docstrings, and fields last. Empty for a text
    of which no outline is known, or no piece fits.
    """
    pieces = outline(text, language)
    if all(piece.kind == "omitted" for piece in pieces):
        return ""
    room, chosen, misses = limit, [], 0
    for index in sorted(range(len(pieces)), key=lambda index: (_RANKS.get(pieces[index].kind, _LAST_RANK), index)):
        num_tokens = count(f"{pieces[index].text}{_GAP}\n")
        if num_tokens <= room:
            chosen.append(index)
            room -= num_tokens
        elif (misses := misses + 1) > _MAX_MISSES:
            break
    while chosen:
        joined = _joined(text, [pieces[index] for index in sorted(chosen)])
        excess = count(joined) - limit
        if excess <= 0:
            return joined
        del chosen[-max(1, len(chosen) * excess // (excess + limit)) :]  # the least important
    return ""


def _joined(text: str, pieces: list[Piece]) -> str:
    parts: list[str] = []
    at = 0
    for piece in pieces:
        between = text[at : piece.start]
        if between.strip():
            parts.append(f"{_GAP}\n".lstrip(" " if not parts else ""))
        elif parts:
            parts.append("\n" * min(2, between.count("\n")) or " ")
        parts.append(piece.text)
        at = piece.end
    return "".join(parts) + (_GAP if text[at:].strip() else "")
