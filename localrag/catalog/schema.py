"""models.toml, read and checked: as pydantic sees it, then as ModelSpec (entries.py), Profile (budgets.py), Council (councils.py).

Every fault is a ConfigError of one line that names the file, the table and the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from localrag.budget import TIERS, Profile, Tier
from localrag.budget.profile import LIMITED, PROTECTED
from localrag.catalog.budgets import (
    LENGTH_FAULT,
    BudgetTable,
    Factor,
    RelevanceTable,
    Table,
    UpToOne,
    profile_of,
    weights_of,
    with_thresholds,
)
from localrag.catalog.councils import CouncilTable, council_of
from localrag.catalog.entries import NAME, EmbedderTable, ModelTable, embedder_of, reranker_of, spec_of
from localrag.catalog.faults import Place, nearest, quoted, shown, shown_path
from localrag.council.roles import Council
from localrag.errors import ConfigError
from localrag.model import ModelSpec

_MAX_FILE_BYTES = 1024 * 1024
_TOML_NAMES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "a table"}
_EXPECTED = {
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "a list",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "dict_type": "a table",
    "model_type": "a table",
}


class MemoriesTable(Table):
    """[memories]: above which importance, and for how long, a memory is told whatever is asked."""

    min_importance: UpToOne = 0
    """A memory of more importance than this is told in every conversation; others where the question shares a word with them."""
    max_age_days: Factor = 0
    """As long as it is no older than this."""


class ServerTable(Table):
    """[server]: what a request with tools and an index gets, an answer of the plain model or a refusal."""

    tools_with_index: Literal["plain", "reject"] = "plain"
    """"plain": nothing is searched, and the model answers alone; "reject": status 400."""


class CatalogTable(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    default_model: str | None = None
    """The model of commands that name none: a table `[models.NAME]` of this file."""
    default_embedder: str | None = None
    """The embedder of every knowledge base: a table `[embedders.NAME]` of this file."""
    models: dict[str, ModelTable] = {}
    """Models that answer."""
    embedders: dict[str, EmbedderTable] = {}
    """Models that turn passages and questions into vectors: a sentence-transformers folder, or a .gguf file."""
    rerankers: dict[str, EmbedderTable] = {}
    """CrossEncoders for `--rerank NAME`: the folder of a sentence-transformers model, from a wheel or a path."""
    budgets: dict[str, BudgetTable] = {}
    """Ways of sharing a window, for `--budget NAME`; one named "default" is used where none is named."""
    relevance: RelevanceTable = RelevanceTable()
    """What makes a file relevant for a task, for `localrag score` and `--weigh`."""
    tags: dict[str, list[str]] = {}
    """A pattern of paths, and the tags that documents there get."""
    memories: MemoriesTable = MemoriesTable()
    """Which memories every conversation is told."""
    server: ServerTable = ServerTable()
    """How `localrag serve` answers."""
    councils: dict[str, CouncilTable] = {}
    """Specialists and a judge, for `localrag council --council NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What a models.toml says, with every path made absolute. `budgets` has a "default" always; `relevance` holds what is set.

    `memories` holds what is set of session.remembering.Recalling. `tags` maps a pattern of paths to the tags that documents there get.
    """

    default_model: str | None
    default_embedder: str | None
    models: dict[str, ModelSpec]
    embedders: dict[str, ModelSpec]
    rerankers: dict[str, ModelSpec]
    budgets: dict[str, Profile]
    relevance: dict[str, object]
    tags: dict[str, tuple[str, ...]]
    memories: dict[str, float]
    rejects_tools: bool
    councils: dict[str, Council]


def read(file: Path) -> Tables:
    """Read and check a models.toml. Raises ConfigError for every fault."""
    raw = _parse(file)
    top = Place(file)
    try:
        table = CatalogTable.model_validate(raw)
    except ValidationError as error:
        raise _explain(top, error) from None
    tiers = with_thresholds(top.inside("relevance", "thresholds"), TIERS, table.relevance)
    models = {name: spec_of(top.inside("models", name), name, entry) for name, entry in table.models.items()}
    budgets = {"default": Profile(tiers=tiers)}
    budgets |= {name: _budget(top.inside("budgets", name), name, entry, tiers) for name, entry in table.budgets.items()}
    tables = Tables(
        default_model=table.default_model,
        default_embedder=table.default_embedder,
        models=models,
        embedders={name: embedder_of(top.inside("embedders", name), name, entry) for name, entry in table.embedders.items()},
        rerankers={name: reranker_of(top.inside("rerankers", name), name, entry) for name, entry in table.rerankers.items()},
        budgets=budgets,
        relevance=weights_of(top.inside("relevance"), table.relevance),
        memories=dict(table.memories.given),  # type: ignore[arg-type]  # numbers
        rejects_tools=table.server.tools_with_index == "reject",
        tags={pattern: tuple(tags) for pattern, tags in table.tags.items()},
        councils={
            name: _council(top.inside("councils", name), name, entry, models=models, budgets=budgets)
            for name, entry in table.councils.items()
        },
    )
    for key, name, known in (
        ("default_model", tables.default_model, tables.models),
        ("default_embedder", tables.default_embedder, tables.embedders),
    ):
        if name is not None and name not in known:
            raise top.error(key, f"{shown(name)} is not in this file{nearest(name, known)}")
    for section, named, others in (
        ("embedders", tables.embedders, tables.models),
        ("rerankers", tables.rerankers, tables.models | tables.embedders),
    ):
        if both := sorted(named.keys() & others.keys()):
            holder = "a model" if both[0] in tables.models else "an embedder"
            raise top.inside(section, both[0]).error(None, f"{holder} has this name already; a name means one thing")
    return tables


def _parse(file: Path) -> dict[str, Any]:
    """The TOML as plain values."""
    where = shown_path(file)
    try:
        with file.open("rb") as handle:
            raw = handle.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{where}: there is no such models file.", hint="Check --models or LOCALRAG_MODELS.", file=str(file)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{where}: the models file cannot be read: {reason}.", file=str(file)) from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{where}: a models file holds {_MAX_FILE_BYTES} bytes at most.", file=str(file), limit_bytes=_MAX_FILE_BYTES)
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: byte {error.start} is not UTF-8.", file=str(file)) from None
    except ValueError as error:  # TOMLDecodeError says line and column; a number of thousands of digits is a plain ValueError
        raise ConfigError(f"{where}: not valid TOML: {' '.join(str(error).split())}.", file=str(file)) from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid TOML: nested too deeply.", file=str(file)) from None


def _explain(top: Place, error: ValidationError) -> ConfigError:
    """The first fault that pydantic found, in the words of a person who wrote the file."""
    fault = error.errors(include_url=False, include_context=False)[0]
    *tables, last = (str(part + 1 if isinstance(part, int) else part) for part in fault["loc"])  # people count from 1
    kind = _kind_of(tables)
    fields = getattr(kind, "model_fields", {})
    entry = get_args(kind)[-1:]
    if not fields and isinstance(entry[0], type) and issubclass(entry[0], BaseModel):  # an entry that is not a table
        place, key = top.inside(*tables, last), None
    else:
        place, key = top.inside(*tables), last
    if fault["type"] == "extra_forbidden":
        if kind is BudgetTable and last in PROTECTED:
            bound = f"The most that it may have is limits.{last}. " if last in LIMITED else ""
            return place.error(key, "is always sent whole, so there is nothing to set", hint=f"{bound}Known keys: {', '.join(fields)}.")
        return place.error(key, f"unknown key{nearest(last, fields)}", hint=f"Known keys: {', '.join(fields)}.")
    given = fault["input"]
    if fault["type"] == "float_type" and type(given) is int:
        return place.error(key, "is too large a number")
    if expected := _EXPECTED.get(fault["type"]):
        return place.error(key, f"must be {expected}, not {given if expected == 'a finite number' else _toml_name(given)}")
    if fault["type"] == LENGTH_FAULT:
        what = quoted(given) if isinstance(given, str) else shown(str(given)) if type(given) in {int, float} else _toml_name(given)
        return place.error(key, f"must be {fault['msg']}, not {what}")
    return place.error(key, fault["msg"].replace("Input should", "must"))


def _kind_of(tables: list[str]) -> Any:  # noqa: ANN401  # a model, or a dict[str, …] as typing spells it
    """What the schema says of the table at that path."""
    kind: Any = CatalogTable
    for name in tables:
        kind = kind.model_fields[name].annotation if hasattr(kind, "model_fields") else get_args(kind)[-1]
    return kind


def _toml_name(value: object) -> str:
    return _TOML_NAMES.get(type(value), "a date or time")


def _budget(place: Place, name: str, entry: BudgetTable, tiers: tuple[Tier, ...]) -> Profile:
    _check_name(place, name)
    return profile_of(place, name, entry, tiers)


def _council(place: Place, name: str, entry: CouncilTable, *, models: Mapping[str, ModelSpec], budgets: Mapping[str, Profile]) -> Council:
    _check_name(place, name)
    return council_of(place, name, entry, models=models, budgets=budgets)


def _check_name(place: Place, name: str) -> None:
    if not NAME.fullmatch(name):
        raise place.error(None, "a name is 1 to 64 letters, digits, dots, dashes or underscores")
