"""Specialists who propose, and a judge who decides: who they are (roles.py), and the flow of what they are asked (flow.py, turns.py).

Names are imported when they are first used: every command reads the councils of models.toml, and few hold one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localrag.deliberation.flow import deliberate
    from localrag.deliberation.roles import JUDGE, PLANNER, Council, Judge, Member
    from localrag.deliberation.steps import Ask, Reply, Search, Step, Tell, Turn, Use, Used
    from localrag.deliberation.turns import first_turns
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
    "Search",
    "Step",
    "Tell",
    "Turn",
    "Use",
    "Used",
    "Verdict",
    "deliberate",
    "first_turns",
]

_MODULES = {
    "flow": ("deliberate",),
    "roles": (
        "Council",
        "JUDGE",
        "Judge",
        "Member",
        "PLANNER",
    ),
    "steps": (
        "Ask",
        "Reply",
        "Search",
        "Step",
        "Tell",
        "Turn",
        "Use",
        "Used",
    ),
    "turns": ("first_turns",),
    "verdict": (
        "Dissent",
        "Verdict",
    ),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"localrag.deliberation.{module}"), name)
    raise AttributeError(f"module 'localrag.deliberation' has no attribute {name!r}")
