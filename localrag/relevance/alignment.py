"""Task alignment: how directly a file is about the task, by its words, by its meaning, or both.

By words: the share of the task's words in the file. Each word weighs its inverse document frequency over all files and counts n / (n + 1)
if it occurs n times; in the path, in a heading or in the name of a definition it counts as NAMING_COUNT more. A word in no file weighs half
as much as one in a single file: such words ("faster", "please") more often say how than where. So one more of the task's words in a file
never lowers its value.

By meaning: the cosine similarity of the task with the best of a bounded number of the file's passages. Hybrid: the mean of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from localrag.relevance.profile import Profile, Rating, count_words, idf, task_terms
from localrag.tokens import Embedder

if TYPE_CHECKING:
    import numpy as np

Method = Literal["keyword", "semantic", "hybrid"]
METHODS: tuple[Method, ...] = get_args(Method)

NAMING_COUNT = 3
"""Extra occurrences for a word in a path, a heading or the name of a definition, which tells what the file is about."""

Progress = Callable[[int, int], None]
"""Called with the number of files embedded, and of all."""

WINDOW_CHARS = 700
"""Characters embedded as one window: about 254 tokens of source code, the limit of the default embedder."""

MAX_WINDOWS = 64
MAX_WINDOWS_IN_ALL = 192
"""Most windows to embed of one file, and of all files together (at least one of each). The default embedder takes about 0.1 s of one core
for a window, so a folder takes about ten seconds."""

BEST_WINDOWS = 3
"""Best windows whose mean is the similarity of a file: one may be chance, and all of them are too blunt."""

_TITLE_CHARS = 100
_TASK_WINDOWS = 8


def align(
    profiles: Sequence[Profile],
    everything: Sequence[Profile],
    task: str,
    method: Method,
    embedder: Embedder | None,
    progress: Progress | None = None,
) -> list[Rating]:
    """Rate how well each of `profiles` fits the task. Words are weighed over `everything`. Without an embedder, words decide."""
    wanted = task_terms(task)
    weights = {stem: _weight(sum(_count(each, stem) > 0 for each in everything), len(everything)) for stem in wanted}
    if method == "keyword" or embedder is None:
        asked = {} if method == "keyword" else {"asked": method, "reason": "no embedder"}
        by_words = _by_words(profiles, wanted, weights)
        return [Rating(value, {"method": "keyword", **asked, "keyword": value, **details}) for value, details in by_words]
    by_meaning = _rate_meaning(profiles, task, weights, embedder, progress)
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


def _rate_meaning(
    profiles: Sequence[Profile], task: str, weights: Mapping[str, float], embedder: Embedder, progress: Progress | None = None
) -> list[Rating]:
    """The cosine similarity of the task with the best windows of each file, at least 0.

    Of a file with too many windows, the first is embedded, those with most of the task's words (`weights` by stem), and then some
    spread over the rest. A window that is too long for the embedder is truncated. The details say how much was embedded.
    """
    wanted = _direction(task, weights, embedder)
    limit = max(1, min(MAX_WINDOWS, MAX_WINDOWS_IN_ALL // max(len(profiles), 1)))
    ratings = []
    for num_done, profile in enumerate(profiles):
        if progress is not None:
            progress(num_done, len(profiles))
        spans = windows(profile.text)
        texts = [profile.text[start:end] for start, end in _chosen(profile.text, spans, limit, weights)]
        pieces = [
            piece for text in texts if text.strip() and (piece := _fitted(f"{profile.path[-_TITLE_CHARS:]}\n{text.strip()}", embedder))
        ]
        near: list[float] = []
        if wanted is not None and pieces:  # one call for each file, so that its vectors do not depend on the files beside it
            near = sorted((float(one) for one in embedder.embed(pieces) @ wanted), reverse=True)[:BEST_WINDOWS]
        value = min(max(sum(near) / len(near), 0.0), 1.0) if near else 0.0
        ratings.append(Rating(value, {"windows_embedded": len(pieces), "windows": len(spans)}))
    return ratings


def windows(text: str) -> list[tuple[int, int]]:
    """Split a text into (start, end) of about WINDOW_CHARS, at line ends if possible."""
    spans, start = [], 0
    while start < len(text):
        end = min(start + WINDOW_CHARS, len(text))
        if end < len(text):
            end = text.rfind("\n", start + WINDOW_CHARS // 2, end) + 1 or end
        spans.append((start, end))
        start = end
    return spans


def _chosen(text: str, spans: list[tuple[int, int]], limit: int, weights: Mapping[str, float]) -> list[tuple[int, int]]:
    if len(spans) <= limit:
        return spans
    held = {}
    for at, (start, end) in enumerate(spans):
        counts = count_words(text[start:end])
        held[at] = sum(weight for stem, weight in weights.items() if counts[stem])
    order = [0, *sorted((at for at in held if at and held[at]), key=lambda at: (-held[at], at))][:limit]
    rest = sorted(held.keys() - set(order))
    room = limit - len(order)
    order += [rest[num * len(rest) // room] for num in range(room)]
    return [spans[at] for at in sorted(order)]


def _direction(task: str, weights: Mapping[str, float], embedder: Embedder) -> np.ndarray | None:
    """The unit vector of a task, the mean over its windows; None for no text."""
    texts = (task[start:end].strip() for start, end in _chosen(task, windows(task), _TASK_WINDOWS, weights))
    pieces = [piece for text in texts if text and (piece := _fitted(text, embedder))]
    if not pieces:
        return None
    mean = embedder.embed(pieces).mean(axis=0)
    length = float((mean @ mean) ** 0.5)
    return mean / length if length else None


def _fitted(text: str, embedder: Embedder) -> str:
    """Truncate a text to what the embedder takes; a lone surrogate becomes a question mark."""
    piece = text.encode("utf-8", "replace").decode()
    while piece and (num_tokens := embedder.count(piece)) > embedder.max_tokens:
        piece = piece[: min(len(piece) * embedder.max_tokens // num_tokens, len(piece) - 1)]
    return piece.strip()
