"""models.toml for another machine, and into one that a person has there: comments and order stay, and the result is compared.

Everything is done twice, to the document that keeps its form and to plain tables; what the document then says has to be the tables.
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
_MODELS = ("models", "embedders", "rerankers")
_ENTRIES = ("budgets", "councils", "tags")
_OTHER_SOURCES = ("wheel", "repo", "file", "revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A model or an embedder that the other machine finds by another path than this one, relative to the home there."""

    table: str
    name: str
    path: str
    sha256: str


def rewritten(text: str, placed: Iterable[Placed], *, defaults: Mapping[str, str], templates: Mapping[str, str], file: Path) -> str:
    """The text of a models.toml in which these entries lead into the home, and the defaults are these. ConfigError where it cannot be.

    `templates` maps the names of models to where their chat templates went: an entry whose template is not there is an error.
    """
    chosen = list(placed)

    def edit(tables: Tables) -> None:
        for key, name in defaults.items():
            if tables.get(key) != name:
                tables[key] = name
        for each in chosen:
            _place(tables, each)
        for name, path in templates.items():
            tables["models"][name]["chat_template"] = path

    return _edited(text, edit, file)


def merged(text: str, other: str, entries: Iterable[tuple[str, str]], *, defaults: Iterable[str], file: Path) -> str:
    """`text` with these (table, name) of `other`, in place of its own, and with these keys of the top level that it lacks."""
    given = tomllib.loads(other)
    wanted = list(entries)

    def edit(tables: Tables) -> None:
        for key in defaults:
            if key in given and key not in tables:
                tables[key] = given[key]
        for table, name in wanted:
            tables.setdefault(table, {})[name] = dict(given[table][name])

    return _edited(text, edit, file)


def with_layer(text: str, other: str, *, file: Path) -> str:
    """`text` with what `other`, the models.toml below it, adds: entries under names of their own, and settings that `text` lacks."""
    given = tomllib.loads(other)

    def edit(tables: Tables) -> None:
        taken = {name for section in _MODELS for name in tables.get(section, {})}
        for key, value in given.items():
            if key in _MODELS:
                _fill(tables.setdefault(key, {}), {name: each for name, each in value.items() if name not in taken}, depth=1)
            elif isinstance(value, dict):
                _fill(tables.setdefault(key, {}), value, depth=1 if key in _ENTRIES else 2)
            elif key not in tables:
                tables[key] = value

    return _edited(text, edit, file)


def _fill(table: Tables, below: Mapping[str, Any], *, depth: int) -> None:
    """Add what `table` lacks, and down to `depth` what its tables lack."""
    for key, value in below.items():
        if key not in table:
            table[key] = deepcopy(value)
        elif depth > 1 and isinstance(value, dict):
            _fill(table[key], value, depth=depth - 1)


def entry(text: str, table: str, name: str) -> dict[str, Any] | None:
    """What an entry says, as it is written; None where there is none."""
    found = tomllib.loads(text).get(table, {}).get(name)
    return found if isinstance(found, dict) else None


def _place(tables: Tables, each: Placed) -> None:
    own = tables.setdefault(each.table, {})
    if each.name not in own:
        own[each.name] = {}
    for key in _OTHER_SOURCES:
        own[each.name].pop(key, None)
    own[each.name]["path"] = each.path
    own[each.name]["sha256"] = each.sha256


def _edited(text: str, edit: Callable[[Tables], None], file: Path) -> str:
    wanted = tomllib.loads(text)
    edit(wanted)
    if wanted == tomllib.loads(text):
        return text
    import tomlkit  # noqa: PLC0415  # weight
    from tomlkit.exceptions import TOMLKitError  # noqa: PLC0415

    try:
        document = tomlkit.parse(text)
        edit(document)
        made = tomlkit.dumps(document)
        if tomllib.loads(made) == wanted:
            return made
        reason = "its tables are written in a way that cannot be edited"
    except (TOMLKitError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    raise ConfigError(
        f"{file} cannot be changed: {reason}.",
        hint="Write its entries as tables, [models.NAME], one below the other; or name another file (--models).",
        file=str(file),
    )
