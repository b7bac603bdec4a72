"""Where in a models.toml a fault is, and its one line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localrag.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """A table of the file, for the error that names it; an empty `table` is the top level."""

    file: Path
    table: tuple[str, ...] = ()

    def inside(self, *names: str) -> Place:
        """A table of this table."""
        return Place(self.file, (*self.table, *names))

    def error(self, key: str | None, what: str, *, hint: str | None = None) -> ConfigError:
        table = f"[{'.'.join(map(shown, self.table))}]" if self.table else "top level"
        where = f"{table}, key {shown(key)}" if key is not None else table
        return ConfigError(f"{shown_path(self.file)}: {where}: {what}", hint=hint, file=str(self.file), table=".".join(self.table), key=key)


def shown(text: str) -> str:
    """A text of the file on one line: bare where TOML would take it bare, else quoted, cut where it is long."""
    if re.fullmatch(r"[A-Za-z0-9._~/=-]{1,200}", text):
        return text
    return quoted(text)


def quoted(text: str) -> str:
    """The same, in quotes always."""
    short = text if len(text) <= 100 else text[:100] + "…"
    return json.dumps(short, ensure_ascii=not short.isprintable())


def shown_path(path: Path) -> str:
    """A path in full, on one line."""
    text = str(path)
    return text if text.isprintable() else json.dumps(text)


def nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
