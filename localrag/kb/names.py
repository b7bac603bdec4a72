"""Names of knowledge bases and of their contents: check, escape and list them. Imports nothing heavy."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from localrag.errors import KnowledgeBaseError, KnowledgeBaseNotFoundError

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
FILE = "kb.sqlite"
"""The file of a knowledge base, in the folder of its name."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal, break a line or reverse its direction."""


def has_control(name: str) -> bool:
    """Whether a name holds control characters, which must not reach a terminal or a prompt."""
    return _CONTROL.search(name) is not None


def escaped(name: str) -> str:
    """A name with its control characters as `\\xNN` or `\\uNNNN`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), name)


def list_kbs(kb_dir: Path) -> list[str]:
    """The names of the knowledge bases in a folder, sorted; [] if the folder does not exist."""
    if not kb_dir.is_dir():
        return []
    return sorted(entry.name for entry in kb_dir.iterdir() if NAME.fullmatch(entry.name) and (entry / FILE).is_file())


def check_name(name: str) -> None:
    """Raises KnowledgeBaseError for an invalid name of a knowledge base."""
    if not NAME.fullmatch(name):
        raise KnowledgeBaseError(
            f"{name!r} cannot be the name of a knowledge base.",
            hint="Use 1 to 64 lower-case letters, digits, '-' and '_', beginning with a letter or a digit.",
            kb=name,
        )


def not_found(address: str, name: str, names: list[str]) -> KnowledgeBaseNotFoundError:
    """The error for a `name` that is not among the existing `names`; it suggests similar ones."""
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    known = f" Did you mean {' or '.join(nearest)}?" if nearest else f" There is {', '.join(names[:5])}." if names else ""
    return KnowledgeBaseNotFoundError(
        f"There is no knowledge base {address!r}.{known}",
        hint=f"Make it with: localrag index PATH --kb {address}",
        kb=address,
        nearest=nearest,
    )
