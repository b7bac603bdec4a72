"""Private files and folders: only their owner can read them, whatever the umask.

The home holds questions, answers and documents. Its folders have the mode 0700 and its files 0600. Every function leaves the umask of the
process alone, because a program that imports localrag has files of its own.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS = 0o077

_IN_HOME = re.compile(
    r"journal\.sqlite.*|kb|models|embedders|eval|exports|prefixes|chat-history|server-token|models\.toml.*"
    r"|(?:attention|loads|speeds|trials|verified)\.json"
    r"|\.(?:attention|loads|models|pull|speeds|trials|unbundle|verified)[.-].*"
)
"""The names that localrag gives to entries of a home."""


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, each with the mode 0700. One that exists keeps its mode. OSError as it comes."""
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def create_private(path: Path) -> None:
    """Create an empty file with the mode 0600 for a library that opens it by name. One that exists stays as it is. OSError as it comes.

    No descriptor is opened where the system allows: closing one would drop the locks that SQLite holds on the file in another thread.
    """
    with suppress(FileExistsError):
        if sys.platform == "linux":  # elsewhere it is for the superuser
            try:
                os.mknod(path, FILE_MODE | stat.S_IFREG)
            except FileExistsError:
                return
            except OSError:  # a file system that does not know it; what else is wrong, the next line says
                pass
            else:
                return
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))


def open_private(path: Path, mode: str, *, encoding: str | None = None) -> IO[Any]:
    """`open` for writing, where a new file gets the mode 0600. OSError as it comes."""
    return open(path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, FILE_MODE))  # Path.open has no opener


def secure_home(home: Path, default: Path | None = None) -> str | None:
    """Close a home to other users. Return a line that says so if they could read something in it until now.

    Only files and folders of this user are changed, and no link is followed. The mode of the home itself stays where it holds entries of
    others, as /tmp does, unless it is the `default` home: what localrag keeps in it is private all the same. A file system that has no
    modes stays as it is. The usual home costs one look at each of its entries, and no walk.
    """
    if os.name != "posix":
        return None
    try:
        status = home.stat()
        with os.scandir(home) as listed:
            entries = list(listed)
    except OSError:
        return None  # not there yet; or the command that needs it says why it cannot be used
    own = [entry for entry in entries if _IN_HOME.fullmatch(entry.name)]
    exposed = [entry for entry in own if _is_exposed(entry.path)]
    for entry in exposed:  # the home comes last, so that a run that is killed here leaves a reason to go on
        _secure_tree(entry.path)
    is_open = bool(status.st_mode & _OTHERS)
    if is_open and not status.st_mode & stat.S_ISVTX and (len(own) == len(entries) or home == default):
        _secure(os.path.realpath(home))
    if not is_open or not exposed or any(_is_exposed(entry.path) for entry in exposed):
        return None
    return f"Other users of this machine could read {home}. Now only you can (folders 0700, files 0600)."


def _secure_tree(path: str) -> None:
    """From the leaves up, so that what was not reached yet is known by the folder above it."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            _secure(os.path.join(folder, name))  # noqa: PTH118  # names may be any bytes
        _secure(folder)
    _secure(path)


def _secure(path: str) -> None:
    with suppress(OSError):  # gone meanwhile, or a file system without modes
        if _is_exposed(path):
            os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode) & ~_OTHERS)  # noqa: PTH101


def _is_exposed(path: str) -> bool:
    """Whether it is a file or folder of this user on which others have rights."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid == os.geteuid() and bool(status.st_mode & _OTHERS)
