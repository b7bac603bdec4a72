"""Write a selection of this machine into one zip that installs itself on another: bundle()."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import IO

from localrag.bundle import manifest
from localrag.bundle.manifest import Content, Kind, Manifest, Thing
from localrag.bundle.requirements import ROOT, Wheels
from localrag.bundle.select import Selection, Source
from localrag.catalog import ByteProgress
from localrag.errors import BundleError, ModelFileError
from localrag.files import file_error
from localrag.settings import Settings

_TIME = (1980, 1, 1, 0, 0, 0)
"""Modification time of every entry; the earliest that a zip can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundled:
    """The file that was written, with its size, sha256 and manifest, and notes for the user."""

    file: Path
    num_bytes: int
    sha256: str
    manifest: Manifest
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        bundle_manifest = self.manifest
        things = [
            {
                "kind": each.kind,
                "name": each.name,
                "num_files": len(bundle_manifest.files_of(each)),
                "num_bytes": bundle_manifest.num_bytes_of(each),
            }
            for each in bundle_manifest.things
        ]
        about = bundle_manifest.model_dump(include={"localrag", "python", "system", "machine", "extras", "installed_bytes"})
        return {
            "file": str(self.file),
            "num_bytes": self.num_bytes,
            "sha256": self.sha256,
            **about,
            "contents": things,
            "notes": list(self.notes),
        }


def bundle(out: Path, selection: Selection, wheels: AbstractContextManager[Wheels], settings: Settings, progress: ByteProgress) -> Bundled:
    """Write a bundle to `out`, replacing any file there. On failure `out` is unchanged.

    `wheels` is entered once `out` proves writable. Raises BundleError, or the error of a model or knowledge base that cannot be read.
    """
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    exported = temporary.with_name(f"{temporary.name}.kb")
    try:
        with _disk_errors(out):
            with temporary.open("xb") as raw:
                _check_space(out, selection)
                with wheels as ready:
                    _check_space(out, selection, ready)
                    packer = _Packer(raw, progress, selection.num_bytes + ready.num_bytes)
                    bundle_manifest = packer.pack(selection, ready, settings, exported)
                raw.flush()
                os.fsync(raw.fileno())
            progress("hashing the bundle", 0, None)
            with temporary.open("rb") as data:
                sha256 = hashlib.file_digest(data, "sha256").hexdigest()
            temporary.replace(out)
    finally:
        for file in (temporary, exported):
            with suppress(OSError):
                file.unlink(missing_ok=True)
    return Bundled(file=out, num_bytes=out.stat().st_size, sha256=sha256, manifest=bundle_manifest, notes=selection.notes)


@dataclass(slots=True)
class _Packer:
    """Writes the zip, and collects the manifest that goes into it last."""

    raw: IO[bytes]
    progress: ByteProgress
    total: int
    done: int = 0
    things: list[Thing] = field(default_factory=list)
    files: dict[str, Content] = field(default_factory=dict)

    def pack(self, selection: Selection, wheels: Wheels, settings: Settings, exported: Path) -> Manifest:
        with zipfile.ZipFile(self.raw, "w", zipfile.ZIP_STORED) as archive:
            bootstrap = resources.files("localrag.bundle").joinpath("bootstrap.py").read_bytes()
            self._add_data(archive, "starter", "starter", manifest.BOOTSTRAP, bootstrap)
            hashes = {source: self._add_source(archive, source) for source in selection.sources}
            models_toml = selection.models_toml(hashes)
            self._add_data(archive, "models_file", manifest.MODELS_FILE, manifest.HOME + manifest.MODELS_FILE, models_toml)
            for name in selection.kbs:
                self._add_knowledge_base(archive, name, settings, exported)
            self._add_wheels(archive, wheels)
            bundle_manifest = self._manifest(selection, wheels)
            archive.writestr(_entry(manifest.MANIFEST, zipfile.ZIP_DEFLATED), bundle_manifest.to_json())
        return bundle_manifest

    def _manifest(self, selection: Selection, wheels: Wheels) -> Manifest:
        is_for_here = bool(wheels.lock)
        return Manifest(
            localrag=metadata.version(ROOT),
            python=f"{sys.version_info.major}.{sys.version_info.minor}" if is_for_here else None,
            python_tag=sys.implementation.cache_tag if is_for_here else None,
            system=platform.system() if is_for_here else None,
            machine=platform.machine() if is_for_here else None,
            libc=" ".join(platform.libc_ver()) if is_for_here else "",
            extras=list(wheels.extras),
            installed_bytes=wheels.installed_bytes,
            default_model=selection.defaults.get("default_model"),
            default_embedder=selection.defaults.get("default_embedder"),
            things=self.things,
            files=self.files,
        )

    def _add_data(self, archive: zipfile.ZipFile, kind: Kind, name: str, path: str, data: bytes) -> None:
        self.things.append(Thing(kind=kind, name=name, path=path))
        self._write(archive, path, data)

    def _add_source(self, archive: zipfile.ZipFile, source: Source) -> str:
        """Add a file or folder as it is. Returns the sha256 of its weights; raises ModelFileError if models.toml gives another one."""
        self.things.append(Thing(kind=source.kind, name=source.name, path=source.path))
        weights = ""
        for path, file in source.files():
            sha256 = self._add_file(archive, path, file, f"{source.kind} {source.name}")
            if file == source.weights:
                weights = sha256
        if source.sha256 is not None and weights != source.sha256:
            raise ModelFileError(
                f"The file of {source.name} is not the one that models.toml describes: its sha256 is {weights}, not {source.sha256}.",
                hint=f"localrag models verify {source.name}",
                name=source.name,
            )
        return weights

    def _add_knowledge_base(self, archive: zipfile.ZipFile, name: str, settings: Settings, exported: Path) -> None:
        from localrag.kb import KnowledgeBase  # noqa: PLC0415  # weight

        self.progress(f"exporting {name}", self.done, self.total)
        with KnowledgeBase.open(settings.kb_dir, name) as kb:
            num_done = self.done + kb.path.stat().st_size
            kb.export(exported)
        path = f"{manifest.KBS}{name}{manifest.KB_SUFFIX}"
        self.things.append(Thing(kind="kb", name=name, path=path))
        self._add_file(archive, path, exported, f"knowledge base {name}")
        self.done = num_done
        exported.unlink()

    def _add_wheels(self, archive: zipfile.ZipFile, wheels: Wheels) -> None:
        if wheels.files:
            self.things.append(Thing(kind="wheels", name="wheels", path=manifest.WHEELS[:-1]))
        for file in wheels.files:
            self._add_file(archive, manifest.WHEELS + file.name, file, "wheels")
        if wheels.lock:
            self._write(archive, manifest.LOCK, wheels.lock.encode("utf-8"))

    def _write(self, archive: zipfile.ZipFile, path: str, data: bytes) -> None:
        archive.writestr(_entry(path, zipfile.ZIP_DEFLATED), data)
        self.files[path] = Content(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))

    def _add_file(self, archive: zipfile.ZipFile, path: str, file: Path, what: str) -> str:
        """Copy a file in blocks; returns its sha256."""
        digest, num_bytes = hashlib.sha256(), 0
        with file.open("rb") as source, archive.open(_entry(path), "w", force_zip64=True) as target:
            while block := source.read(manifest.BLOCK_BYTES):
                target.write(block)
                digest.update(block)
                num_bytes += len(block)
                self.progress(f"packing {what}", self.done + num_bytes, self.total)
        self.done += num_bytes
        self.files[path] = Content(sha256=digest.hexdigest(), num_bytes=num_bytes)
        return digest.hexdigest()


def _entry(name: str, compression: int = zipfile.ZIP_STORED) -> zipfile.ZipInfo:
    """Return an entry of the zip. Models and wheels are stored: they hardly compress, and stored files are read at disk speed."""
    entry = zipfile.ZipInfo(name, _TIME)
    entry.compress_type = compression
    entry.external_attr = 0o100644 << 16
    return entry


def _check_space(out: Path, selection: Selection, wheels: Wheels | None = None) -> None:
    needed_bytes = selection.num_bytes + 2 * selection.largest_kb_bytes  # its export needs two more copies for a moment
    needed_bytes += wheels.num_bytes if wheels else 0
    free_bytes = shutil.disk_usage(out.absolute().parent).free
    if needed_bytes > free_bytes:
        raise BundleError(
            f"The bundle needs about {needed_bytes / 1e6:.0f} MB, but {out.absolute().parent} has {free_bytes / 1e6:.0f} MB free.",
            hint="Free some space, write to another disk, or include less (--kb, --model, --no-wheelhouse).",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        disk_error = file_error(error, error.filename or out, hint="Check the path and its permissions.")
        raise BundleError(f"{error.filename or out}: {disk_error.reason}.", hint=disk_error.hint, **disk_error.numbers) from error
