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
from collections.abc import Container, Iterator, Mapping, Sequence

from localrag.relevance.profile import Profile, Rating, stem
from localrag.terms import STOP_WORDS, words

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
