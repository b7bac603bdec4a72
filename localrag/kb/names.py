"""Names and addresses of knowledge bases: check, parse, escape and list them. Imports nothing heavy.

A name such as `handbook` is a folder of the home. An address such as `postgresql://user@host:port/database#name` is a server and the name
of one of its knowledge bases. The documents of a server are files of several machines: `?machine=NAME` names this one, by default with its
host name. Give machines that see the same files under the same paths (containers, a network share) the same name.
"""

from __future__ import annotations

import difflib
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from localrag.errors import KnowledgeBaseError, KnowledgeBaseNotFoundError

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
FILE = "kb.sqlite"
"""File name of a knowledge base, inside the folder with its name."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, break a line or change the text direction."""


def has_control(name: str) -> bool:
    """Whether a name contains control characters, which must not reach a terminal or a prompt."""
    return _CONTROL.search(name) is not None


def escaped(name: str) -> str:
    """Escape the control characters of a name as `\\xNN` or `\\uNNNN`."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), name)


def list_kbs(kb_dir: Path) -> list[str]:
    """Return the names of the knowledge bases in a folder, sorted; [] if the folder does not exist."""
    if not kb_dir.is_dir():
        return []
    return sorted(entry.name for entry in kb_dir.iterdir() if NAME.fullmatch(entry.name) and (entry / FILE).is_file())


def invalid_name(name: str) -> KnowledgeBaseError:
    """Make the error for a name that is not valid for a knowledge base."""
    return KnowledgeBaseError(
        f"{name!r} is not a valid name for a knowledge base.",
        hint="Use 1 to 64 lower-case letters, digits, '-' and '_', beginning with a letter or a digit.",
        kb=name,
    )


def name_taken(name: str, option: str = "") -> KnowledgeBaseError:
    """Make the error for a new name that another knowledge base has. `option` is the one that gives another name."""
    hint = f"Choose another name{f' ({option})' if option else ''}, or remove that one."
    return KnowledgeBaseError(f"There is a knowledge base {name!r} already.", hint=hint, kb=name)


def not_found(address: str, name: str, names: list[str]) -> KnowledgeBaseNotFoundError:
    """Make the error for a `name` that is not among the existing `names`. It suggests similar names."""
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    detail = f" Did you mean {' or '.join(nearest)}?" if nearest else f" Existing knowledge bases: {', '.join(names[:5])}." if names else ""
    return KnowledgeBaseNotFoundError(
        f"There is no knowledge base {address!r}.{detail}",
        hint=f"Create it with: localrag index PATH --kb {address}",
        kb=address,
        nearest=nearest,
    )


SERVER_PREFIXES = ("postgresql://", "postgres://")
"""Prefixes of an address of a server."""

DEFAULT_NAME = "default"
MAX_NAME_CHARS = 54
"""The name with a prefix is the name of a schema, which has at most 63 characters."""

_MACHINE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:\[\]@/]*)(:\d{1,5})?")
_SHOWN = frozenset({"host", "hostaddr", "port", "user", "dbname", "service", "sslmode"})
_MIN_SECRET_CHARS = 4  # a shorter password cannot be told from other text, and libpq does not repeat passwords
_CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Address:
    """The parsed address of a knowledge base on a server.

    `conninfo` is for libpq and may contain a password; `server` and `shown` never do. `name` is the name of the knowledge base,
    `machine` the name of this machine.
    """

    conninfo: str = field(repr=False)
    server: str
    name: str
    machine: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @property
    def shown(self) -> str:
        """The address without its password, safe to show and to store. It opens the same knowledge base if libpq finds the password."""
        return f"{self.server}#{self.name}"

    def redact(self, text: str) -> str:
        """Replace the password in a text that may repeat the address."""
        for secret in self.secrets:
            text = text.replace(secret, "…")
        return text


def parse_address(text: str) -> Address:
    """Parse an address. The name may also be given as `?kb=name`.

    Raises KnowledgeBaseError for an invalid address, without repeating any part, since that may be a password.
    """
    try:
        text.encode()  # fails for an argument that is not UTF-8
        parts = urlsplit(text)
    except ValueError:
        raise invalid_address() from None
    userinfo, at, hosts = parts.netloc.rpartition("@")
    # An unescaped "/", "?" or "#" in a password would move its rest into the path, query or fragment, where it would be shown.
    if any("@" in part for part in (parts.path, parts.query, parts.fragment)) or not all(map(_HOST.fullmatch, hosts.split(","))):
        raise invalid_address()
    user, _, password = userinfo.partition(":")
    options = [option.partition("=")[::2] for option in parts.query.split("&") if option]
    names = {value for key, value in options if key == "kb"} | ({parts.fragment} if parts.fragment else set())
    name = names.pop() if names else DEFAULT_NAME
    if names or not NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise KnowledgeBaseError(
            "The name of the knowledge base in the PostgreSQL address is not valid.",
            hint=f"After #, use 1 to {MAX_NAME_CHARS} lower-case letters, digits, '-' and '_', beginning with a letter or a digit.",
        )
    machine = next((value for key, value in options if key == "machine"), None)
    if machine is not None and not _MACHINE.fullmatch(machine):
        raise KnowledgeBaseError(
            "The name of the machine in the PostgreSQL address is not valid.",
            hint="After machine=, use 1 to 64 letters, digits, '.', '-' and '_'.",
        )
    machine_option = [] if machine is None else [("machine", machine)]
    options = [(key, value) for key, value in options if key not in ("kb", "machine")]
    hidden = [password, *(value for key, value in options if "pass" in key.lower())]
    secrets = {form for secret in hidden for form in (secret, unquote(secret)) if len(form) >= _MIN_SECRET_CHARS}
    timeout = [] if any(key == "connect_timeout" for key, _ in options) else [("connect_timeout", str(_CONNECT_TIMEOUT_S))]
    return Address(
        conninfo=_join_url(parts.netloc, parts.path, [*options, *timeout]),
        server=_join_url(f"{user}{at}{hosts}", parts.path, [*(option for option in options if option[0] in _SHOWN), *machine_option]),
        name=name,
        machine=machine or socket.gethostname() or "localhost",
        secrets=tuple(sorted(secrets, key=len, reverse=True)),
    )


def invalid_address() -> KnowledgeBaseError:
    """Make the error for an invalid address. It does not repeat the address, which may hold a password anywhere."""
    return KnowledgeBaseError(
        "The address of the PostgreSQL server cannot be read.",
        hint="Write it as postgresql://USER@HOST:PORT/DATABASE#NAME. In a password, write '@', '/', '?' and '#' as %40, %2F, %3F and %23.",
    )


def _join_url(netloc: str, path: str, options: list[tuple[str, str]]) -> str:
    query = "&".join(f"{key}={value}" for key, value in options)
    return f"postgresql://{netloc}{path}{'?' if query else ''}{query}"


def shown(name: str) -> str:
    """Return a name, or an address without its password, that is safe to show and to store. Nothing is opened."""
    if not name.startswith(SERVER_PREFIXES):
        return name
    try:
        return parse_address(name).shown
    except KnowledgeBaseError:
        return "a PostgreSQL server"


def name_of(address: str) -> str:
    """Return the name, as used in labels, of the knowledge base at a name or address. Raises KnowledgeBaseError if it is not valid."""
    if address.startswith(SERVER_PREFIXES):
        return parse_address(address).name
    if not NAME.fullmatch(address):
        raise invalid_name(address)
    return address
