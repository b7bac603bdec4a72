"""The same thing twice is no more evidence: near duplicates go, and what repeats what was chosen can weigh less."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from localrag.passages import Hit
from localrag.terms import terms

MIN_SHARED = 0.95
"""Two texts can be near duplicates if of all different words in either, this share is in both: in a chunk of 200 words, 110 of them
different, two that were exchanged make 0.96, three 0.95."""

MIN_SHARED_RUNS = 0.8
"""And their words have to follow each other alike: this share of all runs of four words is in both. Of 200 words, two that were
exchanged make 0.92."""

_RUN_WORDS = 4
_WORD = re.compile(r"\w+")
_DIGIT = re.compile(r"\d")


class Distinct:
    """Tells texts that were not seen before from near duplicates of those that were."""

    def __init__(self) -> None:
        self._seen: list[tuple[list[str], frozenset[str]]] = []
        self._holders: dict[str, list[int]] = {}

    def is_new(self, text: str) -> bool:
        """Whether nothing like it was seen; then it counts as seen.

        Texts that differ in a number are never duplicates, whatever else they share: rows of a table, data sheets, versions.
        """
        spoken = _WORD.findall(unicodedata.normalize("NFKC", text).casefold()) or [text.strip()]
        kinds = frozenset(spoken)
        # Two sets that share so much share one of their first words in any one order; long words first, few texts have to be compared.
        num_first = len(kinds) - math.ceil(MIN_SHARED * len(kinds)) + 1
        first = sorted(sorted(kinds), key=len, reverse=True)[:num_first]  # equally long ones stay in their order
        candidates = {holder for word in first for holder in self._holders.get(word, ())}
        least, most = MIN_SHARED * len(kinds), len(kinds) / MIN_SHARED  # what tells most texts apart is told first
        near_sized = [self._seen[holder] for holder in sorted(candidates) if least <= len(self._seen[holder][1]) <= most]
        if any(_is_near(spoken, kinds, *other) for other in near_sized):
            return False
        for word in first:
            self._holders.setdefault(word, []).append(len(self._seen))
        self._seen.append((spoken, kinds))
        return True


def _is_near(spoken: list[str], kinds: frozenset[str], other: list[str], other_kinds: frozenset[str]) -> bool:
    num_shared = len(kinds & other_kinds)
    if num_shared < MIN_SHARED * (len(kinds) + len(other_kinds) - num_shared) or any(map(_DIGIT.search, kinds ^ other_kinds)):
        return False
    runs, other_runs = _runs(spoken), _runs(other)
    return len(runs & other_runs) >= MIN_SHARED_RUNS * len(runs | other_runs)


def _runs(spoken: list[str]) -> set[tuple[str, ...]]:
    return {tuple(spoken[at : at + _RUN_WORDS]) for at in range(max(1, len(spoken) - _RUN_WORDS + 1))}


def diversify(hits: Sequence[Hit], k: int, diversity: float) -> list[Hit]:
    """The `k` hits of maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998), best first.

    `diversity` is what likeness costs, 0 (nothing) to 1: a hit loses `diversity` × the best score × its likeness (0 to 1, by the words
    that both have) to the most alike of those chosen before it. The loss is a contribution named "diversity", so that scores stay the
    sums of their contributions, and fall from hit to hit.
    """
    if not hits or not diversity:
        return list(hits[:k])
    top = max(hit.score for hit in hits)
    kinds = [frozenset(terms(hit.chunk.text)) for hit in hits]
    likeness = [0.0] * len(hits)
    left = list(range(len(hits)))
    chosen: list[Hit] = []
    while left and len(chosen) < k:
        best = max(left, key=lambda at: (hits[at].score - diversity * top * likeness[at], -at))
        left.remove(best)
        chosen.append(_less(hits[best], diversity * top * likeness[best]))
        for at in left:
            likeness[at] = max(likeness[at], _alike(kinds[at], kinds[best]))
    return chosen


def _less(hit: Hit, loss: float) -> Hit:
    if not loss:
        return hit
    parts = {**hit.contributions, "diversity": -loss}
    return replace(hit, score=sum(parts.values()), contributions=parts)


def _alike(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / math.sqrt(len(one) * len(other)) if one and other else 0.0
