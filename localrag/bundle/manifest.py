"""The manifest of a bundle, and the checks that an archive agrees with it.

A bundle may come from anyone, so none of its names, sizes and contents is trusted before it is checked. The sha256 of every file in the
manifest detects damage. Only the sha256 of the whole bundle, sent by another route, detects forgery.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from localrag.errors import BundleError
from localrag.kb.names import NAME as KB_NAME

FORMAT: Final = "localrag bundle"
VERSION: Final = 1
MANIFEST, BOOTSTRAP, MODELS_FILE = "manifest.json", "__main__.py", "models.toml"
HOME, WHEELS, KBS = "home/", "wheels/", "kb/"
LOCK = WHEELS + "requirements.lock"
KB_SUFFIX = ".kb"
BLOCK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 8 << 20
_MAX_FILES = 100_000
_MAX_NAME_CHARS = 512
_MAX_RATIO = 1100  # deflate compresses to a thousandth at most; an entry that claims more lies about its size
_FLAG_ENCRYPTED = 0x1
_ARCHIVE_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, RuntimeError, ValueError)
"""Exceptions of zipfile for an archive that is damaged, encrypted, or compressed in an unknown way."""

Kind = Literal["models_file", "model", "template", "embedder", "copy", "kb", "wheels", "starter"]
"""Kind of a thing in a bundle. A "copy" is an embedder converted for llama.cpp; the "starter" is bootstrap.py."""
_PLACES: dict[str, re.Pattern[str]] = {
    "starter": re.compile(re.escape(BOOTSTRAP)),
    "models_file": re.compile(re.escape(HOME + MODELS_FILE)),
    "model": re.compile(re.escape(HOME) + "models/.+"),
    "template": re.compile(re.escape(HOME) + r"models/templates/[A-Za-z0-9._-]+\.jinja"),
    "embedder": re.compile(re.escape(HOME) + "models/.+"),
    "copy": re.compile(re.escape(HOME) + r"embedders/[0-9a-f]{8,64}\.(gguf|json)"),
    "kb": re.compile(f"{KBS}({KB_NAME.pattern}){re.escape(KB_SUFFIX)}"),
    "wheels": re.compile(re.escape(WHEELS[:-1])),
}
"""Paths allowed for each kind. No other place in a home can be written."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Content(_Strict):
    """Size and sha256 of one file."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    num_bytes: Annotated[int, Field(ge=0, le=2**62)]


class Thing(_Strict):
    """A model, knowledge base or other part of a bundle. `path` is a file, or a folder with all its files."""

    kind: Kind
    name: Annotated[str, Field(max_length=200)]
    path: Annotated[str, Field(max_length=_MAX_NAME_CHARS)]

    @property
    def target(self) -> str:
        """Its path relative to the home, if its path is under home/."""
        return self.path.removeprefix(HOME)


class Manifest(_Strict):
    """Everything in a bundle. `python`, `system` and `machine` are the platform of fetched wheels; None for ready wheels or none."""

    format: Literal["localrag bundle"] = FORMAT
    version: Literal[1] = VERSION
    localrag: Annotated[str, Field(max_length=100)]
    python: Annotated[str, Field(max_length=20)] | None
    python_tag: Annotated[str, Field(max_length=20)] | None
    system: Annotated[str, Field(max_length=60)] | None
    machine: Annotated[str, Field(max_length=60)] | None
    libc: Annotated[str, Field(max_length=60)]
    extras: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")]]
    installed_bytes: Annotated[int, Field(ge=0, le=2**62)]
    default_model: Annotated[str, Field(max_length=200)] | None
    default_embedder: Annotated[str, Field(max_length=200)] | None
    things: Annotated[list[Thing], Field(max_length=_MAX_FILES)]
    files: dict[str, Content]

    def of_kind(self, *kinds: Kind) -> list[Thing]:
        """Return the things of these kinds, in the order of the kinds."""
        return [thing for kind in kinds for thing in self.things if thing.kind == kind]

    def files_of(self, thing: Thing) -> dict[str, Content]:
        """Return the files of a thing by their names in the bundle."""
        below = f"{thing.path}/"
        return {name: content for name, content in self.files.items() if name == thing.path or name.startswith(below)}

    def num_bytes_of(self, thing: Thing) -> int:
        return sum(content.num_bytes for content in self.files_of(thing).values())

    def to_json(self) -> bytes:
        return json.dumps(self.model_dump(), indent=1).encode("utf-8")


class Bundle:
    """An open bundle whose names and sizes agree with its manifest. The contents of files are checked as they are read."""

    def __init__(self, file: Path, archive: zipfile.ZipFile) -> None:
        self.file = file
        self._archive = archive
        entries = _entries(file, archive)
        self.manifest = _manifest(file, archive, entries.pop(MANIFEST, None))
        _check_things(file, self.manifest)
        _check_entries(file, self.manifest, entries)

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield a file's bytes. Raises BundleError as soon as there are too many, and at the end if the sha256 differs."""
        content = self.manifest.files[name]
        digest, remaining_bytes = hashlib.sha256(), content.num_bytes
        with _archive_errors(self.file), self._archive.open(name) as source:
            while block := source.read(BLOCK_BYTES):
                remaining_bytes -= len(block)
                if remaining_bytes < 0:
                    raise refusal(self.file, f"{name} is longer than the manifest says")
                digest.update(block)
                yield block
        if remaining_bytes or digest.hexdigest() != content.sha256:
            raise refusal(self.file, f"{name} is damaged")


@contextmanager
def open_bundle(file: Path) -> Iterator[Bundle]:
    """Open a bundle for reading. Raises BundleError for every fault of it, here and while it is read."""
    try:
        raw = file.open("rb")
    except OSError as error:
        raise BundleError(f"{file} cannot be read: {error.strerror or error}.", hint="Check the path.", file=str(file)) from None
    with raw:
        with _archive_errors(file):
            archive = zipfile.ZipFile(raw)
            bundle = Bundle(file, archive)
        yield bundle


def refusal(file: Path, reason: str) -> BundleError:
    """Return the error for a bundle that is invalid for `reason`."""
    return BundleError(
        f"{file} cannot be unbundled: {reason}.", hint="Copy it again, or make it again with localrag bundle.", file=str(file)
    )


def is_safe_name(name: str) -> bool:
    """Whether a name is that of a file that stays in its folder on any operating system."""
    if not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable() or any(mark in name for mark in '\\:*?"<>|'):
        return False
    return all(part not in {"", ".", ".."} and part == part.strip() and not part.endswith(".") for part in name.split("/"))


@contextmanager
def _archive_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except _ARCHIVE_ERRORS as error:
        raise refusal(file, f"it is damaged ({' '.join(str(error).split())[:200]})") from error


def _entries(file: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the archive's entries by name. Raises BundleError unless all are plain files with safe and distinct names."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        name = entry.filename
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if not is_safe_name(name):
            raise refusal(file, f"it has an unsafe name, {name[:200]!r}")
        if name in entries:
            raise refusal(file, f"it has {name} twice")
        if kind not in {0, stat.S_IFREG}:
            raise refusal(file, f"{name} is not a regular file")
        if entry.flag_bits & _FLAG_ENCRYPTED or entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise refusal(file, f"{name} is encrypted, or compressed in a way that localrag does not use")
        if entry.file_size > _MAX_RATIO * max(1, entry.compress_size):
            raise refusal(file, f"{name} claims an impossible compression ratio")
        entries[name] = entry
    if len({name.casefold() for name in entries}) < len(entries):  # on some file systems, one would overwrite the other
        raise refusal(file, "it has names that differ only in case")
    return entries


def _manifest(file: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo | None) -> Manifest:
    if entry is None:
        raise refusal(file, "it has no manifest, so localrag did not make it")
    with archive.open(entry) as source:
        data = source.read(_MAX_MANIFEST_BYTES + 1)
    if len(data) > _MAX_MANIFEST_BYTES:
        raise refusal(file, "its manifest is too long")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise refusal(file, "its manifest is not valid JSON") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise refusal(file, "localrag did not make it")
    if raw.get("version") != VERSION:
        raise refusal(file, f"its format has version {str(raw.get('version'))[:20]!r}, and this localrag reads only version {VERSION}")
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part)[:60] for part in fault["loc"])
        raise refusal(file, f"its manifest is invalid ({field!r}: {fault['msg']})") from None


def _check_things(file: Path, manifest: Manifest) -> None:
    """Check that each thing is where its kind is allowed, none is inside another, and every file belongs to one."""
    paths: set[str] = set()
    for thing in manifest.things:
        if not is_safe_name(thing.path) or _PLACES[thing.kind].fullmatch(thing.path) is None:
            raise refusal(file, f"it has a {thing.kind} in {thing.path!r}, where none is allowed")
        if thing.kind == "kb" and thing.path != f"{KBS}{thing.name}{KB_SUFFIX}":
            raise refusal(file, f"it has a knowledge base {thing.name!r} in {thing.path}")
        if thing.path in paths:
            raise refusal(file, f"it has {thing.path} twice")
        paths.add(thing.path)
    for path in paths:
        if any(parent in paths for parent in _parents(path)):
            raise refusal(file, f"it has {path} inside something else")
    for name in manifest.files:
        if name not in paths and not any(parent in paths for parent in _parents(name)):
            raise refusal(file, f"{name[:200]!r} belongs to nothing in it")


def _check_entries(file: Path, manifest: Manifest, entries: dict[str, zipfile.ZipInfo]) -> None:
    """Check that the archive holds exactly the files of the manifest, with the same sizes."""
    if missing := manifest.files.keys() - entries.keys():
        raise refusal(file, f"it lacks {min(missing)[:200]!r}")
    if extra := entries.keys() - manifest.files.keys():
        raise refusal(file, f"it has {min(extra)}, which is not in its manifest")
    for name, entry in entries.items():
        if entry.file_size != manifest.files[name].num_bytes:
            raise refusal(file, f"{name} has another size than the manifest says")
    for thing in manifest.things:
        if not manifest.files_of(thing):
            raise refusal(file, f"it has no files for {thing.path}")
    if sum(entry.compress_size for entry in entries.values()) > file.stat().st_size:
        raise refusal(file, "its files overlap")


def _parents(name: str) -> Iterator[str]:
    """Yield the folders that a name is in."""
    parts = name.split("/")
    return ("/".join(parts[:number]) for number in range(1, len(parts)))
