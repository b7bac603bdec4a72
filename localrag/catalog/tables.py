"""Base of the pydantic tables of models.toml, and error messages that name file, table and key."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from localrag.errors import ConfigError

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


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for a similar name, else ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
