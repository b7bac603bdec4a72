"""How directly a file is about the task: by its words, by its meaning, or both.

By words: the share of the task's words that the file holds, each word weighing its inverse document frequency over all files at hand
and counting n / (n + 1) where it stands n times; in the path, in a heading or in the name of a definition it stands NAMING_COUNT times
more. A word that no file holds weighs half of one that a single file holds: such words ("faster", "please") more often say how than
where. So one more of the task's words in a file never lowers its value.

By meaning: the cosine similarity of the task with the file's best passages, see meaning.py. Hybrid: the mean of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localrag.relevance.meaning import Progress, rate_meaning
from localrag.relevance.profile import Profile, Rating, idf, task_terms
from localrag.relevance.weights import Method
from localrag.tokens import Embedder

NAMING_COUNT = 3
"""A word in a path, in a heading or in the name of something defined says what the file is about: it counts as so many more."""


def align(
    profiles: Sequence[Profile],
    everything: Sequence[Profile],
    task: str,
    method: Method,
    embedder: Embedder | None,
    progress: Progress | None = None,
) -> list[Rating]:
    """How well each of `profiles` fits the task, in their order. Words are weighed over `everything`. Without an embedder, words decide."""
    wanted = task_terms(task)
    weights = {stem: _weight(sum(_count(each, stem) > 0 for each in everything), len(everything)) for stem in wanted}
    if method == "keyword" or embedder is None:
        asked = {} if method == "keyword" else {"asked": method, "reason": "no embedder"}
        by_words = _by_words(profiles, wanted, weights)
        return [Rating(value, {"method": "keyword", **asked, "keyword": value, **details}) for value, details in by_words]
    by_meaning = rate_meaning(profiles, task, weights, embedder, progress)
    if method == "semantic":
        return [Rating(value, {"method": method, "semantic": value, **details}) for value, details in by_meaning]
    return [
        Rating(
            (word.value + near.value) / 2, {"method": method, "keyword": word.value, "semantic": near.value, **word.details, **near.details}
        )
        for word, near in zip(_by_words(profiles, wanted, weights), by_meaning, strict=True)
    ]


def _by_words(profiles: Sequence[Profile], wanted: Mapping[str, str], weights: Mapping[str, float]) -> list[Rating]:
    total = sum(weights.values())
    ratings = []
    for profile in profiles:
        counts = {stem: _count(profile, stem) for stem in wanted}
        held = sum(weights[stem] * num / (num + 1) for stem, num in counts.items())
        details = {
            "found": {wanted[stem]: num for stem, num in counts.items() if num},
            "missing": [wanted[stem] for stem, num in counts.items() if not num],
        }
        ratings.append(Rating(min(held / total, 1.0) if total else 0.0, details))
    return ratings


def _count(profile: Profile, stem: str) -> int:
    return profile.counts[stem] + NAMING_COUNT * profile.naming_counts[stem]


def _weight(num_holding: int, num_files: int) -> float:
    return idf(num_files, num_holding) if num_holding else idf(num_files, 1) / 2
