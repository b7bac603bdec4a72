"""Token budgets: share a window among sections (`negotiate`), and account for the result (`Ledger`)."""

from localrag.budget.flex import Budget, FlexItem, container, negotiate, settle
from localrag.budget.ledger import Entry, Ledger, Shortened, TimeLimit
from localrag.budget.sections import (
    CUTS,
    OVERFLOWS,
    SECTIONS,
    TIERS,
    Cut,
    Flex,
    Length,
    Overflow,
    Percent,
    Profile,
    Section,
    Tier,
    tokens_of,
)

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
