"""Specialists who propose, and a judge who decides: who they are (roles.py), and the flow of what they are asked (flow.py, turns.py)."""

from localrag.council.flow import deliberate
from localrag.council.roles import JUDGE, PLANNER, Council, Judge, Member
from localrag.council.steps import Ask, Reply, Search, Step, Tell, Turn, Use, Used
from localrag.council.turns import first_turns
from localrag.council.verdict import Dissent, Verdict

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
