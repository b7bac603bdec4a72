"""How near a file is to the task in meaning, from a bounded number of its passages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from localrag.relevance.profile import Profile, Rating, count_words
from localrag.tokens import Embedder

if TYPE_CHECKING:
    import numpy as np

Progress = Callable[[int, int], None]
"""Called with how many files have been embedded, of how many."""

WINDOW_CHARS = 700
"""A window of a file that is embedded as one: about what the default embedder's 254 tokens hold of source code."""

MAX_WINDOWS = 64
MAX_WINDOWS_IN_ALL = 192
"""The most windows that are embedded of one file, and of all files together (but one of each). The default embedder takes about 0.1 s of
one core for a window, so that a folder takes some ten seconds."""

BEST_WINDOWS = 3
"""A file is as near as the mean of so many of its best windows: one passage may be chance, and all of them are too blunt."""

_TITLE_CHARS = 100
_TASK_WINDOWS = 8


def rate_meaning(
    profiles: Sequence[Profile], task: str, weights: Mapping[str, float], embedder: Embedder, progress: Progress | None = None
) -> list[Rating]:
    """The cosine similarity of the task with the best windows of each file, 0 where it is negative.

    Of a file with too many windows, the first is embedded, those with most of the task's words (`weights` by stem), and then some
    spread over the rest. A window that the embedder does not take whole loses its end. The details say how much was embedded.
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
    """(start, end) of stretches of about WINDOW_CHARS that make up the text, ending at line ends where there are some."""
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
    """The unit vector of a task, the mean of its windows' where it is long; None for no text."""
    texts = (task[start:end].strip() for start, end in _chosen(task, windows(task), _TASK_WINDOWS, weights))
    pieces = [piece for text in texts if text and (piece := _fitted(text, embedder))]
    if not pieces:
        return None
    mean = embedder.embed(pieces).mean(axis=0)
    length = float((mean @ mean) ** 0.5)
    return mean / length if length else None


def _fitted(text: str, embedder: Embedder) -> str:
    """The beginning of a text that the embedder takes; a lone surrogate, which is no text, becomes a question mark."""
    piece = text.encode("utf-8", "replace").decode()
    while piece and (num_tokens := embedder.count(piece)) > embedder.max_tokens:
        piece = piece[: min(len(piece) * embedder.max_tokens // num_tokens, len(piece) - 1)]
    return piece.strip()
