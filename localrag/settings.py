"""Paths and limits, read once from the environment; and the defaults of options that people keep in files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import platformdirs

from localrag.errors import ConfigError, UsageError

MAX_TEXT_BYTES = 16 * 1024 * 1024
"""Maximum size of a text from an argument, standard input or a file."""
PREFIX_BYTES = 2 << 30
Learning = Literal["off", "votes", "all"]
"""What may change the rank of a passage: nothing, votes on it, or also how often answers cited it."""
_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where localrag stores its files (`home`), and the models.toml that the user named, if any."""

    home: Path
    models_file: Path | None = None
    prefix_bytes: int = PREFIX_BYTES
    """Maximum size of the prefix cache on disk; 0 turns it off."""
    learn: Learning = "votes"
    """With "all", the same question can return its passages in a different order next time."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, *, models_file: Path | None = None) -> Settings:
        """Read the settings from environment variables.

        LOCALRAG_HOME sets `home`, LOCALRAG_MODELS sets `models_file` (the argument wins), LOCALRAG_PREFIX_BYTES sets
        `prefix_bytes` and LOCALRAG_LEARN sets `learn`. Raises UsageError for an invalid value.
        """
        env = os.environ if env is None else env
        home = env.get("LOCALRAG_HOME") or str(default_home())
        models_path = models_file or (Path(env["LOCALRAG_MODELS"]) if env.get("LOCALRAG_MODELS") else None)
        prefix_bytes = env.get("LOCALRAG_PREFIX_BYTES") or str(PREFIX_BYTES)
        if not (prefix_bytes.isascii() and prefix_bytes.isdigit() and len(prefix_bytes) <= _MAX_DIGITS):
            raise UsageError("LOCALRAG_PREFIX_BYTES is not a number of bytes.", hint="Use digits only; 0 turns the cache off.")
        try:
            folder = Path(home).expanduser().absolute()
        except RuntimeError:  # ~name of an unknown user
            raise UsageError(f"LOCALRAG_HOME is {home[:80]!r}, but there is no such user.", hint="Give the path of a folder.") from None
        learn = env.get("LOCALRAG_LEARN") or "votes"
        if learn not in get_args(Learning):
            raise UsageError(f"LOCALRAG_LEARN is {learn[:40]!r}.", hint=f"Use {', '.join(get_args(Learning))}.")
        return cls(home=folder, models_file=models_path, prefix_bytes=int(prefix_bytes), learn=cast(Learning, learn))

    @property
    def models_dir(self) -> Path:
        return self.home / "models"

    @property
    def kb_dir(self) -> Path:
        return self.home / "kb"

    @property
    def embedders_dir(self) -> Path:
        """Embedders converted for llama.cpp."""
        return self.home / "embedders"

    def models_files(self) -> tuple[Path, ...]:
        """Return the user's models.toml files, highest precedence first: the named one, ./models.toml, the one in the home.

        They are layered over the file that ships, which is only included if it was named. Raises ConfigError if ./models.toml
        belongs to another user: otherwise anyone who can write to a shared folder such as /tmp could choose the model.
        """
        shipped = _shipped_path()
        files = [] if self.models_file is None else [self.models_file]
        for candidate in (Path("models.toml"), self.home / "models.toml"):
            if not candidate.is_file() or any(_is_same(candidate, other) for other in files):
                continue
            if candidate.parent == Path() and shipped is not None and candidate.samefile(shipped):  # run in a checkout
                continue
            if candidate.parent == Path():
                _check_owner(candidate, "Work in another folder, or name the file if you trust it: --models ./models.toml")
            files.append(candidate)
        return tuple(files)

    def layered_models_files(self) -> tuple[Path, ...]:
        """Return `models_files` followed by the file that ships. Raises ConfigError as `models_files` does."""
        own, shipped = self.models_files(), shipped_file()
        return own if any(_is_same(shipped, file) for file in own) else (*own, shipped)


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _check_owner(file: Path, hint: str) -> None:
    """Refuse a file that another user may have planted in a shared folder. Root is exempt: containers run as root on files of
    other users.
    """
    uid = os.geteuid() if hasattr(os, "geteuid") else 0
    if uid != 0 and (owner := file.stat().st_uid) not in (0, uid):
        raise ConfigError(
            f"{file.absolute()} belongs to another user (uid {owner}), so it is not used automatically.",
            hint=hint,
            file=str(file.absolute()),
            owner_uid=owner,
        )


def default_home() -> Path:
    """Return the home that is used when LOCALRAG_HOME is not set."""
    return Path(platformdirs.user_data_dir("localrag", appauthor=False))


def expanded(path: Path) -> Path:
    """Replace a leading `~` by the user's home. `~name` stays as it is if there is no such user."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def shipped_file() -> Path:
    """Return the models.toml that ships: inside the installed package, or next to it in a checkout. Raises ConfigError if it is missing."""
    if (file := _shipped_path()) is None:
        raise ConfigError("The models.toml that ships with localrag is missing.", hint="Install localrag again.")
    return file


def _shipped_path() -> Path | None:
    package = Path(__file__).parent
    return next((file for file in (package / "models.toml", package.parent / "models.toml") if file.is_file()), None)


# --- defaults of options ---

CONFIG_FILE = "config.toml"
"""Name of the file of defaults in the home."""
PROJECT_FILE = "localrag.toml"
"""Name of the file of defaults in the current folder. It wins over the one in the home."""
_MAX_CONFIG_BYTES = 64 * 1024
_PROMPTS = ("ask", "chat", "budget")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "kb": ("index", "search", *_PROMPTS, "council"),
    "model": (*_PROMPTS, "summarize", "tokens", "serve", "mcp"),
    "ctx": (*_PROMPTS, "serve", "mcp"),
    "max-tokens": _PROMPTS,
    "think-tokens": _PROMPTS,
    "top-k": _PROMPTS,
    "evidence": _PROMPTS,
    "evidence-tokens": _PROMPTS,
    "context-ratio": _PROMPTS,
    "cite": _PROMPTS,
    "unanswerable": _PROMPTS,
    "budget": (*_PROMPTS, "serve", "mcp"),
    "seed": ("ask", "chat"),
    "temperature": ("ask", "chat"),
}
"""The options whose defaults can be set, by name, and the commands that use them. Measurements (eval) and councils' models ignore them."""

Value = str | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Default:
    """The default that a person set for an option, and where it comes from: `place` is a variable or a file."""

    value: Value
    origin: Literal["environment", "project", "home"]
    place: str


def defaults(home: Path, env: Mapping[str, str] | None = None) -> dict[str, Default]:
    """Return the defaults that are in force, by option: variables such as LOCALRAG_KB, then ./localrag.toml, then config.toml in the home.

    Several values of one variable are separated by white space. Raises ConfigError for a file that is not valid.
    """
    env = os.environ if env is None else env
    found: dict[str, Default] = {}
    for name in OPTIONS:
        if text := env.get(variable(name)):
            found[name] = Default(tuple(text.split()) if name == "kb" else text, "environment", variable(name))
    project = Path(PROJECT_FILE)
    if project.is_file():
        _check_owner(project, "Work in another folder, or remove the file.")
        found = _from_file(project.absolute(), "project") | found
    return _from_file(home / CONFIG_FILE, "home") | found


def variable(name: str) -> str:
    """Return the environment variable that sets the default of an option."""
    return f"LOCALRAG_{name.upper().replace('-', '_')}"


def _from_file(file: Path, origin: Literal["project", "home"]) -> dict[str, Default]:
    return {name: Default(value, origin, str(file)) for name, value in read_defaults(file).items()}


def read_defaults(file: Path) -> dict[str, Value]:
    """Read a file of defaults; {} if it does not exist. Raises ConfigError, which names the file and the key."""
    try:
        with file.open("rb") as data:
            raw = data.read(_MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}.", hint="Check its permissions.", file=str(file)) from None
    import tomllib  # noqa: PLC0415  # only with such a file

    try:
        if len(raw) > _MAX_CONFIG_BYTES:
            raise ValueError(f"more than {_MAX_CONFIG_BYTES} bytes")  # noqa: TRY301  # as other reasons
        table = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        hint = "Correct it, or remove it."
        raise ConfigError(f"{file}: not valid TOML: {' '.join(str(error).split())[:200]}.", hint=hint, file=str(file)) from None
    return {name: _value(file, name, value) for name, value in table.items()}


def _value(file: Path, name: str, value: Any) -> Value:  # noqa: ANN401  # whatever TOML holds
    check_option(name, f"{file}: ", file=str(file))
    values = value if isinstance(value, list) else [value]
    if name == "kb" and file.name == PROJECT_FILE and any("://" in str(each) for each in values):  # a cloned folder must send nothing out
        hint = "Name a knowledge base of the home here, or set the address in the home: localrag config set kb ADDRESS"
        raise ConfigError(f"{file}: kb must not be on a server.", hint=hint, file=str(file), key=name)
    if name == "kb" and all(isinstance(each, str) and each for each in values):
        return tuple(values)
    if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
        return value
    kinds = "a name or a list of names" if name == "kb" else "a text or a number"
    raise ConfigError(f"{file}: {name} must be {kinds}.", hint=f"Set it with: localrag config set {name} VALUE", file=str(file), key=name)


def check_option(name: str, before: str = "", **numbers: object) -> None:
    """Raise ConfigError, with a suggestion, for a name without a default to set. `before` begins the message."""
    if name in OPTIONS:
        return
    import difflib  # noqa: PLC0415  # only for an error

    near = difflib.get_close_matches(name, OPTIONS, n=2)
    hint = (f"Did you mean {' or '.join(near)}? " if near else "") + f"There are: {', '.join(OPTIONS)}."
    raise ConfigError(f"{before}There is no setting {name[:40]!r}.", hint=hint, key=name[:40], **numbers)


def named_default_model(files: Sequence[Path]) -> bool:
    """Return whether one of these models.toml files sets default_model. A file that is not valid does not: the catalogue reports it."""
    import tomllib  # noqa: PLC0415  # only if a model is set in the home

    for file in files:
        try:
            if "default_model" in tomllib.loads(file.read_text(encoding="utf-8")):
                return True
        except (OSError, ValueError, RecursionError):
            continue
    return False
