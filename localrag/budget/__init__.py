"""Arithmetic on tokens: what each part of a prompt may have (`negotiate`), and what became of it (`Ledger`)."""

from localrag.budget.flex import Budget, negotiate
from localrag.budget.ledger import Entry, Ledger
from localrag.budget.section import Length, Percent, Section

__all__ = ["Budget", "Entry", "Ledger", "Length", "Percent", "Section", "negotiate"]
