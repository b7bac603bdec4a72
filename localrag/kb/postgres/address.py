"""`postgresql://user@host:port/database#name`: where a server is, and which of its knowledge bases is meant.

`?machine=NAME` says which machine this is to it, by whose files documents are known. Without it that is the name of the host; machines
that have the same files under the same paths (containers, a network share) are given one name by it.
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
"""With what stands before it, the name is the name of a schema, which has 63 characters at most."""

_MACHINE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:\[\]@/]*)(:\d{1,5})?")
_SHOWN = frozenset({"host", "hostaddr", "port", "user", "dbname", "service", "sslmode"})
_MIN_SECRET_CHARS = 4  # what is shorter cannot be told from any other text, and libpq repeats no password
_CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Address:
    """`conninfo` is for libpq, and may hold a password; `server` and `shown` never do, and `name` is that of the knowledge base.

    `machine` is the name of this machine: documents are files of one.
    """

    conninfo: str = field(repr=False)
    server: str
    name: str
    machine: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @property
    def shown(self) -> str:
        """The address as it may be shown and kept; it opens the same knowledge base, given the password from elsewhere."""
        return f"{self.server}#{self.name}"

    def hushed(self, text: str) -> str:
        """Text that may repeat the address, without the password."""
        for secret in self.secrets:
            text = text.replace(secret, "…")
        return text


def parse(text: str) -> Address:
    """KnowledgeBaseError, which repeats none of it, for what is no such address. The name may also be given as `?kb=name`."""
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
    """The error for an address that cannot be read; it may hold a password in a place that is not known."""
    return KnowledgeBaseError(
        "The address of the PostgreSQL server cannot be read.",
        hint="Write it as postgresql://USER@HOST:PORT/DATABASE#NAME; in a password, '@', '/', '?' and '#' are %40, %2F, %3F and %23.",
    )


def _written(netloc: str, path: str, options: list[tuple[str, str]]) -> str:
    query = "&".join(f"{key}={value}" for key, value in options)
    return f"postgresql://{netloc}{path}{'?' if query else ''}{query}"
