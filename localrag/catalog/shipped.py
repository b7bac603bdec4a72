"""What ships with localrag: its models.toml, and the councils in it for those whose own file has none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.settings import shipped_file

if TYPE_CHECKING:
    from localrag.council.roles import Council


def with_shipped(own: Mapping[str, Council], file: Path) -> dict[str, Council]:
    """The councils of `file`, and behind them those that ship under other names, with the budgets that ship."""
    from localrag.catalog import schema  # noqa: PLC0415  # weight: pydantic

    shipped = shipped_file()
    if file.absolute() == shipped.absolute():
        return dict(own)
    return {**own, **{name: each for name, each in schema.read(shipped).councils.items() if name not in own}}


def absent_models(council: Council, models: Mapping[str, object]) -> list[str]:
    """The models that a council names and that are not among these; "echo" is always there."""
    named = dict.fromkeys([*(member.model for member in council.members), council.judge.model])
    return [name for name in named if name not in (None, "echo") and name not in models]
