"""bundle(): what is chosen of this machine, in one zip that starts itself on another. Nothing here uses the network."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import IO

from localrag.bundle import manifest
from localrag.bundle.choosing import Chosen, Source
from localrag.bundle.manifest import Content, Kind, Manifest, Thing
from localrag.bundle.needed import ROOT, installed_extras, needed, offered_extras, opened_wheel
from localrag.bundle.wheelhouse import Wheel
from localrag.catalog import ByteProgress
from localrag.errors import BundleError, ModelFileError
from localrag.files import file_error
from localrag.settings import Settings

_TIME = (1980, 1, 1, 0, 0, 0)
_ROOM_FOR_WHEELS = 0.45
"""Of what is installed, as wheels: an estimate that is on the safe side of what was measured (0.3)."""


@dataclass(frozen=True, slots=True)
class Wheels:
    """The wheels of a bundle: made of what is installed (`made`), or ready files; with them go the `extras` that they are enough for."""

    made: tuple[Wheel, ...] = ()
    extras: tuple[str, ...] = ()
    ready: tuple[Path, ...] = ()

    @classmethod
    def of_installed(cls) -> Wheels:
        """localrag and all that it needs, as it is installed here. BundleError for what cannot be packed."""
        extras = installed_extras()
        return cls(tuple(Wheel.of(each) for each in needed(extras)), tuple(extras))

    @classmethod
    def of_folder(cls, folder: Path) -> Wheels:
        """The wheels in a folder, one of localrag among them."""
        ready = tuple(sorted(file for file in folder.glob("*.whl") if file.is_file()))
        if not any(file.name.startswith(f"{ROOT}-") for file in ready):
            raise BundleError(
                f"{folder} has no wheel of localrag among its {len(ready)}.", hint=f"Make one there: pip wheel -w {folder} PATH-OF-LOCALRAG"
            )
        return cls(extras=tuple(offered_extras(ready)), ready=ready)

    @property
    def installed_bytes(self) -> int:
        """What they take when they are installed."""
        return sum(wheel.num_bytes for wheel in self.made) + sum(map(_unpacked_bytes, self.ready))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundled:
    """What was written: the file, its size and its sha256, and what is in it."""

    file: Path
    num_bytes: int
    sha256: str
    manifest: Manifest
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        made = self.manifest
        things = [
            {"kind": each.kind, "name": each.name, "num_files": len(made.files_of(each)), "num_bytes": made.num_bytes_of(each)}
            for each in made.things
        ]
        about = made.model_dump(include={"localrag", "python", "system", "machine", "extras", "installed_bytes"})
        return {
            "file": str(self.file),
            "num_bytes": self.num_bytes,
            "sha256": self.sha256,
            **about,
            "contents": things,
            "notes": list(self.notes),
        }


def bundle(out: Path, chosen: Chosen, wheels: Wheels, settings: Settings, progress: ByteProgress) -> Bundled:
    """Writes a bundle in place of what is at `out`: all of it, or nothing. BundleError, or the error of what cannot be read."""
    _check_room(out, chosen, wheels)
    beside = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    scratch = beside.with_name(f"{beside.name}.kb")
    try:
        with _disk_errors(out):
            with beside.open("xb") as raw:
                packer = _Packer(raw, progress, chosen.num_bytes + wheels.installed_bytes)
                made = packer.pack(chosen, wheels, settings, scratch)
                raw.flush()
                os.fsync(raw.fileno())
            progress("hashing the bundle", 0, None)
            with beside.open("rb") as data:
                sha256 = hashlib.file_digest(data, "sha256").hexdigest()
            beside.replace(out)
    finally:
        for left in (beside, scratch):
            with suppress(OSError):
                left.unlink(missing_ok=True)
    return Bundled(file=out, num_bytes=out.stat().st_size, sha256=sha256, manifest=made, notes=chosen.notes)


@dataclass(slots=True)
class _Packer:
    """The zip that is being written, and the manifest that goes into it last."""

    raw: IO[bytes]
    progress: ByteProgress
    total: int
    done: int = 0
    things: list[Thing] = field(default_factory=list)
    files: dict[str, Content] = field(default_factory=dict)

    def pack(self, chosen: Chosen, wheels: Wheels, settings: Settings, scratch: Path) -> Manifest:
        with zipfile.ZipFile(self.raw, "w", zipfile.ZIP_STORED) as archive:
            starter = resources.files("localrag.bundle").joinpath("starter.py").read_bytes()
            self._thing(archive, "starter", "starter", manifest.STARTER, starter)
            hashes = {source: self._source(archive, source) for source in chosen.sources}
            self._thing(archive, "models_file", manifest.MODELS_FILE, manifest.HOME + manifest.MODELS_FILE, chosen.models_toml(hashes))
            for name in chosen.kbs:
                self._knowledge_base(archive, name, settings, scratch)
            self._wheels(archive, wheels)
            made = self._manifest(chosen, wheels)
            archive.writestr(_entry(manifest.MANIFEST, zipfile.ZIP_DEFLATED), made.to_json())
        return made

    def _manifest(self, chosen: Chosen, wheels: Wheels) -> Manifest:
        is_ours = bool(wheels.made)
        return Manifest(
            localrag=metadata.version(ROOT),
            python=f"{sys.version_info.major}.{sys.version_info.minor}" if is_ours else None,
            python_tag=sys.implementation.cache_tag if is_ours else None,
            system=platform.system() if is_ours else None,
            machine=platform.machine() if is_ours else None,
            libc=" ".join(platform.libc_ver()) if is_ours else "",
            extras=list(wheels.extras),
            installed_bytes=wheels.installed_bytes,
            default_model=chosen.defaults.get("default_model"),
            default_embedder=chosen.defaults.get("default_embedder"),
            things=self.things,
            files=self.files,
        )

    def _thing(self, archive: zipfile.ZipFile, kind: Kind, name: str, path: str, data: bytes) -> None:
        self.things.append(Thing(kind=kind, name=name, path=path))
        archive.writestr(_entry(path, zipfile.ZIP_DEFLATED), data)
        self.files[path] = Content(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))

    def _source(self, archive: zipfile.ZipFile, source: Source) -> str:
        """A file or folder as it is; gives the sha256 of its weights, which has to be the one that models.toml gives."""
        self.things.append(Thing(kind=source.kind, name=source.name, path=source.path))
        weights = ""
        for path, file in source.files():
            found = self._file(archive, path, file, f"{source.kind} {source.name}")
            if file == source.weights:
                weights = found
        if source.sha256 is not None and weights != source.sha256:
            raise ModelFileError(
                f"The file of {source.name} is not the one that models.toml describes: its sha256 is {weights}, not {source.sha256}.",
                hint=f"localrag models verify {source.name}",
                name=source.name,
            )
        return weights

    def _knowledge_base(self, archive: zipfile.ZipFile, name: str, settings: Settings, scratch: Path) -> None:
        from localrag.kb import KnowledgeBase  # noqa: PLC0415  # weight

        self.progress(f"exporting {name}", self.done, self.total)
        with KnowledgeBase.open(settings.kb_dir, name) as kb:
            before = self.done + kb.path.stat().st_size
            kb.export(scratch)
        path = f"{manifest.KBS}{name}{manifest.KB_SUFFIX}"
        self.things.append(Thing(kind="kb", name=name, path=path))
        self._file(archive, path, scratch, f"knowledge base {name}")
        self.done = before
        scratch.unlink()

    def _wheels(self, archive: zipfile.ZipFile, wheels: Wheels) -> None:
        if wheels.made or wheels.ready:
            self.things.append(Thing(kind="wheels", name="wheels", path=manifest.WHEELS[:-1]))
        for file in wheels.ready:
            self._file(archive, manifest.WHEELS + file.name, file, "wheels")
        for wheel in wheels.made:
            path = manifest.WHEELS + wheel.filename

            def count(num_bytes: int) -> None:
                self.done += num_bytes
                self.progress("packing wheels", self.done, self.total)

            with archive.open(_entry(path), "w", force_zip64=True) as out:
                hashing = _Hashing(out)
                wheel.write(hashing, count)
            self.files[path] = hashing.content()

    def _file(self, archive: zipfile.ZipFile, path: str, file: Path, what: str) -> str:
        with file.open("rb") as source, archive.open(_entry(path), "w", force_zip64=True) as out:
            hashing = _Hashing(out)
            while piece := source.read(manifest.PIECE_BYTES):
                hashing.write(piece)
                self.done += len(piece)
                self.progress(f"packing {what}", self.done, self.total)
        self.files[path] = hashing.content()
        return self.files[path].sha256


class _Hashing:
    """Where bytes are written through, and hashed; nothing is read back or written twice, so a zip can be written into a zip."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self._num_bytes += len(data)
        return self._out.write(data)

    def flush(self) -> None:
        self._out.flush()

    def close(self) -> None:
        """Whoever opened it closes it."""

    def content(self) -> Content:
        return Content(sha256=self._digest.hexdigest(), num_bytes=self._num_bytes)


def _entry(name: str, packing: int = zipfile.ZIP_STORED) -> zipfile.ZipInfo:
    """Models and wheels are stored: they hardly pack at all, and are read back at the speed of the disk."""
    entry = zipfile.ZipInfo(name, _TIME)
    entry.compress_type = packing
    entry.external_attr = 0o100644 << 16
    return entry


def _unpacked_bytes(wheel: Path) -> int:
    with opened_wheel(wheel) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def _check_room(out: Path, chosen: Chosen, wheels: Wheels) -> None:
    made = sum(wheel.num_bytes for wheel in wheels.made)
    needed_bytes = chosen.num_bytes + 2 * chosen.largest_kb_bytes  # while it is exported it is there twice more
    needed_bytes += int(made * _ROOM_FOR_WHEELS) + sum(file.stat().st_size for file in wheels.ready)
    free_bytes = shutil.disk_usage(out.absolute().parent).free
    if needed_bytes > free_bytes:
        raise BundleError(
            f"The bundle takes about {needed_bytes / 1e6:.0f} MB, and the disk of {out.absolute().parent} has {free_bytes / 1e6:.0f} free.",
            hint="Make room, write it to another disk, or choose less (--kb, --model, --no-wheelhouse).",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        known = file_error(error, error.filename or out, hint="Check the path and its permissions.")
        raise BundleError(f"{error.filename or out}: {known.reason}.", hint=known.hint, **known.numbers) from error
