"""What a bundle says of itself, and an archive that is held to it.

A bundle may come from anybody: of its names, sizes and contents nothing is believed before it was compared. The manifest has the sha256 of
every file, so damage on the way is found; against a forger only the sha256 of the whole bundle helps, told by another way.
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
from typing import IO, Annotated, Final, Literal

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
_MAX_RATIO = 1100  # deflate packs a thousandth at most: what claims more is no deflate
_FLAG_ENCRYPTED = 0x1
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, RuntimeError, ValueError)
"""What zipfile raises for an archive that is damaged, encrypted, or packed in a way it does not know."""

Kind = Literal["models_file", "model", "template", "embedder", "copy", "kb", "wheels", "starter"]
"""What a thing is; a "copy" is of an embedder, for llama.cpp."""
_WHERE: dict[str, re.Pattern[str]] = {
    "starter": re.compile(re.escape(BOOTSTRAP)),
    "models_file": re.compile(re.escape(HOME + MODELS_FILE)),
    "model": re.compile(re.escape(HOME) + "models/.+"),
    "template": re.compile(re.escape(HOME) + r"models/templates/[A-Za-z0-9._-]+\.jinja"),
    "embedder": re.compile(re.escape(HOME) + "models/.+"),
    "copy": re.compile(re.escape(HOME) + r"embedders/[0-9a-f]{8,64}\.(gguf|json)"),
    "kb": re.compile(f"{KBS}({KB_NAME.pattern}){re.escape(KB_SUFFIX)}"),
    "wheels": re.compile(re.escape(WHEELS[:-1])),
}
"""Where a thing may lie: nothing else of a home can be named."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Content(_Strict):
    """One file of the bundle."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    num_bytes: Annotated[int, Field(ge=0, le=2**62)]


class Thing(_Strict):
    """What one path of the bundle is: a file, or a folder with all that is below it."""

    kind: Kind
    name: Annotated[str, Field(max_length=200)]
    path: Annotated[str, Field(max_length=_MAX_NAME_CHARS)]

    @property
    def target(self) -> str:
        """Its place in a home, for what has one."""
        return self.path.removeprefix(HOME)


class Manifest(_Strict):
    """`python`, `system` and `machine` are those that the wheels are for; None where ready wheels were given, and pip decides."""

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

    def files_of(self, thing: Thing) -> dict[str, Content]:
        """The files that make up a thing, by their names in the bundle."""
        below = f"{thing.path}/"
        return {name: content for name, content in self.files.items() if name == thing.path or name.startswith(below)}

    def num_bytes_of(self, thing: Thing) -> int:
        return sum(content.num_bytes for content in self.files_of(thing).values())

    def to_json(self) -> bytes:
        return json.dumps(self.model_dump(), indent=1).encode("utf-8")


class Bundle:
    """An archive whose names, sizes and manifest agree. What is in its files is compared as they are read."""

    def __init__(self, file: Path, archive: zipfile.ZipFile) -> None:
        self.file = file
        self._archive = archive
        entries = _entries(file, archive)
        self.manifest = _manifest(file, archive, entries.pop(MANIFEST, None))
        _check_things(file, self.manifest)
        _check_entries(file, self.manifest, entries)

    def pieces(self, name: str) -> Iterator[bytes]:
        """A file's bytes. BundleError at the end where they are not those that the manifest speaks of, and before there are more."""
        content = self.manifest.files[name]
        digest, left = hashlib.sha256(), content.num_bytes
        with _damage(self.file), self._archive.open(name) as source:
            while piece := source.read(BLOCK_BYTES):
                left -= len(piece)
                if left < 0:
                    raise refused(self.file, f"{name} is longer than it says")
                digest.update(piece)
                yield piece
        if left or digest.hexdigest() != content.sha256:
            raise refused(self.file, f"{name} is damaged")


@contextmanager
def opened(file: Path) -> Iterator[Bundle]:
    """A bundle to be read. BundleError for whatever is wrong with it, also while it is read."""
    try:
        raw = file.open("rb")
    except OSError as error:
        raise BundleError(f"{file} cannot be read: {error.strerror or error}.", hint="Check the path.", file=str(file)) from None
    with raw:
        with _damage(file):
            archive = zipfile.ZipFile(raw)
            bundle = Bundle(file, archive)
        yield bundle


@contextmanager
def _damage(file: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise refused(file, f"it is damaged ({' '.join(str(error).split())[:200]})") from error


def copy(pieces: Iterator[bytes], out: IO[bytes]) -> int:
    """Writes all pieces; gives how many bytes they are."""
    return sum(out.write(piece) for piece in pieces)


def refused(file: Path, reason: str) -> BundleError:
    return BundleError(
        f"{file} cannot be unbundled: {reason}.", hint="Copy it again and whole, or make it again (localrag bundle).", file=str(file)
    )


def _entries(file: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """What the archive lists, by name: plain files with harmless names, each once."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        name = entry.filename
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if not is_harmless(name):
            raise refused(file, f"it has an unsafe name, {name[:200]!r}")
        if name in entries:
            raise refused(file, f"it has {name} twice")
        if kind not in {0, stat.S_IFREG}:
            raise refused(file, f"{name} is a link or no file")
        if entry.flag_bits & _FLAG_ENCRYPTED or entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise refused(file, f"{name} is encrypted, or packed in another way than localrag does")
        if entry.file_size > _MAX_RATIO * max(1, entry.compress_size):
            raise refused(file, f"{name} is packed too tightly to be true")
        entries[name] = entry
    folded = {name.casefold() for name in entries}
    if len(folded) < len(entries):  # on some file systems one of them would be written over the other
        raise refused(file, "it has names that differ only by their case")
    return entries


def is_harmless(name: str) -> bool:
    """Whether a name stays in the folder that it starts in, on any system, and is that of a file."""
    if not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable() or any(mark in name for mark in '\\:*?"<>|'):
        return False
    return all(part not in {"", ".", ".."} and part == part.strip() and not part.endswith(".") for part in name.split("/"))


def _manifest(file: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo | None) -> Manifest:
    if entry is None:
        raise refused(file, "it is not one that localrag made: it has no manifest")
    with archive.open(entry) as source:
        data = source.read(_MAX_MANIFEST_BYTES + 1)
    if len(data) > _MAX_MANIFEST_BYTES:
        raise refused(file, "its manifest is too long")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise refused(file, "its manifest is no JSON") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise refused(file, "it is not one that localrag made")
    if raw.get("version") != VERSION:
        raise refused(file, f"it is of version {str(raw.get('version'))[:20]!r}, and this localrag knows version {VERSION}")
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part)[:60] for part in fault["loc"])
        raise refused(file, f"its manifest is not as localrag writes it ({place!r}: {fault['msg']})") from None


def _check_things(file: Path, manifest: Manifest) -> None:
    """Each thing where its kind may lie, none inside another, and none twice."""
    paths: set[str] = set()
    for thing in manifest.things:
        if not is_harmless(thing.path) or _WHERE[thing.kind].fullmatch(thing.path) is None:
            raise refused(file, f"it has a {thing.kind} in {thing.path!r}, where none may be")
        if thing.kind == "kb" and thing.path != f"{KBS}{thing.name}{KB_SUFFIX}":
            raise refused(file, f"it has a knowledge base {thing.name!r} in {thing.path}")
        if thing.path in paths:
            raise refused(file, f"it has {thing.path} twice")
        paths.add(thing.path)
    for path in paths:
        if any(above in paths for above in _above(path)):
            raise refused(file, f"it has {path} inside of something else")
    for name in manifest.files:
        if name not in paths and not any(above in paths for above in _above(name)):
            raise refused(file, f"{name[:200]!r} is of nothing that it has")


def _check_entries(file: Path, manifest: Manifest, entries: dict[str, zipfile.ZipInfo]) -> None:
    """What the archive lists is what the manifest lists, with the same sizes."""
    if missing := manifest.files.keys() - entries.keys():
        raise refused(file, f"it lacks {min(missing)[:200]!r}")
    if extra := entries.keys() - manifest.files.keys():
        raise refused(file, f"it has {min(extra)}, which is not in its manifest")
    for name, entry in entries.items():
        if entry.file_size != manifest.files[name].num_bytes:
            raise refused(file, f"{name} has another size than it says")
    for thing in manifest.things:
        if not manifest.files_of(thing):
            raise refused(file, f"it has nothing of {thing.path}")
    if sum(entry.compress_size for entry in entries.values()) > file.stat().st_size:
        raise refused(file, "its files lie on top of each other")


def _above(name: str) -> Iterator[str]:
    """The folders that a name lies in."""
    parts = name.split("/")
    return ("/".join(parts[:number]) for number in range(1, len(parts)))
