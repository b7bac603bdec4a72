"""Councils: members propose, a judge decides. `roles` defines them, `flow` is the procedure, `turns` the request for each role.

Pure rules, without a model, files or a clock. Names are imported on first use: every command reads the councils of models.toml,
but few hold one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localrag.deliberation.flow import Ask, Reply, Search, Step, Tell, Use, Used, deliberate
    from localrag.deliberation.roles import JUDGE, PLANNER, Council, Judge, Member
    from localrag.deliberation.turns import RoleTurn, first_turns
    from localrag.deliberation.verdict import Dissent, Verdict

__all__ = [
    "JUDGE",
    "PLANNER",
    "Ask",
    "Council",
    "Dissent",
    "Judge",
    "Member",
    "Reply",
    "RoleTurn",
    "Search",
    "Step",
    "Tell",
    "Use",
    "Used",
    "Verdict",
    "deliberate",
    "first_turns",
]

_MODULES = {
    "flow": ("Ask", "Reply", "Search", "Step", "Tell", "Use", "Used", "deliberate"),
    "roles": ("Council", "JUDGE", "Judge", "Member", "PLANNER"),
    "turns": ("RoleTurn", "first_turns"),
    "verdict": ("Dissent", "Verdict"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"localrag.deliberation.{module}"), name)
    raise AttributeError(f"module 'localrag.deliberation' has no attribute {name!r}")
