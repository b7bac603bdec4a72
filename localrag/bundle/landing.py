"""One thing of a bundle into a home: what becomes of it beside what is there, and the rename by which it lands."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localrag.bundle.manifest import Thing, refused
from localrag.catalog import Progress
from localrag.catalog.checksums import sha256_of
from localrag.catalog.sources import Stage, publish
from localrag.errors import KnowledgeBaseError, LocalragError, ModelFileError
from localrag.kb.knowledge_base import FolderLocation
from localrag.kb.transfer import content_sha256, import_from
from localrag.settings import Settings

State = Literal["added", "same", "replaced", "kept", "merged"]
"""What became of a thing: it was not there, was there and the same, was replaced; models.toml can be kept as it is, or get entries."""
_MAX_RECORD_BYTES = 64 * 1024
_MAX_MTIME_NS = 2**62


@dataclass(frozen=True, slots=True)
class Move:
    """What is to land: from the stage to the home."""

    thing: Thing
    staged: Path
    target: Path
    state: State


def placed(thing: Thing, folder: Path, settings: Settings, *, force: bool) -> Move:
    """What becomes of a file or folder. ModelFileError for one that differs from what is there."""
    staged, target = folder / thing.path, settings.home / thing.target
    if not target.exists():
        return Move(thing, staged, target, "added")
    if _is_same(staged, target):
        return Move(thing, staged, target, "same")
    if not force and thing.kind != "copy":  # that one is made by localrag, and can be made again
        raise ModelFileError(
            f"The {thing.kind} {thing.name} is there already, and is another file: {target}.",
            hint="Move that one away, or replace it (--force).",
            name=thing.name,
            path=str(target),
        )
    return Move(thing, staged, target, "replaced")


def _is_same(staged: Path, target: Path) -> bool:
    """Whether a file is the same, or a folder has every file of the other one."""
    if staged.is_dir():
        return target.is_dir() and all(_is_same(each, target / each.relative_to(staged)) for each in staged.rglob("*") if each.is_file())
    if not target.is_file() or target.stat().st_size != staged.stat().st_size:
        return False
    return sha256_of(target) == sha256_of(staged)


def imported(file: Path, thing: Thing, folder: Path, settings: Settings, *, force: bool, progress: Progress) -> Move:
    """A knowledge base made of its export, in the stage. KnowledgeBaseError where another one has its name."""
    progress(f"checking {thing.name}", 0, None)
    made = folder / "made"
    try:
        import_from(folder / thing.path, made, thing.name)
    except KnowledgeBaseError as error:
        reason = error.message.replace(str(folder / thing.path), thing.path).rstrip(".")
        raise refused(file, reason) from None
    place = FolderLocation(settings.kb_dir, thing.name)
    staged, target = made / thing.name, place.path.parent
    if not place.path.is_file():
        if target.exists():  # a folder without a knowledge base, as a killed indexer leaves one
            return Move(thing, staged, target, "replaced")
        return Move(thing, staged, target, "added")
    with suppress(LocalragError):  # one that cannot be read differs
        if _content(place) == content_sha256(staged / place.path.name):
            return Move(thing, staged, target, "same")
    if not force:
        raise KnowledgeBaseError(
            f"There is another knowledge base {thing.name!r} already.",
            hint=f"Export it to keep it (localrag kb export {thing.name} FILE), then replace it (--force).",
            kb=thing.name,
        )
    return Move(thing, staged, target, "replaced")


def _content(place: FolderLocation) -> str:
    place.open()  # which brings its tables to today's form
    place.close()
    return content_sha256(place.path)


def land(move: Move, stage: Stage) -> None:
    if move.state == "same":
        return
    if move.thing.kind == "kb" and move.target.exists():
        _make_way(move.target, stage)
    if move.thing.kind == "copy" and move.staged.suffix == ".gguf":
        _keep_time(move.staged)
    publish(move.staged, move.target, stage)


def _make_way(target: Path, stage: Stage) -> None:
    """Away with a knowledge base that is replaced: in its turn to write where there is one, and into the stage where there is none."""
    place = FolderLocation(target.parent, target.name)
    if place.path.is_file():
        place.remove()
    else:
        target.rename(stage.folder / f"replaced-{target.name}")


def _keep_time(gguf: Path) -> None:
    """The time of change that the verdict beside it knows it by; without it, its bytes would be hashed at every question."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        record = gguf.with_suffix(".json")
        mtime_ns = json.loads(record.read_bytes()[:_MAX_RECORD_BYTES])["mtime_ns"]
        if type(mtime_ns) is int and 0 < mtime_ns < _MAX_MTIME_NS:
            os.utime(gguf, ns=(mtime_ns, mtime_ns))
