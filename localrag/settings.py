"""Paths and limits, read once from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import platformdirs

from localrag.errors import ConfigError, UsageError

MAX_TEXT_BYTES = 16 * 1024 * 1024
"""The longest text that a command takes as an argument, from standard input or from a file."""
PREFIX_BYTES = 2 << 30
Learning = Literal["off", "votes", "all"]
"""What moves a passage that is found: nothing, what people said of it, or also how often it was cited."""
_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where localrag keeps what it writes (`home`), and which models file it was told to use, if any."""

    home: Path
    models_file: Path | None = None
    prefix_bytes: int = PREFIX_BYTES
    """The most that evaluated prompts take on disk; 0 keeps none."""
    learn: Learning = "votes"
    """With "all", the same question can find its passages in another order the next time."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, *, models_file: Path | None = None) -> Settings:
        """LOCALRAG_HOME moves everything; LOCALRAG_MODELS names a models.toml, and an argument goes before it; LOCALRAG_PREFIX_BYTES
        is `prefix_bytes`, LOCALRAG_LEARN is `learn`. UsageError for what these cannot be.
        """
        env = os.environ if env is None else env
        home = env.get("LOCALRAG_HOME") or str(default_home())
        named = models_file or (Path(env["LOCALRAG_MODELS"]) if env.get("LOCALRAG_MODELS") else None)
        prefix_bytes = env.get("LOCALRAG_PREFIX_BYTES") or str(PREFIX_BYTES)
        if not (prefix_bytes.isascii() and prefix_bytes.isdigit() and len(prefix_bytes) <= _MAX_DIGITS):
            raise UsageError("LOCALRAG_PREFIX_BYTES is not a number of bytes.", hint="Give digits alone; 0 keeps no evaluated prompts.")
        try:
            folder = Path(home).expanduser().absolute()
        except RuntimeError:  # ~name of nobody
            raise UsageError(f"LOCALRAG_HOME is {home[:80]!r}: whose home is this?", hint="Give the path of a folder.") from None
        learn = env.get("LOCALRAG_LEARN") or "votes"
        if learn not in get_args(Learning):
            raise UsageError(f"LOCALRAG_LEARN is {learn[:40]!r}.", hint=f"It can be {', '.join(get_args(Learning))}.")
        return cls(home=folder, models_file=named, prefix_bytes=int(prefix_bytes), learn=cast(Learning, learn))

    @property
    def models_dir(self) -> Path:
        return self.home / "models"

    @property
    def kb_dir(self) -> Path:
        return self.home / "kb"

    @property
    def embedders_dir(self) -> Path:
        """Copies of embedders that llama.cpp runs."""
        return self.home / "embedders"

    def models_files(self) -> tuple[Path, ...]:
        """The models.toml files of a person that are in force, the one that wins first: the one named, ./models.toml, the home's.

        All are layered over the one that ships, which is not among them unless it is named. ConfigError for a ./models.toml that belongs
        to another user: whoever can write to a shared folder such as /tmp would choose the model.
        """
        shipped = _shipped_path()
        found = [] if self.models_file is None else [self.models_file]
        for candidate in (Path("models.toml"), self.home / "models.toml"):
            if not candidate.is_file() or any(_is_same(candidate, other) for other in found):
                continue
            if candidate.parent == Path() and shipped is not None and candidate.samefile(shipped):  # run in a checkout
                continue
            if candidate.parent == Path():
                _check_owner(candidate)
            found.append(candidate)
        return tuple(found)

    def layered_models_files(self) -> tuple[Path, ...]:
        """`models_files`, and below them the one that ships. ConfigError as there."""
        own, shipped = self.models_files(), shipped_file()
        return own if any(_is_same(shipped, file) for file in own) else (*own, shipped)


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _check_owner(file: Path) -> None:
    """Refuse a file that another user may have left in a shared folder; root, who serves containers with others' files, is not asked."""
    uid = os.geteuid() if hasattr(os, "geteuid") else 0
    if uid != 0 and (owner := file.stat().st_uid) not in (0, uid):
        raise ConfigError(
            f"{file.absolute()} belongs to another user (uid {owner}), so it is not used unasked.",
            hint="Work in another folder, or name it if you trust it: --models ./models.toml",
            file=str(file.absolute()),
            owner_uid=owner,
        )


def default_home() -> Path:
    """The home where LOCALRAG_HOME names none."""
    return Path(platformdirs.user_data_dir("localrag", appauthor=False))


def expanded(path: Path) -> Path:
    """The path with the person's home in place of `~`; `~name` of nobody is a name like any other."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def shipped_file() -> Path:
    """The catalogue that ships: inside the package where it is installed, beside it in a checkout."""
    if (file := _shipped_path()) is None:
        raise ConfigError("The models.toml that ships with localrag is missing.", hint="Install localrag again.")
    return file


def _shipped_path() -> Path | None:
    package = Path(__file__).parent
    return next((file for file in (package / "models.toml", package.parent / "models.toml") if file.is_file()), None)
