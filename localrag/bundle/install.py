"""Restore a bundle into a home: unbundle().

All of the bundle is extracted and checked in a staging folder first. Then each thing is moved into the home by one rename. Identical things
are skipped. A thing that differs from an existing one stops everything before the first move, unless it may be replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localrag.bundle import models_toml
from localrag.bundle.manifest import HOME, KBS, MODELS_FILE, Bundle, Manifest, Thing, open_bundle, refusal
from localrag.catalog import ByteProgress, schema
from localrag.catalog.sources import Stage, find, hashed_file, publish, published_path, sha256_of, staging
from localrag.errors import BundleError, ConfigError, KnowledgeBaseError, LocalragError, ModelFileError
from localrag.files import file_error, make_private_folder, open_private
from localrag.kb.knowledge_base import FolderLocation
from localrag.kb.transfer import content_sha256, import_from
from localrag.settings import Settings, shipped_file
from localrag.types import ModelSpec

State = Literal["added", "same", "replaced", "kept", "merged"]
"""What was done with a thing. "kept" and "merged" are for models.toml: unchanged, or extended by entries."""
_MAX_RECORD_BYTES = 64 * 1024
_MAX_MTIME_NS = 2**62
_TABLES: dict[str, str] = {"model": "models", "embedder": "embedders"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
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
    """The result of unbundle(), with notes for the user."""

    manifest: Manifest
    installed: tuple[Installed, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A thing to be moved from the staging folder to the home."""

    thing: Thing
    staged: Path
    target: Path
    state: State


def unbundle(file: Path, settings: Settings, progress: ByteProgress, *, force: bool = False) -> Unbundled:
    """Install a bundle's models, knowledge bases and models.toml into the home. Wheels are only checked; bootstrap.py installs them.

    Raises BundleError for an invalid bundle, and ModelFileError, KnowledgeBaseError or ConfigError for an existing thing that differs,
    unless `force` replaces it. The home is unchanged then.
    """
    with open_bundle(file) as bundle:
        manifest = bundle.manifest
        _check_space(file, manifest, settings.home)
        with _disk_errors(settings.home), staging(settings.home, progress, what="unbundle") as stage:
            _extract(bundle, stage.folder, progress)
            own = _check_models_file(file, manifest, stage.folder)
            files = manifest.of_kind("model", "template", "embedder", "copy")
            moves = [_plan_move(thing, stage.folder, settings, force=force) for thing in files]
            moves += [_plan_import(file, thing, stage.folder, settings, force=force, progress=progress) for thing in manifest.of_kind("kb")]
            text, state, notes = _plan_models_file(manifest, own, settings, stage.folder, force=force)
            for move in moves:
                _apply(move, stage)
            if text is not None:
                _replace_models_file(text, settings.home / MODELS_FILE, stage)
    installed = [
        Installed(
            kind=move.thing.kind, name=move.thing.name, state=move.state, path=move.target, num_bytes=manifest.num_bytes_of(move.thing)
        )
        for move in moves
    ]
    path = settings.home / MODELS_FILE if state != "same" or (settings.home / MODELS_FILE).exists() else shipped_file()
    installed.append(Installed(kind="models_file", name=MODELS_FILE, state=state, path=path, num_bytes=len(own)))
    if overriding := [file for file in settings.models_files() if file != settings.home / MODELS_FILE]:
        notes.append(f"{overriding[0].absolute()} overrides {path} here: its entries win over those of the same name.")
    return Unbundled(manifest=manifest, installed=tuple(installed), notes=tuple(notes))


def _extract(bundle: Bundle, folder: Path, progress: ByteProgress) -> None:
    """Check every file against the manifest, and write the files for a home to `folder`."""
    done, total = 0, sum(content.num_bytes for content in bundle.manifest.files.values())
    for name, content in bundle.manifest.files.items():
        progress("checking every file", done, total)
        if name.startswith((HOME, KBS)):
            target = folder / name
            make_private_folder(target.parent)
            with open_private(target, "xb") as out:
                out.writelines(bundle.blocks(name))
                out.flush()
                os.fsync(out.fileno())
        else:
            for _ in bundle.blocks(name):
                pass
        done += content.num_bytes


def _check_models_file(file: Path, manifest: Manifest, folder: Path) -> bytes:
    """Return the bundle's models.toml. Raises BundleError unless it leads to every packed model and embedder, and to nothing else.

    Its defaults must be packed, too: merged into a models.toml without defaults, they would name entries that do not exist.
    """
    staged = folder / HOME / MODELS_FILE
    if not staged.is_file():
        raise refusal(file, "it has no models.toml")
    try:
        tables = schema.read(staged, shipped_file())
        defaults = tomllib.loads(staged.read_text("utf-8"))
    except ConfigError as error:
        reason = error.message.replace(str(staged), MODELS_FILE).rstrip(".")
        raise refusal(file, f"its models.toml is invalid ({reason})") from None
    for kind, specs in (("model", tables.models), ("embedder", tables.embedders)):
        things = [thing for thing in manifest.things if thing.kind == kind]
        for thing in things:
            spec = specs.get(thing.name)
            if spec is None or tables.origins[thing.name] != staged:
                raise refusal(file, f"its models.toml has no {kind} {thing.name!r}")
            _check_entry(file, spec, thing, folder)
        default = defaults.get(f"default_{kind}")
        if default is not None and default not in {thing.name for thing in things}:
            raise refusal(file, f"its default {kind} {default!r} is not in it")
    return staged.read_bytes()


def _check_entry(file: Path, spec: ModelSpec, thing: Thing, folder: Path) -> None:
    """Raise BundleError unless an entry of models.toml leads to the staged thing, and has its sha256 or none."""
    staged = folder / thing.path
    path = published_path(spec, folder / HOME / "models") if spec.kind == "wheel" else Path(os.path.normpath(spec.source))
    if spec.kind == "repo" or path != staged:
        raise refusal(file, f"its models.toml looks for {thing.name!r} in another place")
    try:
        sha256 = sha256_of(hashed_file(spec, staged))
    except ModelFileError:
        raise refusal(file, f"the {thing.kind} {thing.name!r} has no weights") from None
    if spec.sha256 not in {None, sha256}:
        raise refusal(file, f"{thing.name!r} has another sha256 than its models.toml says")


def _plan_move(thing: Thing, folder: Path, settings: Settings, *, force: bool) -> Move:
    """Decide what to do with a file or folder. Raises ModelFileError if it differs from the existing one."""
    staged, target = folder / thing.path, settings.home / thing.target
    if not target.exists():
        return Move(thing, staged, target, "added")
    if _is_same(staged, target):
        return Move(thing, staged, target, "same")
    if not force and thing.kind != "copy":  # localrag makes copies, and can make them again
        raise ModelFileError(
            f"Another file is already in the place of the {thing.kind} {thing.name}: {target}.",
            hint="Move that file away, or replace it (--force).",
            name=thing.name,
            path=str(target),
        )
    return Move(thing, staged, target, "replaced")


def _is_same(staged: Path, target: Path) -> bool:
    """Whether two files are identical, or the folder `target` has every file of the folder `staged`."""
    if staged.is_dir():
        return target.is_dir() and all(_is_same(each, target / each.relative_to(staged)) for each in staged.rglob("*") if each.is_file())
    if not target.is_file() or target.stat().st_size != staged.stat().st_size:
        return False
    return sha256_of(target) == sha256_of(staged)


def _plan_import(file: Path, thing: Thing, folder: Path, settings: Settings, *, force: bool, progress: ByteProgress) -> Move:
    """Import a knowledge base in the staging folder. Raises KnowledgeBaseError if another one has its name."""
    progress(f"checking {thing.name}", 0, None)
    imported = folder / "imported"
    try:
        import_from(folder / thing.path, imported, thing.name)
    except KnowledgeBaseError as error:
        reason = error.message.replace(str(folder / thing.path), thing.path).rstrip(".")
        raise refusal(file, reason) from None
    existing = FolderLocation(settings.kb_dir, thing.name)
    staged, target = imported / thing.name, existing.path.parent
    if not existing.path.is_file():  # a folder without a database is what a killed index leaves
        return Move(thing, staged, target, "replaced" if target.exists() else "added")
    with suppress(LocalragError):  # an unreadable one counts as different
        if _content_sha256(existing) == content_sha256(staged / existing.path.name):
            return Move(thing, staged, target, "same")
    if not force:
        raise KnowledgeBaseError(
            f"Another knowledge base is already called {thing.name!r}.",
            hint=f"Export it to keep it (localrag kb export {thing.name} FILE), then replace it (--force).",
            kb=thing.name,
        )
    return Move(thing, staged, target, "replaced")


def _content_sha256(existing: FolderLocation) -> str:
    existing.open()  # migrates its tables to the current schema
    existing.close()
    return content_sha256(existing.path)


def _plan_models_file(
    manifest: Manifest, own: bytes, settings: Settings, folder: Path, *, force: bool
) -> tuple[str | None, State, list[str]]:
    """Return the new text of the home's models.toml (None: unchanged), the state, and notes. Raises ConfigError for a conflict."""
    target, text = settings.home / MODELS_FILE, own.decode("utf-8")
    if not target.exists():
        return (None, "same", []) if own == shipped_file().read_bytes() else (text, "added", [])
    if target.read_bytes() == own:
        return None, "same", []
    tables = schema.read(target, shipped_file())
    own_names = {name for name, origin in tables.origins.items() if origin == target}
    existing = target.read_text(encoding="utf-8")
    entries, replaced = [], []
    for thing in manifest.of_kind("model", "embedder"):
        table = _TABLES[thing.kind]
        spec = (tables.models if thing.kind == "model" else tables.embedders).get(thing.name) if thing.name in own_names else None
        if spec is None and thing.name in own_names:
            raise ConfigError(f"{target} uses the name {thing.name} for something other than this {thing.kind}.", hint="Rename it there.")
        if spec is not None:
            same_entry = models_toml.entry(existing, table, thing.name) == models_toml.entry(text, table, thing.name)
            if same_entry or _leads_to_same_file(spec, folder / thing.path, settings):
                continue
            replaced.append(thing.name)
        entries.append((table, thing.name))
    if replaced and not force:
        raise ConfigError(
            f"{target} has a different entry for {', '.join(replaced)}.",
            hint="Rename it there, or replace the entry (--force). The rest of the file is never changed.",
            file=str(target),
            names=replaced,
        )
    merged = models_toml.merge(existing, text, entries, defaults=("default_model", "default_embedder"), file=target)
    notes = [f"{target} only gets the entries it lacks. Budgets, councils and other tables of the bundle are not added."]
    return (None, "kept", notes) if merged == existing else (merged, "merged", notes)


def _leads_to_same_file(spec: ModelSpec, staged: Path, settings: Settings) -> bool:
    """Whether an existing entry leads to a file with the same contents as the staged one."""
    path = find(spec, settings.models_dir)
    with suppress(LocalragError):
        return path is not None and sha256_of(hashed_file(spec, path)) == sha256_of(hashed_file(spec, staged))
    return False


def _apply(move: Move, stage: Stage) -> None:
    if move.state == "same":
        return
    if move.thing.kind == "kb" and move.target.exists():
        _remove_kb(move.target, stage)
    if move.thing.kind == "copy" and move.staged.suffix == ".gguf":
        _restore_mtime(move.staged)
    publish(move.staged, move.target, stage)


def _remove_kb(target: Path, stage: Stage) -> None:
    """Remove a knowledge base that is replaced, under its write lock. A folder without a database is moved to the staging folder."""
    existing = FolderLocation(target.parent, target.name)
    if existing.path.is_file():
        existing.remove()
    else:
        target.rename(stage.folder / f"replaced-{target.name}")


def _restore_mtime(gguf: Path) -> None:
    """Set the modification time noted in the record next to an embedder's copy; otherwise the copy is hashed at every question."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        record = gguf.with_suffix(".json")
        mtime_ns = json.loads(record.read_bytes()[:_MAX_RECORD_BYTES])["mtime_ns"]
        if type(mtime_ns) is int and 0 < mtime_ns < _MAX_MTIME_NS:
            os.utime(gguf, ns=(mtime_ns, mtime_ns))


def _replace_models_file(text: str, target: Path, stage: Stage) -> None:
    """Write models.toml by one rename. The previous file is kept as models.toml.before."""
    staged = stage.folder / MODELS_FILE
    with open_private(staged, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    if target.exists():
        shutil.copy2(target, target.with_name(f"{MODELS_FILE}.before"))
    publish(staged, target, stage)


def _check_space(file: Path, manifest: Manifest, home: Path) -> None:
    """Check the free disk space. A knowledge base counts four times: it is there twice for a moment, and its tables are rebuilt."""
    needed = sum(manifest.num_bytes_of(thing) * (4 if thing.kind == "kb" else 1) for thing in manifest.things if thing.kind != "wheels")
    disk = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise BundleError(
            f"{file} needs {needed / 1e6:.0f} MB in {home}, but its disk has {free / 1e6:.0f} MB free.",
            hint="Free some space, or move the home (LOCALRAG_HOME).",
            needed_bytes=needed,
            free_bytes=free,
        )


@contextmanager
def _disk_errors(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        disk_error = file_error(error, error.filename or home, hint="Check the path and its permissions (LOCALRAG_HOME moves the home).")
        raise BundleError(f"{error.filename or home}: {disk_error.reason}.", hint=disk_error.hint, **disk_error.numbers) from error
