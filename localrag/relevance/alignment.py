"""Mention density: how often the other files and the task refer to a file.

A reference is the file's path or the end of it, its name, or its module name with a dot (`kb.retrieve`); the stem of the name where it
is hardly an ordinary word: between backticks, after `./`, where it is made of several parts (`knowledge_base`), and in the task where
few other files hold that word, so that "a model" does not name model.py where every file speaks of models. An import that leads to the
file counts once if the text does not spell a reference out. A name that several files share, or one as common as `index` or `__init__`,
needs its folder to be a reference. Case is ignored.

With f references in the other files, which have w words, and t in the task, which has v words, the density per 1,000 words is
d = 1000 f / max(w, 1000) + 1000 t / v, and the value is d / (d + HALF_DENSITY). So one reference in a short note is not yet a crowd, and
one in the task nearly settles it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from localrag.relevance.profile import Profile, Rating, count_words, idf, stem, task_terms
from localrag.text.terms import STOP_WORDS, words
from localrag.text.tokens import Embedder

if TYPE_CHECKING:
    import numpy as np


HALF_DENSITY = 0.5
"""References per 1,000 words that make one half. In localrag's own 126 files and 91,000 words, the median file has 0.02, one in ten has
0.08 or more, and errors.py has the most, 0.54: what everything imports should not outweigh what the task is about."""

MIN_WORDS = 1000

COMMON_NAMES = frozenset(("index", "__init__", "__main__", "main", "mod", "lib", "init", "default", "package", "setup"))

_RUN = re.compile(r"[\w.\\/-]+")
_MAX_RUN_CHARS = 512
_MAX_PARTS = 12
_MIN_STEM_CHARS = 3
_FROM_HERE = re.compile(r"^(?:\.{0,2}/)+")
"""The beginning of a path that says where to start: `./`, `../../`, `/`."""
_SEVERAL_PARTS = re.compile(r"[^_-]+[_-]+[^_-]")


class Names:
    """The names of all files: key → path; None for a key that several share. Keys are in lower case."""

    def __init__(self, profiles: Sequence[Profile]) -> None:
        self.paths: dict[str, str | None] = {}
        self.modules: dict[str, str | None] = {}
        self.stems: dict[str, str | None] = {}
        self.whole = {profile.path.lower(): profile.path for profile in profiles}
        for profile in profiles:
            self._add(profile)

    def _add(self, profile: Profile) -> None:
        name = profile.stem.lower()
        is_common = name in COMMON_NAMES
        parts = profile.path.lower().split("/")[-_MAX_PARTS:]
        dotted = [*parts[:-1], name] if name != "__init__" else parts[:-1]
        for at in range(len(parts)):
            if at < len(parts) - 1 or not is_common:
                _claim(self.paths, "/".join(parts[at:]), profile.path)
            if at < len(parts) - 1:
                _claim(self.paths, "/".join([*parts[at:-1], name]), profile.path)
            if len(dotted) - at >= 2:
                _claim(self.modules, ".".join(dotted[at:]), profile.path)
        if not is_common and len(name) >= _MIN_STEM_CHARS and name not in STOP_WORDS:
            _claim(self.stems, name, profile.path)

    def find(self, run: str, *, bare: Container[str], is_call: bool) -> str | None:
        """The file that a run of path-like characters refers to. `bare`: stems that count alone. `is_call`: a parenthesis follows."""
        relative = run.startswith((".\\", "./", "..\\", "../"))
        run = run.replace("\\", "/").rstrip("./-").lower()
        hidden = _FROM_HERE.sub("", run)
        if hidden.startswith(".") and hidden in self.paths:
            return self._by_path(hidden)
        run = run.lstrip("./")
        if "/" in run:
            return self._by_path(run)
        known = self.paths.get(run)
        if known is not None and "." in run:
            return known
        if "." in run:
            return self._by_module(run, is_call=is_call)
        if run in bare or relative or _SEVERAL_PARTS.search(run):
            return self.stems.get(run)
        return None

    def _by_path(self, run: str) -> str | None:
        """By the end of a file's path, with or without its ending; or a longer path that ends with a file's whole path."""
        if run in self.whole:
            return self.whole[run]
        if run in self.paths:
            return self.paths[run]
        parts = run.split("/")
        for num in range(min(len(parts) - 1, _MAX_PARTS), 1, -1):
            if (found := self.whole.get("/".join(parts[-num:]))) is not None:
                return found
        return None

    def _by_module(self, run: str, *, is_call: bool) -> str | None:
        """By a module name, or by something in that module. `kb.retrieve(` is more likely a method than the module kb/retrieve.py."""
        parts = run.split(".")[:_MAX_PARTS]
        for num in range(len(parts), 1, -1):
            key = ".".join(parts[:num])
            if key in self.modules:
                return None if is_call and num == len(parts) else self.modules[key]
        return None


def _claim(names: dict[str, str | None], key: str, path: str) -> None:
    names[key] = path if names.get(key, path) == path else None


def rate_mentions(
    profiles: Sequence[Profile], everything: Sequence[Profile], task: str, graph: Mapping[str, Sequence[str]]
) -> tuple[list[Rating], list[str]]:
    """Rate how densely `everything` and the task refer to each of `profiles`; also return the paths that the task names."""
    names = Names(everything)
    found: Counter[str] = Counter()
    for source in everything:
        here = Counter(_references(source.text, names))
        for target in graph[source.path]:
            here[target] = max(here[target], 1)
        del here[source.path]
        found.update(here)
    in_task = Counter(_references(task, names, bare=_rare_stems(task, names, everything)))
    num_words = sum(each.num_words for each in everything)
    num_task_words = max(len(words(task)), 1)
    ratings = []
    for profile in profiles:
        num, num_in_task = found[profile.path], in_task[profile.path]
        others = num_words - profile.num_words
        density = 1000 * num / max(others, MIN_WORDS) + 1000 * num_in_task / num_task_words
        details = {"references": num, "words": others, "references_in_task": num_in_task}
        ratings.append(Rating(density / (density + HALF_DENSITY), details))
    return ratings, sorted(in_task)


def _rare_stems(task: str, names: Names, everything: Sequence[Profile]) -> set[str]:
    """The words of a task that are the stem of a file's name and occur in at most one in ten of the other files (or in one)."""
    found = {word for word in words(task.lower()) if names.stems.get(word) is not None}
    most = max(1, len(everything) // 10)
    return {word for word in found if sum(each.counts[stem(word)] > 0 for each in everything if each.path != names.stems[word]) <= most}


def _references(text: str, names: Names, *, bare: Container[str] = ()) -> Iterator[str]:
    """The path of each file that a text refers to, once for each reference: one pass over the text."""
    for match in _RUN.finditer(text):
        run, start, end = match.group(), match.start(), match.end()
        if len(run) > _MAX_RUN_CHARS:
            continue
        ticked = text[start - 1 : start] == "`" == text[end : end + 1]
        found = names.find(run, bare=names.stems if ticked else bare, is_call=text[end : end + 1] == "(")
        if found is not None:
            yield found


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
