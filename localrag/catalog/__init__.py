"""The catalogue: models.toml files, the model files that they name, and the budgets, councils and weights that they set.

Only `Catalog.pull` uses the network. pydantic and huggingface_hub are imported on first use.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from localrag.budget import Profile
from localrag.catalog import sources
from localrag.catalog.sources import ByteProgress, Checksums, VerifyResult, hashed_file
from localrag.errors import ConfigError, ModelFileError, ModelNotFoundError
from localrag.files import replace_text
from localrag.settings import Settings, expanded, shipped_file
from localrag.types import ModelSpec

if TYPE_CHECKING:
    from localrag.catalog.hub import HubFile, Listing
    from localrag.deliberation.roles import Council

__all__ = ["ByteProgress", "Catalog", "CatalogRow", "VerifyResult", "save_in_home"]

Thing = Literal["model", "embedder", "reranker"]
_RESERVED = ("echo", "llm")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRow:
    """One entry and its state on this machine. `sha256_ok` is the last known result: None if nothing was hashed or no hash is expected."""

    name: str
    thing: Thing
    source: str
    file: str
    is_default: bool
    present: bool
    path: str | None
    size_bytes: int | None
    sha256_ok: bool | None
    models_file: str
    """The models.toml that contains the entry."""

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The entries of the active models.toml files, and the folder of pulled files. `profiles` always has a "default"."""

    files: tuple[Path, ...]
    """The models.toml files, highest precedence first; the last is the one that ships, unless that was named."""
    models_dir: Path
    checksums: Checksums
    default_model: str | None
    default_ships: bool
    """Whether the default model is the one that ships, which nobody chose."""
    default_embedder: str | None
    models: Mapping[str, ModelSpec]
    embedders: Mapping[str, ModelSpec]
    rerankers: Mapping[str, ModelSpec]
    origins: Mapping[str, Path]
    """The file that each model, embedder and reranker comes from."""
    profiles: Mapping[str, Profile]
    weights: Mapping[str, object]
    tags: Mapping[str, tuple[str, ...]]
    """Path patterns, with the tags of the documents that match."""
    memories: Mapping[str, float]
    """The settings of [memories], by field name of session.memory.RecallRule."""
    rejects_tools: bool
    """Whether the server rejects tools together with an index ([server] tools_with_index)."""
    committees: Mapping[str, Council]
    """All councils by name."""

    @classmethod
    def load(cls, settings: Settings) -> Catalog:
        """Read and layer the active models.toml files. Raises ConfigError naming file, table and key."""
        from localrag.catalog import schema  # noqa: PLC0415  # weight: pydantic

        files = settings.layered_models_files()
        tables = schema.read(*files)
        return cls(
            files=files,
            models_dir=settings.models_dir,
            checksums=Checksums(settings.home / "verified.json", settings.home / "pulled.json"),
            default_model=tables.default_model,
            default_ships=tables.default_file.exists() and tables.default_file.samefile(shipped_file()),
            default_embedder=tables.default_embedder,
            models=MappingProxyType(tables.models),
            embedders=MappingProxyType(tables.embedders),
            rerankers=MappingProxyType(tables.rerankers),
            origins=MappingProxyType(tables.origins),
            profiles=MappingProxyType(tables.budgets),
            weights=MappingProxyType(tables.relevance),
            tags=MappingProxyType(tables.tags),
            memories=MappingProxyType(tables.memories),
            rejects_tools=tables.rejects_tools,
            committees=MappingProxyType(tables.councils),
        )

    @property
    def file(self) -> Path:
        """The file with the highest precedence."""
        return self.files[0]

    def model(self, name_or_path: str | None = None) -> ModelSpec:
        """Return the entry with that name, the .gguf file at that path, or the default. Raises ModelNotFoundError."""
        return self._choose("model", name_or_path)

    def embedder(self, name_or_path: str | None = None) -> ModelSpec:
        """Return the entry with that name, the .gguf file or sentence-transformers folder at that path, or the default."""
        return self._choose("embedder", name_or_path)

    def reranker(self, name_or_path: str) -> ModelSpec:
        """Return the entry with that name, or the .gguf file or CrossEncoder folder at that path."""
        return self._choose("reranker", name_or_path)

    def entry(self, name: str) -> ModelSpec:
        """Return the model, embedder or reranker with that name. Names are unique across the three."""
        spec = self.models.get(name) or self.embedders.get(name) or self.rerankers.get(name)
        if spec is None:
            raise self._unknown("model, embedder or reranker", name, self.names())
        return spec

    def names(self) -> tuple[str, ...]:
        """Return the names of all models, then embedders, then rerankers, each in order of precedence."""
        return (*self.models, *self.embedders, *self.rerankers)

    def budget(self, name: str | None = None) -> Profile:
        """Return the budget with that name, or the default: the table [budgets.default], else the built-in one. Raises ConfigError
        for an unknown name.
        """
        profile = self.profiles.get("default" if name is None else name)
        if profile is None:
            hint, near = _hint(name or "", tuple(self.profiles))
            names = self.budgets()
            raise ConfigError(f"No budget is named {name!r} in {self._where()}.", hint=hint, name=name, nearest=near, known=names)
        return profile

    def budgets(self) -> list[str]:
        """Return the names of all budgets: "default", then the others in order of precedence."""
        return list(self.profiles)

    def council(self, name: str | None = None) -> Council:
        """Return the council with that name, or "default". Raises ConfigError for an unknown name."""
        key = "default" if name is None else name
        if key not in self.committees:
            names = self.councils()
            hint, near = _hint(key, tuple(names))
            raise ConfigError(f"No council is named {key!r} in {self._where()}.", hint=hint, name=key, nearest=near, known=names)
        return self.committees[key]

    def councils(self) -> list[str]:
        """Return the names of all councils in order of precedence."""
        return list(self.committees)

    def relevance(self) -> Mapping[str, object]:
        """Return the checked settings of [relevance] by field name of Weights; defaults are not included.

        Its thresholds are not included either: they are part of the tiers of every budget.
        """
        return self.weights

    def rows(self) -> list[CatalogRow]:
        """Return every entry with its state, without hashing and without the network."""
        return [
            *(self._row("model", spec, is_default=spec.name == self.default_model) for spec in self.models.values()),
            *(self._row("embedder", spec, is_default=spec.name == self.default_embedder) for spec in self.embedders.values()),
            *(self._row("reranker", spec, is_default=False) for spec in self.rerankers.values()),
        ]

    def locate(self, spec: ModelSpec) -> Path:
        """Return the path of the file or folder on this machine. Raises ModelNotFoundError with the command that fetches it."""
        path = sources.find(spec, self.models_dir)
        if path is None:
            raise sources.missing(spec)
        return path

    def is_here(self, spec: ModelSpec) -> bool:
        """Whether the file or folder is on this machine."""
        return sources.find(spec, self.models_dir) is not None

    def open(self, spec: ModelSpec) -> Path:
        """Like `locate`, and check the sha256 if there is one. A file that has not changed is not hashed again.

        Raises ModelNotFoundError, and ModelFileError with `expected` and `actual` if the hash differs.
        """
        path = self.locate(spec)
        sources.check(spec, path, self.models_dir, self.checksums)
        return path

    def digest(self, spec: ModelSpec) -> str:
        """Return the sha256 of the file, or of the weights in a folder. A file that has not changed is not hashed again."""
        file = hashed_file(spec, self.locate(spec))
        return self.checksums.known(file) or self.checksums.measure(file)

    def verify(self, spec: ModelSpec) -> VerifyResult:
        """Hash the file again. A mismatch is in the result and does not raise an error."""
        return sources.verify(spec, self.locate(spec), self.checksums)

    def pull(self, spec: ModelSpec, progress: ByteProgress) -> Path:
        """Download a missing file, check it, and return its path. No other method uses the network.

        Safe to interrupt and to run twice at the same time. Raises ModelError, and ConfigError if the home is not writable.
        """
        return sources.pull(spec, self.models_dir, self.checksums, progress)

    def listing(self, repo: str, revision: str | None = None) -> Listing:
        """Ask the hub which GGUF models a repository holds. Like `pull`, this uses the network. Raises ModelError."""
        from localrag.catalog import hub  # noqa: PLC0415  # weight

        return hub.list_repository(repo, revision)

    def pulled_entry(self, listing: Listing, file: HubFile, revision: str | None = None) -> ModelSpec:
        """Return the entry of a file of a repository: the one that there is, or a new one with a name of its own."""
        for spec in self.models.values():
            if (spec.kind, spec.source, spec.file, spec.revision) == ("repo", listing.repo, file.file, revision):
                return spec
        stem = file.file.rpartition("/")[2].removesuffix(".gguf").rpartition("-00001-of-")[0] or Path(file.file).stem
        base = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:60] or "model"
        taken = {*self.names(), *_RESERVED}
        name = next(each for each in chain([base], (f"{base}-{number}" for number in count(2))) if each not in taken)
        return ModelSpec(name=name, kind="repo", source=listing.repo, file=file.file, revision=revision)

    def _where(self) -> str:
        """Name the active files for an error: the user's own, and the one that ships."""
        own = [str(file) for file in self.files if file != shipped_file()]
        return f"{', '.join(own)} or the models.toml that ships" if own else str(self.file)

    def _choose(self, thing: Thing, name_or_path: str | None) -> ModelSpec:
        specs, default = self._known(thing)
        name = default if name_or_path is None else name_or_path
        if name is None:
            raise ModelNotFoundError(
                f"{self._where()} names no default {thing}.", hint=f"Set default_{thing} in {self.file}, or name one. {_listed(specs)}"
            )
        if name in specs:
            return specs[name]
        if _looks_like_path(name):
            return self._from_path(thing, name)
        raise self._unknown(thing, name, tuple(specs))

    def _known(self, thing: Thing) -> tuple[Mapping[str, ModelSpec], str | None]:
        """Return the entries of a kind, and the name of the default one."""
        return {
            "model": (self.models, self.default_model),
            "embedder": (self.embedders, self.default_embedder),
            "reranker": (self.rerankers, None),
        }[thing]

    def _from_path(self, thing: Thing, text: str) -> ModelSpec:
        path = expanded(Path(text)).absolute()
        kind = sources.kind_on_disk(path)
        if kind is None:
            raise ModelNotFoundError(f"There is no file {text}.", hint=_listed(self._known(thing)[0]), path=text)
        if kind == "folder" and thing == "model":
            raise ModelNotFoundError(f"{text} is a folder; a model is one .gguf file.", path=text)
        return ModelSpec(name=text, kind="path", source=str(path))

    def _unknown(self, thing: str, name: str, names: tuple[str, ...]) -> ModelNotFoundError:
        hint, near = _hint(name, names)
        message = f"No {thing} is named {name!r} in {self._where()}."
        return ModelNotFoundError(message, hint=hint, name=name, nearest=near, known=list(names))

    def _row(self, thing: Thing, spec: ModelSpec, *, is_default: bool) -> CatalogRow:
        path = sources.find(spec, self.models_dir)
        digest = None
        expected = None if path is None else self.checksums.expected(spec, path.name)
        if path is not None and expected is not None:
            try:
                digest = self.checksums.known(hashed_file(spec, path))
            except ModelFileError:  # a folder without weights
                digest = ""
        return CatalogRow(
            name=spec.name,
            thing=thing,
            source=spec.source,
            file=spec.file,
            is_default=is_default,
            present=path is not None,
            path=None if path is None else str(path),
            size_bytes=None if path is None else sources.size_bytes(path),
            sha256_ok=None if digest is None else digest == expected,
            models_file=str(self.origins[spec.name].absolute()),
        )


def save_in_home(settings: Settings, *, entry: ModelSpec | None = None, default_model: str | None = None) -> Path:
    """Add an entry of the hub, or set the default model, in the home's models.toml. Comments and order stay. Returns the file.

    Raises ConfigError if the file cannot be read, edited or written, or if the entry would not be valid.
    """
    import tomllib  # noqa: PLC0415  # only for an edit

    import tomlkit  # noqa: PLC0415  # only for an edit

    from localrag.catalog.entries import ModelTable, TableRef, spec_of  # noqa: PLC0415  # weight: pydantic

    file = settings.home / "models.toml"
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        document, expected = tomlkit.parse(text), tomllib.loads(text)
        for tables in (document, expected):
            if default_model is not None:
                tables["default_model"] = default_model
            if entry is not None:
                row = {"repo": entry.source, "file": entry.file} | ({"revision": entry.revision} if entry.revision else {})
                spec_of(TableRef(file, ("models", entry.name)), entry.name, ModelTable.model_validate(row))
                tables.setdefault("models", {})[entry.name] = row
        edited = tomlkit.dumps(document)
        if tomllib.loads(edited) != expected:
            raise ConfigError(f"{file} cannot be edited.", hint="Write the entry yourself.", file=str(file))
        replace_text(file, edited)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # tomlkit's errors are ValueErrors
        raise ConfigError(f"{file} cannot be edited: {error}.", hint="Check the file and its permissions.", file=str(file)) from error
    return file


def _looks_like_path(text: str) -> bool:
    return text.endswith(".gguf") or text.startswith("~") or any(mark in text for mark in (os.sep, os.altsep) if mark)


def _hint(name: str, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return a hint for an unknown name, and similar names."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return (f"Did you mean {' or '.join(near)}? " if near else "") + _listed(names), near


def _listed(names: Mapping[str, ModelSpec] | tuple[str, ...]) -> str:
    return f"There are: {', '.join(names)}." if names else "There are none."
