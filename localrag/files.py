"""Private files and folders, locks, disk errors, JSON lines, and the schema versions of SQLite files.

The home holds questions, answers and documents, so its folders get the mode 0700 and its files 0600, whatever the umask. The umask of the
process is never changed, since a program that imports localrag creates files of its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from localrag.errors import LocalragError, UsageError

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS = 0o077

_IN_HOME = re.compile(
    r"journal\.sqlite.*|kb|models|embedders|eval|exports|prefixes|chat-history|server-token|models\.toml.*|config\.toml"
    r"|(?:answerability|attention|loads|speeds|trials|verified)\.json"
    r"|\.(?:answerability|attention|config|loads|models|pull|speeds|trials|unbundle|verified)[.-].*"
)
"""Names that localrag gives to entries of its home."""


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents with the mode 0700. An existing folder keeps its mode. Raises OSError."""
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def create_private(path: Path) -> None:
    """Create an empty file with the mode 0600, for a library that opens files by name. Keep an existing file. Raises OSError.

    On Linux no descriptor is opened: closing one would drop the locks that SQLite holds on the file in another thread.
    """
    with suppress(FileExistsError):
        if sys.platform == "linux":  # elsewhere mknod needs the superuser
            try:
                os.mknod(path, FILE_MODE | stat.S_IFREG)
            except FileExistsError:
                return
            except OSError:  # unsupported by the file system; for other errors os.open below raises
                pass
            else:
                return
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))


def open_private(path: Path, mode: str, *, encoding: str | None = None) -> IO[Any]:
    """Open a file for writing; a new file gets the mode 0600. Raises OSError."""
    return open(path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, FILE_MODE))  # Path.open has no opener


@contextmanager
def atomic_write(path: Path, *, suffix: str = "", fsync: bool = True, replace: bool = True) -> Iterator[IO[bytes]]:
    """Yield a private temporary file in the folder of `path` (mode 0600). Rename it to `path` if the block succeeds, else remove it.

    A killed process leaves `.NAME-*` with the `suffix`. `fsync` flushes the bytes to disk before the rename. Without `replace`, an existing
    `path` raises FileExistsError. OSError propagates.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", suffix=suffix, dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as out:
            yield out
            if fsync:
                out.flush()
                os.fsync(out.fileno())
        if replace:
            part.replace(path)
        else:
            _put_new(part, path)
    finally:
        with suppress(OSError):
            part.unlink()


def _put_new(part: Path, path: Path) -> None:
    """Rename a file, or raise FileExistsError if the new name is taken. Safe against another process that creates it meanwhile."""
    try:
        path.hardlink_to(part)
    except FileExistsError:
        raise
    except OSError:  # FAT, common on USB sticks, has no hard links
        path.touch(exist_ok=False)
        part.replace(path)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, if the system supports it. OSError propagates."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_PART = re.compile(r"(?P<start>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 999


def split_parts(file: str) -> tuple[str, ...]:
    """Return the names of all parts of a split GGUF file, given any of them ("big-00001-of-00003.gguf"); else only `file` itself."""
    match = _PART.fullmatch(file)
    count = 1 if match is None else int(match["count"])
    if match is None or not 1 < count <= _MAX_PARTS or not 1 <= int(match["number"]) <= count:
        return (file,)
    return tuple(f"{match['start']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))


class JsonCache:
    """A cache in a small JSON file: the last `most` values by key, newest last. With `path` None it stores nothing.

    A damaged or unreadable file counts as empty, and write errors are ignored. The file is replaced atomically. If two processes write at
    the same time, one entry can be lost.
    """

    def __init__(self, path: Path | None, *, most: int) -> None:
        self.path = path
        self.most = most

    def read(self) -> dict[str, object]:
        with suppress(OSError, ValueError, RecursionError):
            values = {} if self.path is None else json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(values, dict):
                return values
        return {}

    def put(self, key: str, value: object) -> None:
        if self.path is None:
            return
        values = self.read()
        values.pop(key, None)
        values[key] = value
        for old in list(values)[: -self.most]:
            del values[old]
        with suppress(OSError):
            replace_text(self.path, json.dumps(values, separators=(",", ":")))


def replace_text(path: Path, text: str) -> None:
    """Replace a small file that can be recreated, so without flushing it. Create its folder if needed. OSError propagates."""
    make_private_folder(path.parent)
    with atomic_write(path, fsync=False) as out:
        out.write(text.encode("utf-8"))


def secure_home(home: Path, default: Path | None = None) -> str | None:
    """Make a home private. Return a notice if other users could read something in it until now, else None.

    Only files and folders of this user are changed, and links are not followed. A home that also holds other programs' entries, such as
    /tmp, keeps its own mode unless it is the `default` home; localrag's entries become private in any case. File systems without modes are
    left unchanged. For a private home, the check costs one stat per entry and does not walk folders.
    """
    if os.name != "posix":
        return None
    try:
        status = home.stat()
        with os.scandir(home) as listed:
            entries = list(listed)
    except OSError:
        return None  # not created yet, or unusable, which the command that needs it reports
    own = [entry for entry in entries if _IN_HOME.fullmatch(entry.name)]
    exposed = [entry for entry in own if _is_exposed(entry.path)]
    for entry in exposed:  # the home comes last, so that the next run continues if this one is killed
        _secure_tree(entry.path)
    is_open = bool(status.st_mode & _OTHERS)
    if is_open and not status.st_mode & stat.S_ISVTX and (len(own) == len(entries) or home == default):
        _secure(os.path.realpath(home))
    if not is_open or not exposed or any(_is_exposed(entry.path) for entry in exposed):
        return None
    return f"Other users of this machine could read {home}. Now only you can (folders 0700, files 0600)."


def _secure_tree(path: str) -> None:
    """Secure the leaves first: if the run is killed, the top folder is still exposed, so the next run continues."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            _secure(os.path.join(folder, name))  # noqa: PTH118  # names may be any bytes
        _secure(folder)
    _secure(path)


def _secure(path: str) -> None:
    with suppress(OSError):  # removed meanwhile, or a file system without modes
        if _is_exposed(path):
            os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode) & ~_OTHERS)  # noqa: PTH101


def _is_exposed(path: str) -> bool:
    """Tell whether this is a file or folder of this user that others can access."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid == os.geteuid() and bool(status.st_mode & _OTHERS)


@contextmanager
def locked(path: Path, *, wait_s: float = 0.0, on_wait: Callable[[], None] | None = None) -> Iterator[int]:
    """Hold the lock of a file, creating the file if needed, and yield its descriptor. The system frees the lock if the process dies.

    `on_wait` is called once if another process holds the lock. TimeoutError if it still does after `wait_s` seconds; a negative `wait_s`
    waits without limit. OSError propagates, including on file systems without locks.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415  # 25 ms

    descriptors: list[int] = []
    # A soft lock, the library's substitute where flock is missing, would outlive a killed holder.
    lock = FileLock(path, mode=FILE_MODE, thread_local=False, fallback_to_soft=False, on_acquired=descriptors.append)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if wait_s == 0:
            raise
        if on_wait is not None:
            on_wait()
        lock.acquire(timeout=wait_s)
    try:
        yield descriptors[-1]
    finally:
        lock.release()


def lock_open_file(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file. Return whether the lock was free, or with `wait`, block until it is. Closing the file frees the lock."""
    from filelock import lock_descriptor  # noqa: PLC0415  # as above

    return lock_descriptor(descriptor, blocking=wait)


if sys.platform != "win32":
    import resource

_LITTLE_BYTES = 256 * 1024
"""With less free space, SQLite cannot create its side files and reports IOERR or CANTOPEN."""
_GO_ON = "Then run the same command again: no saved data is lost."


@dataclass(frozen=True, slots=True)
class DiskError:
    """Why a file cannot be used: `reason` (follows a colon), `hint` (how to fix it), and the numbers for scripts."""

    reason: str
    hint: str
    numbers: dict[str, object] = field(default_factory=dict)


def file_error(error: OSError, path: Path | str | None, *, hint: str) -> DiskError:
    """Explain any OSError about `path`. `hint` is used if neither the disk nor permissions are the cause."""
    return disk_error(error, path) or DiskError(error.strerror or str(error), hint)


def disk_error(error: BaseException, path: Path | str | None) -> DiskError | None:
    """Explain an OSError or sqlite3.Error about `path` (None if unknown).

    Returns None if neither the disk, permissions nor a lock is the cause.
    """
    number = (error.errno or 0) if isinstance(error, OSError) else 0
    name = (getattr(error, "sqlite_errorname", "") or "").removeprefix("SQLITE_") if isinstance(error, sqlite3.Error) else ""
    file = None if path is None else Path(path)
    return _no_room(number, name, file) or _no_access(number, name, file)


def _no_room(number: int, name: str, file: Path | None) -> DiskError | None:
    """Explain a full disk, a quota or a size limit. `number` is an errno (or 0), `name` the name of SQLite's error (or "")."""
    kind = name.partition("_")[0]
    folder = None if file is None else _nearest_folder(file)
    room = None if folder is None else _room(folder)
    if number == errno.EDQUOT:
        return DiskError("your quota on this disk is used up", f"Free some space, or have the quota raised. {_GO_ON}")
    if number == errno.ENOSPC or kind == "FULL" or (kind in {"IOERR", "CANTOPEN"} and room is not None and room.is_little):
        return _full(folder, room)
    limit = _max_file_bytes()
    if number == errno.EFBIG or (kind == "IOERR" and limit is not None and file is not None and _is_at_limit(file, limit)):
        reason = "the file would be larger than this system allows" + ("" if limit is None else f" ({limit:,} bytes)")
        return DiskError(reason, f"Raise the limit on file sizes (ulimit -f). {_GO_ON}", {} if limit is None else {"max_bytes": limit})
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
    if number == errno.EIO or (kind == "IOERR" and name != "IOERR_SHORT_READ"):  # a short read means a truncated file
        detail = f" ({name})" if name else ""
        hint = "Check the disk and the system's log, and copy the home to another disk before you continue (LOCALRAG_HOME moves it)."
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
        return DiskError(f"the disk of {folder} is full: it has no free inodes", f"Remove some files from that disk. {_GO_ON}", numbers)
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
        has_free_files=not status.f_files or status.f_favail > 0,  # some file systems report 0 files
        is_read_only=bool(status.f_flag & os.ST_RDONLY),
    )


def _max_file_bytes() -> int | None:
    """Return the largest file size that this process may write; None for no limit."""
    if sys.platform == "win32":
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _is_at_limit(path: Path, limit: int) -> bool:
    """Tell whether SQLite's file, or one of its side files, has almost reached the size limit."""
    files = (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"))
    return any(file.stat().st_size + _LITTLE_BYTES > limit for file in files if file.is_file())


def _nearest_folder(path: Path) -> Path:
    """Return the path itself if it is a folder, else the nearest existing folder above it."""
    return next((folder for folder in (path, *path.parents) if os.path.isdir(folder)), Path(path.anchor or "."))  # noqa: PTH112  # is_dir can raise


def _is_writable(path: Path, folder: Path) -> bool:
    """Tell whether this user can write the file and its folder: SQLite also creates side files."""
    try:
        return os.access(folder, os.W_OK | os.X_OK) and (not path.exists() or os.access(path, os.R_OK | os.W_OK))
    except OSError:
        return False


_PIECE_BYTES = 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def check_regular(path: Path, hint: str) -> None:
    """Raise UsageError unless `path` is a readable regular file. `hint` is for paths that are not files."""
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        if is_file:
            path.open("rb").close()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.", hint="Check the path and its permissions.") from None
    if not is_file:
        raise UsageError(f"{path} is not a file.", hint=hint)


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number (from 1) and bytes of each line that is not blank; None in place of a line longer than `max_bytes`."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(max_bytes + 1):
            number += 1
            if len(raw) > max_bytes and not raw.endswith(b"\n"):
                while (rest := file.readline(_PIECE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
            elif text := (raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw).strip():
                yield number, text


def read_object(raw: bytes, like: str) -> dict[str, Any]:
    """Parse one line as a JSON object. Raises UsageError for invalid UTF-8 or JSON, a repeated key, or NaN. `like` is an example
    for the hint.
    """
    hint = f"Write {like} on each line."
    try:
        row = json.loads(raw.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise UsageError(f"it is not UTF-8 text (byte {error.start}).") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not JSON: {str(error)[:200]}.", hint=hint) from None
    if not isinstance(row, dict):
        raise UsageError("it is not a JSON object.", hint=hint)
    return row


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key is repeated")
    return row


Migration = Callable[[sqlite3.Connection], None]


@contextmanager
def sqlite_transaction(db: sqlite3.Connection, kind: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE") -> Iterator[None]:
    """Run a transaction: all or nothing. There is one IMMEDIATE at a time; DEFERRED gives all reads inside the same snapshot."""
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def prepare_sqlite(db: sqlite3.Connection, migrate: Migration, *, wait_s: float) -> None:
    """Make an opened file ready: a write-ahead log, the current schema through `migrate`, and commits that survive a crash of the machine.

    Waits up to `wait_s` seconds for other processes that create the file.
    """
    if version(db) == 0:  # new, or its creator was killed; the file remembers its journal mode
        use_write_ahead_log(db, wait_s=wait_s)
    migrate(db)
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")


def version(db: sqlite3.Connection) -> int:
    """Return the number of migrations that the file has had."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def apply_missing(db: sqlite3.Connection, migrations: Sequence[Migration], newer: Callable[[int], LocalragError]) -> None:
    """Apply the missing migrations, each in one transaction.

    A file from a newer localrag is left unchanged, and the error that `newer` makes of its version is raised.
    """
    while (num_applied := version(db)) < len(migrations):
        with sqlite_transaction(db):
            if version(db) == num_applied:  # otherwise another process has just applied it
                migrations[num_applied](db)
                db.execute(f"PRAGMA user_version = {num_applied + 1}")
    if num_applied > len(migrations):
        raise newer(num_applied)


def use_write_ahead_log(db: sqlite3.Connection, *, wait_s: float) -> None:
    """Turn on write-ahead logging, waiting up to `wait_s` seconds for other processes.

    Several processes can create the file at the same time, and SQLite's busy timeout does not cover this step.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return
