"""A second look at the best hits by something slower that reads question and passage together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from localrag.errors import KnowledgeBaseError

NUM_RERANKED = 20
"""So many of the best are looked at again."""


class Reranker(Protocol):
    """How well each text answers a query: a number each, higher for better, that need not mean more than its order."""

    def scores(self, query: str, texts: Sequence[str], /) -> list[float]: ...


def rank(reranker: Reranker, query: str, texts: Sequence[str]) -> list[int]:
    """The places of the texts, best first; of equals the one that came first. KnowledgeBaseError unless there is a number for each."""
    scores = reranker.scores(query, texts)
    if len(scores) != len(texts) or any(map(math.isnan, scores)):
        raise KnowledgeBaseError(
            f"The reranker gave {len(scores)} scores for {len(texts)} passages, or some that are no numbers.",
            hint="Use another reranker, or none.",
        )
    return sorted(range(len(texts)), key=lambda place: (-scores[place], place))
