"""What kind of file a path names."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from localrag.relevance.profile import normalised

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
_TEST_CLASS = re.compile(r".*[a-z0-9](?:Test|Tests|TestCase|Spec|IT)")  # Java and its kin: case tells ParserTest from latest
_REQUIREMENT_NAME = re.compile(
    r"(?:uc|req|fr|nfr|us|prd|srs|rfc)[-_ ]?\d.*"
    r"|(?:.*[-_. ])?(?:req|prd|srs|specs?|specification|requirements?|user[-_]?stor(?:y|ies))(?:[-_. ].*)?",
    re.IGNORECASE,
)
_PIP = re.compile(r"(?:.*[-_.])?(?:requirements|constraints)(?:[-_.].*)?\.(?:txt|in)", re.IGNORECASE)


def kind_of(path: str, text: str = "") -> str:
    """source_code, test_code, requirements, documentation, config or other, by name, ending and folders.

    A file without an ending that begins with `#!` is source code. A `requirements.txt` lists packages, so it is config.
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
