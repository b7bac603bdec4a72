"""Dependency depth: the distance of a file, import by import, from the files that the task is about.

These roots are the files that the task names; if it names none, the files whose alignment with the task is at least ROOT_SHARE of the best.
A root has the value 1, a file at distance d from the nearest root 1 - d / (max_depth + 1), a file farther away 0.

Imports are resolved among the given files, never on the disk. An absolute name is looked up from each folder above the importing file, the
nearest first, and in that folder's `src` and the like; failing that, it is the one file with that ending, if there is just one.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence

from localrag.outline import imports, language_of
from localrag.relevance.profile import Profile, Rating

ROOT_SHARE = 0.9

_MAX_PARTS = 12
_MAX_ANCESTORS = 64
_JS_ENDINGS = (".ts", ".tsx", ".d.ts", ".js", ".jsx", ".mjs", ".cjs", ".mts", ".cts", ".json", ".vue", ".svelte")
_JS_COMPILED = {".js": (".ts", ".tsx"), ".jsx": (".tsx",), ".mjs": (".mts",), ".cjs": (".cts",)}  # imported by the name of what it becomes


def import_graph(everything: Sequence[Profile]) -> dict[str, tuple[str, ...]]:
    """path → the sorted paths of the given files that it imports, without itself."""
    resolver = Resolver(profile.path for profile in everything)
    graph = {}
    for profile in everything:
        language = language_of(profile.name)
        names = imports(profile.text, language) if language else []
        found = {path for name in names for path in resolver.resolve(profile.path, name, language or "")}
        graph[profile.path] = tuple(sorted(found - {profile.path}))
    return graph


def choose_roots(profiles: Sequence[Profile], aligned: Sequence[Rating], named: Sequence[str]) -> list[str]:
    """The files that the task is about; [] if it names none and none is aligned with it."""
    if named:
        return sorted(named)
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
        """The files that `name`, as written in `importer`, refers to; a package of Go or Java can be several. [] for unknown ones."""
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
        return next(([found] for name in names if (found := self._endings.get(name)) is not None), [])

    def _python(self, importer: str, name: str) -> list[str]:
        inner = name.lstrip(".")
        num_up = len(name) - len(inner) - 1
        rest = inner.replace(".", "/")
        if num_up >= 0:
            folders = [posixpath.dirname(importer), *_parents(posixpath.dirname(importer))]
            return self._first(_modules(posixpath.join(folders[num_up], rest))) if num_up < len(folders) else []
        for folder in _ancestors(importer):
            if posixpath.join(folder, "__init__.py") in self._paths:
                continue  # Python looks for absolute names beside packages, not within them
            for base in _below(folder, ("", "src", "lib"), rest):
                if found := self._first(_modules(base)):
                    return found
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
        for num in range(len(parts), max(len(parts) - 2, 1), -1):  # the last name may be a member
            rest = "/".join(parts[:num]) + ".java"
            if found := self._first(posixpath.join(folder, rest) for folder in _ancestors(importer)) or self._ending(rest):
                return found
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
        if found := self._rust_below(own, parts, at_least=1):
            return found
        crate = self._ending(f"{parts[0]}/src/lib.rs", f"{parts[0].replace('_', '-')}/src/lib.rs")
        return self._rust_below(posixpath.dirname(crate[0]), parts[1:], at_least=0) if crate else []

    def _rust_below(self, base: str, parts: list[str], *, at_least: int) -> list[str]:
        """The module that the longest prefix of a path names; the rest are items in it."""
        for num in range(len(parts), at_least - 1, -1):
            path = posixpath.join(base, *parts[:num])
            roots = (f"{path}/lib.rs", f"{path}/main.rs") if num == 0 else ()
            if found := self._first(posixpath.normpath(one) for one in (f"{path}.rs", posixpath.join(path, "mod.rs"), *roots)):
                return found
        return []

    def _crate(self, importer: str) -> str:
        """The folder of the crate's root file."""
        folders = list(_ancestors(importer))
        names = ("lib.rs", "main.rs")
        known = (folder for folder in folders if any(posixpath.join(folder, name) in self._paths for name in names))
        return next(known, next((folder for folder in folders if posixpath.basename(folder) == "src"), folders[0]))


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
