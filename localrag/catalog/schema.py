"""models.toml, read and checked: the tables as pydantic sees them, then as ModelSpec, Profile (budgets.py) and Council (councils.py).

Every fault is a ConfigError of one line that names the file, the table and the key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
from localrag.catalog.faults import Place, nearest, quoted, shown, shown_path
from localrag.council.roles import Council
from localrag.errors import ConfigError
from localrag.model import ModelSpec, SourceKind

RESERVED_NAMES = ("echo", "llm")
_MAX_FILE_BYTES = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_REPO = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
# A name and one exact version as PEP 440 spells it: neither an option, a path nor an address of pip's can look like this.
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?=="
    r"(?:[0-9]+!)?[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc)[0-9]+)?(?:\.post[0-9]+)?(?:\.dev[0-9]+)?(?:\+[a-z0-9]+(?:\.[a-z0-9]+)*)?"
)
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


class EmbedderTable(BaseModel):
    """One [embedders.NAME] or [rerankers.NAME]."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    wheel: str | None = None
    repo: str | None = None
    path: str | None = None
    file: str | None = None
    revision: str | None = None
    sha256: str | None = None


class ModelTable(EmbedderTable):
    """One [models.NAME]."""

    n_ctx: int | None = Field(default=None, ge=1, le=2**31 - 1)
    chat_template: str | None = None


class MemoriesTable(Table):
    """[memories]: from which importance on, and for how long, a memory is told whatever is asked."""

    min_importance: UpToOne = 0
    max_age_days: Factor = 0


class CatalogTable(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    default_model: str | None = None
    default_embedder: str | None = None
    models: dict[str, ModelTable] = {}
    embedders: dict[str, EmbedderTable] = {}
    rerankers: dict[str, EmbedderTable] = {}
    budgets: dict[str, BudgetTable] = {}
    relevance: RelevanceTable = RelevanceTable()
    tags: dict[str, list[str]] = {}
    memories: MemoriesTable = MemoriesTable()
    councils: dict[str, CouncilTable] = {}


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
    models = {name: _spec(top.inside("models", name), name, entry) for name, entry in table.models.items()}
    budgets = {"default": Profile(tiers=tiers)}
    budgets |= {name: _budget(top.inside("budgets", name), name, entry, tiers) for name, entry in table.budgets.items()}
    tables = Tables(
        default_model=table.default_model,
        default_embedder=table.default_embedder,
        models=models,
        embedders={name: _embedder(top.inside("embedders", name), name, entry) for name, entry in table.embedders.items()},
        rerankers={name: _reranker(top.inside("rerankers", name), name, entry) for name, entry in table.rerankers.items()},
        budgets=budgets,
        relevance=weights_of(top.inside("relevance"), table.relevance),
        memories=dict(table.memories.given),  # type: ignore[arg-type]  # numbers
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
    if not _NAME.fullmatch(name):
        raise place.error(None, "a name is 1 to 64 letters, digits, dots, dashes or underscores")


def _embedder(place: Place, name: str, entry: EmbedderTable) -> ModelSpec:
    if entry.repo is not None and entry.file is not None and not entry.file.endswith(".gguf"):
        raise place.error("file", "an embedder from a hub repository is one .gguf file; a folder comes from a wheel or a path")
    return _spec(place, name, entry)


def _reranker(place: Place, name: str, entry: EmbedderTable) -> ModelSpec:
    if entry.repo is not None:
        raise place.error("repo", "a reranker is the folder of a CrossEncoder, which comes from a wheel or a path")
    return _spec(place, name, entry)


def _spec(place: Place, name: str, entry: EmbedderTable) -> ModelSpec:
    """One table as a ModelSpec, with what pydantic's types cannot say checked."""
    if name in RESERVED_NAMES:
        raise place.error(None, f"the name {shown(name)} is reserved for an engine that is built in")
    if not _NAME.fullmatch(name) or name.endswith(".gguf"):
        raise place.error(None, "a name is 1 to 64 letters, digits, dots, dashes or underscores, and does not end with .gguf")
    kind, source = _source(place, entry)
    if kind == "path" and entry.file is not None:
        raise place.error("file", 'goes with "wheel" or "repo"; a "path" names the file itself')
    if kind != "path":
        if entry.file is None:
            raise place.error("file", f"is missing: which file of the {'wheel' if kind == 'wheel' else 'repository'}?")
        _check_inside(place, "file", entry.file)
    if entry.revision is not None:
        if kind != "repo":
            raise place.error("revision", 'goes with "repo" only')
        _check_inside(place, "revision", entry.revision)
    if entry.sha256 is not None and not _SHA256.fullmatch(entry.sha256):
        raise place.error("sha256", "must be 64 hexadecimal digits")
    return ModelSpec(
        name=name,
        kind=kind,
        source=source,
        file=entry.file or "",
        revision=entry.revision,
        sha256=entry.sha256.lower() if entry.sha256 else None,
        n_ctx=entry.n_ctx if isinstance(entry, ModelTable) else None,
        chat_template=_chat_template(place, entry) if isinstance(entry, ModelTable) else None,
    )


def _source(place: Place, entry: EmbedderTable) -> tuple[SourceKind, str]:
    """The one source of an entry, checked for its form."""
    given: list[tuple[SourceKind, str]] = []
    for kind, text in (("wheel", entry.wheel), ("repo", entry.repo), ("path", entry.path)):
        if text is not None:
            given.append((kind, text))  # type: ignore[arg-type]  # the three are SourceKind's own
    if not given:
        raise place.error(None, "has no source; one of the keys wheel, repo and path is needed")
    if len(given) > 1:
        raise place.error(given[1][0], f"is a second source beside {shown(given[0][0])}; an entry has one")
    kind, text = given[0]
    if kind == "wheel" and not _REQUIREMENT.fullmatch(text):
        raise place.error("wheel", f'must be "name==version" with one exact version, not {shown(text)}')
    if kind == "repo" and (not _REPO.fullmatch(text) or ".." in text or "--" in text):
        raise place.error("repo", f'must be "owner/name", not {shown(text)}')
    if kind == "path":
        text = str(_absolute(place, "path", text))
    return kind, text


def _chat_template(place: Place, entry: ModelTable) -> Path | None:
    if entry.chat_template is None:
        return None
    path = _absolute(place, "chat_template", entry.chat_template)
    try:
        found = path.is_file()
    except OSError:
        found = False
    if not found:
        raise place.error("chat_template", f"there is no such file: {shown_path(path)}")
    return path


def _absolute(place: Place, key: str, text: str) -> Path:
    """A path of the file: `~` is the person's home, a relative one starts at the folder of models.toml."""
    if not text or not text.isprintable():
        raise place.error(key, f"is not a path: {shown(text)}")
    try:
        return place.file.absolute().parent / Path(text).expanduser()
    except RuntimeError:
        raise place.error(key, f"whose home is this? {shown(text)}") from None


def _check_inside(place: Place, key: str, text: str) -> None:
    """A relative path with `/` that cannot leave the folder it starts in, on any system."""
    if not text.isprintable() or "\\" in text or ":" in text or any(part in {"", ".", ".."} for part in text.split("/")):
        raise place.error(key, f'must be a relative path without "..", backslash or drive, not {shown(text)}')
