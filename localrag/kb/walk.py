"""Which files of a folder are read, and why the others are not."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from localrag.errors import KnowledgeBaseError
from localrag.kb.readers import UnreadableError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_FILE_BYTES = 20 * 1024 * 1024
MAX_DEPTH = 64
IGNORE_FILES = (".gitignore", ".localragignore")  # the second has the last word

SECRET_NAMES = ("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.ppk", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*")
MACHINE_MADE = frozenset({"node_modules", "__pycache__", "site-packages", ".git", ".hg", ".svn", ".venv"})

SETTLED_NS = 2_000_000_000
"""A file that was changed less than 2 s before it was read can change again without its time of change showing that."""

# A pattern with more wildcards, or a longer one, can take minutes against one name: each further star made matching five times slower.
_MAX_WILDCARDS = 6
_MAX_PATTERN_CHARS = 255
_MAX_IGNORE_BYTES = 256 * 1024
_WILDCARD = re.compile(r"\*+|\?|\[")


class Skipped(NamedTuple):
    """A file, folder or pattern that was left out, by the path a person knows, and the reason."""

    source: str
    reason: str


class Found(NamedTuple):
    """A file to read. `source` is its path below the root it was found in, with the root's own name in front."""

    path: str
    source: str


class Content(NamedTuple):
    """A file's bytes. `mtime_ns` is None where a later change of the file might not show in it."""

    data: bytes
    mtime_ns: int | None


@dataclass(slots=True)
class Walk:
    """What a walk over `roots` (absolute paths) found. Below `unseen` it could not look: nothing is known about the files there."""

    roots: list[str] = field(default_factory=list)
    files: list[Found] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    hidden: bool = False

    def vanished(self, known: Sequence[str]) -> list[str]:
        """Those of the known paths that lie below the roots and are no longer among the files."""
        here = {file.path for file in self.files}
        return [path for path in known if path not in here and _below(path, self.roots) and not _below(path, self.unseen)]


def walk(paths: Sequence[Path], *, hidden: bool = False) -> Walk:
    """All files to read below `paths` (folders or single files), sorted by name, each once.

    Symbolic links are not followed, unless given. Hidden names and key files are left out unless `hidden` is set, and so is what an
    ignore file names; what is given itself is read in any case.
    KnowledgeBaseError if a given path does not exist or is not valid UTF-8.
    """
    result = Walk(hidden=hidden)
    seen: set[str] = set()
    for given in paths:
        root = os.path.realpath(given)
        if not os.path.lexists(root):
            raise KnowledgeBaseError(f"There is no file or folder {given}.", hint="Check the path.", path=str(given))
        if root != _shown(root):
            raise KnowledgeBaseError(f"The path {_shown(root)} is not valid UTF-8.", hint="Rename the folder.", path=_shown(root))
        result.roots.append(root)
        name = _shown(given.name if given.name not in ("", "..") else Path(root).name or root)
        found = _folder(root, name, [], result) if Path(root).is_dir() else iter([Found(root, name)])
        for file in found:
            if file.path not in seen:
                seen.add(file.path)
                result.files.append(file)
    return result


def read_file(path: str) -> Content:
    """A regular file's bytes. UnreadableError for anything else, or a file over MAX_FILE_BYTES; OSError as it comes.

    A link put in the file's place is not followed, and a pipe put there does not block.
    """
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # not every system has them all
        flags |= getattr(os, name, 0)
    now_ns = time.time_ns()
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("not a regular file")
        data = file.read(MAX_FILE_BYTES + 1) if status.st_size <= MAX_FILE_BYTES else b""
        if max(status.st_size, len(data)) > MAX_FILE_BYTES:
            raise UnreadableError(f"larger than {MAX_FILE_BYTES // 1024 // 1024} MB")
        after = os.fstat(file.fileno())
    is_settled = status.st_mtime_ns < now_ns - SETTLED_NS and after.st_mtime_ns == status.st_mtime_ns and len(data) == after.st_size
    return Content(data, status.st_mtime_ns if is_settled else None)


def read_bytes(path: str) -> bytes:
    """The bytes alone."""
    return read_file(path).data


def reason_of(error: Exception) -> str:
    """Why something could not be read, to stand after its name."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def is_unchanged(path: str, num_bytes: int, mtime_ns: int | None) -> bool:
    """Whether a file is still the one of this size and time of change, without reading it."""
    if mtime_ns is None:
        return False
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (num_bytes, mtime_ns)


class _Rules(NamedTuple):
    """The patterns of one ignore file; they speak of paths below its folder."""

    folder: str
    file: str
    spec: GitIgnoreSpec


def _folder(folder: str, source: str, rules: list[_Rules], result: Walk, depth: int = 0) -> Iterator[Found]:
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        result.skipped.append(Skipped(source, reason_of(error)))
        result.unseen.append(folder)
        return
    names = {entry.name for entry in entries}
    rules = rules + [_rules(folder, name, source, result) for name in IGNORE_FILES if name in names]
    for entry in entries:
        shown = f"{source}/{_shown(entry.name)}"
        is_folder = entry.is_dir(follow_symlinks=False)
        reason = _left_out(entry, rules, is_folder=is_folder, hidden=result.hidden)
        if not reason and is_folder and depth == MAX_DEPTH:
            reason = f"more than {MAX_DEPTH} folders deep"
        if reason:
            result.skipped.append(Skipped(shown, reason))
        elif is_folder:
            yield from _folder(entry.path, shown, rules, result, depth + 1)
        else:
            yield Found(entry.path, shown)


def _left_out(entry: os.DirEntry[str], rules: list[_Rules], *, is_folder: bool, hidden: bool) -> str:
    """The reason to leave an entry out, or nothing."""
    name = entry.name
    reasons = (
        ("its name is not valid UTF-8", name != _shown(name)),
        ("hidden", not hidden and name.startswith(".")),
        ("made by a program", name in MACHINE_MADE),
        ("may hold a secret key", not hidden and not is_folder and any(fnmatch(name.lower(), pattern) for pattern in SECRET_NAMES)),
        ("symbolic link", entry.is_symlink()),
        ("not a regular file", not is_folder and not entry.is_symlink() and not entry.is_file(follow_symlinks=False)),
    )
    return next((reason for reason, holds in reasons if holds), "") or _ignored(entry.path, rules, is_folder=is_folder)


def _ignored(path: str, rules: list[_Rules], *, is_folder: bool) -> str:
    for rule in reversed(rules):  # the nearest ignore file decides
        below = os.path.relpath(path, rule.folder).replace(os.sep, "/") + ("/" if is_folder else "")
        verdict = rule.spec.check_file(below).include
        if verdict is not None:
            return f"ignored by {rule.file}" if verdict else ""
    return ""


def _rules(folder: str, name: str, source: str, result: Walk) -> _Rules:
    """An ignore file, without the patterns that are no patterns or could take forever; those are named as skipped."""
    from pathspec import GitIgnoreSpec  # noqa: PLC0415  # wanted only where there is such a file

    shown = f"{source}/{name}"
    try:
        lines = read_file(f"{folder}/{name}").data[:_MAX_IGNORE_BYTES].decode("utf-8-sig", "replace").splitlines()
    except (OSError, UnreadableError) as error:
        result.skipped.append(Skipped(shown, f"its patterns are not used: {reason_of(error)}"))
        lines = []
    kept = []
    for line in lines:
        if len(line) > _MAX_PATTERN_CHARS or len(_WILDCARD.findall(line)) > _MAX_WILDCARDS:
            result.skipped.append(
                Skipped(shown, f"pattern {line[:40]!r} has more than {_MAX_WILDCARDS} wildcards or {_MAX_PATTERN_CHARS} characters")
            )
            continue
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            result.skipped.append(Skipped(shown, f"pattern {line[:40]!r} is not valid"))
            continue
        kept.append(line)
    return _Rules(folder, shown, GitIgnoreSpec.from_lines(kept))


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


def _shown(name: str) -> str:
    """A name fit to print and to store: bytes that are not UTF-8 become `\\xNN`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
