"""Check that a file is the one that models.toml describes. Results are cached: hashing 98 MB takes 65 ms, and 4 GB take seconds."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localrag.errors import ModelFileError
from localrag.files import replace_text
from localrag.types import ModelSpec

WEIGHTS_FILE = "model.safetensors"
_MAX_REMEMBERED = 256
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The `expected` sha256 (None: models.toml has none) and the `actual` one of `file`, in lower-case hexadecimal."""

    name: str
    file: Path
    expected: str | None
    actual: str

    @property
    def ok(self) -> bool | None:
        """Whether the two are equal; None if no hash is expected."""
        return None if self.expected is None else self.expected == self.actual

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "file": str(self.file), "ok": self.ok, "expected": self.expected, "actual": self.actual}

    def require(self, *, hint: str | None = None) -> None:
        """Raise ModelFileError if the hash differs from an expected one."""
        if self.ok is False:
            raise ModelFileError(
                f"The file of {self.name} is not the one that models.toml describes: "
                f"its sha256 is {self.actual}, not {self.expected} ({self.file}).",
                hint=hint,
                name=self.name,
                file=str(self.file),
                expected=self.expected,
                actual=self.actual,
            )


def hashed_file(spec: ModelSpec, path: Path, *, hint: str | None = None) -> Path:
    """Return the file that an entry's sha256 refers to: the file itself, or the weights in an embedder's folder. Raises ModelFileError."""
    if not path.is_dir():
        return path
    weights = path / WEIGHTS_FILE
    if not weights.is_file():
        raise ModelFileError(f"The folder of {spec.name} has no {WEIGHTS_FILE}: {path}.", hint=hint, name=spec.name, path=str(path))
    return weights


def sha256_of(file: Path) -> str:
    """Return the sha256 of a file, read in pieces. Raises ModelFileError if it cannot be read."""
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}.", path=str(file)) from None


@dataclass(frozen=True, slots=True)
class Checksums:
    """A cache of sha256 by path, size, modification time and inode, in a small JSON file.

    A damaged cache counts as empty; if it cannot be written, files are hashed again. A change that keeps size, time and inode
    goes unnoticed until `measure` reads the file again.
    """

    record: Path

    def known(self, file: Path) -> str | None:
        """Return the cached sha256 if the file has not changed since. Reads only the file's status."""
        try:
            stamp = _stamp(file)
        except OSError:
            return None
        entry = self._load().get(str(file.absolute()))
        return entry[3] if entry is not None and entry[:3] == stamp else None

    def measure(self, file: Path) -> str:
        """Hash the file and cache the result."""
        started_ns = time.time_ns()
        try:
            before = _stamp(file)
            digest = sha256_of(file)
            after = _stamp(file)
        except OSError as error:
            raise ModelFileError(f"{file} cannot be read: {error.strerror}.", path=str(file)) from None
        # A file modified just now may be modified again within one tick of the clock, without a new stamp.
        if before == after and before[1] < started_ns - _SETTLED_NS:
            self._remember(file, (*after, digest))
        return digest

    def _load(self) -> dict[str, tuple[int, int, int, str]]:
        try:
            raw = json.loads(self.record.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        entries = raw.get("files") if isinstance(raw, dict) else None
        if not isinstance(entries, dict):
            return {}
        return {path: entry for path, value in entries.items() if (entry := _entry(value)) is not None}

    def _remember(self, file: Path, entry: tuple[int, int, int, str]) -> None:
        """Write the cache and rename it into place. If two processes write at once, the last one wins: a result may be lost, but
        is never wrong.
        """
        entries = self._load()
        entries.pop(str(file.absolute()), None)
        kept = dict(list(entries.items())[-(_MAX_REMEMBERED - 1) :])
        kept[str(file.absolute())] = entry
        with suppress(OSError):
            replace_text(self.record, json.dumps({"files": kept}))


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _entry(value: object) -> tuple[int, int, int, str] | None:
    """Return an entry of the cache file if it has the right shape."""
    match value:
        case [int(size), int(mtime_ns), int(inode), str(digest)]:
            return size, mtime_ns, inode, digest
    return None
