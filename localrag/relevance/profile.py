"""A file with its kind and its words, read once for all factors."""

from __future__ import annotations

import math
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import PurePosixPath
from typing import NamedTuple

from localrag.outline import language_of, outline
from localrag.text.terms import terms, words

MAX_WORD_CHARS = 64
"""A longer run of letters is data, not a search word."""

_NAMING = frozenset(("heading", "class", "function", "type"))
_HEAD_END = re.compile(r"[({\n]")  # the name comes before it, parameters and body after it
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# The longest ending that leaves four letters goes. So does an "e", "y" or "s": cache and caching, query and queries, token and tokens meet.
_STEM = re.compile(
    r"([a-z]{4,}?)(?:i[zs](?:ations?|ers?|es?|ed|ing)|ations?|ators?|at(?:es?|ed|ing)|ings?|ions?|ies|ers?|ed|es|ly|e|s|y)?", re.ASCII
)

_CODE = frozenset(
    """.py .pyi .pyx .js .mjs .cjs .jsx .ts .mts .cts .tsx .vue .svelte .java .kt .kts .scala .groovy .c .h .cc .cpp .cxx .hpp .hh .cs .go
    .rs .rb .php .pl .pm .lua .r .jl .swift .m .mm .dart .hs .ml .mli .clj .ex .exs .erl .elm .f .f90 .pas .sql .sh .bash .zsh .fish .ps1
    .bat .proto .graphql .html .htm .css .scss .less .ipynb .scad .cu .cuh .zig .vim .el""".split()  # noqa: SIM905  # a word list
)
_DOCUMENTS = frozenset((".md", ".markdown", ".mdx", ".rst", ".adoc", ".org", ".tex", ".txt", ".text"))
_CONFIG = frozenset(
    """.toml .yaml .yml .json .jsonc .json5 .ini .cfg .conf .env .properties .editorconfig .gitignore .gitattributes .dockerignore .lock
    .mod .sum .plist .gradle .cmake .mk .tf .tfvars .nix .xml""".split()  # noqa: SIM905  # a word list
)
_CONFIG_NAMES = frozenset(("dockerfile", "makefile", "cmakelists.txt", "procfile", "justfile", "vagrantfile", "jenkinsfile", "codeowners"))
_DOCUMENT_NAMES = frozenset(
    ("readme", "license", "licence", "copying", "changelog", "changes", "contributing", "authors", "notice", "news")
)
_TEST_FOLDERS = frozenset(("test", "tests", "testing", "__tests__", "spec", "e2e"))
_REQUIREMENT_FOLDERS = frozenset(("requirements", "specs", "spec", "specifications", "user-stories", "use-cases", "rfcs"))

_TEST_NAME = re.compile(r"test_.*|.*[_.-](?:test|tests|spec)|conftest|tests?", re.IGNORECASE)
_TEST_CLASS = re.compile(r".*[a-z0-9](?:Test|Tests|TestCase|Spec|IT)")  # Java and similar: case distinguishes ParserTest from latest
_REQUIREMENT_NAME = re.compile(
    r"(?:uc|req|fr|nfr|us|prd|srs|rfc)[-_ ]?\d.*"
    r"|(?:.*[-_. ])?(?:req|prd|srs|specs?|specification|requirements?|user[-_]?stor(?:y|ies))(?:[-_. ].*)?",
    re.IGNORECASE,
)
_PIP = re.compile(r"(?:.*[-_.])?(?:requirements|constraints)(?:[-_.].*)?\.(?:txt|in)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class File:
    """A file to score. `path` is its label, with / or \\ between folders; `modified` is in seconds since the epoch, None if unknown."""

    path: str
    text: str
    modified: float | None = None


class Rating(NamedTuple):
    """The value of one factor for one file, 0 to 1, with JSON `details` that explain it."""

    value: float
    details: Mapping[str, object]


class Profile:
    """A file prepared for all factors. `path` is normalised: / between folders, `.` and `..` resolved."""

    def __init__(self, file: File) -> None:
        self.label = file.path
        self.path = normalised(file.path)
        self.text = file.text
        self.modified = file.modified

    @cached_property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @cached_property
    def stem(self) -> str:
        """The name up to its first dot: `view` for `view.spec.ts`. A hidden file's own dot does not count."""
        return self.name[:1] + self.name[1:].partition(".")[0]

    @cached_property
    def counts(self) -> Counter[str]:
        """`count_words` of the text."""
        return _stemmed(self._words)

    @cached_property
    def naming_counts(self) -> Counter[str]:
        """`count_words` of names: the path, headings, and the names of classes, functions and types defined in the file."""
        pieces = (piece.text for piece in outline(self.text, language_of(self.name)) if piece.kind in _NAMING)
        return count_words("\n".join([self.path, *(_HEAD_END.split(text, maxsplit=1)[0] for text in pieces)]))

    @property
    def num_words(self) -> int:
        return self._words.total()

    @cached_property
    def _words(self) -> Counter[str]:
        return _counted(self.text)


def normalised(path: str) -> str:
    """Normalise a path label, so that `./a//b.py`, `a\\b.py` and `a/b.py` are the same file."""
    return posixpath.normpath(path.replace("\\", "/")) if path else ""


def kind_of(path: str, text: str = "") -> str:
    """Classify a file as source_code, test_code, requirements, documentation, config or other, by name, suffix and folders.

    A file without a suffix that begins with `#!` is source code. A `requirements.txt` lists packages, so it is config.
    """
    pure = PurePosixPath(normalised(path))
    suffix, bare = pure.suffix.lower(), pure.name[: -len(pure.suffix)] if pure.suffix else pure.name
    folders = {part.lower() for part in pure.parts[:-1]}
    if suffix in _CODE or (not suffix and text.startswith("#!")):
        is_test = _TEST_NAME.fullmatch(bare) or _TEST_CLASS.fullmatch(bare) or folders & _TEST_FOLDERS
        return "test_code" if is_test else "source_code"
    if suffix == ".feature":
        return "requirements"
    if pure.name.lower() in _CONFIG_NAMES or _PIP.fullmatch(pure.name):
        return "config"
    if suffix in _DOCUMENTS or bare.lower() in _DOCUMENT_NAMES:
        return "requirements" if _REQUIREMENT_NAME.fullmatch(bare) or folders & _REQUIREMENT_FOLDERS else "documentation"
    if suffix in _CONFIG or pure.name.lower() in _CONFIG:
        return "requirements" if folders & _REQUIREMENT_FOLDERS else "config"
    return "other"


def task_terms(task: str) -> dict[str, str]:
    """Return the search words of a task: stem → the word as written. An identifier counts as a whole and by its parts."""
    words_by_stem: dict[str, str] = {}
    for word in terms(f"{_HUMP.sub(' ', task)} {task}"):
        words_by_stem.setdefault(stem(word), word)
    return words_by_stem


@lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """Stem an English word in lower case, just enough for "negotiation" to match "negotiate".

    Short words and words with non-ASCII letters stay unchanged.
    """
    match = _STEM.fullmatch(word)
    if match is None:
        return word
    bare = match[1]
    return bare[:-1] if bare[-1] == bare[-2] and bare[-1] not in "aeiou" else bare  # running meets run


def idf(num_files: int, num_holding: int) -> float:
    """The inverse document frequency of BM25, always positive."""
    return math.log1p((num_files - num_holding + 0.5) / (num_holding + 0.5))


def count_words(text: str) -> Counter[str]:
    """Count the words of a text by stem; a word inside an identifier counts too."""
    return _stemmed(_counted(text))


def _counted(text: str) -> Counter[str]:
    return Counter(words(unicodedata.normalize("NFC", text)))


def _stemmed(counted: Counter[str]) -> Counter[str]:
    stems: Counter[str] = Counter()
    for word, num in counted.items():
        if len(word) <= MAX_WORD_CHARS:
            for one in {stem(part.lower()) for part in (word, *_HUMP.split(word))}:
                stems[one] += num
    return stems
