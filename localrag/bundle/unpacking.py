"""unbundle(): a bundle back into a home. All of it is read and checked in a folder beside; then each thing lands by one rename.

What is there already and the same is left. What is there and differs stops it before anything lands, unless it is to be replaced.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from localrag.bundle import catalogue
from localrag.bundle.landing import State, imported, land, placed
from localrag.bundle.manifest import HOME, KBS, MODELS_FILE, Bundle, Manifest, Thing, copy, opened, refused
from localrag.catalog import ByteProgress, schema
from localrag.catalog.checksums import hashed_file, sha256_of
from localrag.catalog.sources import Stage, find, publish, published_path, staging
from localrag.errors import BundleError, ConfigError, LocalragError, ModelFileError
from localrag.files import file_error, make_private_folder, open_private
from localrag.settings import Settings, shipped_file

_ENTRIES: dict[str, str] = {"model": "models", "embedder": "embedders"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """One thing of a bundle in this home."""

    kind: str
    name: str
    state: State
    path: Path
    num_bytes: int

    def to_dict(self) -> dict[str, object]:
        return {"kind": self.kind, "name": self.name, "state": self.state, "path": str(self.path), "num_bytes": self.num_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbundled:
    """What became of every thing, and what a person should know of it."""

    manifest: Manifest
    landed: tuple[Landed, ...]
    notes: tuple[str, ...]


def unbundle(file: Path, settings: Settings, progress: ByteProgress, *, force: bool = False) -> Unbundled:
    """Restores a bundle's models, knowledge bases and models.toml into the home. Its wheels are checked, and left to its starter.

    Raises BundleError for a bundle that is not whole, and before anything lands: ModelFileError, KnowledgeBaseError or ConfigError for
    what is there and differs, unless `force` replaces it.
    """
    with opened(file) as bundle:
        made = bundle.manifest
        _check_room(file, made, settings.home)
        with _disk_errors(settings.home), staging(settings.home, progress, what="unbundle") as stage:
            _read_all(bundle, stage.folder, progress)
            own = _own_models_file(file, made, stage.folder)
            moves = [placed(thing, stage.folder, settings, force=force) for thing in _landing(made)]
            kbs = [imported(file, thing, stage.folder, settings, force=force, progress=progress) for thing in _of_kind(made, "kb")]
            text, state, notes = _models_toml(made, own, settings, stage.folder, force=force)
            for move in [*moves, *kbs]:
                land(move, stage)
            if text is not None:
                _land_models_file(text, settings.home / MODELS_FILE, stage)
    done = [
        Landed(kind=move.thing.kind, name=move.thing.name, state=move.state, path=move.target, num_bytes=made.num_bytes_of(move.thing))
        for move in [*moves, *kbs]
    ]
    place = settings.home / MODELS_FILE if state != "same" or (settings.home / MODELS_FILE).exists() else shipped_file()
    models_file = Landed(kind="models_file", name=MODELS_FILE, state=state, path=place, num_bytes=len(own))
    if above := [file for file in settings.models_files() if file != settings.home / MODELS_FILE]:
        notes.append(f"Here {above[0].absolute()} goes before {place}: its entries win over those of the same name.")
    return Unbundled(manifest=made, landed=(*done, models_file), notes=tuple(notes))


def _read_all(bundle: Bundle, folder: Path, progress: ByteProgress) -> None:
    """Every file is compared with the manifest; what a home takes is written to the stage meanwhile."""
    done, total = 0, sum(content.num_bytes for content in bundle.manifest.files.values())
    for name, content in bundle.manifest.files.items():
        progress("checking every file", done, total)
        if name.startswith((HOME, KBS)):
            target = folder / name
            make_private_folder(target.parent)
            with open_private(target, "xb") as out:
                copy(bundle.pieces(name), out)
                out.flush()
                os.fsync(out.fileno())
        else:
            for _ in bundle.pieces(name):
                pass
        done += content.num_bytes


def _own_models_file(file: Path, made: Manifest, folder: Path) -> bytes:
    """The models.toml of the bundle, checked: every model and embedder that it brings is found by it, the default ones among them.

    A default that is not brought would come without its entry into a models.toml that names none, and break it.
    """
    staged = folder / HOME / MODELS_FILE
    if not staged.is_file():
        raise refused(file, "it has no models.toml")
    try:
        tables = schema.read(staged, shipped_file())
        defaults = tomllib.loads(staged.read_text("utf-8"))
    except ConfigError as error:
        reason = error.message.replace(str(staged), MODELS_FILE).rstrip(".")
        raise refused(file, f"its models.toml is not one ({reason})") from None
    for kind, specs, default in (
        ("model", tables.models, defaults.get("default_model")),
        ("embedder", tables.embedders, defaults.get("default_embedder")),
    ):
        brought = _of_kind(made, kind)
        for thing in brought:
            spec = specs.get(thing.name)
            if spec is None or tables.origins[thing.name] != staged:
                raise refused(file, f"its models.toml has no {kind} {thing.name!r}")
            place = folder / thing.path
            looked_for = published_path(spec, folder / HOME / "models") if spec.kind == "wheel" else Path(os.path.normpath(spec.source))
            if spec.kind == "repo" or looked_for != place:
                raise refused(file, f"its models.toml looks for {thing.name!r} in another place")
            try:
                actual = sha256_of(hashed_file(spec, place))
            except ModelFileError:
                raise refused(file, f"the {kind} {thing.name!r} has no weights") from None
            if spec.sha256 not in {None, actual}:
                raise refused(file, f"{thing.name!r} is not what its models.toml describes")
        if default is not None and default not in {thing.name for thing in brought}:
            raise refused(file, f"its default {kind} {default!r} is not in it")
    return staged.read_bytes()


def _landing(made: Manifest) -> list[Thing]:
    """What lands as it is, in its order."""
    return [thing for kind in ("model", "template", "embedder", "copy") for thing in _of_kind(made, kind)]


def _of_kind(made: Manifest, kind: str) -> list[Thing]:
    return [thing for thing in made.things if thing.kind == kind]


def _models_toml(made: Manifest, own: bytes, settings: Settings, folder: Path, *, force: bool) -> tuple[str | None, State, list[str]]:
    """What models.toml of the home is to say (None: it stays as it is), and what to tell of it."""
    target, text = settings.home / MODELS_FILE, own.decode("utf-8")
    if not target.exists():
        return (None, "same", []) if own == shipped_file().read_bytes() else (text, "added", [])
    if target.read_bytes() == own:
        return None, "same", []
    known = schema.read(target, shipped_file())
    own_names = {name for name, origin in known.origins.items() if origin == target}
    there = target.read_text(encoding="utf-8")
    wanted, replaced = [], []
    for thing in [*_of_kind(made, "model"), *_of_kind(made, "embedder")]:
        table = _ENTRIES[thing.kind]
        spec = (known.models if thing.kind == "model" else known.embedders).get(thing.name) if thing.name in own_names else None
        if spec is None and thing.name in own_names:
            raise ConfigError(f"{target} has {thing.name} as something else than this {thing.kind}.", hint="Give it another name there.")
        if spec is not None and catalogue.entry(there, table, thing.name) == catalogue.entry(text, table, thing.name):
            continue
        if spec is not None:
            place = find(spec, settings.models_dir)
            with suppress(LocalragError):
                if place is not None and sha256_of(hashed_file(spec, place)) == sha256_of(hashed_file(spec, folder / thing.path)):
                    continue  # its own entry leads to the same file
            replaced.append(thing.name)
        wanted.append((table, thing.name))
    if replaced and not force:
        raise ConfigError(
            f"{target} has another entry for {', '.join(replaced)}.",
            hint="Give it another name there, or replace it (--force); the rest of the file stays as it is.",
            file=str(target),
            names=replaced,
        )
    merged = catalogue.merged(there, text, wanted, defaults=("default_model", "default_embedder"), file=target)
    notes = [f"{target} stays as it is but for these entries: its budgets, councils and other tables are not taken over from the bundle."]
    if merged == there:
        return None, "kept", notes
    return merged, "merged", notes


def _land_models_file(text: str, target: Path, stage: Stage) -> None:
    """One rename; the file that was there is kept beside it."""
    made = stage.folder / MODELS_FILE
    with open_private(made, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    if target.exists():
        shutil.copy2(target, target.with_name(f"{MODELS_FILE}.before"))
    publish(made, target, stage)


def _check_room(file: Path, made: Manifest, home: Path) -> None:
    """Room for what lands; a knowledge base is there twice for a moment, and its tables are made anew."""
    needed = sum(made.num_bytes_of(thing) * (4 if thing.kind == "kb" else 1) for thing in made.things if thing.kind != "wheels")
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise BundleError(
            f"{file} needs {needed / 1e6:.0f} MB in {home}, and its disk has {free / 1e6:.0f} free.",
            hint="Make room, or move the home (LOCALRAG_HOME).",
            needed_bytes=needed,
            free_bytes=free,
        )


@contextmanager
def _disk_errors(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        known = file_error(
            error,
            error.filename or home,
            hint="Check the path and its permissions (LOCALRAG_HOME moves the home).",
        )
        raise BundleError(f"{error.filename or home}: {known.reason}.", hint=known.hint, **known.numbers) from error
