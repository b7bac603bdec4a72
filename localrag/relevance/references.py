"""Two factors of relevance that follow references between files: mention density and dependency depth.

Mention density: how often other files and the task refer to a file. A reference is the file's path or the end of it, its name,
or its module name with a dot (`kb.retrieve`). The stem of the name counts where it is hardly an ordinary word: between
backticks, after `./`, if it has several parts (`knowledge_base`), and in the task if few other files contain that word, so that
"a model" does not refer to model.py in a project about models. An import that leads to the file counts once if the text does
not spell out a reference. A name that several files share, or one as common as `index` or `__init__`, needs its folder. Case is
ignored.

With f references in the other files, which have w words, and t in the task, which has v words, the density per 1,000 words is d
= 1000 f / max(w, 1000) + 1000 t / v, and the value is d / (d + HALF_DENSITY). So one reference in a short note counts little,
and one in the task nearly settles it.

Dependency depth: the distance of a file, import by import, from the files that the task is about. These roots are the files
that the task names; if it names none, the files whose alignment with the task is at least ROOT_SHARE of the best. A root has
the value 1, a file at distance d from the nearest root 1 - d / (max_depth + 1), and a file farther away 0.

Imports are resolved among the given files, never on disk. An absolute name is looked up from each folder above the importing
file, nearest first, and in that folder's `src` and the like; failing that, it is the only file with that ending, if there is
just one.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from localrag.outline import imports, language_of
from localrag.relevance.profile import Profile, Rating, stem
from localrag.text.terms import STOP_WORDS, words

HALF_DENSITY = 0.5
"""References per 1,000 words that give a value of one half. In localrag's own 126 files and 91,000 words, the median file has
0.02, one in ten has at least 0.08, and errors.py has the most, 0.54: a file that everything imports should not outweigh the
files that the task is about.
"""

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
        """Return the file that a run of path-like characters refers to. `bare`: stems that count alone. `is_call`: a parenthesis
        follows.
        """
        relative = run.startswith((".\\", "./", "..\\", "../"))
        run = run.replace("\\", "/").rstrip("./-").lower()
        hidden = _FROM_HERE.sub("", run)
        if hidden.startswith(".") and hidden in self.paths:
            return self._by_path(hidden)
        run = run.lstrip("./")
        if "/" in run:
            return self._by_path(run)
        path = self.paths.get(run)
        if path is not None and "." in run:
            return path
        if "." in run:
            return self._by_module(run, is_call=is_call)
        if run in bare or relative or _SEVERAL_PARTS.search(run):
            return self.stems.get(run)
        return None

    def _by_path(self, run: str) -> str | None:
        """Find a file by the end of its path, with or without its suffix, or by a longer path that ends with the file's whole path."""
        if run in self.whole:
            return self.whole[run]
        if run in self.paths:
            return self.paths[run]
        parts = run.split("/")
        for num in range(min(len(parts) - 1, _MAX_PARTS), 1, -1):
            if (path := self.whole.get("/".join(parts[-num:]))) is not None:
                return path
        return None

    def _by_module(self, run: str, *, is_call: bool) -> str | None:
        """Find a file by a module name, or by a name in that module. `kb.retrieve(` is more likely a method than the module
        kb/retrieve.py.
        """
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
    mentions: Counter[str] = Counter()
    for source in everything:
        here = Counter(_references(source.text, names))
        for target in graph[source.path]:
            here[target] = max(here[target], 1)
        del here[source.path]
        mentions.update(here)
    in_task = Counter(_references(task, names, bare=_rare_stems(task, names, everything)))
    num_words = sum(each.num_words for each in everything)
    num_task_words = max(len(words(task)), 1)
    ratings = []
    for profile in profiles:
        num, num_in_task = mentions[profile.path], in_task[profile.path]
        others = num_words - profile.num_words
        density = 1000 * num / max(others, MIN_WORDS) + 1000 * num_in_task / num_task_words
        details = {"references": num, "words": others, "references_in_task": num_in_task}
        ratings.append(Rating(density / (density + HALF_DENSITY), details))
    return ratings, sorted(in_task)


def _rare_stems(task: str, names: Names, everything: Sequence[Profile]) -> set[str]:
    """The words of a task that are the stem of a file's name and occur in at most one in ten of the other files (or in one)."""
    stems = {word for word in words(task.lower()) if names.stems.get(word) is not None}
    most = max(1, len(everything) // 10)
    return {word for word in stems if sum(each.counts[stem(word)] > 0 for each in everything if each.path != names.stems[word]) <= most}


def _references(text: str, names: Names, *, bare: Container[str] = ()) -> Iterator[str]:
    """Yield the path of each file that a text refers to, once per reference, in one pass."""
    for match in _RUN.finditer(text):
        run, start, end = match.group(), match.start(), match.end()
        if len(run) > _MAX_RUN_CHARS:
            continue
        ticked = text[start - 1 : start] == "`" == text[end : end + 1]
        path = names.find(run, bare=names.stems if ticked else bare, is_call=text[end : end + 1] == "(")
        if path is not None:
            yield path


ROOT_SHARE = 0.9

_MAX_ANCESTORS = 64
_JS_ENDINGS = (".ts", ".tsx", ".d.ts", ".js", ".jsx", ".mjs", ".cjs", ".mts", ".cts", ".json", ".vue", ".svelte")
_JS_COMPILED = {".js": (".ts", ".tsx"), ".jsx": (".tsx",), ".mjs": (".mts",), ".cjs": (".cts",)}  # imported by compiled name


def import_graph(everything: Sequence[Profile]) -> dict[str, tuple[str, ...]]:
    """path → the sorted paths of the given files that it imports, without itself."""
    resolver = Resolver(profile.path for profile in everything)
    graph = {}
    for profile in everything:
        language = language_of(profile.name)
        names = imports(profile.text, language) if language else []
        targets = {path for name in names for path in resolver.resolve(profile.path, name, language or "")}
        graph[profile.path] = tuple(sorted(targets - {profile.path}))
    return graph


def choose_roots(profiles: Sequence[Profile], aligned: Sequence[Rating], task_paths: Sequence[str]) -> list[str]:
    """Return the files that the task is about; [] if it names none and none is aligned with it."""
    if task_paths:
        return sorted(task_paths)
    best = max((rating.value for rating in aligned), default=0.0)
    return sorted(
        profile.path for profile, rating in zip(profiles, aligned, strict=True) if rating.value > 0 and rating.value >= ROOT_SHARE * best
    )


def rate_depths(profiles: Sequence[Profile], graph: Mapping[str, Sequence[str]], roots: Sequence[str], max_depth: int) -> list[Rating]:
    distances = _distances(graph, roots, max_depth)
    ratings = []
    for profile in profiles:
        distance = distances.get(profile.path)
        value = 0.0 if distance is None else 1.0 - distance / (max_depth + 1)
        ratings.append(Rating(value, {"distance": distance, "imports": len(graph[profile.path])}))
    return ratings


def _distances(graph: Mapping[str, Sequence[str]], roots: Sequence[str], max_depth: int) -> dict[str, int]:
    """Breadth first, so that each file has its shortest distance and cycles end."""
    distances = dict.fromkeys(roots, 0)
    layer = list(roots)
    for depth in range(1, max_depth + 1):
        layer = list(dict.fromkeys(target for source in layer for target in graph[source] if target not in distances))
        distances.update(dict.fromkeys(layer, depth))
    return distances


class Resolver:
    """Resolves imports among `paths`, which are normalised: / between folders, no `.` or `..` inside."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._folders: dict[str, list[str]] = {}
        self._endings: dict[str, str | None] = {}
        self._folder_endings: dict[str, str | None] = {}
        for path in sorted(self._paths):
            self._folders.setdefault(posixpath.dirname(path), []).append(path)
            _index(self._endings, path)
        for folder in self._folders:
            _index(self._folder_endings, folder)

    def resolve(self, importer: str, name: str, language: str) -> list[str]:
        """Return the files that `name`, as written in `importer`, refers to; a package of Go or Java can be several. [] if unknown."""
        if len(name) > 1000:
            return []
        resolve = {
            "python": self._python, "javascript": self._javascript, "typescript": self._javascript, "tsx": self._javascript,
            "go": self._go, "rust": self._rust, "java": self._java, "c": self._c, "cpp": self._c,
        }.get(language)  # fmt: skip
        return [] if resolve is None else resolve(importer, name)

    def _first(self, candidates: Iterable[str]) -> list[str]:
        return next(([path] for path in candidates if path in self._paths), [])

    def _ending(self, *names: str) -> list[str]:
        return next(([path] for name in names if (path := self._endings.get(name)) is not None), [])

    def _python(self, importer: str, name: str) -> list[str]:
        inner = name.lstrip(".")
        num_up = len(name) - len(inner) - 1
        rest = inner.replace(".", "/")
        if num_up >= 0:
            folders = [posixpath.dirname(importer), *_parents(posixpath.dirname(importer))]
            return self._first(_modules(posixpath.join(folders[num_up], rest))) if num_up < len(folders) else []
        for folder in _ancestors(importer):
            if posixpath.join(folder, "__init__.py") in self._paths:
                continue  # Python looks for absolute names next to packages, not inside them
            for base in _below(folder, ("", "src", "lib"), rest):
                if paths := self._first(_modules(base)):
                    return paths
        return self._ending(*_modules(rest)) if "/" in rest else []

    def _javascript(self, importer: str, name: str) -> list[str]:
        if not name.startswith("."):
            return []  # a package
        base = posixpath.normpath(posixpath.join(posixpath.dirname(importer), name))
        bare, ending = posixpath.splitext(base)
        compiled = [bare + other for other in _JS_COMPILED.get(ending, ())]
        indexes = [posixpath.join(base, f"index{one}") for one in _JS_ENDINGS]
        return self._first([base, *compiled, *(base + one for one in _JS_ENDINGS), *indexes])

    def _c(self, importer: str, name: str) -> list[str]:
        candidates = [path for folder in _ancestors(importer) for path in _below(folder, ("", "include", "src", "inc"), name)]
        return self._first(posixpath.normpath(path) for path in candidates) or self._ending(name)

    def _go(self, _importer: str, name: str) -> list[str]:
        parts = name.split("/")[-_MAX_PARTS:]
        for at in range(len(parts)):
            ending = "/".join(parts[at:])
            folder = self._folder_endings.get(ending)
            # `fmt` is the standard library's, though there may be a folder of that name; `example.com/tool/fmt` need not be
            if folder is not None and (at < len(parts) - 1 or (folder == ending and "." in parts[0])):
                return [path for path in self._folders[folder] if path.endswith(".go") and not path.endswith("_test.go")]
        return []

    def _java(self, importer: str, name: str) -> list[str]:
        if name.endswith(".*"):
            rest = name.removesuffix(".*").replace(".", "/")
            places = [posixpath.join(folder, rest) for folder in _ancestors(importer)]
            folder = next((one for one in places if one in self._folders), self._folder_endings.get(rest))
            package = [] if folder is None else [path for path in self._folders[folder] if path.endswith(".java")]
            return package or self._java(importer, name.removesuffix(".*"))  # import static a.B.*
        parts = name.split(".")
        for num in range(len(parts), max(len(parts) - 2, 1), -1):  # the last part may be a member
            rest = "/".join(parts[:num]) + ".java"
            if paths := self._first(posixpath.join(folder, rest) for folder in _ancestors(importer)) or self._ending(rest):
                return paths
        return []

    def _rust(self, importer: str, name: str) -> list[str]:
        parts = [part.removeprefix("r#") for part in name.split("::") if part][:_MAX_PARTS]
        if not parts:
            return []
        bare = posixpath.splitext(importer)[0]
        own = posixpath.dirname(importer) if posixpath.basename(bare) in {"mod", "lib", "main"} else bare
        if parts[0] in {"crate", "self", "super"}:
            base = self._crate(importer) if parts[0] == "crate" else own
            for part in parts:
                base = posixpath.dirname(base) if part == "super" else base
            return self._rust_below(base, [part for part in parts if part not in {"crate", "self", "super"}], at_least=0)
        if paths := self._rust_below(own, parts, at_least=1):
            return paths
        crate = self._ending(f"{parts[0]}/src/lib.rs", f"{parts[0].replace('_', '-')}/src/lib.rs")
        return self._rust_below(posixpath.dirname(crate[0]), parts[1:], at_least=0) if crate else []

    def _rust_below(self, base: str, parts: list[str], *, at_least: int) -> list[str]:
        """The module that the longest prefix of a path names; the rest are items in it."""
        for num in range(len(parts), at_least - 1, -1):
            path = posixpath.join(base, *parts[:num])
            roots = (f"{path}/lib.rs", f"{path}/main.rs") if num == 0 else ()
            if paths := self._first(posixpath.normpath(one) for one in (f"{path}.rs", posixpath.join(path, "mod.rs"), *roots)):
                return paths
        return []

    def _crate(self, importer: str) -> str:
        """The folder of the crate's root file."""
        folders = list(_ancestors(importer))
        names = ("lib.rs", "main.rs")
        crate_folders = (folder for folder in folders if any(posixpath.join(folder, name) in self._paths for name in names))
        return next(crate_folders, next((folder for folder in folders if posixpath.basename(folder) == "src"), folders[0]))


def _index(endings: dict[str, str | None], path: str) -> None:
    """Map every ending of a path at its slashes to it; None for an ending that several paths share."""
    parts = path.split("/")[-_MAX_PARTS:]
    for at in range(len(parts)):
        ending = "/".join(parts[at:])
        endings[ending] = path if endings.get(ending, path) == path else None


def _modules(base: str) -> list[str]:
    return [f"{base}.py", f"{base}.pyi", posixpath.join(base, "__init__.py")]


def _below(folder: str, places: Iterable[str], name: str) -> list[str]:
    return [posixpath.join(folder, place, name) for place in places]


def _ancestors(path: str) -> Iterator[str]:
    """The folders above a file, nearest first; the last is the root of all paths."""
    folder = posixpath.dirname(path)
    yield folder
    yield from _parents(folder)


def _parents(folder: str) -> list[str]:
    parents: list[str] = []
    while folder and posixpath.dirname(folder) != folder and len(parents) < _MAX_ANCESTORS:
        folder = posixpath.dirname(folder)
        parents.append(folder)
    return parents
