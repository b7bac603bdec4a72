"""Walk folders: which files are read, why others are skipped, and when they change."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from localrag.errors import KnowledgeBaseError
from localrag.kb.names import escaped
from localrag.kb.readers import UnreadableError
from localrag.kb.secrets import is_secret_name

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_FILE_BYTES = 20 * 1024 * 1024
MAX_DEPTH = 64
IGNORE_FILES = (".gitignore", ".localragignore")  # the second has the last word

MACHINE_MADE = frozenset({"node_modules", "__pycache__", "site-packages", ".git", ".hg", ".svn", ".venv"})

LEFT_OUT_BY_NAME = "may hold a secret by its name; --hidden reads it"

QUIET_MS = 600
"""Changes within this time of each other count as one."""

SETTLED_NS = 2_000_000_000
"""A file that was changed less than 2 s before it was read can change again without a new modification time."""

# A pattern with more wildcards, or a longer one, can take minutes on one name: each further star made matching five times slower.
_MAX_WILDCARDS = 6
_MAX_PATTERN_CHARS = 255
_MAX_IGNORE_BYTES = 256 * 1024
_WILDCARD = re.compile(r"\*+|\?|\[")


class Skipped(NamedTuple):
    """A file, folder or pattern that was skipped, by the path that a person knows, and the reason."""

    source: str
    reason: str


class Found(NamedTuple):
    """A file to read. `source` is its path below the given folder, beginning with that folder's name."""

    path: str
    source: str


class Content(NamedTuple):
    """A file's bytes. `mtime_ns` is None if a later change of the file might not show in it."""

    data: bytes
    mtime_ns: int | None


@dataclass(slots=True)
class Walk:
    """The result of a walk over `roots` (absolute paths). Folders in `unseen` could not be read: nothing is known about their files."""

    roots: list[str] = field(default_factory=list)
    files: list[Found] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    hidden: bool = False
    left_out: set[str] = field(default_factory=set)  # files that turned out to hold a secret when they were read

    def vanished(self, known: Sequence[str]) -> list[str]:
        """The known paths below the roots that are no longer among the files."""
        here = {file.path for file in self.files} - self.left_out
        return [path for path in known if path not in here and _below(path, self.roots) and not _below(path, self.unseen)]


def walk(paths: Sequence[Path], *, hidden: bool = False) -> Walk:
    """List all files to read below `paths` (folders or single files), sorted by name, each once.

    Symbolic links are only followed if they are in `paths`. Unless `hidden` is set, hidden names are skipped, and so are files whose names
    suggest a secret, even if they are in `paths`. Ignored files are skipped unless they are in `paths`. Raises KnowledgeBaseError if a path
    does not exist or is not valid UTF-8.
    """
    result = Walk(hidden=hidden)
    seen: set[str] = set()
    for given in paths:
        root = os.path.realpath(given)
        if not os.path.lexists(root):
            raise KnowledgeBaseError(f"There is no file or folder {given}.", hint="Check the path.", path=str(given))
        if root != _utf8(root):
            raise KnowledgeBaseError(f"The path {_shown(root)} is not valid UTF-8.", hint="Rename the folder.", path=_shown(root))
        result.roots.append(root)
        name = _shown(given.name if given.name not in ("", "..") else Path(root).name or root)
        if Path(root).is_dir():
            found = _folder(root, name, [], result)
        elif not hidden and is_secret_name(Path(root).name):
            result.skipped.append(Skipped(name, LEFT_OUT_BY_NAME))
            found = iter(())
        else:
            found = iter([Found(root, name)])
        for file in found:
            if file.path not in seen:
                seen.add(file.path)
                result.files.append(file)
    return result


def read_file(path: str) -> Content:
    """Read a regular file. Raises UnreadableError for anything else and for a file over MAX_FILE_BYTES; OSError is passed on.

    A link that has replaced the file is not followed, and a pipe does not block.
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


def reason_of(error: Exception) -> str:
    """The reason of a reading error, to follow the name of the file."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def is_unchanged(path: str, num_bytes: int, mtime_ns: int | None) -> bool:
    """Whether a file still has this size and modification time."""
    if mtime_ns is None:
        return False
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (num_bytes, mtime_ns)


def changes(paths: Sequence[Path], *, but: Path) -> Iterator[int]:
    """Yield the number of changed files below `paths` whenever some change; files below `but` do not count. KeyboardInterrupt ends it.

    The first number, usually 0, tells that it listens; earlier changes are missed. The only `import watchfiles`.
    """
    from watchfiles import watch  # noqa: PLC0415  # an extension module, wanted only here

    own, wanted = but.resolve(), [path.resolve() for path in paths]
    only_files = not any(path.is_dir() for path in wanted)
    # An editor saves by putting another file in place, which a watch of the old one does not hear of: its folder does. Beside a folder,
    # which is watched with all below it, that costs watching all below that one too.
    watched = {path if path.is_dir() else path.parent for path in wanted}

    def counts(_change: object, name: str) -> bool:
        path = Path(name)
        return not path.is_relative_to(own) and any(path.is_relative_to(each) for each in wanted)

    heard = watch(
        *sorted(watched),
        watch_filter=counts,
        step=QUIET_MS,
        debounce=10 * QUIET_MS,
        rust_timeout=QUIET_MS,
        yield_on_timeout=True,
        recursive=not only_files,
        ignore_permission_denied=True,
    )
    listens = False
    while True:
        try:
            found = next(heard)
        except (RuntimeError, OSError) as error:  # the system has no more room for watches
            raise KnowledgeBaseError(
                f"Changes cannot be watched for: {error}.",
                hint="Raise fs.inotify.max_user_watches and max_user_instances, or leave --watch out.",
            ) from error
        if found or not listens:
            listens = True
            yield len(found)


class _Rules(NamedTuple):
    """The patterns of one ignore file, for paths below its folder."""

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
    """The reason to skip an entry, or ""."""
    name = entry.name
    reasons = (
        ("its name is not valid UTF-8", name != _utf8(name)),
        ("hidden", not hidden and name.startswith(".")),
        ("made by a program", name in MACHINE_MADE),
        (LEFT_OUT_BY_NAME, not hidden and not is_folder and is_secret_name(name)),
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
    """Read an ignore file. Patterns that are invalid or could take forever are skipped and named."""
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
    """A name that is safe to print and to store: invalid UTF-8 and control characters become `\\xNN`."""
    return escaped(_utf8(name))


def _utf8(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")
