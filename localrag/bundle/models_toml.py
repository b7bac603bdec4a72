"""Rewrite models.toml for another machine, and merge it into the one there, with comments and order preserved.

Every edit is made twice: to the document, which keeps its formatting, and to plain tables. The edited document must parse to the tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrag.errors import ConfigError

Tables = MutableMapping[str, Any]
_MODEL_TABLES = ("models", "embedders", "rerankers")
_ENTRY_TABLES = ("budgets", "councils", "tags")
_SOURCE_KEYS = ("wheel", "repo", "file", "revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocated:
    """A model or embedder whose path on the other machine differs from here. `path` is relative to the home there."""

    table: str
    name: str
    path: str
    sha256: str


def rewrite(text: str, relocated: Iterable[Relocated], *, defaults: Mapping[str, str], templates: Mapping[str, str], file: Path) -> str:
    """Return a models.toml with these paths, defaults and chat templates (by the names of models).

    Raises ConfigError if its tables cannot be edited. `file` is the path that the error names.
    """
    relocated = list(relocated)

    def edit(tables: Tables) -> None:
        for key, name in defaults.items():
            if tables.get(key) != name:
                tables[key] = name
        for each in relocated:
            _relocate(tables, each)
        for name, path in templates.items():
            tables["models"][name]["chat_template"] = path

    return _edited(text, edit, file)


def merge(text: str, other: str, entries: Iterable[tuple[str, str]], *, defaults: Iterable[str], file: Path) -> str:
    """Return `text` with the given (table, name) entries of `other`, and with those of the top-level keys `defaults` that it lacks."""
    other_tables = tomllib.loads(other)
    entries = list(entries)

    def edit(tables: Tables) -> None:
        for key in defaults:
            if key in other_tables and key not in tables:
                tables[key] = other_tables[key]
        for table, name in entries:
            tables.setdefault(table, {})[name] = dict(other_tables[table][name])

    return _edited(text, edit, file)


def add_layer(text: str, other: str, *, file: Path) -> str:
    """Return `text` with what a lower-priority models.toml adds: entries with new names, and settings that `text` lacks."""
    other_tables = tomllib.loads(other)

    def edit(tables: Tables) -> None:
        names = {name for table in _MODEL_TABLES for name in tables.get(table, {})}
        for key, value in other_tables.items():
            if key in _MODEL_TABLES:
                _fill(tables.setdefault(key, {}), {name: each for name, each in value.items() if name not in names}, depth=1)
            elif isinstance(value, dict):
                _fill(tables.setdefault(key, {}), value, depth=1 if key in _ENTRY_TABLES else 2)
            elif key not in tables:
                tables[key] = value

    return _edited(text, edit, file)


def entry(text: str, table: str, name: str) -> dict[str, Any] | None:
    """Return an entry as it is written, or None."""
    value = tomllib.loads(text).get(table, {}).get(name)
    return value if isinstance(value, dict) else None


def _fill(table: Tables, other: Mapping[str, Any], *, depth: int) -> None:
    """Add the keys of `other` that `table` lacks, in nested tables too, down to `depth`."""
    for key, value in other.items():
        if key not in table:
            table[key] = deepcopy(value)
        elif depth > 1 and isinstance(value, dict):
            _fill(table[key], value, depth=depth - 1)


def _relocate(tables: Tables, each: Relocated) -> None:
    entries = tables.setdefault(each.table, {})
    if each.name not in entries:
        entries[each.name] = {}
    for key in _SOURCE_KEYS:
        entries[each.name].pop(key, None)
    entries[each.name]["path"] = each.path
    entries[each.name]["sha256"] = each.sha256


def _edited(text: str, edit: Callable[[Tables], None], file: Path) -> str:
    tables = tomllib.loads(text)
    edit(tables)
    if tables == tomllib.loads(text):
        return text
    import tomlkit  # noqa: PLC0415  # weight
    from tomlkit.exceptions import TOMLKitError  # noqa: PLC0415

    try:
        document = tomlkit.parse(text)
        edit(document)
        edited = tomlkit.dumps(document)
        if tomllib.loads(edited) == tables:
            return edited
        reason = "its tables are written in a form that localrag cannot edit"
    except (TOMLKitError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    raise ConfigError(
        f"{file} cannot be changed: {reason}.",
        hint="Write each entry as a table, [models.NAME], or use another file (--models).",
        file=str(file),
    )
