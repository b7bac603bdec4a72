"""Parse `postgresql://user@host:port/database#name`, the address of a server and of one of its knowledge bases.

Documents are files of a machine. `?machine=NAME` names this machine; the default is the host's name. Give machines with the same files
under the same paths (containers, a network share) the same name.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from localrag.errors import KnowledgeBaseError
from localrag.kb.names import NAME

DEFAULT_NAME = "default"
MAX_NAME_CHARS = 54
"""With its prefix, the name is that of a schema, which has at most 63 characters."""

_MACHINE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:\[\]@/]*)(:\d{1,5})?")
_SHOWN = frozenset({"host", "hostaddr", "port", "user", "dbname", "service", "sslmode"})
_MIN_SECRET_CHARS = 4  # a shorter one cannot be told from other text, and libpq repeats no password
_CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Address:
    """`conninfo` is for libpq and may hold a password; `server` and `shown` never do.

    `name` is that of the knowledge base, `machine` that of this machine.
    """

    conninfo: str = field(repr=False)
    server: str
    name: str
    machine: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @property
    def shown(self) -> str:
        """The address without its password, safe to show and to store. It opens the same knowledge base with a password from elsewhere."""
        return f"{self.server}#{self.name}"

    def hushed(self, text: str) -> str:
        """Remove the password from text that may repeat the address."""
        for secret in self.secrets:
            text = text.replace(secret, "…")
        return text


def parse(text: str) -> Address:
    """Parse an address, also with `?kb=name`. Raises KnowledgeBaseError, which repeats none of it, for an invalid one."""
    try:
        text.encode()  # not so an argument with bytes that are not UTF-8
        parts = urlsplit(text)
    except ValueError:
        raise no_address() from None
    userinfo, at, hosts = parts.netloc.rpartition("@")
    # A password with a "/", "?" or "#" that is not written as %2F, %3F or %23 would go on there, and be shown.
    if any("@" in part for part in (parts.path, parts.query, parts.fragment)) or not all(map(_HOST.fullmatch, hosts.split(","))):
        raise no_address()
    user, _, password = userinfo.partition(":")
    options = [option.partition("=")[::2] for option in parts.query.split("&") if option]
    names = {value for key, value in options if key == "kb"} | ({parts.fragment} if parts.fragment else set())
    name = names.pop() if names else DEFAULT_NAME
    if names or not NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise KnowledgeBaseError(
            "The name of the knowledge base in the PostgreSQL address cannot be one.",
            hint=f"After # stand 1 to {MAX_NAME_CHARS} lower-case letters, digits, '-' and '_', beginning with a letter or a digit.",
        )
    machine = next((value for key, value in options if key == "machine"), None)
    if machine is not None and not _MACHINE.fullmatch(machine):
        raise KnowledgeBaseError(
            "The name of the machine in the PostgreSQL address cannot be one.",
            hint="After machine= stand 1 to 64 letters, digits, '.', '-' and '_'.",
        )
    given = [] if machine is None else [("machine", machine)]
    options = [(key, value) for key, value in options if key not in ("kb", "machine")]
    hidden = [password, *(value for key, value in options if "pass" in key.lower())]
    secrets = {each for secret in hidden for each in (secret, unquote(secret)) if len(each) >= _MIN_SECRET_CHARS}
    timeout = [] if any(key == "connect_timeout" for key, _ in options) else [("connect_timeout", str(_CONNECT_TIMEOUT_S))]
    return Address(
        conninfo=_written(parts.netloc, parts.path, [*options, *timeout]),
        server=_written(f"{user}{at}{hosts}", parts.path, [*(option for option in options if option[0] in _SHOWN), *given]),
        name=name,
        machine=machine or socket.gethostname() or "localhost",
        secrets=tuple(sorted(secrets, key=len, reverse=True)),
    )


def no_address() -> KnowledgeBaseError:
    """The error for an invalid address, which may hold a password anywhere."""
    return KnowledgeBaseError(
        "The address of the PostgreSQL server cannot be read.",
        hint="Write it as postgresql://USER@HOST:PORT/DATABASE#NAME; in a password, '@', '/', '?' and '#' are %40, %2F, %3F and %23.",
    )


def _written(netloc: str, path: str, options: list[tuple[str, str]]) -> str:
    query = "&".join(f"{key}={value}" for key, value in options)
    return f"postgresql://{netloc}{path}{'?' if query else ''}{query}"
