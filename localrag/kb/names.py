"""Which knowledge bases there are in a folder, by their names: nothing heavy is imported to list them."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
FILE = "kb.sqlite"
"""The file of a knowledge base, in the folder that has its name."""


def list_kbs(kb_dir: Path) -> list[str]:
    """The names of the knowledge bases in a folder, sorted; none if the folder is not there."""
    if not kb_dir.is_dir():
        return []
    return sorted(entry.name for entry in kb_dir.iterdir() if NAME.fullmatch(entry.name) and (entry / FILE).is_file())
