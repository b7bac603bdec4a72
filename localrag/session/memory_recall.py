"""Which of the facts that a person keeps are told to the model: those that matter and are new, and those that a question is about."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrag.messages import Memory
from localrag.terms import terms

if TYPE_CHECKING:
    from localrag.journal import StoredMemory

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalling:
    """Above which importance, and for how long, a fact is told whatever is asked."""

    min_importance: float = 0.6
    max_age_days: float = 7.0


class Recall:
    """The memories of one conversation: what was told once stays told, since each that comes later has the prompt evaluated anew."""

    def __init__(self, rule: Recalling) -> None:
        self._rule = rule
        self._told: set[int] = set()

    def memories(self, kept: Iterable[StoredMemory], question: str, *, now: float | None = None) -> list[Memory]:
        """Those to be told, the most important first. One that is older or less important is told if it shares a word with the question."""
        now = time.time() if now is None else now
        asked = set(terms(question))
        kept = list(kept)
        for memory in kept:
            is_new = now - memory.updated_at <= self._rule.max_age_days * _DAY_S
            if (is_new and memory.importance > self._rule.min_importance) or not asked.isdisjoint(terms(memory.text)):
                self._told.add(memory.id)
        told = [memory for memory in kept if memory.id in self._told]
        return [
            Memory(label=f"memory {memory.id}", text=memory.text, importance=memory.importance)
            for memory in sorted(told, key=lambda each: -each.importance)
        ]
