"""Find the files to index, leave out secrets and ignored files, and watch for changes.

Secrets are detected by file name and by the form of private keys and tokens. A false alarm costs a document, so a token must have the
prefix, the full length and the randomness of a real one. An example that is shortened, such as "-----BEGIN PRIVATE KEY----- ...", or filled
with one letter does not count.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from localrag.errors import KnowledgeBaseError
from localrag.kb.names import escaped
from localrag.kb.readers import UnreadableError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


_KEY_FILES = """
    *.pem *.key *.p8 *.pk8 *.p12 *.pfx *.jks *.jceks *.bks *.keystore *.kdb *.kdbx *.ppk *.keychain *.1pux
    id_rsa* id_dsa* id_ecdsa* id_ed25519* secring.*
    *.env .env.* .envrc *.tfstate *.tfstate.* *.tfvars *.tfvars.json
    *htpasswd .netrc _netrc .npmrc .pypirc .pgpass pgpass.conf .my.cnf .dockercfg .git-credentials .vault-token .s3cfg .boto
    shadow shadow- gshadow gshadow- kubeconfig kubeconfig.* *.kubeconfig rootkey.csv *accesskeys.csv
    """.split()  # noqa: SIM905  # a word list reads better as words
_STEMS = "credential credentials secret secrets password passwords client_secret* service-account* service_account* serviceaccount*".split()  # noqa: SIM905
_WORDS = frozenset({"credential", "credentials", "secret", "secrets", "passwords"})
"""Words of a stem such as docker-secrets or secrets.prod."""
_ENVIRONMENTS = frozenset(".prod .production .stage .staging .dev .development .local .live .test .qa .ci".split())  # noqa: SIM905
_SETTINGS = frozenset(".json .yaml .yml .toml .ini .cfg .conf .properties .xml".split()) | _ENVIRONMENTS  # noqa: SIM905
"""Extensions of settings files: secrets.yaml is one; secrets.md and secrets.py are not."""
_LISTS = frozenset({".csv", ".txt"})
"""Extensions of both documents and lists: passwords.txt is a list; secret-santa.txt is not."""
_BACKUP = re.compile(r"(?:\.(?:bak|backup|old|orig|save|enc|gpg)|~)+$")
_EXAMPLES = frozenset({"example", "examples", "sample", "template", "dist", "schema"})


def is_secret_name(name: str) -> bool:
    """Whether files of this name usually hold keys, passwords or tokens: prod.env does, env.example does not."""
    name = name.lower()
    if not _EXAMPLES.isdisjoint(_words(name)):
        return False
    return any(_is_secret_name(each) for each in {name, _BACKUP.sub("", name)})


def _is_secret_name(name: str) -> bool:
    """Check one lower-case name, without removing backup suffixes."""
    if any(fnmatchcase(name, pattern) for pattern in _KEY_FILES):
        return True
    stem, dot, suffix = name.rpartition(".")
    stem, suffix = (stem, dot + suffix) if stem else (name, "")
    if suffix in _SETTINGS and not _WORDS.isdisjoint(_words(stem)):
        return True
    if not suffix and _words(stem)[-1] in _WORDS:
        return True
    is_alone = any(fnmatchcase(stem, pattern) for pattern in _STEMS) or (stem == "env" and suffix in _ENVIRONMENTS)
    return is_alone and (not suffix or suffix in _SETTINGS | _LISTS)


def _words(name: str) -> list[str]:
    return re.split(r"[._-]", name)


class _Token(NamedTuple):
    kind: str
    hint: str
    """The pattern is tried only on texts with this substring."""
    pattern: re.Pattern[str]


def _token(kind: str, hint: str, pattern: str) -> _Token:
    return _Token(kind, hint, re.compile(pattern, re.ASCII))


_TOKENS = (  # every repetition is bounded, so that matching takes linear time
    _token("an AWS secret key", "ecret", r"(?i:secret_?access_?key|aws_?secret_?key)[\"']?\s{0,5}[:=]\s{0,5}[\"']?([\w/+]{40})(?![\w/+=])"),
    _token("a GitHub token", "gh", r"\bgh[oprsu]_([A-Za-z0-9]{36})\b"),
    _token("a GitHub token", "github_pat_", r"\bgithub_pat_(\w{82})\b"),
    _token("a GitLab token", "glpat-", r"\bglpat-([\w-]{20})(?![\w-])"),
    _token("a Slack token", "xox", r"\bxox[abeoprs]-(?:\d{6,14}-){1,3}([A-Za-z0-9]{20,64})\b"),
    _token("a Slack token", "xapp-", r"\bxapp-\d-[A-Z0-9]{8,14}-\d{8,16}-([a-f0-9]{40,80})\b"),
    _token("a Slack webhook", "hooks.slack.com", r"hooks\.slack\.com/services/T\w{8,12}/B\w{8,12}/(\w{24})\b"),
    _token("an OpenAI key", "T3BlbkFJ", r"\bsk-((?:[a-z]{4,8}-)?[\w-]{20,80}?T3BlbkFJ[\w-]{20,80})"),
    _token("an Anthropic key", "sk-ant-", r"\bsk-ant-[a-z]{3,8}\d\d-([\w-]{80,110})"),
    _token("a Google API key", "AIza", r"\bAIza([\w-]{35})(?![\w-])"),
    _token("a Google client secret", "GOCSPX-", r"\bGOCSPX-([\w-]{28})(?![\w-])"),
    _token("a Stripe key", "k_live_", r"\b[rs]k_live_([A-Za-z0-9]{24,120})\b"),
    _token("a Hugging Face token", "hf_", r"\bhf_([A-Za-z]{34})\b"),
    _token("an npm token", "npm_", r"\bnpm_([A-Za-z0-9]{36})\b"),
    _token("a PyPI token", "pypi-", r"\bpypi-AgEIcHlwaS5vcmc([\w-]{50,250})"),
    _token("a SendGrid key", "SG.", r"\bSG\.([\w-]{22}\.[\w-]{43})(?![\w-])"),
    _token("a DigitalOcean token", "_v1_", r"\bdo[opr]_v1_([a-f0-9]{64})\b"),
    _token("an Azure storage key", "AccountKey=", r"\bAccountKey=([A-Za-z0-9+/]{86})=="),
    _token("an age key", "AGE-SECRET-KEY-1", r"\bAGE-SECRET-KEY-1([02-9AC-HJ-NP-Z]{58})\b"),
)
_PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_PUTTY_KEY = re.compile(r"^Private-Lines: \d{1,4}\s", re.MULTILINE)
_HEADER_LINE = re.compile(r"^[\s>|*#/]{0,20}[A-Za-z][A-Za-z-]{2,30}: [^\n]{0,200}$", re.MULTILINE)  # Proc-Type, DEK-Info, Version …
_BETWEEN = re.compile(r"\\r|\\n|[\s\"'`>|*#\\,;]|(?<=[\"'`])\s{0,40}\+")  # between the lines of a key in JSON, code or quoted mail
_BASE64 = re.compile(r"[A-Za-z0-9+/]{60}")
_LOOKED_AT = 2_000  # characters to examine after the opening line of a key
_MAX_KEYS = 1_000  # opening lines to examine
_MIN_BITS = 3.0  # entropy of a token per character; a random token of 20 characters has at least 3.7
_MIN_KEY_BITS = 4.0
_PLACEHOLDERS = ("example", "xxxx", "0123456789", "1234567890", "abcdefgh", "your", "....")


def found_secret(text: str) -> str:
    """Return the kind of secret in a text, such as "a private key"; "" if there is none."""
    if "PRIVATE KEY" in text and _has_key(text, _PRIVATE_KEY):
        return "a private key"
    if "PuTTY-User-Key-File" in text and _has_key(text, _PUTTY_KEY):
        return "a private key"
    return next((token.kind for token in _TOKENS if token.hint in text and any(map(_is_real, token.pattern.findall(text)))), "")


def _has_key(text: str, opening: re.Pattern[str]) -> bool:
    return any(_is_key(text, match.end()) for match in islice(opening.finditer(text), _MAX_KEYS))


def _is_key(text: str, start: int) -> bool:
    body = _BETWEEN.sub("", _HEADER_LINE.sub("", text[start : start + _LOOKED_AT]))
    match = _BASE64.match(body)
    return match is not None and _bits(match[0]) > _MIN_KEY_BITS


def _is_real(token: str) -> bool:
    """Whether a token is random enough to be real. Those in documentation are not."""
    return _bits(token) > _MIN_BITS and not any(word in token.lower() for word in _PLACEHOLDERS)


def _bits(text: str) -> float:
    """Return the entropy of a text in bits per character."""
    return -sum(num / len(text) * math.log2(num / len(text)) for num in Counter(text).values())


MAX_FILE_BYTES = 20 * 1024 * 1024
MAX_DEPTH = 64
IGNORE_FILES = (".gitignore", ".localragignore")  # the second takes precedence

MACHINE_MADE = frozenset({"node_modules", "__pycache__", "site-packages", ".git", ".hg", ".svn", ".venv"})

MAY_BE_READ = "; --hidden reads it"
"""Suffix of the reason for each file that is skipped because of a secret."""
LEFT_OUT_BY_NAME = f"may hold a secret by its name{MAY_BE_READ}"

QUIET_MS = 600
"""Changes within this many milliseconds of each other count as one."""

SETTLED_NS = 2_000_000_000
"""A file modified less than 2 s before it was read may change again without a new modification time."""

# A longer pattern, or one with more wildcards, can take minutes on one name: each additional star made matching five times slower.
_MAX_WILDCARDS = 6
_MAX_PATTERN_CHARS = 255
_MAX_IGNORE_BYTES = 256 * 1024
_WILDCARD = re.compile(r"\*+|\?|\[")


class SkippedFile(NamedTuple):
    """A file, folder or pattern that was skipped, by its displayed path, and the reason."""

    source: str
    reason: str


class FileEntry(NamedTuple):
    """A file to read. `source` is its path below the indexed folder, beginning with that folder's name."""

    path: str
    source: str


class Content(NamedTuple):
    """The bytes of a file. `mtime_ns` is None if a later change of the file might not alter it."""

    data: bytes
    mtime_ns: int | None


@dataclass(slots=True)
class Walk:
    """The result of a walk over `roots` (absolute paths). Folders in `unseen` could not be read, so their files are unknown."""

    roots: list[str] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    hidden: bool = False
    left_out: set[str] = field(default_factory=set)  # files whose contents turned out to hold a secret

    def vanished(self, known_paths: Sequence[str]) -> list[str]:
        """Return the known paths below the roots that are no longer among the files."""
        here = {file.path for file in self.files} - self.left_out
        return [path for path in known_paths if path not in here and _below(path, self.roots) and not _below(path, self.unseen)]


def walk(paths: Sequence[Path], *, hidden: bool = False) -> Walk:
    """List all files to read below `paths` (folders or single files), sorted by name, each once.

    Symbolic links are followed only if they are in `paths` themselves. Unless `hidden` is set, hidden files are skipped, and files whose
    names suggest a secret are skipped even if they are in `paths`. Ignored files are skipped unless they are in `paths`. Raises
    KnowledgeBaseError if a path does not exist or is not valid UTF-8.
    """
    result = Walk(hidden=hidden)
    file_paths: set[str] = set()
    for path in paths:
        root = os.path.realpath(path)
        if not os.path.lexists(root):
            raise KnowledgeBaseError(f"There is no file or folder {path}.", hint="Check the path.", path=str(path))
        if root != _utf8(root):
            raise KnowledgeBaseError(f"The path {_shown(root)} is not valid UTF-8.", hint="Rename the folder.", path=_shown(root))
        result.roots.append(root)
        name = _shown(path.name if path.name not in ("", "..") else Path(root).name or root)
        if Path(root).is_dir():
            files = _folder(root, name, [], result)
        elif not hidden and is_secret_name(Path(root).name):
            result.skipped.append(SkippedFile(name, LEFT_OUT_BY_NAME))
            files = iter(())
        else:
            files = iter([FileEntry(root, name)])
        for file in files:
            if file.path not in file_paths:
                file_paths.add(file.path)
                result.files.append(file)
    return result


def read_file(path: str) -> Content:
    """Read a regular file. Raises UnreadableError for anything else and for a file over MAX_FILE_BYTES; OSError propagates.

    A symbolic link that has replaced the file since the walk is not followed, and a pipe does not block.
    """
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # not all systems have all of these
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
    """Return the reason of a read error, worded to follow the name of the file."""
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
    """Yield the number of changed files below `paths` whenever files change, except for files below `but`. KeyboardInterrupt ends it.

    The first number, usually 0, means that watching has started; earlier changes are missed. This is the only use of watchfiles.
    """
    from watchfiles import watch  # noqa: PLC0415  # an extension module, needed only here

    own, roots = but.resolve(), [path.resolve() for path in paths]
    only_files = not any(path.is_dir() for path in roots)
    # Editors save by replacing the file, which a watch on the old file does not notice, so its folder is watched. If folders are watched
    # too, watching is recursive, which then includes everything below that folder.
    watched = {path if path.is_dir() else path.parent for path in roots}

    def counts(_change: object, name: str) -> bool:
        path = Path(name)
        return not path.is_relative_to(own) and any(path.is_relative_to(each) for each in roots)

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
            batch = next(heard)
        except (RuntimeError, OSError) as error:  # the system's limit of watches is reached
            raise KnowledgeBaseError(
                f"Cannot watch for changes: {error}.",
                hint="Raise fs.inotify.max_user_watches and max_user_instances, or leave --watch out.",
            ) from error
        if batch or not listens:
            listens = True
            yield len(batch)


class _Rules(NamedTuple):
    """The patterns of one ignore file, for paths below its folder."""

    folder: str
    file: str
    spec: GitIgnoreSpec


def _folder(folder: str, source: str, rules: list[_Rules], result: Walk, depth: int = 0) -> Iterator[FileEntry]:
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        result.skipped.append(SkippedFile(source, reason_of(error)))
        result.unseen.append(folder)
        return
    names = {entry.name for entry in entries}
    rules = rules + [_rules(folder, name, source, result) for name in IGNORE_FILES if name in names]
    for entry in entries:
        entry_source = f"{source}/{_shown(entry.name)}"
        is_folder = entry.is_dir(follow_symlinks=False)
        reason = _left_out(entry, rules, is_folder=is_folder, hidden=result.hidden)
        if not reason and is_folder and depth == MAX_DEPTH:
            reason = f"more than {MAX_DEPTH} folders deep"
        if reason:
            result.skipped.append(SkippedFile(entry_source, reason))
        elif is_folder:
            yield from _folder(entry.path, entry_source, rules, result, depth + 1)
        else:
            yield FileEntry(entry.path, entry_source)


def _left_out(entry: os.DirEntry[str], rules: list[_Rules], *, is_folder: bool, hidden: bool) -> str:
    """Return the reason to skip an entry; "" to keep it."""
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
    from pathspec import GitIgnoreSpec  # noqa: PLC0415  # needed only if there is such a file

    file = f"{source}/{name}"
    try:
        lines = read_file(f"{folder}/{name}").data[:_MAX_IGNORE_BYTES].decode("utf-8-sig", "replace").splitlines()
    except (OSError, UnreadableError) as error:
        result.skipped.append(SkippedFile(file, f"its patterns are not used: {reason_of(error)}"))
        lines = []
    patterns = []
    for line in lines:
        if len(line) > _MAX_PATTERN_CHARS or len(_WILDCARD.findall(line)) > _MAX_WILDCARDS:
            result.skipped.append(
                SkippedFile(file, f"pattern {line[:40]!r} has more than {_MAX_WILDCARDS} wildcards or {_MAX_PATTERN_CHARS} characters")
            )
            continue
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            result.skipped.append(SkippedFile(file, f"pattern {line[:40]!r} is not valid"))
            continue
        patterns.append(line)
    return _Rules(folder, file, GitIgnoreSpec.from_lines(patterns))


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


def _shown(name: str) -> str:
    """Escape invalid UTF-8 and control characters as `\\xNN`, so that a name is safe to print and to store."""
    return escaped(_utf8(name))


def _utf8(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")
