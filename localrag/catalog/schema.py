"""Read, check and layer models.toml files: pydantic tables, converted to ModelSpec (entries.py), Profile (budgets.py) and Council
(councils.py).

An entry replaces the entry with the same name in lower files; [relevance], [memories] and [server] are merged key by key. Every
fault is a one-line ConfigError that names the file, the table and the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from localrag.budget import TIERS, Profile, Tier
from localrag.budget.sections import LIMITED, PROTECTED
from localrag.catalog.budgets import BudgetTable, RelevanceTable, profile_of, weights_of, with_thresholds
from localrag.catalog.councils import CouncilTable, council_of
from localrag.catalog.entries import (
    LENGTH_FAULT,
    NAME,
    EmbedderTable,
    Factor,
    ModelTable,
    RerankerTable,
    Table,
    TableRef,
    UpToOne,
    embedder_of,
    nearest,
    quoted,
    reranker_of,
    shown,
    shown_path,
    spec_of,
)
from localrag.deliberation.roles import Council
from localrag.errors import ConfigError
from localrag.types import ModelSpec

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
    """[memories]: the importance and age up to which every conversation gets a memory."""

    min_importance: UpToOne = 0
    """Memories with more importance go into every conversation; others only if they share a word with the question."""
    max_age_days: Factor = 0
    """Age limit of the memories that go into every conversation."""


class ServerTable(Table):
    """[server]: how to answer a request with both tools and an index."""

    tools_with_index: Literal["plain", "reject"] = "plain"
    """"plain": the model answers without a search; "reject": status 400."""


class CatalogTable(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    default_model: str | None = None
    """The default model: a table `[models.NAME]`."""
    default_embedder: str | None = None
    """The embedder of every knowledge base: a table `[embedders.NAME]`."""
    models: dict[str, ModelTable] = {}
    """Models that answer."""
    embedders: dict[str, EmbedderTable] = {}
    """Models that turn passages and questions into vectors: a sentence-transformers folder, or a .gguf file."""
    rerankers: dict[str, RerankerTable] = {}
    """Cross-encoders for `--rerank NAME`: a .gguf file, or the folder of a sentence-transformers model."""
    budgets: dict[str, BudgetTable] = {}
    """Ways to share a window, for `--budget NAME`; one named "default" is the default."""
    relevance: RelevanceTable = RelevanceTable()
    """Relevance of files for a task, for `localrag score` and `--weigh`."""
    tags: dict[str, list[str]] = {}
    """Path patterns, with the tags that matching documents get."""
    memories: MemoriesTable = MemoriesTable()
    """Which memories go into every conversation."""
    server: ServerTable = ServerTable()
    """How `localrag serve` answers."""
    councils: dict[str, CouncilTable] = {}
    """Specialists and a judge, for `localrag council --council NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The contents of the layered files, with absolute paths. `budgets` always has a "default"; `relevance` has only what is set.

    `origins` maps each model, embedder and reranker to its file. `memories` has the settings of session.memory.RecallRule.
    `tags` maps path patterns to tags.
    """

    default_model: str | None
    default_file: Path
    """The file that sets the default model."""
    default_embedder: str | None
    models: dict[str, ModelSpec]
    embedders: dict[str, ModelSpec]
    rerankers: dict[str, ModelSpec]
    origins: dict[str, Path]
    budgets: dict[str, Profile]
    relevance: dict[str, object]
    tags: dict[str, tuple[str, ...]]
    memories: dict[str, float]
    rejects_tools: bool
    councils: dict[str, Council]


Layer = tuple[Path, CatalogTable]
SettingsTable = TypeVar("SettingsTable", bound=Table)


def read(*files: Path) -> Tables:
    """Read, check and layer models.toml files, highest precedence first. Raises ConfigError.

    A process reads each combination once, unless a file changes.
    """
    return _read(tuple((file, _stamp(file)) for file in files))


def _stamp(file: Path) -> tuple[int, ...]:
    """Tell one state of a file from another. A file that cannot be examined is reported when it is read."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=8)
def _read(stamped: tuple[tuple[Path, tuple[int, ...]], ...]) -> Tables:
    layers = [(file, _checked(file)) for file, _ in stamped]
    names = _names(layers)
    origins = {name: file for entries in names.values() for name, (file, _) in entries.items()}
    specs = {
        section: {name: make(TableRef(file, (section, name)), name, entry) for name, (file, entry) in names[section].items()}
        for section, make in _MAKERS.items()
    }
    thresholds = _highest(layers, lambda table: bool(table.relevance.thresholds.given))
    weights = _highest(layers, lambda table: bool(table.relevance.given))
    relevance = _settings(layers, "relevance", RelevanceTable)
    tiers = with_thresholds(TableRef(thresholds, ("relevance", "thresholds")), TIERS, relevance)
    budgets = {"default": Profile(tiers=tiers)}
    budgets |= {name: _budget(TableRef(file, ("budgets", name)), name, entry, tiers) for name, (file, entry) in _merged(layers, "budgets")}
    return Tables(
        default_model=_default(layers, "model", specs["models"], origins),
        default_file=_highest(layers, lambda table: table.default_model is not None),
        default_embedder=_default(layers, "embedder", specs["embedders"], origins),
        **specs,
        origins=origins,
        budgets=budgets,
        relevance=weights_of(TableRef(weights, ("relevance",)), relevance),
        memories=dict(_settings(layers, "memories", MemoriesTable).given),  # type: ignore[arg-type]  # numbers
        rejects_tools=_settings(layers, "server", ServerTable).tools_with_index == "reject",
        tags={pattern: tuple(tags) for pattern, (_, tags) in _merged(layers, "tags")},
        councils={
            name: _council(TableRef(file, ("councils", name)), name, entry, models=specs["models"], budgets=budgets)
            for name, (file, entry) in _merged(layers, "councils")
        },
    )


_MAKERS: dict[str, Callable[[TableRef, str, Any], ModelSpec]] = {"models": spec_of, "embedders": embedder_of, "rerankers": reranker_of}
"""Functions that convert an entry to a ModelSpec, by kind of table. A name may occur in only one kind."""


def _checked(file: Path) -> CatalogTable:
    """Validate one file."""
    try:
        return CatalogTable.model_validate(_parse(file))
    except ValidationError as error:
        raise _explain(TableRef(file), error) from None


def _merged(layers: Sequence[Layer], section: str) -> Iterator[tuple[str, tuple[Path, Any]]]:
    """Yield (name, (file, entry)) for every entry of a section, each from the highest file that has it."""
    names = set[str]()
    for file, table in layers:
        entries = getattr(table, section)
        yield from ((name, (file, entry)) for name, entry in entries.items() if name not in names)
        names |= entries.keys()


def _names(layers: Sequence[Layer]) -> dict[str, dict[str, tuple[Path, Any]]]:
    """Return the entries of models, embedders and rerankers with their files.

    An entry hides entries with the same name in lower files, even of another kind, so that a name that ships later never breaks
    a user's file.
    """
    entries: dict[str, dict[str, tuple[Path, Any]]] = {section: {} for section in _MAKERS}
    names = set[str]()
    for file, table in layers:
        own: dict[str, str] = {}
        for section, holder in (("models", "a model"), ("embedders", "an embedder"), ("rerankers", "a reranker")):
            for name, entry in getattr(table, section).items():
                if name in own:
                    fault = f"{own[name]} already has this name; names must be unique"
                    raise TableRef(file, (section, name)).error(None, fault)
                own[name] = holder
                if name not in names:
                    entries[section][name] = (file, entry)
        names |= own.keys()
    return entries


def _default(layers: Sequence[Layer], kind: str, specs: Mapping[str, ModelSpec], origins: Mapping[str, Path]) -> str | None:
    """Return the default of a kind from the highest file that sets it; None if a higher file uses its name for another kind."""
    key = f"default_{kind}"
    files = [file for file, _ in layers]
    for file, table in layers:
        name: str | None = getattr(table, key)
        if name is None:
            continue
        if name in specs:
            return name
        if name in origins and files.index(origins[name]) < files.index(file):
            return None
        raise TableRef(file).error(key, f"no {kind} is named {shown(name)}{nearest(name, specs)}")
    return None


def _highest(layers: Sequence[Layer], sets: Callable[[CatalogTable], bool]) -> Path:
    """Return the highest file for which `sets` is true, to name in an error; the lowest file if there is none."""
    return next((file for file, table in layers if sets(table)), layers[-1][0])


def _settings(layers: Sequence[Layer], section: str, kind: type[SettingsTable]) -> SettingsTable:
    """Merge a settings table key by key."""

    def given(table: Table) -> dict[str, object]:
        return {key: given(value) if isinstance(value, Table) else value for key, value in table.given.items()}

    def layered(below: dict[str, object], above: dict[str, object]) -> dict[str, object]:
        inner = {key: layered(below[key], value) for key, value in above.items() if isinstance(value, dict) and key in below}  # type: ignore[arg-type]  # tables both
        return below | above | inner

    return kind.model_validate(reduce(layered, [given(getattr(table, section)) for _, table in reversed(layers)]))


def _parse(file: Path) -> dict[str, Any]:
    """Parse the TOML into plain values."""
    where = shown_path(file)
    try:
        with file.open("rb") as handle:
            raw = handle.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{where}: this models file does not exist.", hint="Check --models or LOCALRAG_MODELS.", file=str(file)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{where}: the models file cannot be read: {reason}.", file=str(file)) from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{where}: a models file may have at most {_MAX_FILE_BYTES} bytes.", file=str(file), limit_bytes=_MAX_FILE_BYTES)
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: byte {error.start} is not UTF-8.", file=str(file)) from None
    except ValueError as error:  # TOMLDecodeError has line and column; a number with thousands of digits is a plain ValueError
        raise ConfigError(f"{where}: not valid TOML: {' '.join(str(error).split())}.", file=str(file)) from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid TOML: nested too deeply.", file=str(file)) from None


def _explain(top: TableRef, error: ValidationError) -> ConfigError:
    """Describe the first fault that pydantic found, in terms of the TOML file."""
    fault = error.errors(include_url=False, include_context=False)[0]
    *tables, last = (str(part + 1 if isinstance(part, int) else part) for part in fault["loc"])  # users count from 1
    kind = _kind_of(tables)
    fields = getattr(kind, "model_fields", {})
    entry = get_args(kind)[-1:]
    if not fields and isinstance(entry[0], type) and issubclass(entry[0], BaseModel):  # an entry that is not a table
        place, key = top.inside(*tables, last), None
    else:
        place, key = top.inside(*tables), last
    if fault["type"] == "extra_forbidden":
        if kind is BudgetTable and last in PROTECTED:
            bound = f"Limit its tokens with limits.{last}. " if last in LIMITED else ""
            return place.error(key, "is always sent whole, so it has no settings", hint=f"{bound}Known keys: {', '.join(fields)}.")
        return place.error(key, f"unknown key{nearest(last, fields)}", hint=f"Known keys: {', '.join(fields)}.")
    value = fault["input"]
    if fault["type"] == "float_type" and type(value) is int:
        return place.error(key, "is too large")
    if expected := _EXPECTED.get(fault["type"]):
        return place.error(key, f"must be {expected}, not {value if expected == 'a finite number' else _toml_name(value)}")
    if fault["type"] == LENGTH_FAULT:
        what = quoted(value) if isinstance(value, str) else shown(str(value)) if type(value) in {int, float} else _toml_name(value)
        return place.error(key, f"must be {fault['msg']}, not {what}")
    return place.error(key, fault["msg"].replace("Input should", "must"))


def _kind_of(tables: list[str]) -> Any:  # noqa: ANN401  # a model, or a dict[str, …] as typing spells it
    """Return the schema's type for the table at that path."""
    kind: Any = CatalogTable
    for name in tables:
        kind = kind.model_fields[name].annotation if hasattr(kind, "model_fields") else get_args(kind)[-1]
    return kind


def _toml_name(value: object) -> str:
    return _TOML_NAMES.get(type(value), "a date or time")


def _budget(place: TableRef, name: str, entry: BudgetTable, tiers: tuple[Tier, ...]) -> Profile:
    _check_name(place, name)
    return profile_of(place, name, entry, tiers)


def _council(
    place: TableRef, name: str, entry: CouncilTable, *, models: Mapping[str, ModelSpec], budgets: Mapping[str, Profile]
) -> Council:
    _check_name(place, name)
    return council_of(place, name, entry, models=models, budgets=budgets)


def _check_name(place: TableRef, name: str) -> None:
    if not NAME.fullmatch(name):
        raise place.error(None, "a name must be 1 to 64 letters, digits, dots, dashes or underscores")
