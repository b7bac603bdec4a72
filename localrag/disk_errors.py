"""Errors of the disk, the file system and SQLite's locks, in words that a person can act on.

A full disk, a missing permission or a busy file says nothing about the data in it, so no message here advises to remove anything.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from dataclasses import dataclass, field
from pathlib import Path

if sys.platform != "win32":
    import resource

_LITTLE_BYTES = 256 * 1024
"""With less, SQLite cannot make the files beside its own, and calls that an I/O error or a file that it cannot open."""
_GO_ON = "Then run the same command again: nothing that was kept is lost."


@dataclass(frozen=True, slots=True)
class DiskError:
    """Why a file cannot be used (`reason`, to stand after a colon), the way out (`hint`), and the numbers for scripts."""

    reason: str
    hint: str
    numbers: dict[str, object] = field(default_factory=dict)


def file_error(error: OSError, path: Path | str | None, *, hint: str) -> DiskError:
    """The explanation of any OSError about `path`. `hint` is the way out where neither disk nor permissions are the cause."""
    return disk_error(error, path) or DiskError(error.strerror or str(error), hint)


def disk_error(error: BaseException, path: Path | str | None) -> DiskError | None:
    """The explanation of an OSError or sqlite3.Error about `path`, None if it has no name.

    None where neither the disk nor permissions nor a lock is the cause.
    """
    number = (error.errno or 0) if isinstance(error, OSError) else 0
    name = (getattr(error, "sqlite_errorname", "") or "").removeprefix("SQLITE_") if isinstance(error, sqlite3.Error) else ""
    file = None if path is None else Path(path)
    return _no_room(number, name, file) or _no_access(number, name, file)


def _no_room(number: int, name: str, file: Path | None) -> DiskError | None:
    """`number` is an errno, `name` that of SQLite's error; 0 and empty where there is none."""
    kind = name.partition("_")[0]
    folder = None if file is None else _nearest_folder(file)
    room = None if folder is None else _room(folder)
    if number == errno.EDQUOT:
        return DiskError("your quota on this disk is used up", f"Free some space, or have the quota raised. {_GO_ON}")
    if number == errno.ENOSPC or kind == "FULL" or (kind in {"IOERR", "CANTOPEN"} and room is not None and room.is_little):
        return _full(folder, room)
    limit = _max_file_bytes()
    if number == errno.EFBIG or (kind == "IOERR" and limit is not None and file is not None and _is_at_limit(file, limit)):
        said = "the file would be larger than this system allows" + ("" if limit is None else f" ({limit:,} bytes)")
        return DiskError(said, f"Raise the limit on file sizes (ulimit -f). {_GO_ON}", {} if limit is None else {"max_bytes": limit})
    return None


def _no_access(number: int, name: str, file: Path | None) -> DiskError | None:
    kind = name.partition("_")[0]
    folder = None if file is None else _nearest_folder(file)
    room = None if folder is None else _room(folder)
    is_refused = kind in {"READONLY", "CANTOPEN"} and file is not None and folder is not None and not _is_writable(file, folder)
    if kind in {"BUSY", "LOCKED"}:
        return DiskError("another localrag is writing to it", "Wait for that one to end, then run the same command again.")
    if number == errno.EROFS or (kind in {"READONLY", "CANTOPEN"} and room is not None and room.is_read_only):
        hint = "Have it mounted for writing, or set LOCALRAG_HOME to a folder that can be written."
        return DiskError("its disk is mounted read-only", hint)
    if number in {errno.EACCES, errno.EPERM} or kind == "PERM" or is_refused:
        hint = "Check the owner and permissions of the file and its folder, or set LOCALRAG_HOME to a folder that can be written."
        return DiskError("permission denied", hint)
    if number == errno.EIO or (kind == "IOERR" and name != "IOERR_SHORT_READ"):  # that one is a file that ends too early
        detail = f" ({name})" if name else ""
        hint = "Check the disk and the system's log, and copy the home to another disk before you go on (LOCALRAG_HOME moves it)."
        return DiskError(f"the disk reports an error{detail}", hint)
    return None


@dataclass(frozen=True, slots=True)
class _Room:
    free_bytes: int
    has_free_files: bool
    is_read_only: bool

    @property
    def is_little(self) -> bool:
        return self.free_bytes < _LITTLE_BYTES or not self.has_free_files


def _full(folder: Path | None, room: _Room | None) -> DiskError:
    if folder is None or room is None:
        return DiskError("the disk is full", f"Free some space. {_GO_ON}")
    numbers: dict[str, object] = {"free_bytes": room.free_bytes}
    if not room.has_free_files:
        return DiskError(f"the disk of {folder} is full: it holds no more files", f"Remove some files from that disk. {_GO_ON}", numbers)
    return DiskError(f"the disk of {folder} is full: {room.free_bytes:,} bytes are free", f"Free some space. {_GO_ON}", numbers)


def _room(folder: Path) -> _Room | None:
    if not hasattr(os, "statvfs"):
        return None
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return _Room(
        free_bytes=status.f_bavail * status.f_frsize,
        has_free_files=not status.f_files or status.f_favail > 0,  # some file systems count none
        is_read_only=bool(status.f_flag & os.ST_RDONLY),
    )


def _max_file_bytes() -> int | None:
    """The largest file that this process may write; None where there is no limit."""
    if sys.platform == "win32":
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _is_at_limit(path: Path, limit: int) -> bool:
    """Whether SQLite's file, or the log beside it, is about as large as it may be."""
    files = (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"))
    return any(file.stat().st_size + _LITTLE_BYTES > limit for file in files if file.is_file())


def _nearest_folder(path: Path) -> Path:
    """The folder itself, or the one that the file is in or would be."""
    return next((folder for folder in (path, *path.parents) if os.path.isdir(folder)), Path(path.anchor or "."))  # noqa: PTH112  # is_dir can raise


def _is_writable(path: Path, folder: Path) -> bool:
    """For this user: SQLite also writes beside its file."""
    try:
        return os.access(folder, os.W_OK | os.X_OK) and (not path.exists() or os.access(path, os.R_OK | os.W_OK))
    except OSError:
        return False
