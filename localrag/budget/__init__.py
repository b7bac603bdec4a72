"""Token budgets: share a window among sections (`negotiate`), and account for the result (`Ledger`)."""

from localrag.budget.flex import Budget, FlexItem, container, negotiate, settle, tokens_of
from localrag.budget.ledger import Entry, Ledger, Shortened, TimeLimit
from localrag.budget.profile import OVERFLOWS, TIERS, Overflow, Profile, Tier
from localrag.budget.sections import CUTS, SECTIONS, Cut, Flex, Length, Percent, Section

__all__ = [
    "CUTS",
    "OVERFLOWS",
    "SECTIONS",
    "TIERS",
    "Budget",
    "Cut",
    "Entry",
    "Flex",
    "FlexItem",
    "Ledger",
    "Length",
    "Overflow",
    "Percent",
    "Profile",
    "Section",
    "Shortened",
    "Tier",
    "TimeLimit",
    "container",
    "negotiate",
    "settle",
    "tokens_of",
]
